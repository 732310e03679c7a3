"""Plans declared from a manifest alone: one parameter for each tensor, cut by specs."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping
from typing import Any

from raywl.checkpoint import Manifest
from raywl.checkpoint.dtypes import torch_name, torch_shape
from raywl.plan.copies import contiguous_strides, itemsize_of
from raywl.plan.plan import LoadPlan, TargetInfo
from raywl.plan.shards import copy_of_box, local_box
from raywl.types import ParallelContext, Replicate, ShardSpec, as_shard_spec, check_patterns

__all__ = ["SpecTable", "declare_plan"]


class SpecTable:
    """Shard specs by parameter name: exact names first, then patterns in the order given."""

    def __init__(self, shards: Mapping[str, Any] | None) -> None:
        check_patterns("shards", shards)
        specs = {pattern: as_shard_spec(value) for pattern, value in (shards or {}).items()}
        self._exact = specs
        self._used: set[str] = set()
        self._patterns = [
            (pattern, re.compile(fnmatch.translate(pattern)), spec)
            for pattern, spec in specs.items()
            if any(sign in pattern for sign in "*?[")
        ]

    def of(self, name: str) -> ShardSpec:
        """The spec of a parameter; `Replicate()` where nothing matches."""
        return self.find(name) or Replicate()

    def find(self, name: str) -> ShardSpec | None:
        """The spec of a parameter, or `None` where nothing matches."""
        if name in self._exact:
            self._used.add(name)
            return self._exact[name]
        for text, pattern, spec in self._patterns:
            if pattern.match(name):
                self._used.add(text)
                return spec
        return None

    @property
    def unused(self) -> list[str]:
        """Names and patterns that nothing that was looked up has matched."""
        return [text for text in self._exact if text not in self._used]


def declare_plan(
    manifest: Manifest,
    context: ParallelContext,
    shards: Mapping[str, Any] | None,
    names: Iterable[str] | None,
) -> LoadPlan:
    """The plan of a rank that keeps one contiguous parameter for each tensor, under the tensor's name.

    Raises:
        CheckpointError: A name that isn't in the checkpoint.
        ShapeMismatchError: A tensor hasn't the dim that it is to be cut along.
    """
    specs = SpecTable(shards)
    wanted = list(manifest.tensors) if names is None else list(dict.fromkeys(names))
    copies, targets = [], {}
    for name in wanted:
        entry = manifest.entry(name)
        dtype = torch_name(entry.dtype)
        full = torch_shape(entry.dtype, entry.shape)
        box = local_box(name, full, specs.of(name), context.tp_rank, context.tp_size)
        shape = tuple(end - start for start, end in box)
        targets[name] = TargetInfo(dtype, shape, contiguous_strides(shape, 1))
        if 0 not in shape:
            strides = contiguous_strides(shape, itemsize_of(dtype))
            copies.append(copy_of_box(name, entry, box, name, strides, dtype))
    return LoadPlan(
        identity=manifest.identity,
        context=context,
        files=tuple(file.name for file in manifest.files),
        copies=tuple(copies),
        targets=targets,
    )
