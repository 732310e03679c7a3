"""Loader of expert parameters: which experts are here, and this rank's part of each."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch

from raywl.errors import ShapeMismatchError
from raywl.loaders.copying import Sized, as_bytes, check_shape, weight_name, zero
from raywl.loaders.expert_parts import Part, elements, runs_of, uncut
from raywl.loaders.layout import Along, Layout, layout_of
from raywl.loaders.ranks import ambient_context
from raywl.remap.experts import compute_local_expert_ids

__all__ = ["ExpertLoader"]


@dataclass(frozen=True, slots=True)
class _Cut:
    """A rank's part of the intermediate size `I`, along one dim of a parameter."""

    along: Along
    whole: int
    """`I`."""
    start: int
    num_rows: int
    room: int
    """Elements that the parameter has for it."""
    text: str
    """What messages begin with."""

    def of(self, weight: Sized, first: int = 0, times: int = 1, more: int = 0) -> Sized:
        """The rank's part of a weight that has `times` the rows, `first` others before, and `more` beside."""
        begin = first + times * self.start
        text = f"{self.text} keeps rows {begin} to {begin + times * self.num_rows}, which"
        start, end = self.along.span(begin, begin + times * self.num_rows, (times + more) * self.whole, text)
        return weight.narrow(self.along.dim, start, end - start)

    def check_next(self, num_rows: int) -> None:
        """Refuses that something follows `num_rows` of the parameter that don't end on a block."""
        if num_rows % self.along.border:
            raise ValueError(
                f"{self.text} has up after {num_rows} rows of gate, inside a {self.along.what} of "
                f"{self.along.border}"
            )


class ExpertLoader:
    """Loads expert weights into `w13_*` and `w2_*` parameters that hold all experts of a rank.

    With `H` the hidden size, `I` the intermediate size and `moe_tp` the ranks that share an expert:

        w13_weight  (local experts, 2 * I / moe_tp, H)     w13_bias  (local experts, 2 * I / moe_tp)
        w2_weight   (local experts, H, I / moe_tp)         w2_bias   (local experts, H), whole on each rank

    The gate (`"w1"`) has the first half of a `w13` parameter's rows and up (`"w3"`) the second; when
    `interleaved`, they alternate, gate first, in the parameter and in checkpoints that have both in one.

    With `intermediate_size` a parameter may have more room than a rank's part of `I` needs (kernels that
    want a multiple of some number): each rank keeps `ceil(I / moe_tp)`, rounded up to a multiple of
    `multiple_of`, the last ones fewer, at the front of the gate, of up and of `w2`'s columns; the rest is
    zero, on every load. In checkpoints with one tensor per expert, that costs a read for each of them, where
    otherwise all are read together.

    Companions of quantised weights are cut where the weights are, or refused where that is inside a block,
    a group or a packed word: `raywl.loaders.layout` has the attributes by which parameters say what they
    are. Scales for whole tensors are `(local experts, 2)` for `w13` and `(local experts,)` for `w2`; with one
    place for gate and up, theirs must be equal, which has each of them read by itself. Without
    `intermediate_size`, the last block or group of a companion is taken for a whole one.
    """

    def __init__(
        self,
        num_experts: int,
        expert_map: torch.Tensor | Sequence[int] | None = None,
        transposed: bool = False,
        interleaved: bool = False,
        intermediate_size: int | None = None,
        num_redundant_experts: int = 0,
        multiple_of: int = 1,
    ) -> None:
        """
        Args:
            num_experts: Experts of the layer, on all ranks.
            expert_map: For each of them its place on this rank, -1 for others' (what
                `determine_expert_map` gives). `None`: all are here if the parameter has room for them,
                else contiguous blocks by the ambient context.
            transposed: The checkpoint's matrices are `(in, out)`. Parameters are `(out, in)`, unless their
                attributes say otherwise.
            interleaved: Gate and up rows alternate.
            intermediate_size: `I`, where parameters are padded or their last block isn't whole. `None`: they
                are as large as the rank's equal part.
            num_redundant_experts: Copies that follow the `num_experts`, of expert 0, 1, ... in turn. Expert
                ids and `expert_map` count them; tensors with all experts in one don't have them.
            multiple_of: Each rank's part of `I` is a multiple of so many, so that it is made of whole blocks;
                needs `intermediate_size`.

        Raises:
            ValueError: No experts, a map of another length or with a place twice, or a size below 1.
        """
        if num_experts < 1:
            raise ValueError(f"num_experts must be at least 1, got {num_experts}")
        if num_redundant_experts < 0:
            raise ValueError(f"num_redundant_experts can't be negative, got {num_redundant_experts}")
        if intermediate_size is not None and intermediate_size < 1:
            raise ValueError(f"intermediate_size must be at least 1, got {intermediate_size}")
        if multiple_of < 1 or (multiple_of > 1 and intermediate_size is None):
            raise ValueError(f"multiple_of {multiple_of}: must be at least 1, and needs intermediate_size")
        self.num_experts = num_experts
        self.num_redundant_experts = num_redundant_experts
        self.expert_map = None if expert_map is None else [int(place) for place in expert_map]
        if self.expert_map is not None and len(self.expert_map) != self._num_ids:
            raise ValueError(f"expert_map has {len(self.expert_map)} entries for {self._num_ids} experts")
        here = [place for place in self.expert_map or () if place >= 0]
        if twice := sorted(place for place, times in Counter(here).items() if times > 1):
            raise ValueError(f"expert_map {self.expert_map} puts several experts into one place: {twice}")
        self.transposed, self.interleaved = transposed, interleaved
        self.intermediate_size, self.multiple_of = intermediate_size, multiple_of

    @property
    def _num_ids(self) -> int:
        return self.num_experts + self.num_redundant_experts

    def _each(self, whole: int, size: int) -> int:
        """Rows of `I` that each rank keeps, but for the last ones."""
        return -(-whole // (size * self.multiple_of)) * self.multiple_of

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
                `expert_id=None` a dim of `num_experts` before that. Blocks of packed values may have a dim
                of their own at the end, which the parameter has too or has in its inputs.
            name: The parameter's name.
            shard_id: `"w1"`, `"w2"` or `"w3"`. A weight of twice the rows given as `"w1"` is gate and
                up in one.
            expert_id: Which expert, or `None` for a tensor that holds all.

        Returns:
            Whether anything of it belongs on this rank.

        Raises:
            ShapeMismatchError: The parameter or the weight doesn't have the shape above.
            ValueError: Unknown shard id, an expert id out of range, or a cut inside a block, a group or a
                packed word.
        """
        name = weight_name(loaded_weight) or name
        if shard_id not in ("w1", "w2", "w3"):
            raise ValueError(f"{name}: unknown shard id {shard_id!r}: expected 'w1', 'w2' or 'w3'")
        if expert_id is not None and not 0 <= expert_id < self._num_ids:
            raise ValueError(f"{name}: expert {expert_id} is outside 0..{self._num_ids - 1}")
        data, loaded_weight = as_bytes(param.data, loaded_weight)
        target, weight = (Sized(tensor, tuple(tensor.shape)) for tensor in (data, loaded_weight))
        places = self._places(target, name)
        if expert_id is None:
            check_shape(
                name,
                (self.num_experts, *weight.shape[1:]),
                weight,
                f"the weight doesn't hold {self.num_experts} experts",
            )
            runs = list(runs_of(places, self.num_experts))
        else:
            # One expert is the same as all of them where there is one.
            weight = Sized(weight.tensor.view(1, *weight.shape), (1, *weight.shape))
            runs = [] if places[expert_id] < 0 else [(0, places[expert_id], 1)]
        if not runs:
            return False
        layout = layout_of(param, first_dim=1)
        weight = self._turned(target, weight, layout)
        parts = [
            part
            for first, place, count in runs
            for part in self._parts(
                target.narrow(0, place, count), weight.narrow(0, first, count), shard_id, layout, name
            )
        ]
        # All padding first: a write beside lazy copies that are only noted would have them made one by one.
        for room, dim, source in parts:
            num_real = source.shape[dim]
            if num_real < room.shape[dim]:
                zero(room.narrow(dim, num_real, room.shape[dim] - num_real).tensor)
        for room, dim, source in parts:
            mine = room.narrow(dim, 0, source.shape[dim])
            check_shape(name, mine.shape, source)
            mine.tensor.copy_(source.tensor)
        return True

    def _places(self, param: Sized, name: str) -> list[int]:
        """For each expert its place in the parameter, -1 for those of other ranks."""
        places = self.expert_map
        if places is None:
            places = list(range(self._num_ids))
            context = ambient_context()
            local = compute_local_expert_ids(self._num_ids, context.ep_size, context.ep_rank)
            if local is not None and param.shape[:1] != (self._num_ids,):
                places = [-1] * self._num_ids
                for place, expert in enumerate(sorted(local)):
                    places[expert] = place
        if not 1 <= len(param.shape) <= 4 or param.shape[0] != max(places) + 1:
            raise ShapeMismatchError(
                name,
                (max(places) + 1, *param.shape[1:]),
                tuple(param.shape),
                "the parameter doesn't hold this rank's experts",
            )
        return places

    def _turned(self, param: Sized, weight: Sized, layout: Layout) -> Sized:
        """Experts' weights in the parameter's orientation."""
        if len(weight.shape) == 4 and len(param.shape) == 3:
            *front, groups, values = weight.shape
            weight = Sized(weight.tensor.flatten(2), (*front, groups * values))
        both = layout.output is not None and layout.input is not None
        if len(weight.shape) == 3 and both and self.transposed != layout.inputs_first:
            experts, rows, columns = weight.shape
            weight = Sized(weight.tensor.transpose(1, 2), (experts, columns, rows))
        return weight

    def _parts(self, target: Sized, weight: Sized, shard_id: str, layout: Layout, name: str) -> list[Part]:
        """What to copy where, for experts `(count, ...)` that lie side by side in both tensors."""
        along = layout.input if shard_id == "w2" else layout.output
        if layout.per_tensor or len(target.shape) == 1 or self._is_element(target, weight, along):
            return elements(target, weight, shard_id, name)
        if along is None or (shard_id == "w2" and self._is_for_all_inputs(target, weight, along, layout)):
            return uncut(target, weight, shard_id, name)
        if along.dim >= len(weight.shape):
            raise ShapeMismatchError(name, tuple(target.shape), tuple(weight.shape))
        if shard_id == "w2":
            cut = self._cut(target, weight, along, target.shape[along.dim], 1, name)
            return [(target, along.dim, cut.of(weight))]
        return self._gate_and_up(target, weight, shard_id, along, name)

    def _is_element(self, target: Sized, weight: Sized, along: Along | None) -> bool:
        """Whether a weight has one element for each expert, and the parameter, unmarked, one or two."""
        unmarked = self.intermediate_size != 1 and (along is None or along.unit == 1)
        few = len(target.shape) == 2 and target.shape[1] <= 2
        return unmarked and few and math.prod(weight.shape[1:]) == 1

    def _is_for_all_inputs(self, target: Sized, weight: Sized, along: Along, layout: Layout) -> bool:
        """Whether `w2`'s companion has one element for all inputs, however many ranks share them."""
        same_dims = len(target.shape) == len(weight.shape) > along.dim
        alone = same_dims and target.shape[along.dim] == weight.shape[along.dim] == 1
        return alone and (layout.per_channel or (along.unit == 1 and self.intermediate_size != 1))

    def _gate_and_up(
        self, target: Sized, weight: Sized, shard_id: str, along: Along, name: str
    ) -> list[Part]:
        dim = along.dim
        room = -(-target.shape[dim] // 2)
        is_both = (
            shard_id == "w1" and len(weight.shape) == len(target.shape) and self._is_both(weight, along, room)
        )
        cut = self._cut(target, weight, along, room, 1 + is_both, name)
        if is_both and cut.num_rows == cut.whole and target.shape == weight.shape:
            # Nothing is cut: not even where up begins inside a block.
            return [(target, dim, weight)]
        if not self.interleaved:
            cut.check_next(self._each(cut.whole, ambient_context().moe_tp_size))
        if target.shape[dim] % 2:
            raise ShapeMismatchError(
                name, tuple(target.shape), tuple(weight.shape), "gate and up of an odd number of rows"
            )
        if is_both and self.interleaved:
            return [(target, dim, cut.of(weight, times=2))]
        halves = target.narrow(dim, 0, room), target.narrow(dim, room, room)
        if is_both:
            return [
                (halves[0], dim, cut.of(weight, more=1)),
                (halves[1], dim, cut.of(weight, first=cut.whole, more=1)),
            ]
        second = shard_id == "w3"
        if not self.interleaved:
            return [(halves[second], dim, cut.of(weight))]
        if cut.along.border != 1:
            raise ValueError(
                f"{name}: gate and up alternate, so that a {cut.along.what} of {cut.along.border} rows holds "
                f"both: the checkpoint must have them in one"
            )
        every_other = target.tensor[(slice(None),) * dim + (slice(int(second), None, 2),)]
        shape = (*target.shape[:dim], room, *target.shape[dim + 1 :])
        return [(Sized(every_other, shape), dim, cut.of(weight))]

    def _is_both(self, weight: Sized, along: Along, room: int) -> bool:
        """Whether a weight is gate and up in one, for a parameter with so much room for each."""
        num_stored = weight.shape[along.dim]
        whole, size = self.intermediate_size, ambient_context().moe_tp_size
        if whole is None:
            return num_stored == 2 * room * size
        if along.unit == 1 and num_stored not in (whole, 2 * whole):
            alone, both = along.inferred(whole, num_stored), along.inferred(2 * whole, num_stored)
            each = self._each(whole, size)
            return alone.num_stored(each) != room and both.num_stored(each) == room
        return num_stored == along.num_stored(2 * whole) != along.num_stored(whole)

    def _cut(self, target: Sized, weight: Sized, along: Along, room: int, times: int, name: str) -> _Cut:
        """This rank's part of `I`, for a parameter with `room` for it and a weight of `times` the whole.

        Raises:
            ValueError: `I` can't be cut so.
            ShapeMismatchError: The weight or the parameter has another shape.
        """
        context = ambient_context()
        rank, size = context.moe_tp_rank, context.moe_tp_size
        who = f"rank {rank} of {size} of each expert"
        dim, num_stored = along.dim, weight.shape[along.dim]
        whole = self.intermediate_size
        if whole is None:
            whole = room * size if along.unit == 1 else int(Fraction(num_stored, times) * along.unit)
            if whole % size or (size > 1 and whole // size % along.border):
                raise ValueError(
                    f"{name}: {whole} rows in {num_stored // times} {along.what}s of {along.border} can't be "
                    f"cut into {size} equal parts of whole {along.what}s ({who})"
                )
        else:
            found = along.inferred(times * whole, num_stored)
            along = found if found.num_stored(self._each(whole, size)) == room else along
        each = self._each(whole, size)
        needed = along.num_stored(each)
        if needed > room:
            raise ShapeMismatchError(
                name,
                (room,),
                (needed,),
                f"a parameter of {list(target.shape)} has no room for its part of the intermediate size "
                f"{whole} ({who})",
            )
        expected = list(target.shape)
        expected[dim] = along.num_stored(times * whole)
        check_shape(name, expected, weight, f"shape differs ({who})")
        if needed != room and self.intermediate_size is None:
            raise ShapeMismatchError(
                name, (needed,), (room,), f"a parameter of {list(target.shape)} has other rows ({who})"
            )
        start = min(rank * each, whole)
        return _Cut(along, whole, start, min(each, whole - start), room, f"{name}: {who}")
