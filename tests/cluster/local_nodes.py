"""Nodes that stage a checkpoint in this process, without Ray: real work, and method calls for a network."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from raywl.actors.chunks import ChunkMover, StageRequest
from raywl.coordination import ChunkTable, NodeReport, Orders, StageSpec, StageState, StagingBoard, Ticket


class LocalCluster:
    """A coordinator's board, agents' movers with a cache folder each, and a driver."""

    def __init__(
        self, pin: Any, folder: Path, num_nodes: int, *, chunk_bytes: int = 4096, **spec: Any
    ) -> None:
        self.pin, self.folder = pin, folder
        source = pin.open()
        files = tuple((name, source.files[name].size) for name in sorted(source.files))
        self.names = [f"node{number}" for number in range(num_nodes)]
        table = ChunkTable(files, chunk_bytes)
        self.spec = StageSpec("run", "key", str(pin), table, {name: name for name in self.names}, **spec)
        self.board = StagingBoard(1)
        self.lock = threading.Lock()
        self.movers: dict[str, ChunkMover] = {}
        self.results: dict[str, Any] = {}
        self.threads: dict[str, threading.Thread] = {}
        self.sent: Counter[str] = Counter()
        self.unreachable: set[str] = set()
        self.store_bytes = 1 << 30
        self.on_chunk: Callable[[str, int, str], None] = lambda *_: None

    def cache_of(self, name: str) -> Path:
        return self.folder / name

    def source_of(self, name: str) -> Any:
        return replace(self.pin, cache_dir=str(self.cache_of(name))).open()

    def start(self, *names: str, same_agent: bool = False) -> None:
        """Starts agents, by default on all nodes; one that is started again has lost its memory."""
        for name in names or self.names:
            pin = replace(self.pin, cache_dir=str(self.cache_of(name)))
            request = StageRequest(self.spec, pin)
            mover = self.movers[name] if same_agent else ChunkMover(name, name, _Link(self, name))
            self.movers[name] = mover
            self.unreachable.discard(name)
            thread = threading.Thread(target=self._work, args=(name, mover, request), daemon=True)
            self.threads[name] = thread
            thread.start()

    def _work(self, name: str, mover: ChunkMover, request: StageRequest) -> None:
        try:
            self.results[name] = mover.stage(request)
        except BaseException as error:
            self.results[name] = error

    def kill(self, name: str) -> None:
        """Ends an agent without a word to anybody; what it wrote stays."""
        self.unreachable.add(name)
        work = next(iter(self.movers[name]._works.values()))
        work._link = None
        work.stop("killed")
        self.threads[name].join(10.0)

    def look(self) -> StageState:
        with self.lock:
            return self.board.begin(self.spec, "driver", time.monotonic())

    def wait(self, timeout_s: float = 30.0, until: Callable[[StageState], bool] | None = None) -> StageState:
        """Looks until the run is over, or something else holds."""
        give_up_s = time.monotonic() + timeout_s
        while True:
            state = self.look()
            if state.state != "running" or (until is not None and until(state)):
                return state
            assert time.monotonic() < give_up_s, state.waiting
            time.sleep(0.02)

    def join(self, timeout_s: float = 15.0) -> None:
        """Waits until all agents have heard that it is over."""
        for thread in self.threads.values():
            thread.join(timeout_s)
            assert not thread.is_alive()

    def content(self, name: str) -> dict[str, bytes]:
        """The files under their final names on a node."""
        source = self.source_of(name)
        paths = {file: Path(source.path(file)) for file in source.files}
        return {file: path.read_bytes() for file, path in paths.items() if path.is_file()}

    def left_over(self, name: str) -> list[Path]:
        """Part files, journals and marks of a node."""
        return [
            path
            for path in self.cache_of(name).rglob("*")
            if "incomplete" in path.name or "stage-" in path.name
        ]


class _Link:
    """One agent's way to the others."""

    def __init__(self, cluster: LocalCluster, name: str) -> None:
        self._cluster, self._name = cluster, name

    def store_bytes(self, node_id: str) -> int:
        return self._cluster.store_bytes

    def put(self, array: Any) -> Any:
        return np.array(array)

    def get(self, ref: Any, timeout_s: float) -> Any:
        return ref

    def join_stage(
        self, spec: StageSpec, node_id: str, has: int, fetching: tuple[int, ...], shares: tuple[str, ...]
    ) -> Ticket | None:
        with self._cluster.lock:
            return self._cluster.board.join(spec, node_id, has, fetching, shares, time.monotonic())

    def report_stage(self, report: NodeReport) -> Orders:
        with self._cluster.lock:
            return self._cluster.board.report(report, time.monotonic())

    def ask_chunk(
        self, node_id: str, run: str, chunk: int, asker: str, wait_s: float
    ) -> tuple[str, list[Any]]:
        cluster = self._cluster
        cluster.on_chunk(node_id, chunk, asker)
        if node_id in cluster.unreachable or node_id not in cluster.movers:
            raise ConnectionError(f"{node_id} can't be reached")
        word, refs = cluster.movers[node_id].chunk(run, chunk, asker, wait_s)
        if word == "here":
            cluster.sent[node_id] += refs[0].nbytes
        return word, refs

    def thank_for_chunk(self, node_id: str, run: str, chunk: int, asker: str) -> None:
        if node_id not in self._cluster.unreachable:
            self._cluster.movers[node_id].thanks(run, chunk, asker)

    def count_fetched(self, source: str, nbytes: int) -> None:
        pass
