"""From which node each chunk goes to the others, so that no link carries much more than the checkpoint."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence

from raywl.coordination.chunks import ChunkTable
from raywl.coordination.stage_messages import NOBODY, Route, pack_route

__all__ = ["RouteTable"]


class RouteTable:
    """The routes of one run, as a log that every node follows at its own pace.

    Direct: the source of a chunk sends it to every other node. Through a relay: it sends it to one of them,
    and that one to the rest, so that the source's link carries the chunk once. With equal shares direct
    routes are balanced by themselves; a source that holds more than its share, or is slow, needs relays.

    What each node will have sent is planned in bytes. Entries for the same chunk replace each other; what
    was replaced is dropped when the log is twice as long as it must be.
    """

    def __init__(self, table: ChunkTable) -> None:
        self._table = table
        self._source = array("H", [NOBODY]) * table.num_chunks
        self._relay = array("H", [NOBODY]) * table.num_chunks
        self._log = array("Q")
        self._base = 0
        self._next_relay = 0
        self.sourced: list[int] = []
        """By node index, the chunks that it is the source of."""
        self.relayed: list[int] = []
        """Likewise, those that it passes on for another."""
        self.sends: list[int] = []
        """Likewise, bytes that it sends by all routes that were ever planned."""

    def add_node(self) -> None:
        """One more node, with the next index."""
        for column in (self.sourced, self.relayed, self.sends):
            column.append(0)

    def route(self, chunk: int) -> Route:
        """The route of a chunk; its source is `NOBODY` when it has none."""
        return Route(chunk, self._source[chunk], self._relay[chunk])

    def since(self, seen: int) -> tuple[array[int], int]:
        """What was added to the log after `seen`, packed, and where its end is."""
        # A reader from before the last clearing starts again: it needs the whole of what is left.
        start = max(0, seen - self._base)
        return self._log[start:], self._base + len(self._log)

    def plan(
        self,
        chunk: int,
        source: int,
        relays: Sequence[int],
        num_receivers: int,
        expected_bytes: int,
        holders: Collection[int] = (),
    ) -> None:
        """Decides how a chunk leaves its source, and logs it.

        Args:
            chunk: It.
            source: Index of the node that has it or fetches it.
            relays: Indexes of nodes that could pass it on; the source and holders may be among them.
            num_receivers: Nodes that lack it.
            expected_bytes: What the same node is still going to be the source of, without this one. More
                than there can be makes it use a relay always.
            holders: Nodes that have it already, which is no use in a relay.
        """
        nbytes = self._table.size(chunk)
        relay = NOBODY
        planned = self.sends[source] + num_receivers * nbytes + expected_bytes
        if num_receivers > 1 and planned > self._table.nbytes:
            relay = self._choose_relay(source, relays, holders)
        if relay == NOBODY:
            self.sends[source] += num_receivers * nbytes
        else:
            self.sends[source] += nbytes
            self.sends[relay] += (num_receivers - 1) * nbytes
        self.set(chunk, source, relay)

    def set(self, chunk: int, source: int, relay: int = NOBODY) -> None:
        """Logs a route that was decided elsewhere."""
        self.clear(chunk)
        self._source[chunk], self._relay[chunk] = source, relay
        bit = 1 << chunk
        self.sourced[source] |= bit
        if relay != NOBODY:
            self.relayed[relay] |= bit
        self._log.append(pack_route(chunk, source, relay))
        if len(self._log) > 2 * self._table.num_chunks + 64:
            self._compact()

    def clear(self, chunk: int) -> None:
        """The chunk has no source any more. Nodes learn it by the next route, or when they ask in vain."""
        bit = 1 << chunk
        if (source := self._source[chunk]) != NOBODY:
            self.sourced[source] &= ~bit
        if (relay := self._relay[chunk]) != NOBODY:
            self.relayed[relay] &= ~bit
        self._source[chunk] = self._relay[chunk] = NOBODY

    def _choose_relay(self, source: int, relays: Sequence[int], holders: Collection[int]) -> int:
        # In turn, which is as even as looking for the one that sends least, and costs nothing.
        for _ in relays:
            chosen = relays[self._next_relay % len(relays)]
            self._next_relay += 1
            if chosen != source and chosen not in holders:
                return chosen
        return NOBODY

    def _compact(self) -> None:
        self._base += len(self._log)
        kept = (route for route in map(self.route, range(self._table.num_chunks)) if route.source != NOBODY)
        self._log = array("Q", [pack_route(route.chunk, route.source, route.relay) for route in kept])
        # Readers were at most at the old end, so that all of this is new to them.
