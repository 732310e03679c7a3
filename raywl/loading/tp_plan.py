"""Tensor-parallel plans in the form that Hugging Face configs carry.

A plan maps module (or parameter) names, with `*` for a number, to a style: for example
`{"layers.*.self_attn.q_proj": "colwise"}`, with or without the model's prefix. Source of the styles:
`base_model_tp_plan` of the config classes in transformers 5.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from raywl.loading.names import module_of
from raywl.types import Replicate, Shard, ShardSpec

__all__ = ["STYLES", "shards_from_tp_plan", "unused_entries"]

_COLUMN = ("colwise", "colwise_rep", "colwise_gather_output")
_ROW = ("rowwise", "rowwise_rep", "rowwise_split_input")
_EMBEDDING = ("embedding_rowwise",)
_WHOLE = ("replicate", "replicated_with_grad_allreduce", "sequence_parallel", "moe_tp_experts", "gather")

STYLES = (*_COLUMN, *_ROW, *_EMBEDDING, *_WHOLE)
"""The styles that are supported."""

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.)")


def shards_from_tp_plan(
    tp_plan: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]], tp_size: int
) -> dict[str, ShardSpec]:
    """Shard specs of the parameters that a plan speaks of.

    Args:
        tp_plan: Name patterns to styles. An entry for a parameter itself goes before its module's.
        shapes: Full shapes of the parameters, by name.
        tp_size: Number of parts.

    Raises:
        ValueError: A style that isn't supported, or a dim that `tp_size` doesn't divide.
    """
    unknown = {pattern: style for pattern, style in tp_plan.items() if style not in STYLES}
    if unknown:
        rows = ", ".join(f"{pattern}: {style}" for pattern, style in unknown.items())
        raise ValueError(f"tp_plan styles that aren't supported: {rows}; supported are {', '.join(STYLES)}")
    shards: dict[str, ShardSpec] = {}
    for name, shape in shapes.items():
        style = _style_of(name, tp_plan)
        if style is not None:
            shards[name] = _spec(name, shape, style, tp_size)
    return shards


def unused_entries(tp_plan: Mapping[str, str], names: Iterable[str]) -> list[str]:
    """Entries of a plan that speak of none of the parameters."""
    used = {entry for name in names if (entry := _entry_of(name, tp_plan)) is not None}
    return [entry for entry in tp_plan if entry not in used]


def _style_of(name: str, tp_plan: Mapping[str, str]) -> str | None:
    entry = _entry_of(name, tp_plan)
    return None if entry is None else tp_plan[entry]


def _entry_of(name: str, tp_plan: Mapping[str, str]) -> str | None:
    """The entry for a parameter: its own, else its module's; the longest match counts."""
    for path in (name, module_of(name)):
        parts = _NUMBER.sub("*", path).split(".")
        exact = path.split(".")
        for first in range(len(parts)):
            for candidate in (".".join(exact[first:]), ".".join(parts[first:])):
                if candidate in tp_plan:
                    return candidate
    return None


def _spec(name: str, shape: tuple[int, ...], style: str, tp_size: int) -> ShardSpec:
    if style in _WHOLE or not shape or max(shape) == 1:
        return Replicate()
    if style in _COLUMN:
        dim = max(0, len(shape) - 2)
    elif style in _EMBEDDING:
        dim = 0
    elif len(shape) == 1:
        return Replicate()  # the bias of a row-parallel layer is added once, after the reduction
    else:
        dim = len(shape) - 1
    if shape[dim] % tp_size:
        raise ValueError(
            f"{name}: dim {dim} of {list(shape)} can't be cut into {tp_size} equal parts ({style}): "
            f"{shape[dim]} is not a multiple of {tp_size}"
        )
    return Shard(dim)
