"""Copies cut at bytes of their file: the same elements to the same places, each once."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from raywl.plan.copies import Copy, contiguous_strides, itemsize_of
from raywl.plan.cuts import cut_at, cut_into


@st.composite
def copies(draw: st.DrawFn) -> Copy:
    """Dense, strided, transposed and overlapping ones, at odd bytes."""
    dtype = draw(st.sampled_from(["uint8", "bfloat16", "float32", "complex128"]))
    item = itemsize_of(dtype)
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=3)))
    order = draw(st.permutations(range(len(shape))))
    dense = contiguous_strides(tuple(shape[dim] for dim in order), item)
    wide = draw(st.integers(1, 3))
    strides = {dim: stride * wide for dim, stride in zip(order, dense, strict=True)}
    src = tuple(strides[dim] for dim in range(len(shape)))
    if draw(st.booleans()) and shape:
        src = (item, *src[1:])
    start = draw(st.integers(0, 9))
    return Copy("t", "f", "p", start, 0, shape, src, contiguous_strides(shape, item), dtype, dtype)


def elements(copy: Copy) -> list[tuple[int, int]]:
    """First byte in the file and in the parameter of each element."""
    found = [(copy.src_start, copy.dst_start)]
    for size, src, dst in zip(copy.shape, copy.src_strides, copy.dst_strides, strict=True):
        found = [(a + i * src, b + i * dst) for a, b in found for i in range(size)]
    return found


@settings(max_examples=300, deadline=None)
@given(copy=copies(), place=st.integers(0, 300))
def test_a_cut_keeps_every_element(copy: Copy, place: int) -> None:
    cuts = cut_at(copy, place)
    parts = [*cuts.before, *cuts.across, *cuts.after]
    assert sorted(e for part in parts for e in elements(part)) == sorted(elements(copy))
    assert all(part.src_end <= place for part in cuts.before)
    assert all(part.src_start >= place for part in cuts.after)
    assert all(not part.shape and part.src_start < place < part.src_end for part in cuts.across)


@settings(max_examples=200, deadline=None)
@given(copy=copies(), step=st.integers(1, 40))
def test_chunks_get_what_lies_in_them(copy: Copy, step: int) -> None:
    first = copy.src_start // step * step
    places = list(range(first, copy.src_end + step, step))
    inside, across = cut_into(copy, places)
    parts = [*(piece for _, piece in inside), *across]
    assert sorted(e for part in parts for e in elements(part)) == sorted(elements(copy))
    for number, piece in inside:
        assert places[number] <= piece.src_start
        assert piece.src_end <= places[number + 1]
    for piece in across:
        assert piece.src_start // step != (piece.src_end - 1) // step


def test_few_pieces() -> None:
    """A column cut of many rows makes a few pieces of each chunk, not one of each row."""
    columns = Copy("t", "f", "p", 100, 0, (10_000, 50), (400, 4), (200, 4), "float32", "float32")
    inside, across = cut_into(columns, range(0, 4_000_200, 1 << 20))
    assert len(inside) <= 4 * 3
    assert not across
