"""The nodes that take part in a run, and what each has."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

from raywl.coordination.stage_messages import NOBODY, NodeReport
from raywl.errors import ClusterError

__all__ = ["Member", "Members"]

_PROBES = 64


@dataclass(slots=True, eq=False)
class Member:
    """A node that takes part."""

    node: str
    index: int
    """The same whenever the node joins."""
    number: int
    """Another one whenever it joins, larger than all before."""
    expires_s: float
    has: int = 0
    """Chunks that are safe on its disk."""
    has_bytes: int = 0
    leases: dict[int, float] = field(default_factory=dict)
    """Chunks that it is to fetch, and since when."""
    personal: array[int] = field(default_factory=lambda: array("Q"))
    """Routes for it alone that it hasn't yet confirmed, packed."""
    num_told: int = 0
    """How many of these the last answer had."""
    serial: int = 0
    """Of the last answer."""
    refused: int = 0
    """Chunks that it couldn't fetch."""
    misses: dict[int, tuple[int, float]] = field(default_factory=dict)
    """How often it couldn't get a chunk from nodes that live and have it, and when it last said so."""
    pause_s: float = 0.0
    paused_until_s: float = 0.0
    shares: tuple[str, ...] = ()
    guest_of: str | None = None
    """The node that fills the folder which both share."""
    must_join: bool = False
    finished: bool = False
    slow: bool = False
    last: NodeReport | None = None


class Members:
    """All members of a run, by node id; also those that work on a folder of their own: the receivers."""

    def __init__(self) -> None:
        self.ids: list[str] = []
        """Node ids by index, also of those that have left."""
        self.receivers: list[Member] = []
        """Every one of them is to get all chunks, and may fetch."""
        self.fast: list[int] = []
        """Indexes of receivers that may pass chunks on for others."""
        self._by_node: dict[str, Member] = {}
        self._index: dict[str, int] = {}
        self._next_expiry_s = math.inf
        self._mean_rate = 0.0
        self._probe = 0

    def __iter__(self) -> Iterator[Member]:
        return iter(self._by_node.values())

    def __len__(self) -> int:
        return len(self._by_node)

    def get(self, node: str) -> Member | None:
        """The member by that id, if it takes part."""
        return self._by_node.get(node)

    def at(self, index: int) -> Member | None:
        """The member by that index, if it takes part."""
        return self._by_node.get(self.ids[index]) if index < len(self.ids) else None

    def add(self, node: str, number: int, expires_s: float) -> Member:
        """A new member.

        Raises:
            ClusterError: There are too many.
        """
        if node not in self._index:
            if len(self.ids) >= NOBODY:
                raise ClusterError(f"more than {NOBODY} nodes can't stage a checkpoint together")
            self._index[node] = len(self.ids)
            self.ids.append(node)
        member = self._by_node[node] = Member(node, self._index[node], number, expires_s)
        self._next_expiry_s = min(self._next_expiry_s, expires_s)
        self.regroup()
        return member

    def remove(self, member: Member) -> None:
        """It has left; its guests must find another host."""
        del self._by_node[member.node]
        for guest in self:
            if guest.guest_of == member.node:
                guest.must_join = True
        self.regroup()

    def regroup(self) -> None:
        """After a change of who is a guest, or slow."""
        self.receivers = [member for member in self if member.guest_of is None]
        self.fast = [member.index for member in self.receivers if not member.slow]

    def expired(self, now_s: float) -> list[Member]:
        """Those that have been silent too long."""
        if now_s < self._next_expiry_s:
            return []
        gone = [member for member in self if member.expires_s <= now_s]
        # Leases only grow, so nobody else can expire before that.
        self._next_expiry_s = min((m.expires_s for m in self if m.expires_s > now_s), default=math.inf)
        return gone

    def note_rates(self) -> None:
        """Looks at how fast nodes fetch, for `share`."""
        rates = [m.last.fetch_bytes_per_s for m in self.receivers if m.last and m.last.fetch_bytes_per_s > 0]
        self._mean_rate = sum(rates) / len(rates) if rates else 0.0

    def share(self, member: Member) -> float:
        """The part of what is left that a node will fetch, by the rates so far; else an equal one."""
        equal = 1 / max(1, len(self.receivers))
        rate = member.last.fetch_bytes_per_s if member.last else 0.0
        return min(1.0, equal * rate / self._mean_rate) if rate > 0 and self._mean_rate > 0 else equal

    def held_by_any(self) -> int:
        """Chunks that some receiver has."""
        found = 0
        for member in self.receivers:
            found |= member.has
        return found

    def held_by_all(self) -> int:
        """Chunks that every receiver has."""
        found = -1
        for member in self.receivers:
            found &= member.has
        return found if self.receivers else 0

    def find_holder(self, chunk: int, but: int = NOBODY, *, thorough: bool = False) -> Member | None:
        """Some receiver that has a chunk: one that isn't slow where there is a choice, each in its turn.

        Args:
            chunk: It.
            but: Index of a node that won't do.
            thorough: Look at all of them; otherwise at a few dozens, which costs no more with many nodes.
        """
        slow = None
        for _ in range(len(self.receivers) if thorough else min(_PROBES, len(self.receivers))):
            self._probe = (self._probe + 1) % len(self.receivers)
            member = self.receivers[self._probe]
            if member.index != but and member.has >> chunk & 1:
                if not member.slow:
                    return member
                slow = member
        return slow
