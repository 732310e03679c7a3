"""Which part of a tensor a rank keeps, and the copy that brings it."""

from __future__ import annotations

from raywl.checkpoint.dtypes import torch_name, torch_shape
from raywl.checkpoint.header import TensorEntry
from raywl.errors import ShapeMismatchError
from raywl.plan.copies import Copy, contiguous_strides, itemsize_of
from raywl.types import Shard, ShardSpec

__all__ = ["copy_of_box", "cut", "local_box"]

Box = tuple[tuple[int, int], ...]
"""Half-open element ranges along each dim."""


def cut(size: int, rank: int, num_parts: int) -> tuple[int, int]:
    """The elements that `rank` keeps of a dim, `[start, end)`.

    Uneven sizes are cut as `torch.chunk` and DTensor do: every part is `ceil(size / num_parts)` long
    but the last ones, which may be shorter or empty.
    """
    length = -(-size // num_parts)
    return min(rank * length, size), min((rank + 1) * length, size)


def local_box(name: str, shape: tuple[int, ...], spec: ShardSpec, rank: int, num_parts: int) -> Box:
    """The part of a tensor of `shape` that `rank` keeps under `spec`.

    Raises:
        ShapeMismatchError: The tensor has no such dim.
    """
    box = [(0, size) for size in shape]
    if isinstance(spec, Shard) and num_parts > 1:
        if not -len(shape) <= spec.dim < len(shape):
            raise ShapeMismatchError(
                name, (), shape, f"can't be cut along dim {spec.dim}: it has {len(shape)} dims"
            )
        dim = spec.dim % len(shape)
        box[dim] = cut(shape[dim], rank, num_parts)
    return tuple(box)


def copy_of_box(
    name: str, entry: TensorEntry, box: Box, target: str, dst_strides: tuple[int, ...], dst_dtype: str
) -> Copy:
    """The copy of one box of a tensor into a parameter of the box's shape.

    Args:
        name: The tensor's name.
        entry: Where it lies.
        box: Element ranges, in torch's shape.
        target: The parameter's name.
        dst_strides: The parameter's strides in bytes.
        dst_dtype: torch's name of the parameter's dtype.
    """
    src_dtype = torch_name(entry.dtype)
    strides = entry.strides
    if strides is None:
        strides = contiguous_strides(torch_shape(entry.dtype, entry.shape), itemsize_of(src_dtype))
    start = sum(first * stride for (first, _), stride in zip(box, strides, strict=True))
    return Copy(
        tensor=name,
        file=entry.file,
        target=target,
        src_start=entry.start + start,
        dst_start=0,
        shape=tuple(end - first for first, end in box),
        src_strides=strides,
        dst_strides=dst_strides,
        src_dtype=src_dtype,
        dst_dtype=dst_dtype,
    )
