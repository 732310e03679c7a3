"""Strided copies from a file's bytes to a parameter's bytes, as plain data.

A copy has one shape and two sets of byte strides. All of planning is arithmetic on these; nothing here
knows torch, a file, or memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

__all__ = [
    "Copy",
    "contiguous_strides",
    "itemsize_of",
    "may_overlap",
    "normalise",
    "span_of",
    "split",
    "straight",
]

_WIDE = {"complex64": 8, "complex128": 16, "float64": 8, "int64": 8, "uint64": 8}
_WIDE |= {"complex32": 4, "float32": 4, "int32": 4, "uint32": 4}
_WIDE |= {"bfloat16": 2, "bits16": 2, "float16": 2, "int16": 2, "uint16": 2}


def itemsize_of(dtype: str) -> int:
    """Bytes of one element of a torch dtype, by its name; packed 4-bit pairs count as one element."""
    return _WIDE.get(dtype, 1)


class Copy(NamedTuple):
    """One strided copy out of one checkpoint tensor into one parameter."""

    tensor: str
    """The checkpoint tensor that the bytes belong to."""
    file: str
    """Its file's name inside the checkpoint."""
    target: str
    """The parameter or buffer, by its name in the model."""
    src_start: int
    """Byte of the first element in the file."""
    dst_start: int
    """Byte of the first element, counted from the parameter's first byte."""
    shape: tuple[int, ...]
    """Elements along each dim; no dim is 0."""
    src_strides: tuple[int, ...]
    """Bytes between neighbours along each dim, in the file."""
    dst_strides: tuple[int, ...]
    """Bytes between neighbours along each dim, in the parameter."""
    src_dtype: str
    """torch's name of the dtype that the bytes are read as."""
    dst_dtype: str
    """torch's name of the dtype they are written as; another one means conversion."""
    via: str = ""
    """A dtype that values are converted to in between, where that makes a difference."""

    @property
    def itemsize(self) -> int:
        """Bytes of one element in the file."""
        return itemsize_of(self.src_dtype)

    @property
    def nbytes(self) -> int:
        """Bytes that are kept, counted in the file's dtype."""
        shape = self.shape
        count = shape[0] if len(shape) == 1 else math.prod(shape)
        return count * _WIDE.get(self.src_dtype, 1)

    @property
    def converts(self) -> bool:
        """Whether values change, and not only their places."""
        return self.src_dtype != self.dst_dtype or self.via != ""

    @property
    def src_end(self) -> int:
        """One past the last byte that it needs of the file."""
        return self.src_start + span_of(self.shape, self.src_strides, self.itemsize)

    @property
    def dst_end(self) -> int:
        """One past the last byte that it writes, counted from the parameter's first byte."""
        return self.dst_start + span_of(self.shape, self.dst_strides, itemsize_of(self.dst_dtype))

    @property
    def is_direct(self) -> bool:
        """Whether the bytes lie in one run on both sides and need no conversion."""
        return (
            not self.converts
            and self.src_strides == self.dst_strides
            and (self.src_end - self.src_start == self.nbytes)
        )


@cache
def _one(value: int) -> tuple[int, ...]:
    return (value,)


def straight(
    tensor: str, file: str, target: str, src_start: int, dst_start: int, count: int, dtype: str
) -> Copy:
    """A copy of `count` elements that are one run of bytes on both sides, as most are; see `Copy`."""
    # Equal ones share their tuples: a plan may have a hundred thousand of them.
    shape, strides = _one(count), _one(itemsize_of(dtype))
    return Copy(tensor, file, target, src_start, dst_start, shape, strides, strides, dtype, dtype)


def contiguous_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Byte strides of a row-major array."""
    strides, step = [], itemsize
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def span_of(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> int:
    """Bytes from the first byte of the first element to one past the last byte of the last."""
    span = itemsize
    for size, stride in zip(shape, strides, strict=True):
        if not size:
            return 0
        span += (size - 1) * stride
    return span


def normalise(copy: Copy) -> Copy:
    """The same copy with dims in the file's order, and dims that both sides walk as one made one."""
    if len(copy.shape) == 1 and copy.shape[0] != 1:
        return copy
    dims = sorted(
        (dim for dim in zip(copy.shape, copy.src_strides, copy.dst_strides, strict=True) if dim[0] != 1),
        key=lambda dim: (-dim[1], -dim[2]),
    )
    merged: list[tuple[int, int, int]] = []
    for size, src, dst in dims:
        if merged:
            outer_size, outer_src, outer_dst = merged[-1]
            if outer_src == src * size and outer_dst == dst * size:
                merged[-1] = (outer_size * size, src, dst)
                continue
        merged.append((size, src, dst))
    return copy._replace(
        shape=tuple(size for size, _, _ in merged),
        src_strides=tuple(src for _, src, _ in merged),
        dst_strides=tuple(dst for _, _, dst in merged),
    )


def split(copy: Copy, limit_bytes: int, gap_bytes: int) -> Iterator[Copy]:
    """Cuts a normalised copy into ones that each span at most about `limit_bytes` of the file.

    Args:
        copy: A normalised copy.
        limit_bytes: Longest span in the file; a single element may be wider.
        gap_bytes: Bytes between two neighbours that aren't worth reading over: wider ones are parted.
    """
    if not copy.shape:
        yield copy
        return
    size, src, dst = copy.shape[0], copy.src_strides[0], copy.dst_strides[0]
    if len(copy.shape) == 1 and src == copy.itemsize and size * src <= limit_bytes:
        yield copy
        return
    inner = span_of(copy.shape[1:], copy.src_strides[1:], copy.itemsize)
    if copy.src_end - copy.src_start <= limit_bytes and src - inner <= gap_bytes:
        yield copy
        return
    if inner > limit_bytes or src - inner > gap_bytes:
        rest = copy._replace(
            shape=copy.shape[1:], src_strides=copy.src_strides[1:], dst_strides=copy.dst_strides[1:]
        )
        for index in range(size):
            yield from split(
                rest._replace(src_start=copy.src_start + index * src, dst_start=copy.dst_start + index * dst),
                limit_bytes,
                gap_bytes,
            )
        return
    count = max(1, (limit_bytes - inner) // src + 1) if src else size
    for first in range(0, size, count):
        yield copy._replace(
            shape=(min(count, size - first), *copy.shape[1:]),
            src_start=copy.src_start + first * src,
            dst_start=copy.dst_start + first * dst,
        )


def may_overlap(one: Copy, other: Copy) -> bool:
    """Whether two copies into the same parameter could write the same byte.

    Exact for runs, and for columns of rows of one common length; otherwise cautious.
    """
    if one.dst_end <= other.dst_start or other.dst_end <= one.dst_start:
        return False
    stride = max((*one.dst_strides, *other.dst_strides), default=0)
    if not stride:
        return True
    # Columns inside a row of `stride` bytes, counted from the first row's start of `one`.
    columns = []
    for copy in (one, other):
        shape, strides = copy.shape, copy.dst_strides
        if stride in strides:
            outer = strides.index(stride)
            shape, strides = shape[:outer] + shape[outer + 1 :], strides[:outer] + strides[outer + 1 :]
        width = span_of(shape, strides, itemsize_of(copy.dst_dtype))
        start = (copy.dst_start - one.dst_start) % stride
        if start + width > stride:
            return True
        columns.append((start, start + width))
    (start, end), (other_start, other_end) = columns
    return start < other_end and other_start < end
