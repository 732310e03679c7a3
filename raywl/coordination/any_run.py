"""What all runs have in common, whatever holds their chunks: leases that fail, nodes that end, and words."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

from raywl.coordination.stage_members import Member, Members
from raywl.coordination.stage_messages import (
    FetchFailure,
    NodeReport,
    NodeState,
    StageSpec,
    StageState,
    Ticket,
)
from raywl.errors import ClusterError, StagingTimeout, some_of

__all__ = ["MAX_MISSES", "MIN_REPORT_S", "AnyRun"]

MIN_REPORT_S = 0.2
MAX_MISSES = 3
"""A node that so often couldn't get a chunk from others fetches it itself."""

_MAX_REPORT_S = 2.0
_REPORTS_PER_S = 500
"""What one actor can answer, with some to spare for other calls."""
_MAX_TRIES = 16
"""Nodes that may fail to fetch a chunk before all are told."""
_PAUSE_S, _MAX_PAUSE_S = 5.0, 60.0
"""How long a node that couldn't fetch gets no new leases: doubled each time until it can again."""


class AnyRun(ABC):
    """One checkpoint on its way to some nodes. Pure: events in, answers out, `now_s` from the caller."""

    def __init__(self, spec: StageSpec, epoch: int, now_s: float) -> None:
        self.spec, self.epoch = spec, epoch
        self.error: Exception | None = None
        self.notes: list[str] = []
        self._table = spec.table
        self._labels = dict(spec.nodes)
        self._given_up: set[str] = set()
        self._members = Members()
        self._failures: dict[int, dict[str, Exception]] = {}
        """Chunk that nobody has to the nodes that couldn't fetch it, and why."""
        self._done = False
        self._moved_s = now_s

    def fail(self, error: Exception) -> None:
        """Ends the run with an error; the first one counts."""
        if self.state == "running":
            self.error = error

    @property
    def state(self) -> str:
        """`"running"`, `"done"` or `"failed"`."""
        return "failed" if self.error is not None else "done" if self._done else "running"

    @abstractmethod
    def tick(self, now_s: float) -> None:
        """Does what is due at this time. All events call it; to be called without any, too."""

    def status(self, now_s: float) -> StageState:
        """All that is known, for a driver or a person."""
        self.tick(now_s)
        nodes = tuple(map(self._node_state, self._labels))
        counted = [node for node in nodes if node.state != "lost" and node.guest_of is None]
        return StageState(
            self.spec.run,
            self.state,
            sum(node.has_bytes for node in counted),
            sum(self._bytes_for(node.node) for node in counted),
            nodes,
            self.error,
            tuple(self.notes),
            self.waiting(now_s) if self.state == "running" else "",
        )

    def waiting(self, now_s: float) -> str:
        """Who holds what since when, and who isn't done, in a few words."""
        leases = [(since_s, c, m.node) for m in self._members for c, since_s in m.leases.items()]
        held = [
            f"{self._name(node)} fetches chunk {chunk} ({self._table.describe(chunk)}) "
            f"since {now_s - since_s:.0f} s"
            for since_s, chunk, node in sorted(leases)[:4]
        ]
        held += [f"{len(leases) - 4} more leases"] if len(leases) > 4 else []
        if num_free := self._num_with_nobody():
            held.append(f"{num_free} of {self._table.num_chunks} chunks are with nobody")
        told = [text for node in self._living() if (text := self._not_done(node, now_s))]
        held += [f"not done: {some_of(told, 4)}"] if told else []
        failed = {
            self._name(node): error for nodes in self._failures.values() for node, error in nodes.items()
        }
        held += [f"{node} failed: {error}" for node, error in list(failed.items())[:2]]
        return "; ".join(held) or "everybody is done"

    # --- what differs ---

    @abstractmethod
    def _num_with_nobody(self) -> int:
        """Chunks that are wanted, and that nobody has or fetches."""

    @abstractmethod
    def _bytes_for(self, node: str) -> int:
        """What a node is to get in all."""

    @abstractmethod
    def _bytes_at(self, member: Member) -> int:
        """What it has got."""

    @abstractmethod
    def _not_done(self, node: str, now_s: float) -> str:
        """A node, and what it lacks, in words; empty if it is done."""

    @abstractmethod
    def _drop_lease(self, chunk: int, member: Member) -> bool:
        """Ends a lease with the chunk not fetched; returns whether nobody has the chunk now."""

    # --- leases ---

    def _rests(self, member: Member, now_s: float) -> bool:
        """Whether a node that couldn't fetch gets no leases now. Others can fetch; and when nobody can, that
        should be known soon."""
        return now_s < member.paused_until_s and any(
            other.paused_until_s <= now_s for other in self._members.receivers
        )

    def _fetch_failed(self, member: Member, failure: FetchFailure, now_s: float) -> None:
        if failure.chunk in member.leases:
            if now_s >= member.paused_until_s:
                member.pause_s = min(_MAX_PAUSE_S, max(_PAUSE_S, 2 * member.pause_s))
                member.paused_until_s = now_s + member.pause_s
            self._pass_on(failure.chunk, member, failure.error)

    def _pass_on(self, chunk: int, member: Member, error: Exception) -> None:
        """A lease has failed: the chunk goes to the next node, or, where none is left, the error to all."""
        member.refused |= 1 << chunk
        member.misses.pop(chunk, None)
        if self._drop_lease(chunk, member):
            self._failures.setdefault(chunk, {})[member.node] = error
            self._check_tried(chunk)

    def _check_tried(self, chunk: int) -> None:
        tried = self._failures[chunk]
        if len(tried) < _MAX_TRIES and any(not m.refused >> chunk & 1 for m in self._members.receivers):
            return
        *others, (_, error) = tried.items()
        for node, other in others:
            error.add_note(f"also on node {self._name(node)}: {other}")
        self.fail(error)

    def _check_all_tried(self) -> None:
        for chunk in list(self._failures):
            self._check_tried(chunk)

    def _take_overdue(self, now_s: float) -> None:
        """Passes on leases that were kept too long, where somebody else could take them."""
        since_s = now_s - self.spec.chunk_lease_s
        overdue = [(c, m) for m in self._members for c, taken_s in m.leases.items() if taken_s <= since_s]
        for chunk, member in overdue:
            if any(m is not member and not m.refused >> chunk & 1 for m in self._members.receivers):
                told = f"held chunk {chunk} ({self._table.describe(chunk)}) for {self.spec.chunk_lease_s:g} s"
                error = ClusterError(f"{told} without having fetched it", node=self._name(member.node))
                self._pass_on(chunk, member, error)

    # --- nodes ---

    def _living(self) -> Iterator[str]:
        return (node for node in self._labels if node not in self._given_up)

    def _check_done(self) -> None:
        # Once done it stays so: nodes may go then.
        living = map(self._members.get, self._living())
        self._done = self._done or all(member is not None and member.finished for member in living)

    def _check_stall(self, now_s: float) -> None:
        still_s = now_s - self._moved_s
        if self.state == "running" and still_s >= self.spec.stall_s:
            text = f"{self.spec.label}: nothing has moved for {still_s:.0f} s: {self.waiting(now_s)}"
            self.fail(StagingTimeout(text))

    @property
    def _next_s(self) -> float:
        """When a node reports again."""
        return min(_MAX_REPORT_S, max(MIN_REPORT_S, len(self._members) / _REPORTS_PER_S))

    def _silent_s(self, member: Member, now_s: float) -> float:
        """Since when nothing was heard of a node."""
        return self.spec.node_lease_s - (member.expires_s - now_s)

    def _name(self, node: str) -> str:
        return self._labels.get(node, node)

    def _node_state(self, node: str) -> NodeState:
        member, label = self._members.get(node), self._name(node)
        if member is None:
            return NodeState(node, label, "lost" if node in self._given_up else "absent")
        last = member.last or NodeReport(self.spec.run, node, Ticket(0, 0))
        state = "finished" if member.finished else "guest" if member.guest_of else "working"
        return NodeState(
            node,
            label,
            state,
            self._bytes_at(member),
            last.fetched_bytes,
            last.received_bytes,
            last.sent_bytes,
            last.peak_store_bytes,
            last.fetch_bytes_per_s,
            last.send_bytes_per_s,
            member.slow,
            member.guest_of,
            last.notes,
        )
