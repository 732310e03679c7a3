"""How a table lies in chunks, and whether its chunks fit a store."""

from __future__ import annotations

import math
from dataclasses import dataclass

from raywl.checkpoint import TensorEntry
from raywl.checkpoint.dtypes import TORCH_NAMES, TORCH_ONLY, torch_name, torch_shape
from raywl.errors import CapacityError, CheckpointError
from raywl.plan.copies import itemsize_of

__all__ = ["CHUNK_BYTES", "PlasmaBudget", "TableLayout"]

CHUNK_BYTES = 64 << 20
"""Bytes of a chunk, about, when the caller doesn't say how many rows it holds."""

_STORE_SHARE = 0.8
"""Part of a node's object store that tables may take: the rest is for everybody else's objects."""


@dataclass(frozen=True, slots=True)
class TableLayout:
    """A table of `shape[0]` rows, cut into chunks of whole rows."""

    name: str
    """The tensor's name, for messages."""
    dtype: str
    """torch's name."""
    shape: tuple[int, ...]
    """`(rows, ...)`, in torch's elements."""
    rows_per_chunk: int

    @classmethod
    def of_entry(cls, name: str, entry: TensorEntry, rows_per_chunk: int | None) -> TableLayout:
        """The layout of a checkpoint's tensor.

        Raises:
            CheckpointError: A 0-d tensor has no rows; torch can't hold what it is of; or its rows don't lie
                one after the other in the file.
            ValueError: Fewer than one row to a chunk.
        """
        if entry.dtype in TORCH_ONLY:
            raise CheckpointError(None, name, f"is {torch_name(entry.dtype)}, which tables don't have")
        if entry.dtype not in TORCH_NAMES:
            raise CheckpointError(None, name, f"is {entry.dtype}, which torch has no dtype for")
        if entry.strides is not None:
            reason = (
                "is a view whose rows aren't one after the other in its file; `raywl convert` writes them so"
            )
            raise CheckpointError(None, name, reason)
        layout = cls.of(name, TORCH_NAMES[entry.dtype], torch_shape(entry.dtype, entry.shape), rows_per_chunk)
        if layout.nbytes != entry.nbytes:
            reason = f"has rows of {entry.shape[-1]} {entry.dtype} elements, which don't fill whole bytes"
            raise CheckpointError(None, name, reason)
        return layout

    @classmethod
    def of(cls, name: str, dtype: str, shape: tuple[int, ...], rows_per_chunk: int | None) -> TableLayout:
        """The layout of a tensor of that dtype and shape; raises as `of_entry`."""
        if not shape:
            raise CheckpointError(None, name, "is 0-d: a table needs rows")
        if rows_per_chunk is not None and rows_per_chunk < 1:
            raise ValueError(f"rows_per_chunk must be at least 1, got {rows_per_chunk}")
        row_bytes = math.prod(shape[1:]) * itemsize_of(dtype)
        rows = rows_per_chunk or max(1, CHUNK_BYTES // max(row_bytes, 1))
        return cls(name, dtype, shape, min(rows, max(shape[0], 1)))

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return math.prod(self.shape[1:]) * itemsize_of(self.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return self.shape[0] * self.row_bytes

    @property
    def num_chunks(self) -> int:
        """Number of chunks; the last one may hold fewer rows."""
        return -(-self.shape[0] // self.rows_per_chunk)

    def rows_of(self, chunk: int) -> tuple[int, int]:
        """Rows `[start, end)` of a chunk.

        Raises:
            IndexError: There is no such chunk.
        """
        if not 0 <= chunk < self.num_chunks:
            raise IndexError(f"{self.name}: chunk {chunk} is outside 0..{self.num_chunks - 1}")
        start = chunk * self.rows_per_chunk
        return start, min(start + self.rows_per_chunk, self.shape[0])

    def bytes_of(self, chunk: int) -> tuple[int, int]:
        """Bytes `[start, end)` of a chunk, counted from the table's first byte."""
        start, end = self.rows_of(chunk)
        return start * self.row_bytes, end * self.row_bytes


@dataclass(frozen=True, slots=True)
class PlasmaBudget:
    """What a node's object store has for tables."""

    node: str
    """What the node is called."""
    store_bytes: int
    """Capacity of the store."""
    shm_bytes: int
    """Bytes that the store has taken already where its memory comes from, and those that are free there."""
    table_bytes: int
    """Bytes of the tables that are there already."""

    @property
    def free_bytes(self) -> int:
        """Bytes that one more table may have."""
        return max(0, min(int(self.store_bytes * _STORE_SHARE), self.shm_bytes) - self.table_bytes)

    def check(self, layout: TableLayout) -> None:
        """Raises `CapacityError`, with the numbers and the setting to change, when a table doesn't fit."""
        if layout.nbytes > self.free_bytes:
            raise CapacityError(
                "object store memory",
                layout.nbytes,
                self.free_bytes,
                f"table {layout.name} on node {self.node}: its store has {self.store_bytes} bytes, of which "
                f"tables may take {_STORE_SHARE:.0%} and {self.table_bytes} are taken; shared memory has "
                f"room for {self.shm_bytes}; start Ray with a "
                "larger object_store_memory (ray start --object-store-memory=BYTES), or use placement='file'",
                unit="bytes",
            )
