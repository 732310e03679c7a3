"""What goes where in expert parameters, apart from cuts: runs of experts, single elements, whole ones."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from raywl.errors import ShapeMismatchError
from raywl.loaders.copying import Sized, check_shape

__all__ = ["Part", "elements", "runs_of", "uncut"]

Part = tuple[Sized, int, Sized]
"""`(room, dim, source)`: `source` goes to the front of `room` along `dim`, and may be shorter."""


def elements(target: Sized, weight: Sized, shard_id: str, name: str) -> list[Part]:
    """One element for each expert's tensor: gate and up have one each, or one in common."""
    count = target.shape[0]
    num_places, num_values = math.prod(target.shape[1:]), math.prod(weight.shape[1:])
    places = Sized(target.tensor.view(count, num_places), (count, num_places))
    values = Sized(weight.tensor.reshape(count, num_values), (count, num_values))
    if shard_id != "w2" and num_places == 2 and num_values == 1:
        places = places.narrow(1, int(shard_id == "w3"), 1)
    elif num_places != num_values or num_places > 2 or (num_places == 2 and shard_id != "w1"):
        raise ShapeMismatchError(
            name,
            (count,) if shard_id == "w2" else (count, 2),
            tuple(target.shape),
            f"one element for each expert's tensors, which the weight {list(weight.shape)} doesn't fit",
        )
    elif shard_id == "w3":
        _check_equal(places.tensor, values.tensor, name)
        return []
    return [(places, 1, values)]


def _check_equal(gate: torch.Tensor, up: torch.Tensor, name: str) -> None:
    """Refuses that up has another scale than gate, whose place it shares."""
    if gate.is_meta:
        return  # the check of a reload, which has no values
    up = up.to(gate.dtype)
    if not torch.equal(gate, up):
        raise ValueError(
            f"{name}: is {up.flatten().tolist()}, and {gate.flatten().tolist()} was loaded for the gate, but "
            "the parameter has one element for both: give it (experts, 2)"
        )


def uncut(target: Sized, weight: Sized, shard_id: str, name: str) -> list[Part]:
    """The same on each rank of an expert. Gate's stands for up's too, where there is one place for both."""
    own = weight.shape[1:]
    if shard_id != "w2" and tuple(target.shape[1:]) == (2, *own):
        own_place = target.tensor.select(1, int(shard_id == "w3"))
        target, shard_id = Sized(own_place, weight.shape), "w1"
    check_shape(name, target.shape, weight)
    return [] if shard_id == "w3" else [(target, 0, weight)]


def runs_of(places: Sequence[int], num_experts: int) -> Iterator[tuple[int, int, int]]:
    """Local experts as `(first in the checkpoint, its place, count)`, neighbours on both sides together."""
    first = 0
    while first < len(places):
        count = 1
        if places[first] >= 0:
            last = first // num_experts * num_experts + num_experts
            while first + count < min(len(places), last) and places[first + count] == places[first] + count:
                count += 1
            yield first % num_experts, places[first], count
        first += count
