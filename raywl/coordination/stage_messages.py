"""What drivers, agents and the coordinator tell each other while a checkpoint is staged."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from raywl.coordination.chunks import ChunkTable

__all__ = [
    "NOBODY",
    "FetchFailure",
    "FileCheck",
    "NodeReport",
    "NodeState",
    "Orders",
    "Route",
    "StageSpec",
    "StageState",
    "Ticket",
    "pack_route",
    "unpack_route",
]

NOBODY = 0xFFFF
"""Index of no node."""


@dataclass(frozen=True, slots=True)
class StageSpec:
    """One run: what is brought to which nodes. The same for all of its messages."""

    run: str
    """Unique for all time."""
    key: str
    """Checkpoint, cache folder and mode: who asks for the same while it runs takes part in it."""
    label: str
    """The checkpoint, for people."""
    table: ChunkTable
    nodes: Mapping[str, str]
    """Node ids, and what to call the nodes."""
    node_lease_s: float = 15.0
    """A node that has been silent for so long has lost its leases."""
    driver_lease_s: float = 30.0
    """A run that no driver has asked about for so long is given up."""
    chunk_lease_s: float = 120.0
    """A chunk that was not fetched within this time goes to another node, if one is there."""
    stall_s: float = 180.0
    """A run in which nothing has moved for so long fails."""
    settle_s: float = 3.0
    """How long to wait at the start for all nodes to say what they have already."""
    in_flight: int = 0
    """Chunks that may be on their way to a node at once, when nothing is written to disks (`StreamRun`); 0
    where everything is (`StageRun`)."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """What a node was given when it joined; every report shows it."""

    epoch: int
    """Of the run at this coordinator: another one after a restart."""
    member: int
    """Of the node: another one whenever it joins."""


@dataclass(frozen=True, slots=True)
class FetchFailure:
    """A node couldn't fetch a chunk from the source, after its own retries."""

    chunk: int
    error: Exception
    """What to raise where nobody can."""


@dataclass(frozen=True, slots=True)
class NodeReport:
    """A node's heartbeat. May be repeated: everything in it is a fact, or grows only."""

    run: str
    node: str
    ticket: Ticket
    answered: int = 0
    """Serial number of the last answer that it got."""
    has: int = 0
    """Chunks that are safe on its disk; those since the last report that was answered suffice."""
    seen_routes: int = 0
    """Where in the log of routes it is."""
    seen_nodes: int = 0
    """How many nodes it knows the ids of."""
    num_wanted: int = 0
    """Chunks that it wants to have leases of, those included that it has."""
    failed: tuple[FetchFailure, ...] = ()
    lost: tuple[tuple[int, int], ...] = ()
    """Chunks that couldn't be had from a node, and that node's index."""
    shares: tuple[str, ...] = ()
    """Nodes whose markers are in its cache folder."""
    fetch_bytes_per_s: float = 0.0
    send_bytes_per_s: float = 0.0
    """What left it while it had anything to send; 0 as long as that isn't known."""
    fetched_bytes: int = 0
    """From the source, since the run began."""
    received_bytes: int = 0
    sent_bytes: int = 0
    peak_store_bytes: int = 0
    """The most that it had in the object store for the run at once."""
    step: int = 0
    """Grows while it works at something that no chunk shows."""
    finished: bool = False
    """All files are in their place."""
    notes: tuple[str, ...] = ()
    spoiled: tuple[int, ...] = ()
    """Files whose bytes turned out wrong, by index in the table."""
    error: Exception | None = None
    """It can't go on: its disk is full, a file is not what the source announced."""
    needs: int | None = None
    """Of a stream: the chunks that it still has a use for; `None` until its ranks have said so."""
    holds: int = 0
    """Of a stream: the chunks that it has fetched and can give away."""


@dataclass(frozen=True, slots=True)
class Route:
    """Where a chunk comes from: `source` has it or fetches it; others ask `relay`, which asks `source`."""

    chunk: int
    source: int
    """Index of a node."""
    relay: int = NOBODY

    def provider(self, me: int) -> int:
        """Whom the node `me` asks; `NOBODY` when it is the source itself."""
        if me == self.source:
            return NOBODY
        return self.source if self.relay in (NOBODY, me) else self.relay


def pack_route(chunk: int, source: int, relay: int = NOBODY) -> int:
    """A route as one number of 64 bits."""
    return chunk << 32 | source << 16 | relay


def unpack_route(packed: int) -> Route:
    """The route of a number."""
    return Route(packed >> 32, packed >> 16 & 0xFFFF, packed & 0xFFFF)


class FileCheck(NamedTuple):
    """A file of a stream that one node checks for all."""

    file: int
    """Its index."""
    whole: bool
    """Whether all of it comes by that node, so that it can be hashed."""


@dataclass(frozen=True, slots=True)
class Orders:
    """The answer to a report."""

    state: str
    """`"run"`; `"join"`: the ticket is no longer good, join again; `"over"`: forget the run."""
    why: str = ""
    """Why it is not to go on."""
    serial: int = 0
    """Of the answers to a node."""
    leases: tuple[int, ...] = ()
    """All chunks that the node is to fetch, those included that it was told before."""
    routes: array[int] = field(default_factory=lambda: array("Q"))
    """New routes, packed; a later one replaces an earlier one. Some may come twice."""
    seen_routes: int = 0
    nodes: tuple[str, ...] = ()
    """Ids of the nodes that it doesn't know yet, by index."""
    guest_of: str | None = None
    """The node that fills the folder which both share; it is to wait for that."""
    look: bool = False
    """The folder is filled: a guest is to look whether it has everything."""
    next_s: float = 0.2
    """When to report again."""
    spoiled: tuple[int, ...] = ()
    """With `"over"`: files whose bytes turned out wrong; what came of them is to be thrown away."""
    keep: int | None = None
    """Of a stream: what the node fetches or holds that others still need; `None`: that isn't known now."""
    checks: tuple[FileCheck, ...] = ()
    """Of a stream: the files that this node is to check."""


@dataclass(frozen=True, slots=True)
class NodeState:
    """What is known of a node of a run."""

    node: str
    label: str
    state: str
    """`"absent"`, `"working"`, `"guest"`, `"finished"`, `"lost"`."""
    has_bytes: int = 0
    fetched_bytes: int = 0
    received_bytes: int = 0
    sent_bytes: int = 0
    peak_store_bytes: int = 0
    fetch_bytes_per_s: float = 0.0
    send_bytes_per_s: float = 0.0
    slow: bool = False
    guest_of: str | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StageState:
    """What a driver is told of its run."""

    run: str
    """Of the run that it takes part in: perhaps another driver's, which began earlier."""
    state: str
    """`"unknown"`, `"running"`, `"done"`, `"failed"`."""
    done_bytes: int = 0
    """Over all nodes."""
    total_bytes: int = 0
    nodes: tuple[NodeState, ...] = ()
    error: Exception | None = None
    notes: tuple[str, ...] = ()
    waiting: str = ""
    """Who holds what since when, and who isn't done."""

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "run": self.run,
            "state": self.state,
            "done_bytes": self.done_bytes,
            "total_bytes": self.total_bytes,
            "nodes": [{name: getattr(node, name) for name in node.__slots__} for node in self.nodes],
            "error": None if self.error is None else str(self.error),
            "notes": list(self.notes),
            "waiting": self.waiting,
        }
