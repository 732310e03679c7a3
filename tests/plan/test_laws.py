"""Planning conserves bytes: every wanted byte is delivered once, to its place."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import placement_types as placements

from raywl import ParallelContext, Replicate, Shard
from raywl.errors import ShapeMismatchError
from raywl.plan import Copy, cut, local_box, schedule
from raywl.plan import reads as reads_module
from raywl.plan.copies import contiguous_strides, may_overlap, normalise, span_of, split
from raywl.types import as_shard_spec

from .strategies import copies, effect, layouts, offsets

law = settings(deadline=None, max_examples=100)
many = settings(deadline=None, max_examples=200)


@law
@given(copies())
def test_normalising_changes_no_byte(copy):
    assert effect(normalise(copy)) == effect(copy)
    assert normalise(copy).nbytes == copy.nbytes
    assert normalise(normalise(copy)) == normalise(copy)


@law
@given(copies())
def test_ends_are_those_of_the_last_bytes(copy):
    moved = effect(copy)
    assert copy.dst_end == max(moved) + 1
    assert copy.src_end == max(moved.values()) + 1
    assert copy.nbytes == len(moved)


@law
@given(copies())
def test_a_direct_copy_is_one_run(copy):
    if copy.is_direct:
        moved = effect(copy)
        assert moved == {copy.dst_start + i: copy.src_start + i for i in range(copy.nbytes)}


@law
@given(copies(), st.integers(1, 64), st.integers(0, 32))
def test_splitting_delivers_every_byte_once(copy, limit, gap):
    copy = normalise(copy)
    moved = {}
    for piece in split(copy, limit, gap):
        part = effect(piece)
        assert not part.keys() & moved.keys()
        moved |= part
        assert piece.src_end - piece.src_start <= max(limit, piece.itemsize)
    assert moved == effect(copy)


@law
@given(copies(), st.integers(0, 16))
def test_no_piece_spans_a_gap_that_is_too_wide(copy, gap):
    for piece in split(normalise(copy), 1 << 30, gap):
        wanted = sorted(set(effect(piece).values()))
        assert all(b - a - 1 <= gap for a, b in itertools.pairwise(wanted))


@many
@given(
    st.lists(st.tuples(copies(), st.sampled_from("fg")), max_size=6),
    st.integers(8, 128),
    st.integers(0, 16),
    st.integers(0, 16),
    st.integers(8, 64),
    st.integers(1, 5),
)
def test_reads_deliver_every_byte_of_every_copy_once(rows, window, gap, slack, shared, pieces):
    everything = [
        copy._replace(file=file, target=f"p{index}", tensor=f"t{index}")
        for index, (copy, file) in enumerate(rows)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reads_module, "WINDOW_BYTES", window)
        patch.setattr(reads_module, "GAP_BYTES", gap)
        patch.setattr(reads_module, "SLACK_BYTES", slack)
        patch.setattr(reads_module, "SHARED_BYTES", shared)
        patch.setattr(reads_module, "MAX_PIECES", pieces)
        reads = schedule(everything, {"g": 0, "f": 1})
    delivered = {copy.target: {} for copy in everything}
    for read in reads:
        assert 0 < len(read.pieces) <= pieces
        assert read.start == min(piece.src_start for piece in read.pieces)
        assert read.end == max(piece.src_end for piece in read.pieces)
        for piece in read.pieces:
            assert piece.file == read.file
            part = effect(piece)
            assert not part.keys() & delivered[piece.target].keys()
            delivered[piece.target] |= part
        if read.direct:
            assert all(piece.is_direct for piece in read.pieces)
            ends = [(piece.src_start, piece.src_end) for piece in read.pieces]
            assert all(a[1] <= b[0] for a, b in itertools.pairwise(ends))
            assert read.end - read.start <= max(window, 8)
    assert delivered == {copy.target: effect(copy) for copy in everything}
    order = [({"g": 0, "f": 1}[read.file], read.start) for read in reads]
    assert order == sorted(order)


@law
@given(st.lists(copies(max_dims=2), min_size=1, max_size=5), st.integers(0, 16))
def test_a_read_spans_unwanted_bytes_only_between_rows_and_neighbours(rows, slack):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reads_module, "SLACK_BYTES", slack)
        patch.setattr(reads_module, "GAP_BYTES", 0)
        reads = schedule(rows, {"f": 0})
    for read in reads:
        wanted = sorted({byte for piece in read.pieces for byte in effect(piece).values()})
        assert all(b - a - 1 <= slack for a, b in itertools.pairwise(wanted))


@st.composite
def two_writes(draw):
    """Two copies into one memory, often rows and columns of the same matrix."""
    pair = []
    matrix = draw(st.booleans())
    for _ in range(2):
        if matrix:
            rows, columns = draw(st.integers(1, 4)), draw(st.integers(1, 4))
            first = draw(st.integers(0, 24)) * 2
            step = draw(st.sampled_from([16, 16, 32]))
            shape, dst = (rows, columns), (step, draw(st.sampled_from([2, 2, 4])))
        else:
            shape = tuple(draw(st.lists(st.integers(1, 4), max_size=3)))
            first, dst = draw(layouts(shape, 2))
            first += 2 * draw(st.integers(0, 10))
        src = contiguous_strides(shape, 2)
        pair.append(Copy("t", "f", "p", 0, first, shape, src, dst, "bfloat16", "bfloat16"))
    return pair


def written(copy):
    return {copy.dst_start + o + b for o in offsets(copy.shape, copy.dst_strides) for b in range(2)}


@many
@given(two_writes())
def test_a_real_overlap_is_never_denied(pair):
    one, other = (normalise(copy) for copy in pair)
    if written(one) & written(other):
        assert may_overlap(one, other)
        assert may_overlap(other, one)


def test_interleaved_and_neighbouring_writes_do_not_overlap():
    """What fused loaders do: halves, columns, and alternating rows of one parameter."""

    def at(first, shape, strides):
        src = contiguous_strides(shape, 2)
        return normalise(Copy("t", "f", "p", 0, first, shape, src, strides, "bfloat16", "bfloat16"))

    assert not may_overlap(at(0, (4, 8), (16, 2)), at(64, (4, 8), (16, 2)))
    assert not may_overlap(at(0, (8, 4), (16, 2)), at(8, (8, 4), (16, 2)))
    assert not may_overlap(at(0, (4, 8), (32, 2)), at(16, (4, 8), (32, 2)))


@law
@given(st.integers(0, 40), st.integers(1, 12))
def test_cuts_tile_a_dim_in_rank_order_as_torch_chunks(size, num_parts):
    parts = [cut(size, rank, num_parts) for rank in range(num_parts)]
    assert [start for start, _ in parts] == [0, *(end for _, end in parts[:-1])]
    assert parts[-1][1] == size
    chunks = [len(chunk) for chunk in torch.arange(size).chunk(num_parts)]
    sizes = [end - start for start, end in parts]
    assert sizes == (chunks + [0] * num_parts)[:num_parts] or size == 0


@law
@given(st.lists(st.integers(0, 6), max_size=4), st.integers(1, 7), st.data())
def test_the_ranks_boxes_tile_the_tensor(shape, num_parts, data):
    shape = tuple(shape)
    dims = st.integers(-len(shape), len(shape) - 1) if shape else st.nothing()
    spec = data.draw(st.builds(Shard, dims) | st.just(Replicate())) if shape else Replicate()
    boxes = [local_box("w", shape, spec, rank, num_parts) for rank in range(num_parts)]
    held = [set(itertools.product(*(range(start, end) for start, end in box))) for box in boxes]
    if spec == Replicate():
        assert all(box == tuple((0, size) for size in shape) for box in boxes)
    else:
        assert sum(len(part) for part in held) == math.prod(shape)
        assert len(set().union(*held)) == math.prod(shape)


def test_a_dim_that_is_not_there_is_named():
    with pytest.raises(ShapeMismatchError, match=r"dim 2: it has 2 dims"):
        local_box("w", (4, 4), Shard(2), 0, 2)


def test_placements_that_no_bytes_correspond_to_are_refused_by_name():
    assert as_shard_spec(placements.Shard(1)) == Shard(1)
    assert as_shard_spec(placements.Replicate()) == Replicate()
    with pytest.raises(ValueError, match="Partial"):
        as_shard_spec(placements.Partial())
    with pytest.raises(ValueError, match="_StridedShard"):
        as_shard_spec(placements._StridedShard(0, split_factor=2))
    with pytest.raises(TypeError, match="not a shard spec"):
        as_shard_spec(1)


def test_spans_of_nothing_are_empty():
    assert span_of((0, 3), (12, 4), 4) == 0
    assert span_of((), (), 4) == 4
    assert ParallelContext().rank == 0
