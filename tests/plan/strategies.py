"""Random copies, and what they do to bytes, worked out element by element."""

from __future__ import annotations

import itertools
import math

from hypothesis import strategies as st

from raywl.plan import Copy
from raywl.plan.copies import contiguous_strides

DTYPES = {"uint8": 1, "bfloat16": 2, "float32": 4, "complex64": 8}


def offsets(shape, strides):
    """Byte offset of every element, in row-major order."""
    return [
        sum(i * s for i, s in zip(index, strides, strict=True))
        for index in itertools.product(*map(range, shape))
    ]


def effect(copy):
    """Destination byte to source byte."""
    size = copy.itemsize
    moved = {}
    sources = offsets(copy.shape, copy.src_strides)
    places = offsets(copy.shape, copy.dst_strides)
    for source, place in zip(sources, places, strict=True):
        for byte in range(size):
            where = copy.dst_start + place + byte
            assert where not in moved, "a byte is written twice"
            moved[where] = copy.src_start + source + byte
    return moved


@st.composite
def layouts(draw, shape, itemsize, *, dense=False):
    """First byte and strides of a view of `shape`: dims in any order, steps, and padding."""
    order = draw(st.permutations(range(len(shape))))
    strides, step = [0] * len(shape), itemsize
    for dim in reversed(order):
        gap = 1 if dense else draw(st.sampled_from([1, 1, 1, 2, 3]))
        strides[dim] = step * gap
        step = strides[dim] * shape[dim]
        if not dense:
            step += itemsize * draw(st.sampled_from([0, 0, 1, 5]))
    return draw(st.integers(0, 3)) * itemsize, tuple(strides)


@st.composite
def copies(draw, target="p", file="f", max_dims=4, src_start=None):
    """A copy whose destination elements don't overlap; the source may repeat elements."""
    dtype = draw(st.sampled_from(list(DTYPES)))
    size = DTYPES[dtype]
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=max_dims)))
    kind = draw(st.sampled_from(["plain", "views", "views", "repeats"]))
    if kind == "plain":
        src = dst = contiguous_strides(shape, size)
        first = 0
    else:
        _, src = draw(layouts(shape, size))
        first, dst = draw(layouts(shape, size))
    if kind == "repeats":
        src = tuple(draw(st.sampled_from([0, stride])) for stride in src)
    # Files put tensors at any byte.
    start = draw(st.integers(0, 40)) if src_start is None else src_start
    return Copy("t", file, target, start, first, shape, src, dst, dtype, dtype)


def numel(copy):
    return math.prod(copy.shape)
