"""Which route each chunk of a run gets, as nodes come, go, and turn out slow."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator

from raywl.coordination.chunks import ChunkTable, each_bit
from raywl.coordination.routes import RouteTable
from raywl.coordination.stage_members import Member, Members
from raywl.coordination.stage_messages import pack_route

__all__ = ["RoutePlanner"]

_MIN_RATED = 3
"""Of fewer rates none is odd."""
_SLOW, _FAST_AGAIN = 0.5, 0.75
"""Parts of the median rate."""
_MANY = 16
"""Holders of the same chunks; with more, relays are chosen without looking who of them has what."""


class RoutePlanner:
    """Decides routes, and keeps them in a `RouteTable`."""

    def __init__(self, table: ChunkTable, members: Members) -> None:
        self.routes = RouteTable(table)
        self._table, self._members = table, members

    def fetched_by(self, chunk: int, member: Member, expected_bytes: int = 0) -> None:
        """A chunk that nobody has is going to be fetched by a node.

        Args:
            chunk: It.
            member: The node.
            expected_bytes: What it is likely to fetch besides.
        """
        if member.slow:
            expected_bytes = self._table.nbytes
        num_receivers = len(self._members.receivers) - 1
        self.routes.plan(chunk, member.index, self._members.fast, num_receivers, expected_bytes)

    def held(self, bits: int) -> None:
        """Chunks that some nodes have and others lack: each gets a source among those."""
        if not bits:
            return
        holders = [member for member in self._members.receivers if member.has & bits]
        few = len(holders) <= _MANY
        sources: dict[int, Member] = {}
        loads: Counter[int] = Counter()
        for chunk in each_bit(bits):
            if few:
                who = [member for member in holders if member.has >> chunk & 1]
                who = [member for member in who if not member.slow] or who
                found = min(who, key=lambda member: loads[member.index], default=None)
            else:
                found = self._members.find_holder(chunk, thorough=True)
            if found is not None:
                sources[chunk] = found
                loads[found.index] += self._table.size(chunk)
        total = len(self._members.receivers)
        for chunk, source in sources.items():
            have = [member.index for member in holders if member.has >> chunk & 1] if few else [source.index]
            loads[source.index] -= self._table.size(chunk)
            expected_bytes = self._table.nbytes if source.slow else loads[source.index]
            self.routes.plan(chunk, source.index, self._members.fast, total - len(have), expected_bytes, have)

    def late(self, member: Member) -> None:
        """A node that joins when chunks are under way gets those that others have from whoever will have
        sent least: other late ones among them, which will get those chunks before it."""
        needed = list(each_bit(self._members.held_by_any() & ~member.has))
        others = [m.index for m in self._members.receivers if m is not member and not m.slow]
        others = others or [m.index for m in self._members.receivers if m is not member]
        if not needed or not others:
            return
        sends = self.routes.sends
        level = _level([sends[index] for index in others], len(needed) * self._table.chunk_bytes)
        room = {index: level - sends[index] for index in others if sends[index] < level}
        turn = _in_turn(room, self._table.chunk_bytes)
        for chunk in needed:
            provider = next(turn, others[chunk % len(others)])
            sends[provider] += self._table.size(chunk)
            member.personal.append(pack_route(chunk, provider))

    def leave(self, member: Member, leased: int) -> None:
        """A node has left: what it was to pass on takes other ways.

        Args:
            member: It is no member any more, and has no leases.
            leased: Chunks that others are fetching.
        """
        self._reroute(self.routes.sourced[member.index] | self.routes.relayed[member.index], leased)

    def judge(self, leased: int) -> None:
        """Looks for nodes that send at less than half the rate of the others, and takes work off them."""
        rated = [m for m in self._members.receivers if m.last and m.last.send_bytes_per_s > 0]
        if len(rated) < _MIN_RATED:
            return
        rates = {m.index: m.last.send_bytes_per_s for m in rated if m.last}
        median = statistics.median(rates.values())
        changed = False
        for member in rated:
            rate = rates[member.index]
            if not member.slow and rate < _SLOW * median:
                member.slow = changed = True
                self._members.regroup()
                self._reroute(self.routes.sourced[member.index] | self.routes.relayed[member.index], leased)
            elif member.slow and rate > _FAST_AGAIN * median:
                member.slow, changed = False, True
        if changed:
            self._members.regroup()

    def _reroute(self, affected: int, leased: int) -> None:
        if not affected:
            return
        anywhere = self._members.held_by_any()
        orphans = affected & ~anywhere & ~leased
        for chunk in each_bit(orphans):
            self.routes.clear(chunk)
        # What everybody has needs no route; one that joins later gets its own.
        rest = affected & ~orphans & ~self._members.held_by_all()
        self.held(rest & anywhere)
        for chunk in each_bit(rest & ~anywhere):
            source = self._members.at(self.routes.route(chunk).source)
            if source is not None:
                self.fetched_by(chunk, source)


def _level(heights: list[int], amount: int) -> float:
    """How high the water stands when `amount` is poured over ground of these heights."""
    below = 0
    for count, height in enumerate(sorted(heights), 1):
        if height * (count - 1) - below >= amount:
            return (amount + below) / (count - 1)
        below += height
    return (amount + below) / len(heights)


def _in_turn(room: dict[int, float], step: int) -> Iterator[int]:
    """Indexes in turn, each as often as its room has steps."""
    left = dict(room)
    while left:
        for index in list(left):
            yield index
            left[index] -= step
            if left[index] <= 0:
                del left[index]
