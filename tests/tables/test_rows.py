"""Gathering rows: as indexing the whole tensor would, from chunks that lie anywhere."""

from __future__ import annotations

import mmap
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raywl.checkpoint.dtypes import TORCH_NAMES
from raywl.errors import CheckpointError, ShapeMismatchError
from raywl.tables import TableLayout
from raywl.tables.rows import RowReader

DTYPES = [getattr(torch, name) for name in sorted(set(TORCH_NAMES.values()))]


@pytest.fixture(autouse=True)
def no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def raw_of(tensor: torch.Tensor) -> np.ndarray:
    """A tensor's bytes, flat."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy()


def table_of(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Any bits there are, not only those of finite numbers."""
    nbytes = torch.empty(shape, dtype=dtype).nbytes
    raw = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return (raw % 2 if dtype is torch.bool else raw).view(dtype).reshape(shape)


def reader_of(table: torch.Tensor, rows_per_chunk: int | None = None, gaps: list[int] | None = None):
    """A reader over chunks of their own, apart from each other by `gaps` bytes and out of order."""
    name = str(table.dtype).removeprefix("torch.")
    layout = TableLayout.of("t", name, tuple(table.shape), rows_per_chunk)
    raw, spans = raw_of(table), [layout.bytes_of(chunk) for chunk in range(layout.num_chunks)]
    gaps = (gaps or [0]) * (len(spans) + 1)
    memory = np.full(layout.nbytes + sum(gaps) + 64, 0xEE, np.uint8)
    chunks: list[np.ndarray] = [memory[:0]] * len(spans)
    at = 0
    for gap, index in zip(gaps, reversed(range(len(spans))), strict=False):
        start, end = spans[index]
        at += gap
        memory[at : at + end - start] = raw[start:end]
        chunks[index] = memory[at : at + end - start]
        at += end - start
    memory.flags.writeable = False
    for chunk in chunks:
        chunk.flags.writeable = False
    return RowReader(layout, chunks)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        one.shape == other.shape and one.dtype == other.dtype and np.array_equal(raw_of(one), raw_of(other))
    )


def eager(table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The rows by plain indexing of their bytes, since not all dtypes can be indexed."""
    row = table[0].nbytes if table.shape[0] else 0
    raw = raw_of(table).reshape(table.shape[0], row)[ids.reshape(-1).numpy()]
    return torch.from_numpy(raw.copy()).reshape(-1).view(table.dtype).reshape((*ids.shape, *table.shape[1:]))


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_gather_is_indexing(data):
    """Any dtype, shape, chunking, alignment of chunks, shape of ids; with and without `out`."""
    dtype = data.draw(st.sampled_from(DTYPES))
    shape = (data.draw(st.integers(1, 30)), *data.draw(st.lists(st.integers(0, 6), max_size=2)))
    table = table_of(shape, dtype, data.draw(st.integers(0, 9)))
    gaps = data.draw(st.lists(st.integers(0, 24), min_size=1, max_size=4))
    reader = reader_of(table, data.draw(st.none() | st.integers(1, 35)), gaps)
    ids_shape = data.draw(st.lists(st.integers(0, 4), max_size=3))
    count = int(np.prod(ids_shape, dtype=int))
    values = data.draw(st.lists(st.integers(0, shape[0] - 1), min_size=count, max_size=count))
    id_dtype = data.draw(st.sampled_from([torch.int64, torch.int32, torch.int16, torch.uint8]))
    ids = torch.tensor(values, dtype=id_dtype).reshape(ids_shape)
    expected = eager(table, ids.long())
    assert same_bits(reader.gather(ids), expected)
    out = table_of((*ids_shape, *shape[1:]), dtype, 77)
    assert reader.gather(ids.numpy(), out) is out
    assert same_bits(out, expected)


def test_ids_of_every_kind():
    """Lists, arrays that are read-only, reversed or of another byte order, ranges, one number."""
    table = torch.arange(40, dtype=torch.float32).reshape(20, 2)
    reader = reader_of(table, 3)
    frozen = np.array([3, 1, 19])
    frozen.flags.writeable = False
    for ids in (
        [3, 1, 19],
        (3, 1, 19),
        frozen,
        np.array([19, 1, 3])[::-1],
        np.array([3, 1, 19], ">i4"),
        np.array([3, 1, 19], np.uint64),
        [torch.tensor(3), torch.tensor(1), torch.tensor(19)],
        torch.tensor([19, 0, 1, 0, 3]).flip(0)[::2],
    ):
        assert torch.equal(reader.gather(ids), table[[3, 1, 19]])
    assert torch.equal(reader.gather(7), table[7])
    assert torch.equal(reader.gather(np.int32(7)), table[7])
    assert torch.equal(reader.gather(range(20)), table)
    assert reader.gather([]).shape == (0, 2)
    assert reader.gather(np.zeros((0, 5))).shape == (0, 5, 2)
    assert reader.gather([[], []]).shape == (2, 0, 2)


@pytest.mark.parametrize(
    "ids", [[1.0], [True], ["1"], np.array([1j]), torch.tensor([0.5]), torch.tensor([True]), [None], [2**70]]
)
def test_ids_that_are_no_integers(ids):
    with pytest.raises(ValueError, match="t: row ids must be integers"):
        reader_of(torch.zeros(4, 2)).gather(ids)


@pytest.mark.parametrize("wrong", [-1, 20, 2**40, -(2**40), np.uint64(2**64 - 1)])
def test_ids_outside_the_table(wrong):
    """The first such id and the range; `out` isn't touched."""
    reader = reader_of(torch.zeros(20, 2), 6)
    out = torch.full((3, 2), 5.0)
    with pytest.raises(CheckpointError, match=f"tensor 't': row id {wrong} is outside 0..19"):
        reader.gather(np.array([0, wrong, 3], np.uint64 if wrong > 2**50 else np.int64), out)
    assert out.eq(5).all()


def test_a_table_without_rows_or_without_width():
    """Nothing can be asked of the one; the other has rows of nothing."""
    empty = reader_of(torch.zeros(0, 3))
    assert empty.gather([]).shape == (0, 3)
    with pytest.raises(CheckpointError, match="row id 0 is outside the table, which has no rows"):
        empty.gather([0])
    thin = reader_of(torch.zeros(5, 0), 2)
    assert thin.gather([4, 0]).shape == (2, 0)
    with pytest.raises(CheckpointError, match=r"outside 0\.\.4"):
        thin.gather([5])


def test_out_is_checked_before_anything_is_written():
    reader = reader_of(torch.ones(20, 2), 6)
    with pytest.raises(ShapeMismatchError) as caught:
        reader.gather([1, 2, 3], torch.zeros(3, 4))
    assert (caught.value.expected, caught.value.got) == ((3, 2), (3, 4))
    for out in (
        torch.zeros(3, 2, dtype=torch.float64),
        torch.zeros(2, 3).t(),
        torch.zeros(3, 2, device="meta"),
        torch.zeros(3, 2).to_sparse(),
    ):
        with pytest.raises(ValueError, match="out must be a contiguous"):
            reader.gather([1, 2, 3], out)


def test_out_anywhere_in_other_memory():
    """At any offset of its storage, whatever the rows' width; a parameter; nothing beside it is touched."""
    table = table_of((9, 8), torch.float8_e4m3fn)
    reader = reader_of(table, 4)
    ids = torch.tensor([8, 0, 3])
    for offset in range(9):
        memory = torch.full((64,), 0x11, dtype=torch.uint8)
        out = memory.view(torch.float8_e4m3fn)[offset : offset + 24].view(3, 8)
        reader.gather(ids, out)
        assert same_bits(out, eager(table, ids))
        assert memory[:offset].eq(0x11).all()
        assert memory[offset + 24 :].eq(0x11).all()
    floats = torch.arange(20, dtype=torch.float32).reshape(10, 2)
    param = torch.nn.Parameter(torch.zeros(2, 2))
    reader_of(floats).gather([9, 4], param)
    assert torch.equal(param.detach(), floats[[9, 4]])
    with torch.inference_mode():
        assert torch.equal(reader_of(floats).gather(torch.tensor([9, 4])), floats[[9, 4]])


def test_memory_that_can_only_be_read(tmp_path):
    """A read-only mapping, whose pages would kill the process if anything wrote to them."""
    table = table_of((50, 3), torch.bfloat16)
    path = tmp_path / "table"
    path.write_bytes(b"x" * 13 + raw_of(table).tobytes())
    with open(path, "rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    whole = np.frombuffer(mapping, np.uint8)[13:]
    layout = TableLayout.of("t", "bfloat16", (50, 3), 7)
    chunks = [whole[slice(*layout.bytes_of(index))] for index in range(layout.num_chunks)]
    reader = RowReader(layout, chunks)
    ids = torch.tensor([[49, 0], [7, 6]])
    assert same_bits(reader.gather(ids), eager(table, ids))


def test_chunks_live_as_long_as_their_reader():
    """Nobody else holds them."""
    reader = reader_of(torch.arange(2_000_000, dtype=torch.int32).reshape(-1, 4), 1000)
    junk = [np.zeros(1_000_000, np.uint8) for _ in range(8)]
    assert reader.gather([499_999]).tolist() == [[1999996, 1999997, 1999998, 1999999]]
    del junk
