"""The actor that acts for one node."""

from __future__ import annotations

import contextlib
import os
import pickle
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from raywl.actors.chunks import ChunkMover, MoverLink, StageFiles, StageRequest, list_files
from raywl.actors.failures import Place, as_raywl_error
from raywl.actors.names import Hello, mine
from raywl.actors.pins import PinBoard, Pinned
from raywl.actors.requests import SourceRequest
from raywl.actors.shelf import ShelfLink, TableParts, TableRequest, TableShelf
from raywl.actors.warming import PageWarmer
from raywl.caches import PruneReport, list_cache, prune_cache
from raywl.checkpoint import TensorEntry
from raywl.coordination import Beat
from raywl.errors import CheckpointError
from raywl.node.page_cache import release_checkpoint_page_cache, resident_fraction
from raywl.node.prefetch import FileRange, prefetch, should_prefetch
from raywl.sources.cache import cache_root
from raywl.tables import PlasmaBudget

if TYPE_CHECKING:
    from raywl.opening import Checkpoint

__all__ = ["AgentLink", "NodeAgent", "Opened"]

_ALONE_S = 60.0
_FIRST_PAUSE_S = 1.0
_STOP_S = 10.0


class AgentLink(ShelfLink, MoverLink, Protocol):
    """What an agent asks of the cluster."""

    def beat(self, node_id: str, held: tuple[str, ...]) -> Beat:
        """Tells the coordinator that the agent lives, and what it holds.

        When there is no coordinator, an agent that holds something makes one; otherwise it raises.
        """

    def end_this_actor(self) -> None:
        """Ends the calling actor for good."""


@dataclass(frozen=True, slots=True)
class Opened:
    """What a node found."""

    identity: str
    num_tensors: int
    nbytes: int
    kind: str = "local"
    """What its source is; see `Source.kind`."""


class NodeAgent:
    """Opens checkpoints on its node, once for all ranks there.

    One per node, detached, pinned to it, named by raywl's version, protocol and the node's id; every
    method runs in its process, several at a time in threads.

    1. A launch makes it, or finds it (`get_if_exists`), and compares versions by `hello`.
    2. `open` reads the checkpoint's headers here; the driver compares the identities of all nodes.
    3. `fetch` brings its files to this node, where they aren't there.
    4. Each rank of the node asks for the same checkpoint by `checkpoint`.
    5. `release` drops its pages, where that is asked for, when all ranks have loaded.
    6. `close` forgets it. All of these may be repeated.
       Tables that all processes of the node share are made, found and dropped by the methods of their name.
       `stage` brings a checkpoint here together with other nodes; `chunk` and `thanks` are theirs to call,
       `take_chunks` and `read_range` those of ranks that it is streamed to.
    7. A thread asks the coordinator by heartbeat whether the agent is still needed, and ends it when
       nothing has needed it for the idle time, or when there has been no coordinator for a minute; never
       while it has a table, or takes part in a staging.
    8. After a crash Ray starts it again on the same node, empty: what it forgot is read from disk again.
    """

    def __init__(self, node_id: str, label: str, link: AgentLink) -> None:
        """Runs in the agent's process.

        Args:
            node_id: The node that it is pinned to.
            label: What to call that node in messages.
            link: Its way to the cluster.
        """
        self._node_id = node_id
        self._place = Place(label)
        self._link = link
        self._lock = threading.Lock()
        self._opening: dict[str, threading.Lock] = {}
        self._opened: dict[str, tuple[Opened, bytes]] = {}
        self._unfetched: dict[str, Checkpoint] = {}
        """Open checkpoints whose files aren't known to be on this node, with what fetching them takes."""
        self._progress: dict[str, tuple[int, int, str]] = {}
        """How far what is being fetched for a group is."""
        self._warmers: dict[str, PageWarmer] = {}
        self._hurry = threading.Event()
        self._shelf = TableShelf(node_id, label, link, self._tell_held)
        self._mover = ChunkMover(node_id, label, link, self._tell_held)
        notes = os.path.join(cache_root(None), "pins", f"{node_id}.json")
        self._pins = PinBoard(label, notes, self._tell_held)
        threading.Thread(target=self._heartbeats, name="raywl-agent", daemon=True).start()

    def hello(self) -> Hello:
        """Version and protocol."""
        return mine()

    def open(self, request: SourceRequest) -> Opened:
        """Opens the checkpoint on this node; a second call for the group answers from memory.

        Raises:
            RaywlError: As `open_checkpoint`, with this node's name.
        """
        return self._open(request)[0]

    def fetch(self, request: SourceRequest) -> int:
        """Brings all files of the checkpoint to this node; returns the bytes that came.

        Raises:
            RaywlError: As `Manifest.fetch`, with this node's name.
        """
        self._open(request)
        return self._fetch(request)

    def progress(self, group: str) -> tuple[int, int, str]:
        """Bytes that `fetch` has, those that it is to have, and what is going on."""
        return self._progress.get(group, (0, 0, "fetch"))

    def checkpoint(self, request: SourceRequest, identity: str) -> bytes:
        """The pickled `Checkpoint`, for ranks of this node.

        Args:
            request: As given to `open`.
            identity: What the nodes agreed on.

        Raises:
            CheckpointError: It has changed on this node since.
        """
        opened, pickled = self._open(request)
        if opened.identity != identity:
            raise CheckpointError(
                request.label,
                None,
                f"changed while it was loaded: it was {identity}, now it is {opened.identity}",
            ).at(str(self._place))
        # Where this process was started anew, it may have been in the middle of it.
        self._fetch(request)
        return pickled

    def close(self, group: str) -> None:
        """Forgets what a group had opened."""
        with self._lock:
            self._opened.pop(group, None)
            self._unfetched.pop(group, None)
            self._opening.pop(group, None)
            warmer = self._warmers.pop(group, None)
        if warmer is not None:
            warmer.stop()

    def list_files(self, request: SourceRequest) -> StageFiles:
        """What belongs to a remote checkpoint, and whether this node has it.

        Raises:
            RaywlError: As `open_checkpoint`, with this node's name.
        """
        assert not isinstance(request.ref, str)
        with self._as_raywl("looking at the checkpoint"):
            return list_files(request.ref)

    def stage(self, request: StageRequest) -> str:
        """Takes part in a staging until it is over: see `ChunkMover.stage`."""
        return self._mover.stage(request)

    def chunk(self, run: str, chunk: int, asker: str, wait_s: float) -> tuple[str, list[Any]]:
        """A chunk for another node's agent: see `ChunkMover.chunk`."""
        return self._mover.chunk(run, chunk, asker, wait_s)

    def thanks(self, run: str, chunk: int, asker: str) -> None:
        """Another node's agent has a chunk that it asked for."""
        self._mover.thanks(run, chunk, asker)

    def take_chunks(
        self,
        run: str,
        rank: int,
        needs: int | None,
        done: tuple[int, ...],
        lost: tuple[int, ...],
        wait_s: float,
    ) -> tuple[str, list[Any]]:
        """Chunks of a stream for a rank of this node: see `ChunkMover.take`."""
        return self._mover.take(run, rank, needs, done, lost, wait_s)

    def read_range(self, run: str, file: str, start: int, end: int) -> bytes | None:
        """Bytes of a stream that a rank of this node can't wait for: see `ChunkMover.read`."""
        return self._mover.read(run, file, start, end)

    def staging(self) -> dict[str, Any]:
        """What is being staged here, as JSON values."""
        return self._mover.status()

    def prefetch(self, request: SourceRequest) -> str:
        """Reads the checkpoint's files into the page cache, if they fit; returns why not, empty when done.

        Raises:
            RaywlError: As `open_checkpoint`.
        """
        from raywl.node.memory import available_ram_bytes

        paths = self._paths(request)
        with self._as_raywl("prefetching"):
            cold = [path for path in paths if resident_fraction(path) != 1.0]
            ranges = [FileRange(path, 0, os.path.getsize(path)) for path in cold]
            decision = should_prefetch("", sum(row.end for row in ranges), available_ram_bytes(), True)
            if decision.warn:
                return f"not read into the page cache: {decision.reason}"
            prefetch(ranges, {path: path for path in cold}, num_threads=4)
            return ""

    def pin(self, request: SourceRequest, asked: list[str], quota_bytes: int | None) -> Pinned:
        """Keeps the checkpoint's files in memory: see `PinBoard.pin`."""
        paths = self._paths(request)
        with self._as_raywl("pinning"):
            return self._pins.pin(self._open(request)[0].identity, asked, paths, quota_bytes)

    def unpin(self, names: list[str]) -> int:
        """Lets go of what was pinned: see `PinBoard.unpin`."""
        return self._pins.unpin(names)

    def prune(self, max_age_s: float | None, max_bytes: int | None, dry_run: bool) -> PruneReport:
        """Deletes what nobody uses from this node's cache: see `prune_cache`."""
        with self._as_raywl("pruning"):
            return prune_cache(
                max_age_s=max_age_s, max_bytes=max_bytes, keep=self._pins.paths(), dry_run=dry_run
            )

    def overview(self) -> dict[str, Any]:
        """What this node has and does, as JSON values."""
        return {
            "staging": self._mover.status(),
            "pins": self._pins.status(),
            "tables": list(self._shelf.names()),
            "warming": self.warmed(),
            "cache": [one.to_dict() for one in list_cache()],
        }

    def _paths(self, request: SourceRequest) -> list[str]:
        checkpoint: Checkpoint = pickle.loads(self._open(request)[1])  # noqa: S301 (its own)
        return [checkpoint.path(file.name) for file in checkpoint.files]

    def warm(self, group: str, paths: dict[str, str], ranges: list[FileRange]) -> None:
        """Fills the page cache with what a rank of this node is about to read; returns at once."""
        with self._lock:
            warmer = self._warmers.setdefault(group, PageWarmer())
        warmer.add(paths, ranges)

    def release(self, request: SourceRequest) -> int:
        """Drops the checkpoint's files from the page cache, once the ranks here are done with them.

        Returns:
            Bytes that left it.

        Raises:
            RaywlError: As `open_checkpoint`.
        """
        with self._lock:
            warmer = self._warmers.get(request.group)
        if warmer is not None:
            warmer.stop(_STOP_S)
        return release_checkpoint_page_cache(self._paths(request))

    def warmed(self) -> dict[str, dict[str, Any]]:
        """By group: bytes that ranks asked to have in the page cache, and bytes that were read for it."""
        with self._lock:
            warmers = dict(self._warmers)
        return {group: warmer.status() for group, warmer in warmers.items()}

    def table_entry(self, request: SourceRequest, tensor: str) -> tuple[TensorEntry, str]:
        """Where a tensor lies, and the checkpoint's identity on this node.

        Raises:
            RaywlError: As `open_checkpoint`; a `CheckpointError` when there is no such tensor.
        """
        checkpoint: Checkpoint = pickle.loads(self._open(request)[1])  # noqa: S301 (its own)
        with self._as_raywl("finding the table"):
            return checkpoint.entry(tensor), checkpoint.identity

    def table_budget(self, name: str) -> PlasmaBudget:
        """Room for a table in this node's object store."""
        return self._shelf.budget(name)

    def share_table(self, request: TableRequest, rows: list[Any] | None = None) -> TableParts:
        """Makes a table on this node: see `TableShelf.share`."""
        with self._as_raywl("sharing the table"):
            return self._shelf.share(request, rows or ())

    def find_table(self, request: TableRequest) -> TableParts:
        """A table's parts, for readers of this node: see `TableShelf.find`."""
        with self._as_raywl("sharing the table"):
            return self._shelf.find(request)

    def table_chunk(self, request: TableRequest, index: int) -> Any:
        """A chunk of a table that was made of a tensor in memory, for another node's agent."""
        with self._as_raywl("sharing the table"):
            return self._shelf.chunk(request, index)

    def drop_table(self, request: TableRequest) -> None:
        """Forgets a table: see `TableShelf.drop`."""
        self._shelf.drop(request)

    def undo_table(self, request: TableRequest) -> None:
        """Takes back a `share_table` that failed: see `TableShelf.undo`."""
        self._shelf.undo(request)

    def _held(self) -> tuple[str, ...]:
        return (*self._shelf.names(), *self._mover.names(), *self._pins.names())

    def _tell_held(self) -> None:
        # At once, since a driver may end idle helpers before the next heartbeat.
        with contextlib.suppress(Exception):
            self._link.beat(self._node_id, self._held())
        self._hurry.set()

    @contextlib.contextmanager
    def _as_raywl(self, doing: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            raise as_raywl_error(error, self._place, doing) from None

    def _open(self, request: SourceRequest) -> tuple[Opened, bytes]:
        with self._lock:
            lock = self._opening.setdefault(request.group, threading.Lock())
        with lock:
            known = self._opened.get(request.group)
            if known is not None:
                return known
            from raywl.opening import open_checkpoint

            with self._as_raywl("open_checkpoint"):
                checkpoint = open_checkpoint(request.ref, **request.options)
            opened = Opened(
                checkpoint.identity, len(checkpoint.tensors), checkpoint.nbytes, checkpoint.source.kind
            )
            with self._lock:
                self._unfetched[request.group] = checkpoint
                self._opened[request.group] = known = (opened, pickle.dumps(checkpoint))
            return known

    def _fetch(self, request: SourceRequest) -> int:
        with self._lock:
            lock = self._opening.setdefault(request.group, threading.Lock())
        with lock, self._as_raywl("fetching"):
            checkpoint = self._unfetched.get(request.group)
            if checkpoint is None:
                return 0

            def note(*told: Any) -> None:
                self._progress[request.group] = told

            try:
                nbytes = checkpoint.fetch(progress=note)
            finally:
                self._progress.pop(request.group, None)
            with self._lock:
                self._unfetched.pop(request.group, None)
            self._link.count_fetched(checkpoint.source.kind, nbytes)
            return nbytes

    def _forget_all_but(self, groups: tuple[str, ...]) -> None:
        # Of drivers that died. Where the coordinator is too new to know a group, its ranks' next
        # question opens the checkpoint again.
        with self._lock:
            known = {*self._opened, *self._warmers}
        for group in known:
            # A group's reloads are named below it.
            if group.partition("/")[0] not in groups:
                self.close(group)

    def _heartbeats(self) -> None:
        pause_s, last_answer_s = _FIRST_PAUSE_S, time.monotonic()
        while True:
            try:
                answer = self._link.beat(self._node_id, self._held())
            except Exception:
                # No coordinator: it may be starting again. Without one, nobody can need this agent.
                if time.monotonic() - last_answer_s > _ALONE_S and not self._held():
                    break
            else:
                if answer.retire and not self._held():
                    break
                pause_s, last_answer_s = answer.next_beat_s, time.monotonic()
                self._forget_all_but(answer.groups)
            self._hurry.wait(pause_s)
            self._hurry.clear()
        self._link.end_this_actor()
