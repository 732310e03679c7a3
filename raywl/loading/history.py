"""What live models were loaded from, so that a reload can tell another architecture."""

from __future__ import annotations

from typing import NamedTuple
from weakref import WeakKeyDictionary

from torch import nn

from raywl.checkpoint import Manifest
from raywl.errors import CheckpointError, MissingWeightsError
from raywl.report import LoadReport

__all__ = ["check_same_architecture", "note_loaded"]

_CODES = {"BOOL", "U8", "I8", "F4", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"}
"""Dtypes whose values mean something only together with scales, or with a table."""


class _Loaded(NamedTuple):
    homeless: frozenset[str]
    """Tensors that had no place in the model."""
    dtypes: dict[str, str]
    """Dtype of every tensor, as the checkpoint had it."""


_LOADED: WeakKeyDictionary[nn.Module, _Loaded] = WeakKeyDictionary()


def _homeless(report: LoadReport) -> frozenset[str]:
    return frozenset(report.unexpected)


def note_loaded(model: nn.Module, manifest: Manifest, report: LoadReport) -> None:
    """Notes what a model was loaded from."""
    dtypes = {name: entry.dtype for name, entry in manifest.tensors.items()}
    _LOADED[model] = _Loaded(_homeless(report), dtypes)


def check_same_architecture(model: nn.Module, manifest: Manifest, report: LoadReport) -> None:
    """Refuses a checkpoint that fits a model only because it holds more than the model, or other codes.

    What the checkpoint before it had as well is fine; for a model that raywl hasn't loaded, nothing is known
    to have been before.

    Raises:
        MissingWeightsError: Tensors have no place that the last checkpoint didn't have either.
        CheckpointError: A tensor has turned from numbers into codes, or back.
    """
    last = _LOADED.get(model, _Loaded(frozenset(), {}))
    root = manifest.path(manifest.source.only or "").rstrip("/")
    more = sorted(_homeless(report) - last.homeless)
    if more:
        raise MissingWeightsError(
            root, more, f"another architecture? {len(more)} tensors have no place in the live model"
        )
    for name in report.loaded:
        now = manifest.tensors[name].dtype
        before = last.dtypes.get(name, _numbers(now, model))
        if now != before and (now in _CODES or before in _CODES):
            raise CheckpointError(
                manifest.path(manifest.tensors[name].file),
                name,
                f"is {now}, but the live model was loaded from {before}: such values mean something else",
            )


def _numbers(dtype: str, model: nn.Module) -> str:
    """What an unknown checkpoint had: numbers, for a model that has none but numbers."""
    kinds = {parameter.dtype.itemsize for parameter in model.parameters()}
    return dtype if dtype not in _CODES or 1 in kinds else "numbers"
