"""From copies to reads: ordered by file and offset, coalesced, cut into windows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from raywl.plan.copies import Copy, normalise, split

__all__ = ["GAP_BYTES", "MAX_PIECES", "SHARED_BYTES", "SLACK_BYTES", "WINDOW_BYTES", "Read", "schedule"]

WINDOW_BYTES = 16 << 20
"""Longest read. Blocks of 8 to 32 MiB in file order are the fastest (docs/architecture.md)."""

GAP_BYTES = 32 << 10
"""Strided rows further apart than this are read one by one, nearer ones with what lies between."""

SLACK_BYTES = 4 << 10
"""Neighbouring reads are joined over at most so many bytes that nobody wants: one page."""

SHARED_BYTES = 256 << 10
"""Longest read through scratch that joins neighbours, which keeps the scratch in a core's cache."""

MAX_PIECES = 1000
"""Most destinations of one read; the kernel takes 1,024 (IOV_MAX)."""


class Read(NamedTuple):
    """One range of a file, and the copies that it serves."""

    file: str
    start: int
    """First byte in the file."""
    end: int
    """One past the last byte."""
    direct: bool
    """Whether the pieces are runs without overlap, to be read straight into their destinations."""
    pieces: tuple[Copy, ...]
    """In order of their first byte."""


def schedule(copies: Iterable[Copy], file_order: dict[str, int]) -> list[Read]:
    """The reads that serve all copies.

    Every wanted byte is read once, as long as direct and other copies want different bytes; a byte that
    nobody wants only where it lies between rows, or between neighbours less than a page apart.

    Args:
        copies: In any order.
        file_order: Position of every file among the checkpoint's files.
    """
    # Each piece with its end, which takes arithmetic and is asked for often.
    ends: list[tuple[int, int, int, int, bool]] = []
    pieces: list[Copy] = []
    for copy in copies:
        order = file_order[copy.file]
        if len(copy.shape) == 1 and 0 < (nbytes := copy.nbytes) <= WINDOW_BYTES and copy.is_direct:
            # Whole tensors, mostly: nothing to be arranged.
            ends.append((order, copy.src_start, copy.src_start + nbytes, len(pieces), True))
            pieces.append(copy)
        elif 0 not in copy.shape:
            for piece in split(normalise(copy), WINDOW_BYTES, GAP_BYTES):
                ends.append((order, piece.src_start, piece.src_end, len(pieces), piece.is_direct))
                pieces.append(piece)
    ends.sort()
    reads: list[Read] = []
    group: list[Copy] = []
    end, direct = 0, False
    for _, _, piece_end, at, piece_direct in ends:
        piece = pieces[at]
        if group and not (piece_direct == direct and _fits(group, end, direct, piece, piece_end)):
            reads.append(Read(group[0].file, group[0].src_start, end, direct, tuple(group)))
            group = []
        end = max(end, piece_end) if group else piece_end
        direct = piece_direct
        group.append(piece)
    if group:
        reads.append(Read(group[0].file, group[0].src_start, end, direct, tuple(group)))
    return reads


def _fits(group: list[Copy], end: int, direct: bool, piece: Copy, piece_end: int) -> bool:
    """Whether `piece` can join a group of its kind that reaches to byte `end`."""
    first = group[0]
    if piece.file != first.file or len(group) >= MAX_PIECES:
        return False
    overlaps = piece.src_start < end
    if direct:
        # A run that two destinations want is read twice: a read scatters each byte to one place.
        near = not overlaps and piece.src_start - end <= SLACK_BYTES
        return near and piece_end - first.src_start <= WINDOW_BYTES
    # Scratch stays small, unless several copies want the same bytes.
    limit = WINDOW_BYTES if overlaps else SHARED_BYTES
    return piece.src_start - end <= SLACK_BYTES and max(end, piece_end) - first.src_start <= limit
