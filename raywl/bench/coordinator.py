"""How much work staging is for the coordinator: its state machine with simulated nodes, some of which die."""

from __future__ import annotations

import heapq
import random
import time
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from raywl.coordination import NOBODY, ChunkTable, NodeReport, Orders, StageSpec, StagingBoard, Ticket
from raywl.coordination.chunks import each_bit, set_of
from raywl.coordination.stage_messages import unpack_route

__all__ = ["Simulation"]

_DRIVER_S = 1.0


@dataclass(slots=True)
class _Node:
    """A simulated agent, with the disk that outlives it."""

    name: str
    ticket: Ticket | None = None
    alive: bool = True
    has: int = 0
    """Chunks on its disk."""
    told: int = 0
    """Those of them that the coordinator has confirmed."""
    last_s: float = 0.0
    leases: tuple[int, ...] = ()
    provider: array[int] = field(default_factory=lambda: array("H"))
    """Whom to ask for each chunk, by its index."""
    routed: int = 0
    seen_routes: int = 0
    ids: list[str] = field(default_factory=list)
    answered: int = 0
    me: int = NOBODY
    fetch_credit: float = 0.0
    receive_credit: float = 0.0
    begun: int = 0
    """Chunks of its leases that it has asked the source for."""
    asked_s: dict[int, float] = field(default_factory=dict)
    """Chunks that their providers haven't got yet, since when it asks."""


@dataclass
class Simulation:
    """Nodes that stage one checkpoint, on a clock of their own.

    What it assumes: messages arrive at once and in order, except that `loss` of the answers are lost.
    Between two reports a node fetches its leases at `fetch_bytes_per_s`, one after the other, and
    receives chunks at `receive_bytes_per_s` from nodes that have them at that moment, in order of their
    numbers; how many others ask the same node makes no difference to it. A node that dies keeps its disk;
    what it had begun to fetch was sent by the source in vain. `num_deaths` nodes die at moments drawn
    evenly over `death_span_s`; every second of them is started again after `restart_s`, the others are
    gone, which the driver notices and says after `notice_s`. A node that asks another for a chunk in vain
    for `patience_s` says so. The source is right and never fails.

    It measures the time that the board's own methods take, and nothing of the simulation around them.
    """

    num_nodes: int = 1000
    num_files: int = 1000
    file_bytes: int = 64 << 20
    num_deaths: int = 100
    death_span_s: float = 30.0
    restart_s: float = 4.0
    notice_s: float = 16.0
    loss: float = 0.01
    fetch_bytes_per_s: float = 50e6
    receive_bytes_per_s: float = 1.1e9
    num_wanted: int = 16
    patience_s: float = 5.0
    seed: int = 0
    own_s: float = 0.0
    """Seconds of processor time that the coordinator's state machine took."""
    num_messages: int = 0
    fetched: dict[int, int] = field(default_factory=dict)
    """By chunk, how often the source was asked for it."""
    excused: dict[int, int] = field(default_factory=dict)
    """By chunk, how often a node died that alone had it or was fetching it."""
    sent: dict[str, int] = field(default_factory=dict)
    """Bytes that each node sent to others."""

    def run(self, give_up_s: float = 3600.0) -> dict[str, Any]:
        """Simulates until the run is over.

        Raises:
            RuntimeError: It failed, or wasn't over at `give_up_s` of its clock.
        """
        self._random = random.Random(self.seed)
        names = [f"n{number}" for number in range(self.num_nodes)]
        files = tuple((f"file-{number}", self.file_bytes) for number in range(self.num_files))
        self._table = ChunkTable(files)
        self._spec = StageSpec("run", "key", "simulated", self._table, {name: name for name in names})
        self._board = StagingBoard()
        self._nodes = {name: _Node(name) for name in names}
        self._now_s = 0.0
        self._events: list[tuple[float, int, str, str]] = []
        self._serial = 0
        self._schedule(names)
        began_s = time.perf_counter()
        state = self._step_until_over(give_up_s)
        done = [node for node in state.nodes if node.state == "finished"]
        return {
            "nodes": self.num_nodes,
            "finished": len(done),
            "files": self.num_files,
            "chunks": self._table.num_chunks,
            "checkpoint_bytes": self._table.nbytes,
            "deaths": self.num_deaths,
            "own_s": self.own_s,
            "wall_s": time.perf_counter() - began_s,
            "simulated_s": self._now_s,
            "messages": self.num_messages,
            "source_ratio": sum(self.fetched.values()) / self._table.num_chunks,
            "most_sent_ratio": max(self.sent.values(), default=0) / self._table.nbytes,
            "all_excused": self.is_excused,
        }

    @property
    def is_excused(self) -> bool:
        """Whether every chunk was fetched once, and once more for each death that took it away."""
        return all(
            1 <= self.fetched.get(chunk, 0) <= 1 + self.excused.get(chunk, 0)
            for chunk in range(self._table.num_chunks)
        )

    def _schedule(self, names: list[str]) -> None:
        for name in names:
            self._at(self._random.uniform(0.0, 0.5), "report", name)
        victims = self._random.sample(names, self.num_deaths)
        for number, name in enumerate(victims):
            dies_s = self._random.uniform(0.5, self.death_span_s)
            self._at(dies_s, "die", name)
            if number % 2:
                self._at(dies_s + self.restart_s, "restart", name)
            else:
                self._at(dies_s + self.notice_s, "notice", name)
        self._at(0.0, "driver", "")

    def _at(self, when_s: float, what: str, name: str) -> None:
        self._serial += 1
        heapq.heappush(self._events, (when_s, self._serial, what, name))

    def _call(self, method: Any, *arguments: Any) -> Any:
        began_s = time.thread_time()
        answer = method(*arguments, self._now_s)
        self.own_s += time.thread_time() - began_s
        self.num_messages += 1
        return answer

    def _step_until_over(self, give_up_s: float) -> Any:
        while True:
            self._now_s, _, what, name = heapq.heappop(self._events)
            if self._now_s > give_up_s:
                raise RuntimeError(f"not over after {give_up_s:g} s of its clock")
            if what == "driver":
                state = self._call(self._board.begin, self._spec, "driver")
                if state.state == "done":
                    return state
                if state.state == "failed":
                    raise RuntimeError(f"failed at {self._now_s:.1f} s: {state.error}")
                self._at(self._now_s + _DRIVER_S, "driver", "")
                continue
            node = self._nodes[name]
            if what == "notice":
                self._call(self._board.drop_node, "run", name, "it died")
            elif what == "die":
                self._die(node)
            elif what == "restart":
                self._nodes[name] = _Node(name, has=node.has)
                self._at(self._now_s, "report", name)
            elif node.alive:
                self._report(node)

    def _die(self, node: _Node) -> None:
        node.alive = False
        elsewhere = 0
        for other in self._nodes.values():
            if other.alive:
                elsewhere |= other.has
        begun = set(each_bit(node.begun & ~node.has))
        for chunk in begun | set(each_bit(node.has & ~elsewhere)):
            self.excused[chunk] = self.excused.get(chunk, 0) + 1

    def _report(self, node: _Node) -> None:
        if node.ticket is None:
            has = node.has
            node.ticket = self._call(self._board.join, self._spec, node.name, has, (), ())
            node.told, node.last_s = has, self._now_s
            if node.ticket is None:
                return
            node.provider = array("H", [NOBODY]) * self._table.num_chunks
            node.routed = node.seen_routes = node.answered = 0
            node.ids = []
        lost = self._work(node)
        done = node.has == self._table.everything
        report = NodeReport(
            "run",
            node.name,
            node.ticket,
            answered=node.answered,
            has=node.has & ~node.told,
            seen_routes=node.seen_routes,
            seen_nodes=len(node.ids),
            num_wanted=self.num_wanted,
            lost=tuple(lost),
            finished=done,
        )
        orders: Orders = self._call(self._board.report, report)
        if orders.state == "over":
            return
        self._at(self._now_s + orders.next_s, "report", node.name)
        if self._random.random() < self.loss:
            return
        if orders.state == "join":
            node.ticket = None
            return
        self._follow(node, orders, node.has)

    def _follow(self, node: _Node, orders: Orders, has: int) -> None:
        node.told = has
        node.answered, node.leases = orders.serial, orders.leases
        node.ids += orders.nodes
        node.seen_routes = orders.seen_routes
        if node.me == NOBODY or node.me >= len(node.ids) or node.ids[node.me] != node.name:
            node.me = node.ids.index(node.name)
        chunks = []
        for packed in orders.routes:
            route = unpack_route(packed)
            node.provider[route.chunk] = route.provider(node.me)
            chunks.append(route.chunk)
        node.routed |= set_of(chunks)

    def _work(self, node: _Node) -> list[tuple[int, int]]:
        """What a node has got done since its last report."""
        passed_s, node.last_s = self._now_s - node.last_s, self._now_s
        node.fetch_credit = min(node.fetch_credit, 0.0) + passed_s * self.fetch_bytes_per_s
        for chunk in node.leases:
            bit = 1 << chunk
            if node.has & bit or node.fetch_credit <= 0:
                continue
            if not node.begun & bit:
                node.begun |= bit
                self.fetched[chunk] = self.fetched.get(chunk, 0) + 1
            node.fetch_credit -= self._table.size(chunk)
            node.has |= bit
        for chunk in [chunk for chunk in node.asked_s if node.has >> chunk & 1]:
            del node.asked_s[chunk]
        lost: list[tuple[int, int]] = []
        node.receive_credit = min(node.receive_credit, 0.0) + passed_s * self.receive_bytes_per_s
        for chunk in self._receivable(node):
            if node.receive_credit <= 0:
                break
            index = node.provider[chunk]
            if index == NOBODY:
                continue
            provider = self._nodes[node.ids[index]]
            if not provider.alive:
                # A call to it fails at once; the next one is made some time later.
                if len(lost) < 8 and self._now_s >= node.asked_s.get(chunk, 0.0):
                    lost.append((chunk, index))
                    node.asked_s[chunk] = self._now_s + self.patience_s / 2
            elif not provider.has >> chunk & 1:
                if len(node.asked_s) < 8:
                    node.asked_s.setdefault(chunk, self._now_s)
                if self._now_s - node.asked_s.get(chunk, self._now_s) > self.patience_s:
                    lost.append((chunk, index))
                    del node.asked_s[chunk]
            else:
                node.asked_s.pop(chunk, None)
                node.has |= 1 << chunk
                node.receive_credit -= self._table.size(chunk)
                self.sent[provider.name] = self.sent.get(provider.name, 0) + self._table.size(chunk)
        return lost

    def _receivable(self, node: _Node) -> Iterator[int]:
        return each_bit(node.routed & ~node.has)
