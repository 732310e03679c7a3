"""Named byte ranges of one memory, found by the bytes in them."""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

__all__ = ["Places"]


class Places:
    """Ranges that may overlap, as parameters do that are views of one buffer.

    They lie on levels: the ranges of a level are apart from each other and in order, so that one of many
    thousands is found in a few steps. A flat buffer and the parameters in it make two levels.

    Args:
        rows: `(first byte, end byte, name)`, each of at least one byte; earlier ones take precedence.
    """

    __slots__ = ("_levels", "names")

    def __init__(self, rows: Sequence[tuple[int, int, str]]) -> None:
        self.names = tuple([name for _, _, name in rows])
        """In the order given."""
        self._levels: list[tuple[list[int], list[int], list[int]]] = []
        # By the end of each level, so that the first to end takes the next range if any does.
        ends: list[tuple[int, int]] = []
        for index in sorted(range(len(rows)), key=lambda index: (rows[index][0], -rows[index][1])):
            start, end, _ = rows[index]
            if ends and ends[0][0] <= start:
                level = heapq.heapreplace(ends, (end, ends[0][1]))[1]
            else:
                level = len(self._levels)
                heapq.heappush(ends, (end, level))
                self._levels.append(([], [], []))
            for column, value in zip(self._levels[level], (start, end, index), strict=True):
                column.append(value)

    def holding(self, start: int, end: int) -> list[str]:
        """Names of the ranges that all bytes from `start` to `end` lie in."""
        found = []
        for starts, ends, indexes in self._levels:
            at = bisect_right(starts, start) - 1
            if at >= 0 and end <= ends[at]:
                found.append(indexes[at])
        return [self.names[index] for index in sorted(found)]

    def meeting(self, start: int, end: int) -> list[str]:
        """Names of the ranges that any byte from `start` to `end` lies in."""
        found: list[int] = []
        for starts, ends, indexes in self._levels:
            found += indexes[bisect_right(ends, start) : bisect_left(starts, end)]
        return [self.names[index] for index in sorted(found)]
