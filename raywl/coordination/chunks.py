"""A checkpoint's files cut into chunks, and sets of chunks as the bits of an integer."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

__all__ = ["CHUNK_BYTES", "ChunkSpan", "ChunkTable", "all_bits", "each_bit", "lowest_bit", "set_of"]

CHUNK_BYTES = 8 << 20
"""Size of a chunk: with larger ones all fetches end together, and nothing can be passed on before."""


def all_bits(count: int) -> int:
    """The set of chunks 0 to `count - 1`."""
    return (1 << count) - 1


def set_of(chunks: Iterable[int]) -> int:
    """A set of some numbers."""
    numbers = list(chunks)
    if not numbers:
        return 0
    marks = bytearray(max(numbers) // 8 + 1)
    for number in numbers:
        marks[number >> 3] |= 1 << (number & 7)
    return int.from_bytes(marks, "little")


def lowest_bit(bits: int) -> int:
    """The smallest number in a set that isn't empty."""
    return (bits & -bits).bit_length() - 1


def each_bit(bits: int) -> Iterator[int]:
    """The numbers in a set, ascending."""
    # Searching the text is linear in all; clearing one bit of a large integer after the other is not.
    digits = bin(bits)[:1:-1]
    at = digits.find("1")
    while at >= 0:
        yield at
        at = digits.find("1", at + 1)


class ChunkSpan(NamedTuple):
    """Where a chunk lies."""

    file: int
    """Index of its file."""
    start: int
    """First byte in the file; half-open."""
    end: int


@dataclass(frozen=True)
class ChunkTable:
    """All chunks of a checkpoint, numbered by file and offset. An empty file has none."""

    files: tuple[tuple[str, int], ...]
    """Name and size in bytes."""
    chunk_bytes: int = CHUNK_BYTES
    """Size of every chunk but the last of each file."""
    num_chunks: int = field(default=0, init=False, repr=False, compare=False)
    """How many there are."""
    nbytes: int = field(default=0, init=False, repr=False, compare=False)
    """Bytes of all files."""
    _first: tuple[int, ...] = field(default=(), init=False, repr=False, compare=False)
    """First chunk of each file, and the number of all."""
    _lacking: dict[int, int] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Chunks that are shorter than the others, and by how much."""
    _short: int = field(default=0, init=False, repr=False, compare=False)
    """The same chunks as a set."""

    def __post_init__(self) -> None:
        if self.chunk_bytes < 1:
            raise ValueError(f"chunk_bytes must be at least 1, got {self.chunk_bytes}")
        sizes = [size for _, size in self.files]
        first = tuple(accumulate((-(-size // self.chunk_bytes) for size in sizes), initial=0))
        lacking = {
            after - 1: -size % self.chunk_bytes
            for size, after in zip(sizes, first[1:], strict=True)
            if size % self.chunk_bytes
        }
        values = {"num_chunks": first[-1], "nbytes": sum(sizes), "_first": first, "_lacking": lacking}
        for name, value in {**values, "_short": set_of(lacking)}.items():
            object.__setattr__(self, name, value)

    @property
    def everything(self) -> int:
        """The set of all chunks."""
        return all_bits(self.num_chunks)

    def span(self, chunk: int) -> ChunkSpan:
        """Where a chunk lies.

        Raises:
            IndexError: There is no such chunk.
        """
        if not 0 <= chunk < self.num_chunks:
            raise IndexError(f"chunk {chunk} is outside 0..{self.num_chunks - 1}")
        # The last of the files that begin there: empty ones before it begin there, too.
        file = bisect_right(self._first, chunk) - 1
        start = (chunk - self._first[file]) * self.chunk_bytes
        return ChunkSpan(file, start, min(start + self.chunk_bytes, self.files[file][1]))

    def size(self, chunk: int) -> int:
        """Bytes of a chunk."""
        return self.chunk_bytes - self._lacking.get(chunk, 0)

    def chunks_of(self, file: int) -> range:
        """The chunks of a file."""
        return range(self._first[file], self._first[file + 1])

    def file_bits(self, file: int) -> int:
        """The same as a set."""
        chunks = self.chunks_of(file)
        return all_bits(len(chunks)) << chunks.start

    def bits_within(self, file: int, start: int, end: int) -> int:
        """The chunks of a file that lie whole in the bytes `[start, end)`."""
        size = self.files[file][1]
        first = -(-start // self.chunk_bytes)
        last = -(-size // self.chunk_bytes) if end >= size else end // self.chunk_bytes
        return all_bits(max(0, last - first)) << (self._first[file] + first)

    def nbytes_of(self, bits: int) -> int:
        """Bytes of a set of chunks."""
        lacking = sum(self._lacking[chunk] for chunk in each_bit(bits & self._short))
        return bits.bit_count() * self.chunk_bytes - lacking

    def describe(self, chunk: int) -> str:
        """A chunk for people: file and bytes."""
        file, start, end = self.span(chunk)
        return f"{self.files[file][0]}, bytes {start} to {end}"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.files, self.chunk_bytes)
