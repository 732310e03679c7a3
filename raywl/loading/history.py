"""What live models were loaded from: by it a reload tells another architecture, and saving goes back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple
from weakref import WeakKeyDictionary

from torch import nn

from raywl.checkpoint import Manifest, TensorEntry
from raywl.checkpoint.manifest import root
from raywl.errors import CheckpointError, MissingWeightsError
from raywl.plan import LoadPlan
from raywl.report import LoadReport

__all__ = ["LastLoad", "check_same_architecture", "last_load", "note_loaded"]

_CODES = {"BOOL", "U8", "I8", "F4", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"}
"""Dtypes whose values mean something only together with scales, or with a table."""


class LastLoad(NamedTuple):
    """What is remembered of a model's last load."""

    homeless: frozenset[str]
    """Tensors that had no place in the model."""
    tensors: Mapping[str, TensorEntry]
    """All that the checkpoint had."""
    empty: tuple[str, ...]
    """Tensors that were loaded and have no elements, of which there are no copies."""
    plan: LoadPlan | None
    """The copies that brought them into the model."""
    computed: frozenset[str]
    """Parameters and buffers that hold something else than the copies, computed by loaders."""


_NOTHING = LastLoad(frozenset(), {}, (), None, frozenset())
_LOADED: WeakKeyDictionary[nn.Module, LastLoad] = WeakKeyDictionary()


def note_loaded(model: nn.Module, manifest: Manifest, report: LoadReport, computed: frozenset[str]) -> None:
    """Notes what a model was loaded from, and what of it its loaders computed."""
    homeless = frozenset(report.unexpected)
    empty = tuple(name for name in report.loaded if not manifest.tensors[name].nbytes)
    _LOADED[model] = LastLoad(homeless, manifest.tensors, empty, report.plan, computed)


def last_load(model: nn.Module) -> LastLoad | None:
    """What is remembered of a model's last load; `None` for one that raywl hasn't loaded."""
    return _LOADED.get(model)


def check_same_architecture(model: nn.Module, manifest: Manifest, report: LoadReport) -> None:
    """Refuses a checkpoint that fits a model only because it holds more than the model, or other codes.

    What the checkpoint before it had as well is fine; for a model that raywl hasn't loaded, nothing is known
    to have been before.

    Raises:
        MissingWeightsError: Tensors have no place that the last checkpoint didn't have either.
        CheckpointError: A tensor has turned from numbers into codes, or back.
    """
    last = _LOADED.get(model, _NOTHING)
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
        before = last.tensors[name].dtype if name in last.tensors else unknown
        if now != before and (now in _CODES or before in _CODES):
            raise CheckpointError(
                manifest.source.label(manifest.tensors[name].file),
                name,
                f"is {now}, but the live model was loaded from {before}: such values mean something else",
            )
