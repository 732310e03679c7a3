"""One checkpoint on its way to all nodes: who fetches which chunk, and who gets it from whom."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from raywl.coordination.any_run import MAX_MISSES, MIN_REPORT_S, AnyRun
from raywl.coordination.chunks import each_bit, lowest_bit
from raywl.coordination.stage_members import Member
from raywl.coordination.stage_messages import NOBODY, NodeReport, Orders, StageSpec, Ticket, pack_route
from raywl.coordination.stage_routes import RoutePlanner

__all__ = ["StageRun"]

_JUDGE_S = 1.0


class StageRun(AnyRun):
    """The state of one run. Pure: events in, answers out, `now_s` from the caller's clock.

    A chunk is free (nobody has it or fetches it), leased to one node, or had by somebody. Nodes report what
    they have; the answers carry leases of a few chunks, always the lowest free ones, so that a faster node
    comes back sooner and gets more, and the routes by which the others get each chunk from its source.

    1. Nodes `join` with what they have. Until all have, or for `settle_s`, nothing is leased.
    2. `report` takes what is new and answers with leases and routes.
    3. A node that is silent, or joins again, loses its leases; its chunks get other routes, or are free
       again. A node that joins later gets routes of its own, from whoever will have sent least.
    4. A chunk that a node can't fetch goes to the next one. When none is left, or nothing moves any more,
       the run has failed, and every node and driver is told why.
    5. It is done when each node that was asked for has finished, or has been given up by `drop_node`.

    Nodes that share a folder are one receiver: the first of them fills it, and the others, its guests, wait
    and then look.
    """

    def __init__(self, spec: StageSpec, epoch: int, now_s: float) -> None:
        super().__init__(spec, epoch, now_s)
        self._planner = RoutePlanner(spec.table, self._members)
        self._free = spec.table.everything
        self._leased = self._again = 0
        """Chunks with a lease; of them those that somebody has who can't pass them to everybody."""
        self._holder: dict[int, Member] = {}
        """Chunk to who has the lease of it."""
        self._best: dict[str, tuple[int, int]] = {}
        """The most that each node ever had, and its highest step: only more than that counts as movement."""
        self._vain_until_s: dict[int, float] = {}
        """Chunk to when to look again for somebody else who has it."""
        self._spoiled: set[int] = set()
        self._settled = False
        self._settle_s = now_s + spec.settle_s
        self._judged_s = now_s

    # --- what nodes say ---

    def join(
        self, node: str, has: int, fetching: Iterable[int], shares: Iterable[str], number: int, now_s: float
    ) -> Ticket:
        """A node takes part, or does so again after it was started anew or was silent for too long.

        Args:
            node: Its id.
            has: All chunks that are safe on its disk.
            fetching: Those that it is fetching: by leases of a coordinator that was lost.
            shares: Nodes whose markers it found in its cache folder.
            number: Of the membership, larger than all before.
            now_s: The time.
        """
        self.tick(now_s)
        if (before := self._members.get(node)) is not None:
            self._remove(before, now_s)
        member = self._members.add(node, number, now_s + self.spec.node_lease_s)
        if member.index == len(self._planner.routes.sends):
            self._planner.routes.add_node()
        self._best.setdefault(node, (-1, 0))
        member = self._find_host(member, tuple(shares), now_s)
        if member.guest_of is None:
            self._take(member, has, now_s)
            if self._settled:
                self._planner.late(member)
            for chunk in fetching:
                if 0 <= chunk < self._table.num_chunks and self._free & ~member.has & 1 << chunk:
                    self._lease(chunk, member, now_s)
                    self._planner.fetched_by(chunk, member)
        self._settle(now_s)
        return Ticket(self.epoch, number)

    def report(self, report: NodeReport, now_s: float) -> Orders:
        """A node's heartbeat; the answer may get lost, and the report be repeated."""
        self.tick(now_s)
        member = self._members.get(report.node)
        if member is None or report.ticket != Ticket(self.epoch, member.number) or member.must_join:
            why = "it was silent for too long" if member is None else "it has joined again since"
            return Orders("join", why, next_s=MIN_REPORT_S)
        member.expires_s = now_s + self.spec.node_lease_s
        member.last = report
        if report.answered == member.serial:
            del member.personal[: member.num_told]
            member.num_told = 0
        self._spoiled.update(report.spoiled)
        if report.error is not None:
            self.fail(report.error)
        if report.shares != member.shares:
            member = self._find_host(member, report.shares, now_s)
        if member.guest_of is None:
            self._take(member, report.has, now_s)
            for failure in report.failed:
                self._fetch_failed(member, failure, now_s)
            for chunk, provider in report.lost:
                self._not_passed(member, chunk, provider, now_s)
            self._settle(now_s)
            self._grant(member, report.num_wanted, now_s)
        self._note_work(member, report, now_s)
        return self._orders(member, report)

    def tick(self, now_s: float) -> None:
        """Does what is due at this time. All events call it; to be called without any, too."""
        for member in self._members.expired(now_s):
            self._remove(member, now_s)
        self._settle(now_s)
        if now_s - self._judged_s < _JUDGE_S:
            return
        self._judged_s = now_s
        self._members.note_rates()
        self._planner.judge(self._leased)
        self._take_overdue(now_s)
        self._check_stall(now_s)

    # --- what drivers say and ask ---

    def want(self, nodes: Mapping[str, str], now_s: float) -> None:
        """Other nodes are to get it, too: ids, and what to call them."""
        self._labels.update(nodes)
        self._given_up -= set(nodes)
        self._done = False
        self._check_done()

    def drop_node(self, node: str, why: str, now_s: float) -> None:
        """A driver knows that a node is gone: nobody waits for it any more."""
        if (member := self._members.get(node)) is not None:
            self._remove(member, now_s)
        if node in self._labels and node not in self._given_up:
            self._given_up.add(node)
            self.notes.append(f"node {self._labels[node]} was lost: {why}")
        self._settle(now_s)
        self._check_done()

    # --- leases ---

    def _take(self, member: Member, has: int, now_s: float) -> None:
        """Notes what a node has."""
        fresh = has & self._table.everything & ~member.has
        if not fresh:
            return
        member.has |= fresh
        member.has_bytes += self._table.nbytes_of(fresh)
        for chunk in [chunk for chunk in member.leases if fresh >> chunk & 1]:
            self._end_lease(chunk)
            member.pause_s = 0.0
        for chunk in [chunk for chunk in member.misses if fresh >> chunk & 1]:
            del member.misses[chunk]
        for chunk in [chunk for chunk in self._failures if fresh >> chunk & 1]:
            del self._failures[chunk]
        if not self._settled:
            return
        # It brings what nobody had: a late node with a warm cache, or one whose lease had passed on.
        for chunk in each_bit(fresh & self._leased & ~self._again):
            self._end_lease(chunk)
            self._planner.fetched_by(chunk, member)
        new, self._free = fresh & self._free, self._free & ~fresh
        self._planner.held(new)

    def _grant(self, member: Member, num_wanted: int, now_s: float) -> None:
        """Leases the lowest free chunks to a node, and no more than its share of what is left."""
        if not self._settled or self.state != "running":
            return
        if self._rests(member, now_s):
            return
        free = self._free & ~member.refused
        if not free or len(member.leases) >= num_wanted:
            return
        share, left = self._members.share(member), self._free.bit_count()
        limit = min(num_wanted, max(1, -int(-(left + len(member.leases)) * share // 1)))
        while len(member.leases) < limit and free:
            chunk = lowest_bit(free)
            free &= free - 1
            self._lease(chunk, member, now_s)
            left -= 1
            self._planner.fetched_by(chunk, member, int(share * left * self._table.chunk_bytes))

    def _lease(self, chunk: int, member: Member, now_s: float) -> None:
        self._free &= ~(1 << chunk)
        self._leased |= 1 << chunk
        member.leases[chunk] = now_s
        self._holder[chunk] = member

    def _end_lease(self, chunk: int) -> None:
        member, bit = self._holder.pop(chunk), 1 << chunk
        del member.leases[chunk]
        self._leased &= ~bit
        self._again &= ~bit

    def _drop_lease(self, chunk: int, member: Member) -> bool:
        # The chunk is free, or as it was before it was fetched again.
        again = self._again >> chunk & 1
        self._end_lease(chunk)
        self._planner.routes.clear(chunk)
        if not again:
            self._free |= 1 << chunk
        elif (other := self._members.find_holder(chunk, but=member.index, thorough=True)) is not None:
            self._planner.routes.set(chunk, other.index)
        else:
            self._free |= 1 << chunk
        return bool(self._free >> chunk & 1)

    def _not_passed(self, member: Member, chunk: int, provider: int, now_s: float) -> None:
        """A node couldn't get a chunk from another one: it gets another route, or a lease of its own."""
        if not 0 <= chunk < self._table.num_chunks or (member.has | self._free) >> chunk & 1:
            return
        routes = self._planner.routes
        route = routes.route(chunk)
        if route.source == member.index:
            return
        now_at = NOBODY if route.source == NOBODY else route.provider(member.index)
        if now_at != provider and self._members.at(now_at) is not None:
            member.personal.append(pack_route(chunk, route.source, route.relay))
            return
        other = self._another_holder(chunk, provider, now_s)
        if self._gives_nothing(member, chunk, provider, now_s):
            if not self._leased >> chunk & 1:
                self._again |= 1 << chunk
                self._lease(chunk, member, now_s)
                self._planner.fetched_by(chunk, member)
        elif other is not None:
            routes.sends[other.index] += self._table.size(chunk)
            member.personal.append(pack_route(chunk, other.index))
        elif route.relay == provider:
            # Nobody else has it: straight from the one that fetches it.
            member.personal.append(pack_route(chunk, route.source))

    def _gives_nothing(self, member: Member, chunk: int, provider: int, now_s: float) -> bool:
        """Whether a node has asked often enough, of nodes that live and have the chunk: a network that is
        in parts. Fetching the chunk twice is better than never."""
        asked = self._members.at(provider)
        if asked is None or not asked.has >> chunk & 1:
            return False
        misses, last_s = member.misses.get(chunk, (0, now_s))
        # One that hasn't spoken since may be dead, which is known soon.
        misses += asked.expires_s - self.spec.node_lease_s > last_s
        member.misses[chunk] = misses, now_s
        return misses >= MAX_MISSES

    def _another_holder(self, chunk: int, provider: int, now_s: float) -> Member | None:
        if now_s < self._vain_until_s.get(chunk, 0.0):
            return None
        other = self._members.find_holder(chunk, but=provider)
        self._vain_until_s.pop(chunk, None)
        if other is None:
            # All who lack it ask, and there may be many.
            self._vain_until_s[chunk] = now_s + _JUDGE_S
        return other

    # --- members ---

    def _remove(self, member: Member, now_s: float) -> None:
        for chunk in list(member.leases):
            self._drop_lease(chunk, member)
        self._members.remove(member)
        self._planner.leave(member, self._leased)
        self._free = self._table.everything & ~self._members.held_by_any() & ~self._leased
        self._check_done()
        # It may have been the last that hadn't failed.
        self._check_all_tried()

    def _find_host(self, member: Member, shares: tuple[str, ...], now_s: float) -> Member:
        """Makes a node the guest of one that was there before it and has the same folder."""
        member.shares = shares
        hosts = [self._members.get(node) for node in shares if member.guest_of is None]
        hosts = [
            host if host.guest_of is None else self._members.get(host.guest_of) for host in hosts if host
        ]
        found = next((host for host in hosts if host is not None and host.number < member.number), None)
        if found is None:
            return member
        # As if it left; only that it still waits for the files.
        self._remove(member, now_s)
        guest = self._members.add(member.node, member.number, member.expires_s)
        guest.shares, guest.guest_of, guest.last = shares, found.node, member.last
        self._members.regroup()
        return guest

    def _settle(self, now_s: float) -> None:
        """From here on chunks are leased: everybody has said what is there, or has had the time to."""
        if self._settled or not len(self._members):
            return
        missing = any(n not in self._given_up and self._members.get(n) is None for n in self._labels)
        if missing and now_s < self._settle_s:
            return
        self._settled = True
        held = self._members.held_by_any()
        for chunk in each_bit(held & self._leased):
            self._end_lease(chunk)
        self._free &= ~held
        self._planner.held(held & ~self._members.held_by_all())

    def _note_work(self, member: Member, report: NodeReport, now_s: float) -> None:
        best_bytes, best_step = self._best[member.node]
        if member.has_bytes > best_bytes or report.step > best_step or report.finished > member.finished:
            self._best[member.node] = max(best_bytes, member.has_bytes), max(best_step, report.step)
            self._moved_s = now_s
        if report.finished and not member.finished:
            member.finished = True
            self._check_done()

    # --- words ---

    def _orders(self, member: Member, report: NodeReport) -> Orders:
        if self.state != "running":
            why = "" if self.error is None else str(self.error)
            return Orders("over", why, spoiled=tuple(sorted(self._spoiled)))
        member.serial += 1
        next_s = self._next_s
        ids = tuple(self._members.ids[report.seen_nodes :])
        if member.guest_of is not None:
            host = self._members.get(member.guest_of)
            look = host is not None and host.finished
            return Orders("run", serial=member.serial, guest_of=member.guest_of, look=look, next_s=next_s)
        routes, seen = self._planner.routes.since(report.seen_routes)
        member.num_told = len(member.personal)
        if member.personal:
            routes = routes + member.personal
        leases = tuple(sorted(member.leases))
        return Orders("run", "", member.serial, leases, routes, seen, ids, next_s=next_s)

    def _not_done(self, node: str, now_s: float) -> str:
        member = self._members.get(node)
        if member is None:
            return f"{self._name(node)} (takes no part)"
        if member.finished:
            return ""
        silent_s = self._silent_s(member, now_s)
        percent = 100 * member.has_bytes // max(1, self._table.nbytes)
        return f"{self._name(node)} (has {percent} %, last heard of {silent_s:.0f} s ago)"

    def _num_with_nobody(self) -> int:
        return self._free.bit_count()

    def _bytes_for(self, node: str) -> int:
        return self._table.nbytes

    def _bytes_at(self, member: Member) -> int:
        return member.has_bytes
