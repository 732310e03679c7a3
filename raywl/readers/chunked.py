"""Which chunks of a checkpoint some reads want, and what of each goes where."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from raywl.coordination import ChunkTable
from raywl.coordination.chunks import set_of
from raywl.plan import Copy, Read
from raywl.plan.cuts import cut_into
from raywl.readers.memory import ByteView
from raywl.readers.staging import place

__all__ = ["ChunkedReads", "as_raw"]


@dataclass(eq=False)
class _Element:
    """A single element whose bytes lie in several chunks."""

    copy: Copy
    raw: torch.Tensor
    lacking: int
    """Bytes that haven't come."""


@dataclass(eq=False)
class _Part:
    """What is wanted of one chunk."""

    pieces: list[Copy] = field(default_factory=list)
    elements: list[_Element] = field(default_factory=list)
    nbytes: int = 0
    """Of the reads, what lies in it."""


class ChunkedReads:
    """Reads, to be made chunk by chunk, in any order of chunks.

    A chunk ends anywhere, also in the middle of a row or of an element: copies are cut there, and the few
    elements that lie across an end are put together in memory of their own.

    Args:
        reads: What is wanted.
        table: The chunks of the checkpoint.
    """

    def __init__(self, reads: Iterable[Read], table: ChunkTable) -> None:
        self._table = table
        self._lock = threading.Lock()
        self._parts: dict[int, _Part] = {}
        files = {name: index for index, (name, _) in enumerate(table.files)}
        for read in reads:
            first, size = table.chunks_of(files[read.file]).start, table.chunk_bytes
            for number in range(read.start // size, -(-read.end // size)):
                start, end = number * size, (number + 1) * size
                self._part(first + number).nbytes += min(end, read.end) - max(start, read.start)
            for piece in read.pieces:
                self._cut(piece, first)

    def _part(self, chunk: int) -> _Part:
        return self._parts.setdefault(chunk, _Part())

    def _cut(self, piece: Copy, first: int) -> None:
        size = self._table.chunk_bytes
        low, high = piece.src_start // size, -(-piece.src_end // size)
        if high <= low + 1:
            self._part(first + low).pieces.append(piece)
            return
        inside, across = cut_into(piece, range(low * size, high * size + 1, size))
        for number, part in inside:
            self._part(first + low + number).pieces.append(part)
        for copy in across:
            element = _Element(copy, torch.empty(copy.itemsize, dtype=torch.uint8), copy.itemsize)
            for number in range(copy.src_start // size, -(-copy.src_end // size)):
                self._part(first + number).elements.append(element)

    @property
    def needs(self) -> int:
        """The chunks that are wanted, as a set."""
        return set_of(self._parts)

    def nbytes(self, chunk: int) -> int:
        """What lies in a chunk of the reads."""
        return self._parts[chunk].nbytes

    def place(self, chunk: int, data: Any, targets: Mapping[str, ByteView]) -> None:
        """Puts to their places what is wanted of a chunk. Threads may do so with different chunks at once.

        Args:
            chunk: Its number.
            data: Its bytes, a 1-d uint8 array; read-only memory is fine.
            targets: Where each target lies.

        Raises:
            CheckpointError: torch can't copy the one dtype into the other.
        """
        part, raw, start = self._parts[chunk], as_raw(data), self._table.span(chunk).start
        for piece in part.pieces:
            if piece.is_direct:
                first, nbytes = piece.src_start - start, piece.nbytes
                target = targets[piece.target].raw[piece.dst_start : piece.dst_start + nbytes]
                target.copy_(raw[first : first + nbytes])
            else:
                place(piece, raw, start, targets[piece.target])
        for element in part.elements:
            copy = element.copy
            low, high = max(copy.src_start, start), min(copy.src_end, start + raw.numel())
            element.raw[low - copy.src_start : high - copy.src_start] = raw[low - start : high - start]
            with self._lock:
                # Another thread may have the other half.
                element.lacking -= high - low
                is_whole = element.lacking == 0
            if is_whole:
                place(copy, element.raw, copy.src_start, targets[copy.target])


def as_raw(data: Any) -> torch.Tensor:
    """A 1-d uint8 array as a tensor over the same memory, which lives as long as the array does."""
    if not data.nbytes:
        return torch.empty(0, dtype=torch.uint8)
    # Through the address, since torch takes read-only arrays only with a warning.
    return torch.frombuffer((ctypes.c_char * data.nbytes).from_address(data.ctypes.data), dtype=torch.uint8)
