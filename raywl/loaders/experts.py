"""Loader of expert parameters: which experts are here, and this rank's part of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from raywl.errors import ShapeMismatchError
from raywl.loaders.copying import check_shape, copy_checked, weight_name, zero
from raywl.loaders.ranks import ambient_context
from raywl.remap.experts import compute_local_expert_ids

__all__ = ["ExpertLoader"]


class ExpertLoader:
    """Loads expert weights into `w13_*` and `w2_*` parameters that hold all experts of a rank.

    With `H` the hidden size, `I` the intermediate size and `moe_tp` the ranks that share an expert:

        w13_weight  (local experts, 2 * I / moe_tp, H)     w13_bias  (local experts, 2 * I / moe_tp)
        w2_weight   (local experts, H, I / moe_tp)         w2_bias   (local experts, H), whole on each rank

    The gate (`"w1"`) has the first half of a `w13` parameter's rows and up (`"w3"`) the second; when
    `interleaved`, they alternate, gate first, in the parameter and in checkpoints that have both in one.

    With `intermediate_size` a parameter may have more room than a rank's part of `I` needs (kernels that
    want a multiple of some number): each rank keeps `ceil(I / moe_tp)`, the last ones fewer, at the front
    of the gate, of up and of `w2`'s columns; the rest is zero, on every load. In checkpoints with one
    tensor per expert, that costs a read for each of them, where otherwise all are read together.
    """

    def __init__(
        self,
        num_experts: int,
        expert_map: torch.Tensor | Sequence[int] | None = None,
        transposed: bool = False,
        interleaved: bool = False,
        intermediate_size: int | None = None,
    ) -> None:
        """
        Args:
            num_experts: Experts of the layer, on all ranks.
            expert_map: For each of them its place on this rank, -1 for others' (what
                `determine_expert_map` gives). `None`: all are here if the parameter has room for them,
                else contiguous blocks by the ambient context.
            transposed: The checkpoint's matrices are `(in, out)`; parameters are `(out, in)`.
            interleaved: Gate and up rows alternate.
            intermediate_size: `I`, where parameters are padded. `None`: they are not.

        Raises:
            ValueError: No experts, a map of another length, or an intermediate size below 1.
        """
        if num_experts < 1:
            raise ValueError(f"num_experts must be at least 1, got {num_experts}")
        if intermediate_size is not None and intermediate_size < 1:
            raise ValueError(f"intermediate_size must be at least 1, got {intermediate_size}")
        self.num_experts = num_experts
        self.expert_map = None if expert_map is None else [int(place) for place in expert_map]
        if self.expert_map is not None and len(self.expert_map) != num_experts:
            raise ValueError(f"expert_map has {len(self.expert_map)} entries for {num_experts} experts")
        self.transposed, self.interleaved = transposed, interleaved
        self.intermediate_size = intermediate_size

    def __call__(
        self,
        param: torch.Tensor,
        loaded_weight: torch.Tensor,
        name: str,
        shard_id: str,
        expert_id: int | None,
    ) -> bool:
        """Loads one expert's weight, or that of all experts.

        Args:
            param: As above.
            loaded_weight: `(out, in)` or, transposed, `(in, out)`, or a bias `(out,)`; with
                `expert_id=None` a dim of `num_experts` before that.
            name: The parameter's name.
            shard_id: `"w1"`, `"w2"` or `"w3"`. A weight of twice the rows given as `"w1"` is gate and
                up in one.
            expert_id: Which expert, or `None` for a tensor that holds all.

        Returns:
            Whether anything of it belongs on this rank.

        Raises:
            ShapeMismatchError: The parameter or the weight doesn't have the shape above.
            ValueError: Unknown shard id, or an expert id out of range.
        """
        name = weight_name(loaded_weight) or name
        if shard_id not in ("w1", "w2", "w3"):
            raise ValueError(f"{name}: unknown shard id {shard_id!r}: expected 'w1', 'w2' or 'w3'")
        if expert_id is not None and not 0 <= expert_id < self.num_experts:
            raise ValueError(f"{name}: expert {expert_id} is outside 0..{self.num_experts - 1}")
        places = self._places(param, name)
        target, weight = param.data, loaded_weight
        if expert_id is None:
            check_shape(
                name,
                (self.num_experts, *weight.shape[1:]),
                weight,
                f"the weight doesn't hold {self.num_experts} experts",
            )
            runs = list(_runs(places))
        else:
            # One expert is the same as all of them where there is one.
            weight = weight.view(1, *weight.shape)
            runs = [] if places[expert_id] < 0 else [(0, places[expert_id], 1)]
        if self.transposed and param.dim() == 3 and weight.dim() == 3:
            weight = weight.transpose(1, 2)
        parts = [
            part
            for first, place, count in runs
            for part in self._parts(
                target.narrow(0, place, count), weight.narrow(0, first, count), shard_id, name
            )
        ]
        # All padding first: a write beside lazy copies that are only noted would have them made one by one.
        for room, dim, source in parts:
            num_real = source.shape[dim]
            if num_real < room.shape[dim]:
                zero(room.narrow(dim, num_real, room.shape[dim] - num_real))
        for room, dim, source in parts:
            copy_checked(room.narrow(dim, 0, source.shape[dim]), source, name)
        return bool(runs)

    def _places(self, param: torch.Tensor, name: str) -> list[int]:
        """For each expert its place in the parameter, -1 for those of other ranks."""
        places = self.expert_map
        if places is None:
            places = list(range(self.num_experts))
            context = ambient_context()
            local = compute_local_expert_ids(self.num_experts, context.ep_size, context.ep_rank)
            if local is not None and param.shape[:1] != (self.num_experts,):
                places = [-1] * self.num_experts
                for place, expert in enumerate(sorted(local)):
                    places[expert] = place
        if param.dim() not in (2, 3) or param.shape[0] != max(places) + 1:
            raise ShapeMismatchError(
                name,
                (max(places) + 1, *param.shape[1:]),
                tuple(param.shape),
                "the parameter doesn't hold this rank's experts",
            )
        return places

    def _parts(
        self, target: torch.Tensor, weight: torch.Tensor, shard_id: str, name: str
    ) -> list[tuple[torch.Tensor, int, torch.Tensor]]:
        """What to copy where, for experts `(count, ...)` that lie side by side in both tensors.

        Returns:
            `(room, dim, source)`: `source` goes to the front of `room` along `dim`, and may be shorter.
        """
        context = ambient_context()
        rank, size = context.moe_tp_rank, context.moe_tp_size
        count, cut_to = target.shape[0], f"shape differs (rank {rank} of {size} of each expert)"
        if shard_id == "w2":
            if target.dim() == 2:
                check_shape(name, target.shape, weight)
                return [(target, 1, weight)]
            whole, start, length = self._cut(target.shape[2], rank, size, target, name)
            check_shape(name, (count, target.shape[1], whole), weight, cut_to)
            return [(target, 2, weight.narrow(2, start, length))]
        if target.shape[1] % 2:
            raise ShapeMismatchError(
                name, tuple(target.shape), tuple(weight.shape), "gate and up of an odd number of rows"
            )
        rows = target.shape[1] // 2
        whole, start, length = self._cut(rows, rank, size, target, name)
        if shard_id == "w1" and weight.dim() == target.dim() and weight.shape[1] == 2 * whole:
            check_shape(name, (count, 2 * whole, *target.shape[2:]), weight, cut_to)
            if self.interleaved:
                return [(target, 1, weight.narrow(1, 2 * start, 2 * length))]
            return [
                (target.narrow(1, 0, rows), 1, weight.narrow(1, start, length)),
                (target.narrow(1, rows, rows), 1, weight.narrow(1, whole + start, length)),
            ]
        check_shape(name, (count, whole, *target.shape[2:]), weight, cut_to)
        second = shard_id == "w3"
        mine = target[:, int(second) :: 2] if self.interleaved else target.narrow(1, second * rows, rows)
        return [(mine, 1, weight.narrow(1, start, length))]

    def _cut(self, room: int, rank: int, size: int, param: torch.Tensor, name: str) -> tuple[int, int, int]:
        """`I`, and where this rank's part of it starts and how long it is, for a parameter with `room`."""
        whole = self.intermediate_size
        if whole is None:
            return room * size, rank * room, room
        each = -(-whole // size)
        if each > room:
            raise ShapeMismatchError(
                name,
                (room,),
                (each,),
                f"a parameter of {list(param.shape)} has no room for its part of the intermediate size "
                f"{whole} (rank {rank} of {size} of each expert)",
            )
        start = min(rank * each, whole)
        return whole, start, min(each, whole - start)


def _runs(places: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Local experts as `(first expert, its place, count)`, neighbours on both sides taken together."""
    first = 0
    while first < len(places):
        count = 1
        if places[first] >= 0:
            while first + count < len(places) and places[first + count] == places[first] + count:
                count += 1
            yield first, places[first], count
        first += count
