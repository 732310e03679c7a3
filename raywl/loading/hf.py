"""Names and fusions that transformers itself applies when it loads a checkpoint into its models.

Since transformers 5 a model may keep in one parameter what checkpoints keep in many tensors (all experts
of a layer). The library's own conversion mapping says which; here each of its rules becomes a place
inside the parameter, so that every tensor is still read straight to where it belongs.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn

from raywl.errors import CheckpointError, ShapeMismatchError

__all__ = ["ConversionRules", "FusedPart", "offsets_of_parts"]


class FusedPart(NamedTuple):
    """Which part of a fused parameter a tensor is."""

    position: int | None
    """Position along dim 0 (the expert), or `None` where tensors are only concatenated."""
    order: int
    """Position among the tensors that are concatenated."""
    dim: int | None
    """Dim of the tensor along which they are concatenated; `None` where there is one."""


class ConversionRules:
    """The renamings and fusions that transformers registers for a model; none for other models."""

    def __init__(self, model: nn.Module) -> None:
        transforms = _transforms_of(model)
        self._renamings = [rule for rule in transforms if not hasattr(rule, "operations")]
        self._converters = [rule for rule in transforms if hasattr(rule, "operations")]

    def map_name(self, name: str) -> tuple[str, FusedPart | None]:
        """The parameter's name for a checkpoint tensor's, and its part when the parameter is fused.

        Raises:
            CheckpointError: The rule computes values, which can't be read into place.
        """
        for rule in self._renamings:
            name, _ = rule.rename_source_key(name)
        for rule in self._converters:
            target, pattern = rule.rename_source_key(name)
            if pattern is not None:
                return target, _part_of(rule, pattern, name, target)
        return name, None


def _transforms_of(model: nn.Module) -> Sequence[Any]:
    # Only a process that has imported transformers can hold one of its models.
    library = sys.modules.get("transformers")
    if library is None or not isinstance(model, library.PreTrainedModel):
        return ()
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
    except ImportError:  # before 5.0 models have the checkpoints' names
        return ()
    found: Sequence[Any] = get_model_conversion_mapping(model, add_legacy=False)
    return found


def _part_of(rule: Any, pattern: str, name: str, target: str) -> FusedPart:
    kinds = [type(operation).__name__ for operation in rule.operations]
    dims: list[Any] = [getattr(operation, "dim", None) for operation in rule.operations]
    order = rule.source_patterns.index(pattern)
    if kinds[:1] == ["MergeModulelist"] and dims[0] == 0 and kinds[1:] in ([], ["Concatenate"]):
        digits = pattern.replace("*.", r"(\d+)\.")
        found = re.search(digits, name)
        if found is not None and found.groups():
            # The merged tensors have one dim more than each of them.
            return FusedPart(int(found.group(1)), order, dims[1] - 1 if kinds[1:] else None)
    if kinds == ["Concatenate"]:
        return FusedPart(None, order, dims[0])
    raise CheckpointError(
        None,
        name,
        f"transformers makes {target} of it by {' and '.join(kinds)}, which can't be read into place",
    )


def offsets_of_parts(
    param: str, shape: tuple[int, ...], parts: Mapping[FusedPart, tuple[int, ...]]
) -> dict[FusedPart, tuple[int, ...]]:
    """Where each part starts inside a fused parameter, in elements along its dims.

    Args:
        param: The parameter's name.
        shape: Its shape.
        parts: Shapes of the tensors, by part.

    Raises:
        ShapeMismatchError: The parts together don't have the parameter's shape.
    """
    rows: dict[int | None, list[FusedPart]] = {}
    for part in sorted(parts, key=lambda part: (part.position or 0, part.order)):
        rows.setdefault(part.position, []).append(part)
    starts: dict[FusedPart, tuple[int, ...]] = {}
    for position, row in rows.items():
        whole = list(parts[row[0]])
        filled = 0
        for part in row:
            size = list(parts[part])
            start = [0] * len(size)
            if part.dim is not None:
                start[part.dim] = filled
                filled += size[part.dim]
                whole[part.dim] = filled
            starts[part] = tuple(start) if position is None else (position, *start)
        together = tuple(whole) if position is None else (len(rows), *whole)
        if together != shape:
            raise ShapeMismatchError(param, shape, together, "the tensors fused into it have another shape")
    return starts
