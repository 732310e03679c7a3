"""What live models were loaded from, so that a reload can tell another architecture."""

from __future__ import annotations

from typing import NamedTuple
from weakref import WeakKeyDictionary

from torch import nn

from raywl.checkpoint import Manifest
from raywl.checkpoint.manifest import root
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


def note_loaded(model: nn.Module, manifest: Manifest, report: LoadReport) -> None:
    """Notes what a model was loaded from."""
    dtypes = {name: entry.dtype for name, entry in manifest.tensors.items()}
    _LOADED[model] = _Loaded(frozenset(report.unexpected), dtypes)


def check_same_architecture(model: nn.Module, manifest: Manifest, report: LoadReport) -> None:
    """Refuses a checkpoint that fits a model only because it holds more than the model, or other codes.

    What the checkpoint before it had as well is fine; for a model that raywl hasn't loaded, nothing is known
    to have been before.

    Raises:
        MissingWeightsError: Tensors have no place that the last checkpoint didn't have either.
        CheckpointError: A tensor has turned from numbers into codes, or back.
    """
    last = _LOADED.get(model, _Loaded(frozenset(), {}))
    where = root(manifest.source)
    more = sorted(set(report.unexpected) - last.homeless)
    if more:
        raise MissingWeightsError(
            where, more, f"another architecture? {len(more)} tensors have no place in the live model"
        )
    # What an unknown checkpoint had: numbers, for a model that holds nothing as narrow as codes.
    only_numbers = all(parameter.dtype.itemsize > 1 for parameter in model.parameters())
    for name in report.loaded:
        now = manifest.tensors[name].dtype
        unknown = "numbers" if now in _CODES and only_numbers else now
        before = last.dtypes.get(name, unknown)
        if now != before and (now in _CODES or before in _CODES):
            raise CheckpointError(
                manifest.path(manifest.tensors[name].file),
                name,
                f"is {now}, but the live model was loaded from {before}: such values mean something else",
            )
