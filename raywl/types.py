"""Vocabulary that every layer shares: where a rank stands, and how a tensor is cut.

Imports only the standard library, so that planning needs neither torch nor Ray.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, fields
from typing import Any, Self

__all__ = [
    "ParallelContext",
    "Replicate",
    "Shard",
    "ShardSpec",
    "as_shard_spec",
    "check_patterns",
    "current_context",
    "whole_number",
]

_ENTERED: ContextVar[tuple[ParallelContext, ...]] = ContextVar("raywl_parallel_contexts", default=())


@dataclass(frozen=True, slots=True)
class Shard:
    """A tensor is cut along `dim` into equal parts, one for each tensor-parallel rank."""

    dim: int
    """Dimension that is cut; negative counts from the last."""


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every rank holds the whole tensor."""


ShardSpec = Shard | Replicate


def as_shard_spec(value: Any) -> ShardSpec:
    """raywl's spec for `value`: one of its own, or torch's `Shard` / `Replicate` placement.

    Raises:
        ValueError: A strided or partial placement, which no checkpoint bytes correspond to.
        TypeError: Anything else.
    """
    if isinstance(value, Shard | Replicate):
        return value
    if type(value).__module__.startswith("torch.distributed"):
        kind = type(value).__name__
        if kind == "Shard":
            return Shard(value.dim)
        if kind == "Replicate":
            return Replicate()
        raise ValueError(f"placement {value!r}: only Shard(dim) and Replicate() can be loaded, not {kind}")
    raise TypeError(f"{value!r} is not a shard spec: expected Shard(dim) or Replicate()")


def check_patterns(name: str, value: Any) -> None:
    """Refuses what isn't a mapping of name patterns, where it would fail later in words of something else.

    Raises:
        TypeError: It is another thing, or a key isn't text.
    """
    if value is None:
        return
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} must be a mapping of name patterns, not {type(value).__name__}")
    for pattern in value:
        if not isinstance(pattern, str):
            raise TypeError(f"{name} has names and patterns as keys, not {pattern!r}")


def whole_number(name: str, value: Any) -> int:
    """`value` as Python's own int, whatever integer type it is.

    Raises:
        ValueError: It is no integer: a float, a bool, a text.
    """
    if isinstance(value, bool):
        raise ValueError(f"{name} must be a whole number, not {value!r}")
    try:
        return operator.index(value)
    except TypeError:
        raise ValueError(f"{name} must be a whole number, not {value!r}") from None


@dataclass(frozen=True, slots=True)
class ParallelContext:
    """Where one rank stands in its group.

    A group has `pp_size * dp_size * tp_size` ranks, tp varying fastest, then dp, then pp. Experts are
    spread over `ep_size` of the `dp_size * tp_size` ranks of a stage, and each expert is cut by
    `moe_tp_size = dp_size * tp_size / ep_size`; neighbouring ranks share an expert. Ranks are 0 and
    sizes 1 by default; `ep_rank`, `moe_tp_rank` and `moe_tp_size` follow from the others when left out.

    `with context:` makes it the ambient one, which functions use that are given no rank or size.

    Raises:
        ValueError: A size below 1, a rank outside its size, or an `ep_size` that doesn't divide the stage.
    """

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    dp_rank: int = 0
    dp_size: int = 1
    ep_rank: int = -1
    ep_size: int = 1
    moe_tp_rank: int = -1
    moe_tp_size: int = -1
    local_rank: int = 0
    local_size: int = 1

    def __post_init__(self) -> None:
        for spec in fields(self):
            object.__setattr__(self, spec.name, whole_number(spec.name, getattr(self, spec.name)))
        stage_size = self.dp_size * self.tp_size
        stage_rank = self.dp_rank * self.tp_size + self.tp_rank
        if self.ep_size > 0 and self.moe_tp_size == -1:
            # Experts may be spread without any dense tensor being cut (dp x tp of 1).
            if stage_size != 1 and stage_size % self.ep_size:
                raise ValueError(f"ep_size {self.ep_size} does not divide dp_size x tp_size = {stage_size}")
            object.__setattr__(self, "moe_tp_size", max(1, stage_size // self.ep_size))
        if self.ep_rank == -1:
            spread = self.ep_size > 1 and stage_size > 1
            object.__setattr__(self, "ep_rank", stage_rank // max(1, self.moe_tp_size) if spread else 0)
        if self.moe_tp_rank == -1:
            object.__setattr__(self, "moe_tp_rank", stage_rank % max(1, self.moe_tp_size))
        for kind in ("tp", "pp", "dp", "ep", "moe_tp", "local"):
            rank, size = getattr(self, f"{kind}_rank"), getattr(self, f"{kind}_size")
            if size < 1:
                raise ValueError(f"{kind}_size must be at least 1, got {size}")
            if not 0 <= rank < size:
                raise ValueError(f"{kind}_rank {rank} is outside 0..{size - 1}")

    @classmethod
    def of_rank(
        cls,
        rank: int,
        *,
        tp_size: int = 1,
        pp_size: int = 1,
        dp_size: int = 1,
        ep_size: int = 1,
        local_rank: int = 0,
        local_size: int = 1,
    ) -> ParallelContext:
        """The context of global rank `rank` of a group of `pp_size * dp_size * tp_size`.

        Raises:
            ValueError: `rank` is outside the group, or the sizes don't divide.
        """
        sizes = {"tp_size": tp_size, "pp_size": pp_size, "dp_size": dp_size, "ep_size": ep_size}
        sizes = {name: whole_number(name, size) for name, size in sizes.items()}
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name} must be at least 1, got {size}")
        tp_size, pp_size, dp_size, ep_size = sizes.values()
        rank = whole_number("rank", rank)
        if (dp_size * tp_size) % ep_size:
            raise ValueError(f"ep_size {ep_size} does not divide dp_size x tp_size = {dp_size * tp_size}")
        world_size = pp_size * dp_size * tp_size
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is outside 0..{world_size - 1}")
        return cls(
            tp_rank=rank % tp_size,
            dp_rank=rank // tp_size % dp_size,
            pp_rank=rank // (tp_size * dp_size),
            local_rank=local_rank,
            local_size=local_size,
            **sizes,
        )

    @property
    def world_size(self) -> int:
        """Ranks in the group."""
        return self.pp_size * self.dp_size * self.tp_size

    @property
    def rank(self) -> int:
        """Global rank in the group."""
        return (self.pp_rank * self.dp_size + self.dp_rank) * self.tp_size + self.tp_rank

    def to_dict(self) -> dict[str, int]:
        """All ranks and sizes, by name."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def __enter__(self) -> Self:
        _ENTERED.set((*_ENTERED.get(), self))
        return self

    def __exit__(self, *exc: object) -> None:
        _ENTERED.set(_ENTERED.get()[:-1])


def current_context() -> ParallelContext | None:
    """The ambient context, or `None` outside every `with context:`."""
    entered = _ENTERED.get()
    return entered[-1] if entered else None
