"""The part of a node's agent that brings staged checkpoints to its node, and passes them on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from raywl.actors.chunk_window import Window
from raywl.actors.failures import Place, as_raywl_error
from raywl.actors.shared_lock import SharedLocks
from raywl.actors.stage_work import StageWork, window_of
from raywl.actors.stream_work import StreamAsk, StreamWork
from raywl.checkpoint.manifest import find_weights
from raywl.coordination import NodeReport, Orders, StageSpec, Ticket
from raywl.sources import Pin

__all__ = ["ChunkMover", "MoverLink", "StageFiles", "StageRequest", "list_files"]


class MoverLink(Protocol):
    """What staging asks of the cluster."""

    def store_bytes(self, node_id: str) -> int:
        """Capacity of a node's object store."""

    def put(self, array: Any) -> Any:
        """Puts an array into this node's object store, owned by this process; returns its reference."""

    def get(self, ref: Any, timeout_s: float) -> Any:
        """The array behind a reference."""

    def join_stage(
        self, spec: StageSpec, node_id: str, has: int, fetching: tuple[int, ...], shares: tuple[str, ...]
    ) -> Ticket | None:
        """Tells the coordinator that a node takes part: see `StagingBoard.join`."""

    def report_stage(self, report: NodeReport) -> Orders:
        """A node's heartbeat for a run: see `StagingBoard.report`."""

    def ask_chunk(
        self, node_id: str, run: str, chunk: int, asker: str, wait_s: float
    ) -> tuple[str, list[Any]]:
        """Asks another node's agent: see `ChunkMover.chunk`."""

    def thank_for_chunk(self, node_id: str, run: str, chunk: int, asker: str) -> None:
        """Tells another node's agent that a chunk has come; doesn't wait."""

    def count_fetched(self, source: str, nbytes: int) -> None:
        """Counts bytes that came from a kind of source, for the cluster's metrics."""


@dataclass(frozen=True)
class StageRequest:
    """What a driver asks a node for."""

    spec: StageSpec
    pin: Pin
    """Where the files come from; its secrets aren't shown."""
    window_bytes: int | None = field(default=None)
    """Most bytes of chunks in the node's object store; `None`: 1 GiB, or a fifth of the store."""
    stream: StreamAsk | None = None
    """Where nothing is to be written to disks."""


@dataclass(frozen=True)
class StageFiles:
    """What belongs to a checkpoint, as a node finds it."""

    files: tuple[tuple[str, int], ...]
    """Names and sizes, the small ones first."""
    ranged: bool
    """Whether the source gives parts of all of them."""
    complete: bool
    """All of them are on that node."""
    kind: str
    """Of the source."""
    version: str
    """What the cache tells this state of the files from others by."""


def list_files(pin: Pin) -> StageFiles:
    """Looks at what a remote checkpoint has, by its listing and index; headers are read on the nodes later.

    Raises:
        RaywlError: As `open_checkpoint`, for what listing and index tell.
    """
    source = pin.open()
    weights = find_weights(source, tuple(pin.allow_patterns))
    names = dict.fromkeys([*(file.name for file in source.companions()), *weights.names])
    files = [source.files[name] for name in names if name in source.files]
    return StageFiles(
        tuple((file.name, file.size) for file in files),
        all(file.ranged for file in files),
        all(source.has(file.name) for file in files),
        source.kind,
        source.repository.version,
    )


class ChunkMover:
    """The runs that this node takes part in. Every method runs in the agent's process; all may be repeated.

    1. `stage` takes part until the run is over. When the agent is killed meanwhile, Ray calls it again after
       the restart, and it goes on with what is on the disk.
    2. `chunk` gives other nodes what this one has, `thanks` ends that.
    3. `take` and `read` give the ranks of this node what is streamed to them.
    """

    def __init__(
        self, node_id: str, label: str, link: MoverLink, on_change: Callable[[], None] = lambda: None
    ) -> None:
        """Args:
        node_id: The node's.
        label: What to call it in messages.
        link: The way to the cluster.
        on_change: Called when `names` has another answer.
        """
        self._node_id, self._place, self._link, self._on_change = node_id, Place(label), link, on_change
        self._lock = threading.Lock()
        self._works: dict[str, StageWork] = {}
        self._windows: tuple[Window, Window] | None = None
        self._locks = SharedLocks()

    def names(self) -> tuple[str, ...]:
        """The runs that this node takes part in; it is needed as long as there are any."""
        with self._lock:
            return tuple(f"stage/{run}" for run in self._works)

    def stage(self, request: StageRequest) -> str:
        """Takes part in a run until it is over; returns why that is, empty when all was well.

        Raises:
            RaywlError: This node can't take part.
        """
        run = request.spec.run
        with self._lock:
            work = self._works.get(run)
            if work is None:
                try:
                    windows = self._shared_windows(request.window_bytes)
                    kind = StageWork if request.stream is None else StreamWork
                    work = kind(request, self._node_id, str(self._place), self._link, windows, self._locks)
                except Exception as error:
                    raise as_raywl_error(error, self._place, "staging") from None
                self._works[run] = work
                first = True
            else:
                first = False
        if not first:
            return work.wait()
        self._on_change()
        try:
            return work.run()
        except Exception as error:
            raise as_raywl_error(error, self._place, "staging") from None
        finally:
            with self._lock:
                del self._works[run]
            self._on_change()

    def chunk(self, run: str, chunk: int, asker: str, wait_s: float) -> tuple[str, list[Any]]:
        """A chunk for another node.

        Args:
            run: Its run.
            chunk: Which.
            asker: The node that asks.
            wait_s: How long to wait for a chunk that is on its way to this node.

        Returns:
            `"here"` and one reference; or without any `"later"` (not here yet), `"busy"` (no room in the
            store now) or `"gone"` (this node doesn't know the run).
        """
        with self._lock:
            work = self._works.get(run)
        return ("gone", []) if work is None else work.give(chunk, asker, wait_s)

    def thanks(self, run: str, chunk: int, asker: str) -> None:
        """Another node has a chunk that it asked for."""
        with self._lock:
            work = self._works.get(run)
        if work is not None:
            work.thanked(chunk, asker)

    def take(
        self,
        run: str,
        rank: int,
        needs: int | None,
        done: tuple[int, ...],
        lost: tuple[int, ...],
        wait_s: float,
    ) -> tuple[str, list[tuple[int, Any]]]:
        """Chunks for a rank of this node. Harmless when repeated.

        Args:
            run: Its stream.
            rank: Which.
            needs: All chunks that it lacks, as a set: at first, and when that isn't known here; else `None`.
            done: Chunks that it has taken since.
            lost: Chunks whose references led nowhere.
            wait_s: How long to wait for one.

        Returns:
            `"here"`, and numbers with references, perhaps none yet; or `"unknown"` (say what you need),
            `"gone"` (no such stream here, or not yet), `"over"`, and why.
        """
        with self._lock:
            work = self._works.get(run)
        if not isinstance(work, StreamWork):
            return "gone", []
        return work.take(rank, needs, done, lost, wait_s)

    def read(self, run: str, file: str, start: int, end: int) -> bytes | None:
        """Bytes for a rank that can't wait for its chunk; `None`: no such stream here, or not yet.

        Raises:
            RaywlError: As the source.
        """
        with self._lock:
            work = self._works.get(run)
        if not isinstance(work, StreamWork):
            return None
        try:
            return work.read(file, start, end)
        except Exception as error:
            raise as_raywl_error(error, self._place, "reading") from None

    def status(self) -> dict[str, Any]:
        """The runs here, as JSON values."""
        with self._lock:
            works = dict(self._works)
        return {run: work.status() for run, work in works.items()}

    def _shared_windows(self, window_bytes: int | None) -> tuple[Window, Window]:
        """One for what comes in and one for what goes out, for all runs of the node together."""
        if self._windows is None:
            limit_bytes = window_bytes or window_of(self._link.store_bytes(self._node_id))
            self._windows = Window(limit_bytes // 2), Window(limit_bytes - limit_bytes // 2)
        if not self._works:
            for window in self._windows:
                window.peak_bytes = 0
        return self._windows
