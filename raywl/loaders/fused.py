"""Loaders of dense parameters that hold several checkpoint tensors, or one with padding."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from raywl.loaders.copying import part_of, weight_name
from raywl.loaders.layout import layout_of
from raywl.loaders.pieces import Piece, copy_pieces, load_uncut
from raywl.loaders.ranks import ambient_context

__all__ = ["MergedColumnLoader", "QKVLoader", "VocabLoader"]


def _at_least_one(**sizes: int) -> None:
    for what, size in sizes.items():
        if size < 1:
            raise ValueError(f"{what} must be at least 1, got {size}")


class QKVLoader:
    """Loads q, k and v into one `qkv_proj` parameter, its rows in that order, cut by heads.

    Each rank keeps `num_heads / tp_size` query heads. Key and value heads are cut likewise, and where
    there are fewer of them than ranks, `tp_size / num_kv_heads` neighbouring ranks hold the same one.
    Weights, and biases of one dim, have the output rows in dim 0.

    Companions of quantised weights are cut with them, or refused where a head ends inside a block or a
    packed word: `raywl.loaders.layout` has the attributes by which parameters say what they are.
    """

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
        """
        Args:
            num_heads: Query heads of the whole model.
            num_kv_heads: Key (and value) heads of the whole model.
            head_dim: Rows of each head.

        Raises:
            ValueError: One is below 1.
        """
        _at_least_one(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim

    def __call__(self, param: torch.Tensor, loaded_weight: torch.Tensor, shard_id: str | None = None) -> None:
        """Loads one of q, k and v, or all.

        Args:
            param: `(local rows of q, k and v, ...)`; of scales for whole tensors `(3,)`.
            loaded_weight: `(heads * head_dim, ...)`; for `None`, q, k and v one after the other.
            shard_id: `"q"`, `"k"`, `"v"`, or `None` when they are fused in the checkpoint.

        Raises:
            ShapeMismatchError: The parameter or the weight doesn't have the rows that the heads need.
            ValueError: Heads that don't divide, that cut a block or a packed word, or another shard id.
        """
        name = weight_name(loaded_weight)
        if shard_id is not None and shard_id not in ("q", "k", "v"):
            raise ValueError(f"unknown shard id {shard_id!r}: expected 'q', 'k', 'v' or None")
        context = ambient_context()
        rank, size = context.tp_rank, context.tp_size
        num_q, num_kv, kv_part = self._heads_of(rank, size, name)
        layout = layout_of(param)
        index = None if shard_id is None else "qkv".index(shard_id)
        if load_uncut(param, loaded_weight, layout, index=index, count=3, name=name):
            return
        whole = [self.head_dim * heads for heads in (self.num_heads, self.num_kv_heads, self.num_kv_heads)]
        rows = [self.head_dim * heads for heads in (num_q, num_kv, num_kv)]
        starts = [rank * rows[0], kv_part * rows[1], kv_part * rows[2]]
        assert layout.output is not None
        copy_pieces(
            param,
            loaded_weight,
            layout.output,
            _pieces(rows, rows, starts, whole, index),
            num_local=sum(rows),
            num_rows=sum(whole) if index is None else whole[index],
            name=name,
            who=f"rank {rank} of {size}",
            holds=f"the parameter doesn't hold {num_q} query and 2 x {num_kv} key and value heads",
        )

    def _heads_of(self, rank: int, size: int, name: str | None) -> tuple[int, int, int]:
        """Query heads of a rank, its key heads, and which part of all key heads these are."""
        num_q = part_of(self.num_heads, rank, size, "num_heads", name)
        if size <= self.num_kv_heads:
            return num_q, part_of(self.num_kv_heads, rank, size, "num_kv_heads", name), rank
        if size % self.num_kv_heads:
            raise ValueError(
                f"{'' if name is None else f'{name}: '}num_kv_heads {self.num_kv_heads} can't be spread "
                f"evenly over {size} ranks (rank {rank} of {size})"
            )
        return num_q, 1, rank // (size // self.num_kv_heads)


class MergedColumnLoader:
    """Loads several column-parallel weights (gate and up) into one parameter, each cut by itself.

    Companions of quantised weights are cut with them, as by `QKVLoader`. With `padded_sizes`, weights and
    companions are cut as if zeros followed each weight, so that the cuts fall on blocks: every rank's part
    then begins and ends on one, and the last ranks keep fewer rows, or none; the rest is zero, on every
    load.
    """

    def __init__(self, sizes: Sequence[int], padded_sizes: Sequence[int] | None = None) -> None:
        """
        Args:
            sizes: Rows of each weight in the checkpoint, in the parameter's order.
            padded_sizes: Rows of each, of all ranks together, where parameters have more.

        Raises:
            ValueError: None, one below 1, or a padded size below its size.
        """
        self.sizes = tuple(sizes)
        if not self.sizes:
            raise ValueError("sizes is empty: expected the rows of at least one weight")
        _at_least_one(**{f"sizes[{index}]": size for index, size in enumerate(self.sizes)})
        self.padded_sizes = self.sizes if padded_sizes is None else tuple(padded_sizes)
        if len(self.padded_sizes) != len(self.sizes) or any(
            padded < size for padded, size in zip(self.padded_sizes, self.sizes, strict=True)
        ):
            raise ValueError(f"padded_sizes {self.padded_sizes} can't hold sizes {self.sizes}")

    def __call__(self, param: torch.Tensor, loaded_weight: torch.Tensor, shard_id: int | None = None) -> None:
        """Loads one of the weights, or all.

        Args:
            param: `(sum(padded sizes) / tp_size, ...)`; of scales for whole tensors `(len(sizes),)`.
            loaded_weight: `(sizes[shard_id], ...)`; for `None`, all of them one after the other.
            shard_id: Which one, or `None` when they are fused in the checkpoint.

        Raises:
            ShapeMismatchError: The parameter or the weight has other rows.
            ValueError: A size that `tp_size` doesn't divide, a cut inside a block or a packed word, or a
                shard id out of range.
        """
        name = weight_name(loaded_weight)
        if shard_id is not None and not 0 <= shard_id < len(self.sizes):
            raise ValueError(f"shard id {shard_id!r} is outside 0..{len(self.sizes) - 1}")
        layout = layout_of(param)
        if load_uncut(param, loaded_weight, layout, index=shard_id, count=len(self.sizes), name=name):
            return
        context = ambient_context()
        rank, size = context.tp_rank, context.tp_size
        rooms = [
            part_of(padded, rank, size, f"sizes[{index}] =", name)
            for index, padded in enumerate(self.padded_sizes)
        ]
        starts = [min(rank * room, rows) for room, rows in zip(rooms, self.sizes, strict=True)]
        counts = [
            min(room, rows - start) for room, rows, start in zip(rooms, self.sizes, starts, strict=True)
        ]
        assert layout.output is not None
        copy_pieces(
            param,
            loaded_weight,
            layout.output,
            _pieces(rooms, counts, starts, self.sizes, shard_id),
            num_local=sum(rooms),
            num_rows=sum(self.sizes) if shard_id is None else self.sizes[shard_id],
            name=name,
            who=f"rank {rank} of {size}",
            holds="the parameter has other rows",
        )


class VocabLoader:
    """Loads vocabulary rows, cut after padding; pad rows are zero, on every load.

    Companions of quantised weights are cut with them, as by `QKVLoader`.
    """

    def __init__(self, num_embeddings: int, padded_to: int) -> None:
        """
        Args:
            num_embeddings: Rows in the checkpoint.
            padded_to: The padded number of rows, or a number that it is the next multiple of.

        Raises:
            ValueError: One is below 1.
        """
        _at_least_one(num_embeddings=num_embeddings, padded_to=padded_to)
        self.num_embeddings = num_embeddings
        self.num_padded = -(-num_embeddings // padded_to) * padded_to
        """Rows of all ranks together."""

    def __call__(self, param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
        """Loads this rank's rows.

        Args:
            param: `(num_padded / tp_size, ...)`.
            loaded_weight: `(num_embeddings, ...)`.

        Raises:
            ShapeMismatchError: The parameter or the weight has another shape.
            ValueError: `tp_size` doesn't divide the padded rows, or a rank's rows begin inside a block or a
                packed word.
        """
        name = weight_name(loaded_weight)
        layout = layout_of(param)
        if load_uncut(param, loaded_weight, layout, index=None, count=1, name=name):
            return
        context = ambient_context()
        rank, size = context.tp_rank, context.tp_size
        rows = part_of(self.num_padded, rank, size, "padded vocabulary", name)
        start = min(rank * rows, self.num_embeddings)
        assert layout.output is not None
        copy_pieces(
            param,
            loaded_weight,
            layout.output,
            [Piece(0, rows, start, min(rows, self.num_embeddings - start))],
            num_local=rows,
            num_rows=self.num_embeddings,
            name=name,
            who=f"rank {rank} of {size}",
            holds="the parameter has other rows",
        )


def _pieces(
    rooms: Sequence[int],
    counts: Sequence[int],
    starts: Sequence[int],
    whole: Sequence[int],
    index: int | None,
) -> list[Piece]:
    """What goes where, for all of the weights that a parameter holds one after the other, or for one.

    Args:
        rooms: Rows that the parameter has for each.
        counts: Rows of each that this rank keeps.
        starts: The first of them, in the weight.
        whole: Rows of each weight.
        index: Which one the checkpoint's tensor is, `None` for all of them, one after the other.
    """
    places, firsts = (list(accumulate(sizes, initial=0)) for sizes in (rooms, whole))
    return [
        Piece(places[i], rooms[i], starts[i] + (firsts[i] if index is None else 0), counts[i])
        for i in (range(len(rooms)) if index is None else (index,))
    ]
