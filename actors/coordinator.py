"""The actor that knows which groups of ranks live on the cluster."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping
from typing import Any, Protocol

from raywl.actors.names import Hello, mine
from raywl.coordination import Beat, Group, GroupRegistry, Lease

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
    4. When no group has lived for the idle time and the agents have ended, it ends itself.
    5. After a crash Ray starts it again, empty, on any node: the next heartbeats tell it everything.
    """

    def __init__(self, link: CoordinatorLink) -> None:
        self._link = link
        self._lock = threading.Lock()
        # Epochs must be above those of an earlier life, which the wall clock is.
        self._registry = GroupRegistry(time.monotonic(), first_epoch=time.time_ns())
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
            return self._registry.retire_idle(time.monotonic()), self._registry.is_unused

    def status(self) -> dict[str, Any]:
        """Groups, leases and nodes."""
        with self._lock:
            return self._registry.status(time.monotonic())

    def _watch(self) -> None:
        pause = threading.Event()
        while True:
            self._see_nodes()
            with self._lock:
                over, beat_s = self._registry.is_over(time.monotonic()), self._registry.beat_s
            if over:
                self._link.end_this_actor()
                return
            pause.wait(beat_s)

    def _see_nodes(self) -> None:
        with contextlib.suppress(Exception):
            alive = self._link.alive_node_ids()
            with self._lock:
                self._registry.see_nodes(alive)
