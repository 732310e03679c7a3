"""Copies into one memory that are still to be made, and what copies have set of it."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from typing import Any

from raywl.plan.copies import Copy, itemsize_of, may_overlap

__all__ = ["Pending", "covered_bytes", "merge_runs", "runs_of", "writes_once"]

Run = tuple[int, int]
"""Half-open byte range."""

_NONE: list[Any] = []
"""Never added to."""


class Pending:
    """Copies in the order they were asked for; finds those that a further one may overlap.

    Most copies lie in spans of their own, which are kept in order, so that a parameter or a flat buffer
    of many thousand parts costs little each. Those whose spans cross (alternating rows) are compared
    one by one.
    """

    __slots__ = ("_apart", "_copies", "_crossing", "_starts")

    def __init__(self) -> None:
        self._copies: list[Copy] = []
        # Most memories have one copy, which needs no order.
        self._starts: list[int] = _NONE
        self._apart: list[Copy] = _NONE
        self._crossing: list[Copy] = _NONE

    def __len__(self) -> int:
        return len(self._copies)

    def add(self, copy: Copy) -> None:
        """Takes a copy."""
        self._copies.append(copy)
        if len(self._copies) == 1:
            return
        if self._starts is _NONE:
            first = self._copies[0]
            self._starts, self._apart, self._crossing = [first.dst_start], [first], []
        if next(self._near(copy), None) is not None:
            self._crossing.append(copy)
            return
        at = bisect_left(self._starts, copy.dst_start)
        self._starts.insert(at, copy.dst_start)
        self._apart.insert(at, copy)

    def may_overlap(self, copy: Copy) -> bool:
        """Whether a copy could write a byte that one of these writes."""
        if len(self._copies) < 2:
            return bool(self._copies) and may_overlap(copy, self._copies[0])
        return any(may_overlap(copy, other) for other in self._near(copy)) or any(
            may_overlap(copy, other) for other in self._crossing
        )

    def _near(self, copy: Copy) -> Iterator[Copy]:
        """Of the copies that lie apart, those whose spans meet this one's."""
        at = bisect_right(self._starts, copy.dst_start)
        if at and self._apart[at - 1].dst_end > copy.dst_start:
            yield self._apart[at - 1]
        if at < len(self._starts):
            end = copy.dst_end
            while at < len(self._starts) and self._starts[at] < end:
                yield self._apart[at]
                at += 1

    def take(self) -> list[Copy]:
        """All copies, in order; none are left."""
        copies, self._copies = self._copies, []
        self._starts = self._apart = self._crossing = _NONE
        return copies


def writes_once(copy: Copy) -> bool:
    """Whether no two elements of a copy go to the same byte; `False` also where that isn't plain to see."""
    reach = itemsize_of(copy.dst_dtype)
    for stride, size in sorted(zip(copy.dst_strides, copy.shape, strict=True)):
        if size > 1:
            if stride < reach:
                return False
            reach = stride * (size - 1) + reach
    return True


def runs_of(copy: Copy) -> Iterator[Run]:
    """The byte ranges that a copy writes, each as long as its layout allows."""
    dims = sorted(zip(copy.dst_strides, copy.shape, strict=True), reverse=True)
    length = itemsize_of(copy.dst_dtype)
    while dims and (dims[-1][0] == length or dims[-1][1] == 1):
        stride, size = dims.pop()
        length += stride * (size - 1)
    starts: Iterable[int] = [copy.dst_start]
    for stride, size in dims:
        starts = [start + index * stride for start in starts for index in range(size)]
    return ((start, start + length) for start in starts)


def merge_runs(runs: Iterable[Run]) -> list[Run]:
    """The same bytes as runs that neither meet nor overlap, in order."""
    merged: list[Run] = []
    for start, end in sorted(runs):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def covered_bytes(runs: Iterable[Run], merged: list[Run]) -> int:
    """How many bytes of `runs` lie in `merged`, which is as `merge_runs` gives it."""
    total = 0
    for start, end in runs:
        at = max(0, bisect_right(merged, (start, end)) - 1)
        while at < len(merged) and merged[at][0] < end:
            total += max(0, min(end, merged[at][1]) - max(start, merged[at][0]))
            at += 1
    return total
