"""How tables are cut into chunks, and what fits a store."""

from __future__ import annotations

import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raywl.checkpoint import TensorEntry
from raywl.checkpoint.dtypes import DTYPE_BITS, TORCH_NAMES
from raywl.errors import CapacityError, CheckpointError
from raywl.tables import PlasmaBudget, TableLayout
from raywl.tables.layout import CHUNK_BYTES

MIB = 1 << 20


@given(
    rows=st.integers(0, 40),
    width=st.lists(st.integers(0, 5), max_size=2),
    dtype=st.sampled_from(sorted(TORCH_NAMES.values())),
    rows_per_chunk=st.none() | st.integers(1, 50),
)
def test_chunks_tile_the_table(rows, width, dtype, rows_per_chunk):
    """Every byte is in one chunk, in order, and chunks are whole rows."""
    layout = TableLayout.of("t", dtype, (rows, *width), rows_per_chunk)
    spans = [layout.bytes_of(chunk) for chunk in range(layout.num_chunks)]
    assert [start for start, _ in spans] == [0, *(end for _, end in spans)][: len(spans)]
    assert (spans[-1][1] if spans else 0) == layout.nbytes
    assert layout.nbytes == torch.empty((rows, *width), dtype=getattr(torch, dtype)).nbytes
    per_chunk = [end - start for start, end in map(layout.rows_of, range(layout.num_chunks))]
    assert sum(per_chunk) == rows
    assert all(0 < count <= layout.rows_per_chunk for count in per_chunk)
    assert len(set(per_chunk[:-1])) <= 1
    assert pickle.loads(pickle.dumps(layout)) == layout


def test_chunks_are_of_a_good_size():
    """About 64 MiB by default; one row when a row is larger; never more rows than there are."""
    assert TableLayout.of("t", "bfloat16", (10**6, 128), None).rows_per_chunk == CHUNK_BYTES // 256
    assert TableLayout.of("t", "uint8", (3, CHUNK_BYTES + 1), None).rows_per_chunk == 1
    assert TableLayout.of("t", "uint8", (3, 1), None).rows_per_chunk == 3
    assert TableLayout.of("t", "uint8", (3, 1), 10**9).num_chunks == 1


def test_no_such_chunk():
    """The numbers are in the message."""
    layout = TableLayout.of("t", "uint8", (10, 2), 4)
    for chunk in (-1, 3):
        with pytest.raises(IndexError, match=f"t: chunk {chunk} is outside 0..2"):
            layout.rows_of(chunk)


def test_what_is_no_table():
    """0-d tensors, chunks of no rows, and dtypes that torch has no type for; four-bit pairs count as one."""
    with pytest.raises(CheckpointError, match="tensor 't': is 0-d: a table needs rows"):
        TableLayout.of("t", "uint8", (), None)
    for rows in (0, -1):
        with pytest.raises(ValueError, match=f"rows_per_chunk must be at least 1, got {rows}"):
            TableLayout.of("t", "uint8", (3, 1), rows)
    for dtype in sorted(set(DTYPE_BITS) - set(TORCH_NAMES)):
        with pytest.raises(CheckpointError, match=f"tensor 't': is {dtype}, which torch has no dtype for"):
            TableLayout.of_entry("t", TensorEntry(dtype, (4, 4), "f", 0, 12), None)
    packed = TableLayout.of_entry("t", TensorEntry("F4", (5, 6), "f", 0, 15), None)
    assert (packed.shape, packed.dtype, packed.nbytes) == ((5, 3), "float4_e2m1fn_x2", 15)
    with pytest.raises(CheckpointError, match="tensor 't'"):
        # Two rows share a byte.
        TableLayout.of_entry("t", TensorEntry("F4", (2, 3), "f", 0, 3), None)


@pytest.mark.parametrize(
    ("store", "shm", "taken", "free"),
    [
        (1000 * MIB, 10_000 * MIB, 0, 800 * MIB),
        (1000 * MIB, 10_000 * MIB, 300 * MIB, 500 * MIB),
        (1000 * MIB, 100 * MIB, 0, 100 * MIB),
        (1000 * MIB, 100 * MIB, 60 * MIB, 40 * MIB),
        (1000 * MIB, 0, 0, 0),
        (1000 * MIB, 10_000 * MIB, 900 * MIB, 0),
        (0, 10_000 * MIB, 0, 0),
    ],
)
def test_budget_at_its_edge(store, shm, taken, free):
    """What is exactly free fits, and one byte more doesn't."""
    budget = PlasmaBudget("10.0.0.7", store, shm, taken)
    assert budget.free_bytes == free
    budget.check(TableLayout.of("t", "uint8", (free, 1), None))
    with pytest.raises(CapacityError) as caught:
        budget.check(TableLayout.of("t", "uint8", (free + 1, 1), None))
    error = caught.value
    assert (error.resource, error.needed, error.available) == ("object store memory", free + 1, free)
    for part in ("table t", "10.0.0.7", str(store), str(taken), "80%", "--object-store-memory", "'file'"):
        assert part in str(error)
