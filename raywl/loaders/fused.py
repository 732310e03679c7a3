"""Loaders of dense parameters that hold several checkpoint tensors, or one with padding."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from raywl.loaders.copying import check_shape, copy_checked, part_of, weight_name, zero
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
            param: `(local rows of q, k and v, ...)`.
            loaded_weight: `(heads * head_dim, ...)`; for `None`, q, k and v one after the other.
            shard_id: `"q"`, `"k"`, `"v"`, or `None` when they are fused in the checkpoint.

        Raises:
            ShapeMismatchError: The parameter or the weight doesn't have the rows that the heads need.
            ValueError: Heads that don't divide, or another shard id.
        """
        name = weight_name(loaded_weight)
        context = ambient_context()
        rank, size = context.tp_rank, context.tp_size
        num_q = part_of(self.num_heads, rank, size, "num_heads", name)
        if size <= self.num_kv_heads:
            num_kv = part_of(self.num_kv_heads, rank, size, "num_kv_heads", name)
            kv_part = rank
        else:
            num_kv = 1
            if size % self.num_kv_heads:
                raise ValueError(
                    f"{'' if name is None else f'{name}: '}num_kv_heads {self.num_kv_heads} can't be spread "
                    f"evenly over {size} ranks (rank {rank} of {size})"
                )
            kv_part = rank // (size // self.num_kv_heads)
        rows_q, rows_kv = num_q * self.head_dim, num_kv * self.head_dim
        check_shape(
            name,
            (rows_q + 2 * rows_kv, *param.shape[1:]),
            param,
            f"the parameter doesn't hold {num_q} query and 2 x {num_kv} key and value heads",
        )
        # shard id: first row in the parameter, rows there, this rank's part, rows in the checkpoint
        whole_q, whole_kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        shards = {
            "q": (0, rows_q, rank, whole_q),
            "k": (rows_q, rows_kv, kv_part, whole_kv),
            "v": (rows_q + rows_kv, rows_kv, kv_part, whole_kv),
        }
        if shard_id is not None and shard_id not in shards:
            raise ValueError(f"unknown shard id {shard_id!r}: expected 'q', 'k', 'v' or None")
        wanted = shards if shard_id is None else {shard_id: shards[shard_id]}
        check_shape(name, (sum(whole for *_, whole in wanted.values()), *param.shape[1:]), loaded_weight)
        first = 0
        for start, rows, part, whole in wanted.values():
            copy_checked(
                param.data.narrow(0, start, rows),
                loaded_weight.narrow(0, first + part * rows, rows),
                name,
            )
            first += whole


class MergedColumnLoader:
    """Loads several column-parallel weights (gate and up) into one parameter, each cut by itself."""

    def __init__(self, sizes: Sequence[int]) -> None:
        """
        Args:
            sizes: Rows of each weight in the checkpoint, in the parameter's order.

        Raises:
            ValueError: None, or one below 1.
        """
        self.sizes = tuple(sizes)
        if not self.sizes:
            raise ValueError("sizes is empty: expected the rows of at least one weight")
        _at_least_one(**{f"sizes[{index}]": size for index, size in enumerate(self.sizes)})

    def __call__(self, param: torch.Tensor, loaded_weight: torch.Tensor, shard_id: int | None = None) -> None:
        """Loads one of the weights, or all.

        Args:
            param: `(sum(sizes) / tp_size, ...)`.
            loaded_weight: `(sizes[shard_id], ...)`; for `None`, all of them one after the other.
            shard_id: Which one, or `None` when they are fused in the checkpoint.

        Raises:
            ShapeMismatchError: The parameter or the weight has other rows.
            ValueError: A size that `tp_size` doesn't divide, or a shard id out of range.
        """
        name = weight_name(loaded_weight)
        context = ambient_context()
        rank, size = context.tp_rank, context.tp_size
        parts = [
            part_of(rows, rank, size, f"sizes[{index}] =", name) for index, rows in enumerate(self.sizes)
        ]
        check_shape(name, (sum(parts), *param.shape[1:]), param, "the parameter has other rows")
        if shard_id is not None and not 0 <= shard_id < len(parts):
            raise ValueError(f"shard id {shard_id!r} is outside 0..{len(parts) - 1}")
        wanted = range(len(parts)) if shard_id is None else (shard_id,)
        check_shape(name, (sum(self.sizes[index] for index in wanted), *param.shape[1:]), loaded_weight)
        first = 0
        for index in wanted:
            rows = parts[index]
            copy_checked(
                param.data.narrow(0, sum(parts[:index]), rows),
                loaded_weight.narrow(0, first + rank * rows, rows),
                name,
            )
            first += self.sizes[index]


class VocabLoader:
    """Loads vocabulary rows, cut after padding; pad rows are zero, on every load."""

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
            ValueError: `tp_size` doesn't divide the padded rows.
        """
        name = weight_name(loaded_weight)
        context = ambient_context()
        rows = part_of(self.num_padded, context.tp_rank, context.tp_size, "padded vocabulary", name)
        check_shape(name, (rows, *param.shape[1:]), param, "the parameter has other rows")
        check_shape(name, (self.num_embeddings, *param.shape[1:]), loaded_weight)
        start = min(context.tp_rank * rows, self.num_embeddings)
        num_real = min(rows, self.num_embeddings - start)
        # Pad rows first: a lazy weight's copy is then the last thing that touches the parameter.
        if num_real < rows:
            zero(param.data.narrow(0, num_real, rows - num_real))
        # A rank of pad rows alone copies nothing, and by that still says that it has seen the weight.
        copy_checked(param.data.narrow(0, 0, num_real), loaded_weight.narrow(0, start, num_real), name)
