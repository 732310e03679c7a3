"""Which parameter a checkpoint's name means."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any, NamedTuple

from raywl.loading.hf import FusedPart
from raywl.remap.kv_scales import kv_scale_places
from raywl.remap.moe_names import maybe_remap_moe_expert_param_name

__all__ = ["NameTable", "Route"]

_FEW = 2000
"""Up to so many parameters are all looked through for one that is called almost like a name."""


class Route(NamedTuple):
    """Where one checkpoint tensor goes."""

    param: str
    """The parameter's name in the model."""
    shard_id: Any = None
    """Which part of a stacked or expert parameter it is."""
    expert_id: int | None = None
    """Which expert it is, of a parameter that holds several; `None` for all of them in one."""
    is_expert: bool = False
    """Whether an expert mapping led here, whose loaders are called with more arguments."""
    fused: FusedPart | None = None
    """Where it lies in a parameter that transformers fuses out of several tensors."""


class NameTable:
    """Finds the parameter for a name: itself, else as a KV-cache scale, an expert's, stacked, or by prefix.

    Args:
        params: The model's names.
        stacked: `(param_name, weight_name, shard_id)` rows: a name that contains `weight_name` is that
            part of the parameter with `param_name` instead, or, with the `shard_id` `None`, also.
        expert_mapping: `(param_name, weight_name, expert_id, shard_id)` rows, likewise.
        prefixes: Prefixes that either side may have and the other not (`model.`).
    """

    def __init__(
        self,
        params: Iterable[str],
        stacked: Sequence[tuple[str, str, Any]] | None = None,
        expert_mapping: Sequence[tuple[str, str, int | None, Any]] | None = None,
        prefixes: Sequence[str] = (),
    ) -> None:
        self._params = set(params)
        self._stacked = list(stacked or ())
        self._experts: dict[str, list[tuple[str, str, int | None, Any]]] = {}
        for row in expert_mapping or ():
            self._experts.setdefault(row[1], []).append(row)
        lengths = {weight_name.strip(".").count(".") + 1 for weight_name in self._experts}
        self._expert_lengths = sorted(lengths, reverse=True)
        self._prefixes = [prefix.rstrip(".") + "." for prefix in prefixes if prefix]

    def find(self, name: str) -> list[Route]:
        """Every place of a tensor, by its name; none when the model has no place for it."""
        for candidate in self._spellings(name):
            if (param := self._there(candidate)) is not None:
                return [Route(param), *self._copies(candidate)]
            if scales := kv_scale_places(candidate, self._params):
                return [Route(param) for param in scales]
            routes = self._expert(candidate) or self._stack(candidate)
            if routes:
                return routes
        return []

    def nearest(self, name: str) -> list[str]:
        """Parameters that are called almost as a tensor without a place would be, at most three."""
        tried = [name, *self._replaced(name)]
        close: dict[str, None] = {}
        for candidate in tried:
            siblings = [param for param in self._params if module_of(param) == module_of(candidate)]
            few = siblings or (list(self._params) if len(self._params) <= _FEW else [])
            close |= dict.fromkeys(get_close_matches(candidate, few, n=3))
        return list(close)[:3]

    def _there(self, name: str) -> str | None:
        """The parameter by a name, or by that of an expert one level deeper."""
        moved = name if name in self._params else maybe_remap_moe_expert_param_name(name, self._params)
        return moved if moved in self._params else None

    def _replaced(self, name: str) -> Iterable[str]:
        """What the rows of stacked parameters and experts make of a name, whether or not there is such."""
        for param_name, weight_name, _ in self._stacked:
            if weight_name in name:
                yield name.replace(weight_name, param_name, 1)
        for weight_name, rows in self._experts.items():
            if weight_name in name:
                yield name.replace(weight_name, rows[0][0], 1)

    def _spellings(self, name: str) -> Iterable[str]:
        yield name
        for prefix in self._prefixes:
            yield prefix + name
            if name.startswith(prefix):
                yield name.removeprefix(prefix)

    def _expert(self, name: str) -> list[Route]:
        """Looks every run of segments up, so that the cost doesn't grow with the number of experts."""
        parts = name.split(".")
        for length in self._expert_lengths:
            for first in range(len(parts) - length + 1):
                middle = ".".join(parts[first : first + length])
                for key in (middle + ".", "." + middle + ".", "." + middle, middle):
                    rows = self._experts.get(key)
                    if rows is None:
                        continue
                    routes = [
                        Route(param, shard_id, expert_id, is_expert=True)
                        for param_name, weight_name, expert_id, shard_id in rows
                        if weight_name in name
                        and (param := self._there(name.replace(weight_name, param_name, 1))) is not None
                    ]
                    if routes:
                        return routes
        return []

    def _copies(self, name: str) -> list[Route]:
        """Further parameters that take all of a tensor that has a place by its own name (keys as values)."""
        found = dict.fromkeys(
            name.replace(weight_name, param_name, 1)
            for param_name, weight_name, shard_id in self._stacked
            if shard_id is None and weight_name in name
        )
        return [Route(param) for param in found if param != name and param in self._params]

    def _stack(self, name: str) -> list[Route]:
        """The first parameter that a row leads to, and every part of it that rows say (keys as values)."""
        routes: list[Route] = []
        for param_name, weight_name, shard_id in self._stacked:
            if weight_name in name:
                route = Route(name.replace(weight_name, param_name, 1), shard_id)
                is_first = not routes and route.param in self._params
                if is_first or (routes and route.param == routes[0].param and route not in routes):
                    routes.append(route)
        return routes


def module_of(name: str) -> str:
    """The module that a parameter belongs to."""
    return name.rpartition(".")[0]
