"""One checkpoint on its way to the ranks of some nodes, with no disk in between."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice

from raywl.coordination.any_run import MAX_MISSES, MIN_REPORT_S, AnyRun
from raywl.coordination.chunks import all_bits, each_bit, lowest_bit
from raywl.coordination.stage_members import Member
from raywl.coordination.stage_messages import (
    NOBODY,
    FileCheck,
    NodeReport,
    Orders,
    StageSpec,
    Ticket,
    pack_route,
)

__all__ = ["StreamRun"]

_JUDGE_S = 1.0


class StreamRun(AnyRun):
    """The state of one stream. Pure: events in, answers out, `now_s` from the caller's clock.

    Each node needs some chunks, until its ranks have taken them. A chunk that somebody needs is free, or
    leased to one node, or held by the node that fetched it, until nobody else needs it. What nobody needs is
    never fetched.

    1. Nodes `join`. As long as one of them hasn't said what it needs, nothing is leased.
    2. `report` takes what a node still needs and holds, and answers with leases, with routes to what others
       fetch or hold, and with what the node must keep for others.
    3. A chunk is leased only when it is among the next `in_flight` chunks of every node that needs it, and
       while the one that fetches it holds fewer than that. So a node has room for all that is under way to it
       and never waits for room with something in its hands. The lowest chunk of all that anybody needs
       may always be leased: nobody waits for anything before it, so it comes and goes, and then the next.
    4. What a node held is gone with it, and is leased again if it is still needed.
    5. A chunk that a node can't fetch goes to the next one, to one that doesn't need it in the end. When none
       is left, or nothing moves any more, the run has failed, and every node and driver is told why.
    6. It is done when each node has taken what it needs and checked what it was to check.
    """

    def __init__(self, spec: StageSpec, epoch: int, now_s: float) -> None:
        super().__init__(spec, epoch, now_s)
        self._needs: dict[str, int] = {}
        """Node to what it needs, as it last said: also of one that is starting again."""
        self._later: dict[str, int] = {}
        """Node to those of them that it has no room for yet."""
        self._told: set[str] = set()
        """Members that have said what they need since they joined."""
        self._at_first: dict[str, int] = {}
        """Node to what it needed when it first said so."""
        self._checks: dict[str, list[FileCheck]] | None = None
        """Node to the files that it checks, once all have said what they need."""
        self._best: dict[str, int] = {}
        """The highest step of each node."""
        self._judged_s = now_s

    # --- what nodes say ---

    def join(
        self, node: str, has: int, fetching: Iterable[int], shares: Iterable[str], number: int, now_s: float
    ) -> Ticket:
        """A node takes part, or does so again after it was started anew or was silent for too long.

        Args:
            node: Its id.
            has: Nothing: without a disk, what it holds it says in its reports.
            fetching: Chunks that it is fetching: by leases of a coordinator that was lost.
            shares: Of no use here.
            number: Of the membership, larger than all before.
            now_s: The time.
        """
        self.tick(now_s)
        if (before := self._members.get(node)) is not None:
            self._remove(before)
        member = self._members.add(node, number, now_s + self.spec.node_lease_s)
        leased = self._leased()
        for chunk in fetching:
            if 0 <= chunk < self._table.num_chunks and not leased >> chunk & 1:
                member.leases[chunk] = now_s
        return Ticket(self.epoch, number)

    def report(self, report: NodeReport, now_s: float) -> Orders:
        """A node's heartbeat; the answer may get lost, and the report be repeated."""
        self.tick(now_s)
        member = self._members.get(report.node)
        if member is None or report.ticket != Ticket(self.epoch, member.number):
            why = "it was silent for too long" if member is None else "it has joined again since"
            return Orders("join", why, next_s=MIN_REPORT_S)
        member.expires_s = now_s + self.spec.node_lease_s
        if member.last is not None and report.answered < member.last.answered:
            # One that arrives late says what isn't so any more.
            return Orders("join", "a later report of it came before", next_s=MIN_REPORT_S)
        member.last = report
        if report.error is not None:
            self.fail(report.error)
        self._take(member, report, now_s)
        for failure in report.failed:
            self._fetch_failed(member, failure, now_s)
        for chunk, provider in report.lost:
            self._not_passed(member, chunk, provider, now_s)
        if self._is_settled:
            self._choose_checks()
            self._grant(member, report.num_wanted, now_s)
        self._note_end(member, report)
        return self._orders(member, report)

    def tick(self, now_s: float) -> None:
        """Does what is due at this time. All events call it; to be called without any, too."""
        for member in self._members.expired(now_s):
            self._remove(member)
        if now_s - self._judged_s >= _JUDGE_S:
            self._judged_s = now_s
            self._take_overdue(now_s)
        if any(member.node not in self._told for member in self._members):
            # Ranks build their models; for how long is their driver's business.
            self._moved_s = now_s
        self._check_stall(now_s)

    # --- what drivers say and ask ---

    def want(self, nodes: Mapping[str, str], now_s: float) -> None:
        """Nothing: nobody else takes part in a stream."""

    def drop_node(self, node: str, why: str, now_s: float) -> None:
        """A driver knows that a node is gone: nobody waits for it any more."""
        if (member := self._members.get(node)) is not None:
            self._remove(member)
        if node in self._labels and node not in self._given_up:
            self._given_up.add(node)
            self._needs.pop(node, None)
            self._later.pop(node, None)
            self.notes.append(f"node {self._labels[node]} was lost: {why}")
            for check in (self._checks or {}).pop(node, ()):
                self.notes.append(f"{self._table.files[check.file][0]}: not checked, with that node")
        self._check_done()
        self._check_all_tried()

    # --- sets of chunks ---

    @property
    def _is_settled(self) -> bool:
        """Whether it is known what every node needs."""
        return all(node in self._told for node in self._living())

    def _needed(self, but: str | None = None) -> int:
        found = 0
        for node, needs in self._needs.items():
            found |= 0 if node == but else needs
        return found

    def _held(self) -> int:
        return self._members.held_by_any()

    def _leased(self) -> int:
        found = 0
        for member in self._members:
            for chunk in member.leases:
                found |= 1 << chunk
        return found

    def _too_early(self) -> int:
        """Chunks that some node has no room for yet."""
        found = 0
        for later in self._later.values():
            found |= later
        return found

    def _beyond(self, needs: int) -> int:
        """Of what a node needs, all but the first `in_flight`."""
        if needs.bit_count() <= self.spec.in_flight:
            return 0
        return needs & ~all_bits(_nth_bit(needs, self.spec.in_flight) + 1)

    def _tried_in_vain(self) -> int:
        """Chunks that no member that needs them can fetch."""
        found = -1
        for member in self._members:
            found &= ~self._needs.get(member.node, 0) | member.refused
        return found

    # --- leases ---

    def _take(self, member: Member, report: NodeReport, now_s: float) -> None:
        """Notes what a node needs and holds."""
        everything = self._table.everything
        fresh = report.holds & everything & ~member.has
        member.has = report.holds & everything
        if report.needs is not None:
            before = self._needs.get(member.node, 0)
            # Within one membership it only gets less.
            needs = report.needs & (before if member.node in self._told else everything)
            if member.node not in self._told or needs != before:
                self._moved_s = now_s
            self._needs[member.node] = needs
            self._later[member.node] = self._beyond(needs)
            self._told.add(member.node)
            self._at_first.setdefault(member.node, needs)
        needed = self._needed()
        for chunk in [chunk for chunk in member.leases if member.has >> chunk & 1]:
            del member.leases[chunk]
            member.pause_s = 0.0
        if self._is_settled:
            for other in self._members:
                for chunk in [chunk for chunk in other.leases if not needed >> chunk & 1]:
                    del other.leases[chunk]
        if fresh:
            self._moved_s = now_s
        for chunk in [c for c in self._failures if member.has >> c & 1 or not needed >> c & 1]:
            del self._failures[chunk]

    def _grant(self, member: Member, num_wanted: int, now_s: float) -> None:
        """Leases the lowest free chunks to a node that needs them, or that all others have failed for."""
        if self.state != "running" or len(member.leases) >= num_wanted:
            return
        if self._rests(member, now_s):
            return
        needed = self._needed()
        free = needed & ~self._held() & ~self._leased() & ~member.refused
        if not free:
            return
        first = 1 << lowest_bit(needed)
        mine = self._needs.get(member.node, 0) | self._tried_in_vain()
        free &= mine & ~(self._too_early() & ~first)
        num_held = member.has.bit_count()
        while free and len(member.leases) < num_wanted:
            bit = free & -free
            free ^= bit
            if bit != first and num_held + len(member.leases) >= self.spec.in_flight:
                return
            member.leases[lowest_bit(bit)] = now_s

    def _drop_lease(self, chunk: int, member: Member) -> bool:
        del member.leases[chunk]
        return not self._held() >> chunk & 1

    def _check_all_tried(self) -> None:
        # When nobody takes part, somebody may come.
        if len(self._members):
            super()._check_all_tried()

    def _not_passed(self, member: Member, chunk: int, provider: int, now_s: float) -> None:
        """A node couldn't get a chunk from the one that holds it: after some tries, it fetches it itself.

        The other may be starting again, and then holds nothing; or the network is in parts, when fetching it
        twice is better than never."""
        asked = self._members.at(provider)
        if asked is None or asked is member or not 0 <= chunk < self._table.num_chunks:
            return
        if not asked.has >> chunk & 1 or not self._needs.get(member.node, 0) >> chunk & 1:
            return
        misses, _ = member.misses.get(chunk, (0, now_s))
        member.misses[chunk] = misses + 1, now_s
        if misses + 1 >= MAX_MISSES and not member.refused >> chunk & 1:
            member.leases.setdefault(chunk, now_s)

    # --- members ---

    def _remove(self, member: Member) -> None:
        self._members.remove(member)
        self._told.discard(member.node)
        # It may have been the last that hadn't failed.
        self._check_all_tried()

    def _choose_checks(self) -> None:
        """Shares out the files among the nodes that get all of them, else among those that get some."""
        if self._checks is not None:
            return
        checks: dict[str, list[FileCheck]] = {node: [] for node in self._living()}
        nbytes = dict.fromkeys(checks, 0)
        for file, (_, size) in enumerate(self._table.files):
            bits = self._table.file_bits(file)
            getting = [node for node in checks if self._needs[node] & bits]
            whole = [node for node in getting if self._needs[node] & bits == bits]
            if not getting:
                continue
            chosen = min(whole or getting, key=nbytes.__getitem__)
            nbytes[chosen] += size if whole else 0
            checks[chosen].append(FileCheck(file, bool(whole)))
        self._checks = checks

    def _note_end(self, member: Member, report: NodeReport) -> None:
        if report.step > self._best.get(member.node, 0):
            self._best[member.node] = report.step
            self._moved_s = max(self._moved_s, member.expires_s - self.spec.node_lease_s)
        member.finished = report.finished and self._needs.get(member.node) == 0
        self._check_done()

    # --- words ---

    def _orders(self, member: Member, report: NodeReport) -> Orders:
        if self.state != "running":
            return Orders("over", "" if self.error is None else str(self.error))
        member.serial += 1
        keep = None
        if self._is_settled:
            keep = member.has
            for chunk in member.leases:
                keep |= 1 << chunk
            keep &= self._needed(but=member.node)
        return Orders(
            "run",
            "",
            member.serial,
            tuple(sorted(member.leases)),
            self._routes(member),
            nodes=tuple(self._members.ids[report.seen_nodes :]),
            next_s=self._next_s,
            keep=keep,
            checks=tuple((self._checks or {}).get(member.node, ())),
        )

    def _routes(self, member: Member) -> array[int]:
        """Where everything is that a node needs and others hold or fetch; all of it each time."""
        needs = self._needs.get(member.node, 0) & ~member.has
        for chunk in member.leases:
            needs &= ~(1 << chunk)
        found: dict[int, int] = {}
        for other in self._members:
            if other is not member:
                found |= {chunk: other.index for chunk in other.leases if needs >> chunk & 1}
        for other in self._members:
            if other is not member:
                found |= dict.fromkeys(_few(other.has & needs), other.index)
        return array("Q", [pack_route(chunk, found[chunk], NOBODY) for chunk in sorted(found)])

    def _not_done(self, node: str, now_s: float) -> str:
        member, name = self._members.get(node), self._name(node)
        if member is None:
            return f"{name} (takes no part)"
        if node not in self._told:
            return f"{name} (its ranks haven't said what they need)"
        if member.finished:
            return ""
        silent_s = self._silent_s(member, now_s)
        left, all_ = self._needs[node].bit_count(), self._at_first[node].bit_count()
        return f"{name} (lacks {left} of {all_} chunks, last heard of {silent_s:.0f} s ago)"

    def _num_with_nobody(self) -> int:
        return (self._needed() & ~self._held() & ~self._leased()).bit_count()

    def _bytes_for(self, node: str) -> int:
        return self._table.nbytes_of(self._at_first.get(node, 0))

    def _bytes_at(self, member: Member) -> int:
        return self._table.nbytes_of(self._at_first.get(member.node, 0) & ~self._needs.get(member.node, 0))


def _few(bits: int) -> Iterator[int]:
    """The numbers in a set of a few that are near to each other, which may be large."""
    if bits:
        low = lowest_bit(bits)
        yield from (low + number for number in each_bit(bits >> low))


def _nth_bit(bits: int, count: int) -> int:
    """The `count`-th smallest number of a set that has more than that."""
    low, width = lowest_bit(bits), 64
    bits >>= low
    while (bits & all_bits(width)).bit_count() < count:
        width *= 2
    return low + next(islice(each_bit(bits & all_bits(width)), count - 1, None))
