"""Copies cut at bytes of a file, for bytes that come in chunks."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple

from raywl.plan.copies import Copy, normalise

__all__ = ["Cuts", "cut_at", "cut_into"]


class Cuts(NamedTuple):
    """What a cut makes of a copy; all of its elements are in one of these."""

    before: list[Copy]
    """Of elements that end at the place or before it."""
    across: list[Copy]
    """Of single elements that have bytes on both sides of it."""
    after: list[Copy]
    """Of elements that begin at it or after it."""


def cut_at(copy: Copy, place: int) -> Cuts:
    """Cuts a copy at a byte of its file, wherever rows and elements end."""
    found = Cuts([], [], [])
    _cut(normalise(copy), place, found)
    return found


def _cut(copy: Copy, place: int, found: Cuts) -> None:
    if copy.src_end <= place:
        found.before.append(copy)
    elif copy.src_start >= place:
        found.after.append(copy)
    elif not copy.shape:
        found.across.append(copy)
    else:
        # Normalised: the first dim has the longest steps.
        size, src, dst = copy.shape[0], copy.src_strides[0], copy.dst_strides[0]
        rest = copy._replace(
            shape=copy.shape[1:], src_strides=copy.src_strides[1:], dst_strides=copy.dst_strides[1:]
        )
        inner = rest.src_end - rest.src_start
        # Rows [0, first) end at the place or before, rows [last, size) begin at it or after.
        first, last = 0, 0
        if src:
            first = min(size, max(0, (place - inner - copy.src_start) // src + 1))
            last = min(size, max(first, -(-(place - copy.src_start) // src)))
        else:
            last = size
        if first:
            found.before.append(copy._replace(shape=(first, *copy.shape[1:])))
        for row in range(first, last):
            _cut(
                rest._replace(src_start=copy.src_start + row * src, dst_start=copy.dst_start + row * dst),
                place,
                found,
            )
        if last < size:
            found.after.append(
                copy._replace(
                    src_start=copy.src_start + last * src,
                    dst_start=copy.dst_start + last * dst,
                    shape=(size - last, *copy.shape[1:]),
                )
            )


def cut_into(copy: Copy, places: Iterable[int]) -> tuple[list[tuple[int, Copy]], list[Copy]]:
    """Cuts a copy at several places.

    Args:
        copy: The copy.
        places: Bytes of the file, ascending: the first at its first byte or before, the last at its end or
            after.

    Returns:
        The pieces that lie between two places, each with the number of its first place; and the elements
        that lie across one.
    """
    inside: list[tuple[int, Copy]] = []
    across: list[Copy] = []
    left = [copy]
    for number, (_, end) in enumerate(pairwise(places)):
        after: list[Copy] = []
        for piece in left:
            cuts = cut_at(piece, end)
            inside += [(number, one) for one in cuts.before]
            across += cuts.across
            after += cuts.after
        left = after
    return inside, across
