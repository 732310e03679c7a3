"""The actor that knows which groups of ranks live on the cluster."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping
from typing import Any, Protocol

from raywl.actors.names import Hello, mine
from raywl.coordination import (
    Beat,
    Group,
    GroupRegistry,
    Lease,
    NodeReport,
    Orders,
    StageSpec,
    StageState,
    StagingBoard,
    Ticket,
)

__all__ = ["CoordinatorLink", "LoadCoordinator"]


class CoordinatorLink(Protocol):
    """What the coordinator asks of the cluster."""

    def end_this_actor(self) -> None:
        """Ends the calling actor for good."""

    def alive_node_ids(self) -> set[str]:
        """The cluster's nodes; raises where it can't be asked."""


class LoadCoordinator:
    """A thin shell over `raywl.coordination`: it adds the clock, a lock, and its own end.

    One per cluster, named, detached, on any node; every method runs in its process and returns at once.

    1. The first launch makes it (`get_if_exists`); later ones find it by its name.
    2. A driver calls `keep` when its launch begins, and then as its heartbeat; agents call `beat`.
    3. `drop` ends a group; a group whose driver is silent ends by itself.
    4. While a checkpoint is staged, its driver calls `begin_stage`, and its nodes `join_stage` and
       `report_stage`, all of them again and again.
    5. When no group has lived for the idle time, nothing is staged and the agents have ended, it ends itself.
    6. After a crash Ray starts it again, empty, on any node: the next heartbeats tell it everything.
    """

    def __init__(self, link: CoordinatorLink) -> None:
        self._link = link
        self._lock = threading.Lock()
        # Epochs must be above those of an earlier life, which the wall clock is.
        self._registry = GroupRegistry(time.monotonic(), first_epoch=time.time_ns())
        self._board = StagingBoard(first_epoch=time.time_ns())
        threading.Thread(target=self._watch, name="raywl-coordinator", daemon=True).start()

    def hello(self) -> Hello:
        """Version and protocol."""
        return mine()

    def keep(self, group: Group) -> Lease:
        """Called by drivers: see `GroupRegistry.keep`."""
        with self._lock:
            return self._registry.keep(group, time.monotonic())

    def drop(self, name: str) -> None:
        """Called by drivers: see `GroupRegistry.drop`."""
        with self._lock:
            self._registry.drop(name, time.monotonic())

    def agree(self, name: str, identities: Mapping[str, str], labels: Mapping[str, str]) -> str:
        """Called by drivers: see `GroupRegistry.agree`."""
        with self._lock:
            return self._registry.agree(name, identities, labels)

    def beat(self, node_id: str, held: tuple[str, ...] = ()) -> Beat:
        """Called by agents: see `GroupRegistry.beat`."""
        with self._lock:
            return self._registry.beat(node_id, time.monotonic(), held)

    def retire_idle(self) -> tuple[tuple[str, ...], bool]:
        """Called by a driver that ends the helpers: ids of nodes whose agents it is to end, and whether
        this coordinator is unused as well."""
        self._see_nodes()
        with self._lock:
            idle = self._registry.retire_idle(time.monotonic())
            return idle, self._registry.is_unused and self._board.is_idle

    def begin_stage(self, spec: StageSpec, driver: str) -> StageState:
        """Called by drivers, as their heartbeat too: see `StagingBoard.begin`."""
        with self._lock:
            return self._board.begin(spec, driver, time.monotonic())

    def leave_stage(self, run: str, driver: str) -> None:
        """Called by drivers: see `StagingBoard.leave`."""
        with self._lock:
            self._board.leave(run, driver, time.monotonic())

    def drop_from_stage(self, run: str, node_id: str, why: str) -> None:
        """Called by drivers: see `StagingBoard.drop_node`."""
        with self._lock:
            self._board.drop_node(run, node_id, why, time.monotonic())

    def join_stage(
        self, spec: StageSpec, node_id: str, has: int, fetching: tuple[int, ...], shares: tuple[str, ...]
    ) -> Ticket | None:
        """Called by agents: see `StagingBoard.join`."""
        with self._lock:
            return self._board.join(spec, node_id, has, fetching, shares, time.monotonic())

    def report_stage(self, report: NodeReport) -> Orders:
        """Called by agents: see `StagingBoard.report`."""
        with self._lock:
            return self._board.report(report, time.monotonic())

    def status(self) -> dict[str, Any]:
        """Groups, leases, nodes, and what is staged."""
        with self._lock:
            now_s = time.monotonic()
            return {**self._registry.status(now_s), "stages": self._board.status(now_s)}

    def _watch(self) -> None:
        pause = threading.Event()
        while True:
            self._see_nodes()
            with self._lock:
                now_s, beat_s = time.monotonic(), self._registry.beat_s
                self._board.tick(now_s)
                over = self._registry.is_over(now_s) and self._board.is_idle
            if over:
                self._link.end_this_actor()
                return
            pause.wait(beat_s)

    def _see_nodes(self) -> None:
        with contextlib.suppress(Exception):
            alive = self._link.alive_node_ids()
            with self._lock:
                self._registry.see_nodes(alive)
