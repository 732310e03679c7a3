"""What a model calls the scales of its KV cache, by what the checkpoint calls them."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, TypeVar

__all__ = [
    "kv_scale_kind",
    "kv_scale_places",
    "maybe_remap_kv_scale_name",
    "remap_kv_scale_weights",
    "unused_kv_scales",
]

T = TypeVar("T")
Row = tuple[str, tuple[str, ...]]
"""What a checkpoint's name ends in, and what the model's may end in, in order of preference."""

_TABLE = (
    # checkpoint ends in                        model ends in
    (".kv_scale", ".attn.k_scale"),
    (".self_attn.{p}_proj.{kv}_scale", ".self_attn.A.{kv}_scale"),
    (".self_attn.qkv_proj.{kv}_scale", ".self_attn.attn.{kv}_scale"),
    (".self_attn.qkqkv_proj.{kv}_scale", ".self_attn.attn.{kv}_scale"),
    (".mixer.{p}_proj.{kv}_scale", ".mixer.attn.{kv}_scale"),
    (".self_attn.q.scale", ".self_attn.attn.q_scale"),
    (".self_attn.{kv}_cache.scale", ".self_attn.attn.{kv}_scale"),
    (".self_attn.{kv}_proj.output_scale", ".self_attn.attn.{kv}_scale"),
    (".self_attn.prob_scale", ".self_attn.attn.prob_scale"),
    (".{qkv}_scale", ".attn.{qkv}_scale"),
    (".{qkv}_zero_point", ".attn.{qkv}_zero_point"),
)
"""The first row that matches counts. A letter in braces is one of `_LETTERS`, on both sides the same;
`A` is the first of `_ATTENTIONS` that the model has."""
_LETTERS = {"p": "kv", "kv": "kv", "qkv": "qkv"}
_ATTENTIONS = ("mla_attn.mla_attn", "attn")
_DEPRECATED = ".kv_scale"


def _spelled_out() -> Iterator[Row]:
    """The table with every letter and attention put in: `(ending, possible endings in the model)`."""
    for ending, target in _TABLE:
        rows = [(ending, target)]
        for key, letters in _LETTERS.items():
            mark = f"{{{key}}}"
            if mark in ending:
                rows = [(a.replace(mark, x), b.replace(mark, x)) for a, b in rows for x in letters]
        for one, other in rows:
            targets = [other.replace(".A.", f".{name}.") for name in _ATTENTIONS]
            yield one, tuple(dict.fromkeys(targets))


def _by_last_part() -> dict[str, list[Row]]:
    """The rows by what a name must have after its last dot, in the order of the table."""
    rows: dict[str, list[Row]] = {}
    for row in _spelled_out():
        rows.setdefault(row[0].rpartition(".")[2], []).append(row)
    return rows


_ROWS = _by_last_part()

_MAX_REMEMBERED = 256
_warned: dict[tuple[int, int, str], None] = {}


def maybe_remap_kv_scale_name(name: str, params_dict: Mapping[str, Any]) -> str | None:
    """The model's name for a scale or zero point of the KV cache.

    Args:
        name: A name of the checkpoint.
        params_dict: The model's parameters by name.

    Returns:
        The name itself when `params_dict` has it, or when it is no such scale; else the model's name;
        `None`, with one warning for each kind of scale, when the model has no such parameter.
    """
    if name in params_dict:
        return name
    row = _row_of(name)
    if row is None:
        return name
    ending, targets = row
    if ending == _DEPRECATED:
        _warn_once(params_dict, "deprecated", f"{_DEPRECATED[1:]} in checkpoints is deprecated: {name}")
    new = _first_there(name, row, params_dict)
    if new is None:
        kind = _kind(row)
        missing = name.removesuffix(ending) + targets[-1]
        _warn_once(params_dict, kind, f"{kind} {name} is not loaded: the model has no {missing}")
    return new


def remap_kv_scale_weights(
    weights: Iterable[tuple[str, T]], params_dict: Mapping[str, Any]
) -> Iterator[tuple[str, T]]:
    """The weights under the model's names for KV-cache scales, one by one.

    `kv_scale` comes twice, for `k_scale` and for `v_scale`. Scales that the model has no place for are
    left out; how many of each kind is one warning at the end.

    Args:
        weights: `(name in the checkpoint, weight)`.
        params_dict: The model's parameters by name.
    """
    dropped = []
    for name, weight in weights:
        places = None if name in params_dict else kv_scale_places(name, params_dict)
        if places is None:
            yield name, weight
            continue
        for new in places:
            yield new, weight
        if not places:
            dropped.append(name)
    if dropped:
        warnings.warn(unused_kv_scales(dropped), stacklevel=2)


def kv_scale_places(name: str, params: Collection[str]) -> list[str] | None:
    """Every parameter that a scale or zero point of the KV cache goes to: two for `kv_scale`.

    Args:
        name: A name of the checkpoint that the model doesn't have.
        params: The model's names.

    Returns:
        Their names, none where the model has no place for it; `None` when it is no such scale.
    """
    row = _row_of(name)
    if row is None:
        return None
    found = [_first_there(name, row, params)]
    if row[0] == _DEPRECATED:
        _warn_once(params, "deprecated", f"{_DEPRECATED[1:]} in checkpoints is deprecated: {name}")
        v_scale = f"{name.removesuffix(_DEPRECATED)}.attn.v_scale"
        found.append(v_scale if v_scale in params else None)
    return [new for new in found if new is not None]


def kv_scale_kind(name: str) -> str | None:
    """What kind of scale or zero point of the KV cache a checkpoint's name means; `None` for other names."""
    row = _row_of(name)
    return None if row is None else _kind(row)


def unused_kv_scales(names: Iterable[str]) -> str:
    """A message that sums up scales that are left out: how many of each kind, and one of them."""
    examples: dict[str, str] = {}
    counts: Counter[str] = Counter()
    for name in names:
        kind = kv_scale_kind(name) or "other"
        counts[kind] += 1
        examples.setdefault(kind, name)
    kinds = (f"{count} {kind} (for example {examples[kind]})" for kind, count in counts.items())
    return f"these scales of the KV cache are not used: {', '.join(kinds)}"


def _row_of(name: str) -> Row | None:
    for row in _ROWS.get(name.rpartition(".")[2], ()):
        if name.endswith(row[0]):
            return row
    return None


def _first_there(name: str, row: Row, params: Collection[str]) -> str | None:
    stem = name.removesuffix(row[0])
    for target in row[1]:
        if (new := stem + target) in params:
            return new
    return None


def _kind(row: Row) -> str:
    ending, targets = row
    return "kv_scale" if ending == _DEPRECATED else targets[-1].rpartition(".")[2]


def _warn_once(params_dict: Collection[str], kind: str, text: str) -> None:
    # By address, as a mapping can't be referred to weakly: a model that comes later at the same address
    # may go without its warning, and no model is kept alive.
    key = (id(params_dict), len(params_dict), kind)
    if key not in _warned:
        _warned[key] = None
        while len(_warned) > _MAX_REMEMBERED:
            del _warned[next(iter(_warned))]
        warnings.warn(text, stacklevel=3)
