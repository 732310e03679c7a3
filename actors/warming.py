"""One node's page cache, filled with what its ranks are about to read."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from raywl.node.prefetch import Covered, FileRange, prefetch

__all__ = ["PageWarmer"]


class PageWarmer:
    """Reads what ranks ask for into the page cache: each byte once, in the order of files and offsets.

    Part of a node's agent; every method runs in the agent's process. One for each group.

    1. Every rank calls `add` with the ranges of its plan; a thread of the agent starts to read.
    2. What several ranks want is read once; ranges that come later are merged into the order.
    3. `stop` ends it: the group has loaded, or has gone.
    """

    def __init__(self, num_threads: int = 4) -> None:
        self._num_threads = num_threads
        self._lock = threading.Lock()
        self._covered = Covered()
        self._waiting: list[tuple[int, int, FileRange]] = []
        self._order: dict[str, int] = {}
        self._paths: dict[str, str] = {}
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._asked_bytes = self._read_bytes = 0

    def add(self, paths: Mapping[str, str], ranges: Sequence[FileRange]) -> None:
        """Takes a rank's ranges.

        Args:
            paths: Path of each of the checkpoint's files on this node, in the checkpoint's order.
            ranges: What the rank is about to read.
        """
        with self._lock:
            if self._stop.is_set():
                return
            for name, path in paths.items():
                self._order.setdefault(name, len(self._order))
                self._paths[name] = path
            for file, start, end in ranges:
                self._asked_bytes += end - start
                for fresh in self._covered.add(file, start, end):
                    heapq.heappush(self._waiting, (self._order[file], fresh.start, fresh))
            if self._thread is None and self._waiting:
                self._thread = threading.Thread(target=self._run, name="raywl-warm", daemon=True)
                self._thread.start()

    def stop(self, wait_s: float = 0.0) -> None:
        """Ends the reading after the blocks that are under way, and waits so long for those."""
        with self._lock:
            self._stop.set()
            self._waiting.clear()
            thread = self._thread
        if thread is not None and wait_s:
            thread.join(wait_s)

    def status(self) -> dict[str, Any]:
        """Bytes that ranks asked for, counted for each, and bytes that were read for all of them."""
        with self._lock:
            return {"asked_bytes": self._asked_bytes, "read_bytes": self._read_bytes}

    def _next(self) -> Iterator[FileRange]:
        while True:
            with self._lock:
                if not self._waiting:
                    self._thread = None
                    return
                taken = heapq.heappop(self._waiting)[2]
            yield taken

    def _run(self) -> None:
        # Files that can't be read are a warning in the log; the ranks' own reads say more.
        prefetch(
            self._next(), self._paths, num_threads=self._num_threads, stop=self._stop, on_read=self._count
        )

    def _count(self, nbytes: int) -> None:
        with self._lock:
            self._read_bytes += nbytes
