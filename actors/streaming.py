"""A stream as its driver sees it, beside what the ranks do meanwhile."""

from __future__ import annotations

import contextlib
import pickle
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from raywl.actors.chunks import StageRequest
from raywl.actors.deadline import Deadline
from raywl.actors.rank_feed import StreamJob
from raywl.actors.raycalls import Node
from raywl.actors.requests import request_for_nodes
from raywl.actors.stage_driver import (
    StagingCalls,
    chunk_bytes_for,
    report_of_nodes,
    smallest_window_bytes,
)
from raywl.actors.stream_work import StreamAsk
from raywl.coordination import ChunkTable, StageSpec, StageState
from raywl.errors import RaywlError, SourceError, StagingTimeout, some_of
from raywl.opening import Checkpoint, open_checkpoint
from raywl.progress import Progress
from raywl.sources import CachedSource
from raywl.sources.resolve import is_remote
from raywl.stage_report import StageReport
from raywl.text import format_bytes

if TYPE_CHECKING:
    from raywl.actors.group import GroupParts
    from raywl.actors.rank import Job
    from raywl.sources import Pin

__all__ = ["NOTHING_TO_STREAM", "Stream", "check_mode", "load_by_stream", "open_for_stream"]

T = TypeVar("T")

_MODES = ("cache", "stream")
_MAX_HEADS_BYTES = 64 << 20

NOTHING_TO_STREAM = "nothing to stream: the files are on the nodes, and are read there"


def check_mode(name: str, mode: str) -> None:
    """Raises `ValueError`, with the list, for an unknown way of bringing a checkpoint to nodes."""
    if mode not in _MODES:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, _MODES))}, not {mode!r}")


def open_for_stream(ref: Any, source: Mapping[str, Any]) -> Checkpoint | None:
    """The checkpoint to stream; `None` where there is nothing to: a local path, or a cache used offline.

    Raises:
        RaywlError, ValueError: As `open_checkpoint`.
        SourceError: Its source gives files only whole.
    """
    if not isinstance(ref, Checkpoint):
        if not is_remote(ref):
            return None
        checkpoint = open_checkpoint(ref, **source)
    elif source:
        raise ValueError(f"{sorted(source)} are for opening a checkpoint, and this one is open")
    else:
        checkpoint = ref
    told = checkpoint.source
    if not isinstance(told, CachedSource) or told.offline:
        return None
    whole = [file.name for file in checkpoint.files if not told.files[file.name].ranged]
    if whole:
        raise SourceError(
            told.ref, f"can't be streamed: its server gives no parts of {some_of(whole)}; use 'cache'"
        )
    return checkpoint


class Stream:
    """One checkpoint on its way to nodes, with nothing written to their disks.

    1. Made, and begun with `begin`, before the ranks are asked to load `job`.
    2. `tick` is called meanwhile, and is the driver's heartbeat; `watched` lets what ended the stream come
       first.
    3. `finish` waits for its end, when everything is checked.
    4. `leave` in any case.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        nodes: Sequence[Node],
        ranks: Mapping[str, tuple[int, ...]],
        deadline: Deadline,
        progress: Progress | None = None,
    ) -> None:
        """Args:
        checkpoint: What `open_for_stream` gave.
        nodes: Where to.
        ranks: Node id to the ranks there; empty where chunks are only to pass by.
        deadline: Bounds it.
        progress: Told how far it is.
        """
        run = f"stream-{uuid.uuid4().hex[:16]}"
        # Under no group: nothing of it is kept by the agents.
        pin: Pin = request_for_nodes(run, checkpoint, {}).ref  # type: ignore[assignment]
        window_bytes = smallest_window_bytes(nodes)
        chunk_bytes = chunk_bytes_for(window_bytes)
        self.table = ChunkTable(tuple((file.name, file.size) for file in checkpoint.files), chunk_bytes)
        spec = StageSpec(
            run=run,
            key=run,
            label=str(pin),
            table=self.table,
            nodes={node.node_id: node.label for node in nodes},
            # Half of a window for what a node fetches, half for what it gets, and one to spare.
            in_flight=max(1, window_bytes // 2 // chunk_bytes - 1),
        )
        self.checkpoint, self._nodes, self._deadline = checkpoint, nodes, deadline
        self.job = StreamJob(run, self.table, pickle.dumps(checkpoint) if ranks else b"")
        request = StageRequest(spec, pin, stream=StreamAsk(ranks, _heads(checkpoint)))
        self._calls = StagingCalls(request, nodes, deadline, progress, needs_all=bool(ranks))
        self._state: StageState | None = None

    @property
    def nbytes(self) -> int:
        """Of the files that hold weights."""
        return self.table.nbytes

    def begin(self) -> None:
        """Asks the nodes to take part."""
        self._state = self._calls.begin()

    def tick(self) -> None:
        """Looks at how it goes.

        Raises:
            RaywlError: It has failed.
        """
        if self._state is None or self._state.state == "running":
            self._state = self._calls.step(0.0)
        if self._state.error is not None:
            raise self._state.error

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """What ended the stream comes before what ranks say of that; a time that is up says who waits for
        what."""
        try:
            yield
        except RaywlError as error:
            state = None
            with contextlib.suppress(Exception):
                state = self._calls.look()
            if state is not None and isinstance(state.error, RaywlError) and error is not state.error:
                state.error.partly_loaded = error.partly_loaded
                state.error.add_note(f"then: {error}")
                raise state.error from None
            if isinstance(error, StagingTimeout) and state is not None and state.waiting:
                told = StagingTimeout(f"{error}; {state.waiting}")
                told.partly_loaded = error.partly_loaded
                raise told from None
            raise

    def finish(self) -> StageReport:
        """Waits until all nodes have what they need, and have checked what is theirs to check.

        Raises:
            RaywlError: It has failed.
        """
        while True:
            self.tick()
            assert self._state is not None
            if self._state.state != "running":
                return self._report(self._state)
            if self._deadline.remaining_s() == 0:
                self._deadline.check([self._state.waiting])
            # Not the end of a call, which may be there already.
            self._state = self._calls.step()

    def leave(self) -> None:
        """Ends it, if it hasn't ended."""
        self._calls.leave()

    def _report(self, state: StageState) -> StageReport:
        source = self.checkpoint.source
        report = StageReport(source.ref, self.checkpoint.identity, "stream", source.kind, self.nbytes)
        report_of_nodes(report, state, self._nodes)
        peak_bytes = max(node.peak_store_bytes for node in report.nodes)
        report.notes.insert(
            0,
            f"streamed: {format_bytes(report.bytes_from_source)} left the source, "
            f"{format_bytes(report.bytes_between_nodes)} went between nodes, nothing to disks; at most "
            f"{format_bytes(peak_bytes)} in a node's object store",
        )
        return report


def load_by_stream(
    checkpoint: Checkpoint,
    parts: GroupParts,
    job: Job,
    deadline: Deadline,
    load: Callable[..., list[T]],
) -> tuple[list[T], StageReport]:
    """Has the ranks of a group load a checkpoint while it streams to them.

    Args:
        checkpoint: What `open_for_stream` gave.
        parts: The group's.
        job: What the ranks are told, but for the stream.
        deadline: Bounds it all.
        load: Has them do it, called as `load(job, on_tick=...)`.

    Returns:
        What `load` returned, and how the bytes came.

    Raises:
        RaywlError: What ended the stream; else as `load`.
    """
    ranks: dict[str, tuple[int, ...]] = {}
    for spec in parts.specs:
        ranks[spec.node_id] = (*ranks.get(spec.node_id, ()), spec.rank)
    stream = Stream(checkpoint, parts.nodes, ranks, deadline)
    try:
        with stream.watched():
            stream.begin()
            reports = load(replace(job, stream=stream.job), on_tick=stream.tick)
        try:
            staged = stream.finish()
            staged.notes += [f"{node.node}: {note}" for node in staged.nodes for note in node.notes]
            return reports, staged
        except RaywlError as error:
            error.partly_loaded = True
            raise
    finally:
        stream.leave()


def _heads(checkpoint: Checkpoint) -> dict[str, bytes]:
    """What is known of files' beginnings, so that it is fetched once: of small files, where it counts."""
    source: Any = checkpoint.source
    found: dict[str, bytes] = {}
    left = _MAX_HEADS_BYTES
    for file in sorted(checkpoint.files, key=lambda file: file.size):
        head = source.heads.get(file.name)
        if head and len(head) <= left:
            found[file.name] = head
            left -= len(head)
    return found
