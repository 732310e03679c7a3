"""One stream on one node: chunks that are fetched or got from others, and given to the ranks here."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from raywl.actors.chunk_queue import ChunkQueue
from raywl.actors.chunk_window import Window
from raywl.actors.stage_work import StageWork
from raywl.coordination import FileCheck, NodeReport, Orders, unpack_route
from raywl.errors import CorruptFileError, SourceError
from raywl.pace import peer_pace
from raywl.sources import RemoteFile
from raywl.sources.digest import Digest, strongest
from raywl.sources.transfer import Stopped, fetch_range, read_range
from raywl.text import format_bytes

if TYPE_CHECKING:
    from raywl.actors.chunks import MoverLink, StageRequest
    from raywl.actors.shared_lock import SharedLocks

__all__ = ["StreamAsk", "StreamWork"]

_RECEIVES = 6
_MAX_FETCHES = 8
_GET_S = 60.0
_WAIT_S = 1.0
_ROOM_S = 10.0
_MAX_WAITERS = 24
_BATCH = 8
_RECENT_BYTES = 32 << 20
_NOBODY = -1
"""In place of a rank, where chunks only pass by."""


@dataclass(frozen=True)
class StreamAsk:
    """What a driver asks of the nodes of a stream, beside what it asks of every staging."""

    ranks: Mapping[str, tuple[int, ...]]
    """Node id to the ranks there; none: chunks pass by, and are dropped."""
    heads: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    """First bytes of files, as far as they were read to look at them."""


@dataclass(eq=False)
class _Held:
    """A chunk in the node's store."""

    ref: Any
    array: Any
    window: Window
    own: bool
    """Whether this node fetched it, and gives it to others."""


@dataclass(eq=False)
class _Hashing:
    """A file that this node hashes, chunk by chunk in order."""

    file: RemoteFile
    bits: int
    chunk: int
    """The next one."""
    last: int
    digest: Digest | None = None
    expected: str = ""


class StreamWork(StageWork):
    """A stream as one node does it. Every method runs in the agent's process.

    As `StageWork`, but for what holds the chunks: the node's object store, until the ranks here have taken
    them, they are hashed, if that is this node's to do, and no other node needs what was fetched here. How
    many may be under way is the coordinator's business: no thread here waits for room with a chunk in its
    hands, but for the second in which the store keeps what was freed.

    `take` and `read` are called by the ranks of the node, `give` by other nodes.
    """

    def __init__(
        self,
        request: StageRequest,
        node_id: str,
        label: str,
        link: MoverLink,
        windows: tuple[Window, Window],
        locks: SharedLocks,
    ) -> None:
        """As of `StageWork`."""
        super().__init__(request, node_id, label, link, windows, locks)
        assert request.stream is not None
        self._source = self._files.source
        self._remote = [self._source.files[name] for name, _ in self._table.files]
        self._heads = request.stream.heads
        self._ranks = request.stream.ranks.get(node_id, ())
        self._lacks: dict[int, int] = {}
        """Rank to the chunks that it hasn't taken."""
        self._first_needs: int | None = None
        """What the node needed when all its ranks had said so."""
        self._alive: dict[int, _Held] = {}
        self._keep = 0
        """Chunks that other nodes need of this one."""
        self._new_here: set[int] = set()
        """Chunks that were fetched since the last report was made."""
        self._checks: dict[int, bool] = {}
        self._hashing: dict[int, _Hashing] = {}
        self._unhashed = 0
        """Chunks that must still be hashed."""
        self._to_look_at: list[FileCheck] = []
        """Files to compare with the source in the end."""
        self._num_hashed = 0
        self._early_bytes = 0
        self._recent: OrderedDict[tuple[str, int, int], bytes] = OrderedDict()
        self._reading = threading.Lock()
        self._may_work = True
        # Nothing is written to a disk here.
        self._paces = [pace for pace in (peer_pace(),) if pace is not None]
        if not self._ranks:
            self._lacks[_NOBODY] = self._first_needs = self._table.everything

    # --- what the agent calls ---

    def run(self) -> str:
        """As `StageWork.run`."""
        try:
            loops = (*[self._fetch_loop] * _MAX_FETCHES, *[self._receive_loop] * _RECEIVES, self._check_loop)
            for loop in loops:
                thread = threading.Thread(
                    target=self._guarded, args=(loop,), name="raywl-stream", daemon=True
                )
                self._threads.append(thread)
                thread.start()
            self._result = self._pilot()
            if self._error is not None:
                raise self._error
            return self._result
        finally:
            self._end()

    def give(self, chunk: int, asker: str, wait_s: float) -> tuple[str, list[Any]]:
        """A chunk that was fetched here, for another node: see `ChunkMover.chunk`."""

        def own() -> _Held | None:
            held = self._alive.get(chunk)
            return held if held is not None and held.own else None

        with self._changed:
            if own() is None and chunk in self._lease_order and self._num_waiters < _MAX_WAITERS:
                self._num_waiters += 1
                self._changed.wait_for(lambda: own() or self._stop.is_set(), wait_s)
                self._num_waiters -= 1
            if self._stop.is_set():
                return "gone", []
            held = own()
            if held is None:
                return "later", []
            self._send_meter.begin()
            self._send_meter.end(self._table.size(chunk))
            return "here", [held.ref]

    def thanked(self, chunk: int, asker: str) -> None:
        """Nothing: the coordinator says what nobody needs any more."""

    def take(
        self, rank: int, needs: int | None, done: tuple[int, ...], lost: tuple[int, ...], wait_s: float
    ) -> tuple[str, list[tuple[int, Any]]]:
        """Chunks for a rank of this node: see `ChunkMover.take`."""
        with self._changed:
            if needs is not None:
                self._lacks[rank] = needs
                if self._first_needs is None and all(one in self._lacks for one in self._ranks):
                    self._first_needs = self._still_needed()
                self._hurry.set()
            if rank not in self._lacks:
                return "unknown", []
            for chunk in done:
                self._lacks[rank] &= ~(1 << chunk)
            if done:
                self._drop_unneeded()
            for chunk in lost:
                # Its owner has died; what is mapped here is good, and is put once more.
                if (held := self._alive.get(chunk)) is not None:
                    held.ref = self._link.put(held.array)

            def ready() -> list[int]:
                return [chunk for chunk in self._alive if self._lacks[rank] >> chunk & 1][:_BATCH]

            self._changed.wait_for(lambda: ready() or not self._lacks[rank] or self._stop.is_set(), wait_s)
            if self._stop.is_set() and self._lacks[rank]:
                return "over", [(0, self._why())]
            return "here", [(chunk, self._alive[chunk].ref) for chunk in ready()]

    def read(self, name: str, start: int, end: int) -> bytes:
        """Bytes for a rank that can't wait for its chunk: fetched for that alone, once for the ranks here.

        Raises:
            RaywlError: As the source.
        """
        key = name, start, end
        with self._reading:
            data = self._recent.get(key)
            if data is None:
                data = self._fetch_early(self._source.files[name], start, end)
                self._recent[key] = data
                while sum(map(len, self._recent.values())) > _RECENT_BYTES and len(self._recent) > 1:
                    self._recent.popitem(last=False)
            return data

    def _fetch_early(self, file: RemoteFile, start: int, end: int) -> bytes:
        head = self._heads.get(file.name, b"")
        known = head[start:end]
        start += len(known)
        if start >= end:
            return known
        self._fetch_meter.begin()
        try:
            came = read_range(partial(self._source.stream, file), start, end, self._source.limits())
        finally:
            self._fetch_meter.end(0)
        self._fetch_meter.total_bytes += len(came)
        self._early_bytes += len(came)
        return known + came

    def status(self) -> dict[str, Any]:
        """As JSON values."""
        with self._changed:
            lacking = self._still_needed()
        first = self._first_needs or 0
        return {
            **super().status(),
            "has_bytes": self._table.nbytes_of(first & ~lacking),
            "total_bytes": self._table.nbytes_of(first),
            "in_store": len(self._alive),
        }

    def _why(self) -> str:
        return str(self._error or self._result or "the stream was ended")

    # --- the coordinator ---

    def _join(self) -> bool:
        with self._changed:
            fetching = tuple(self._fetching)
            self._ids, self._queue = [], ChunkQueue(_RECEIVES)
            self._orders, self._lease_order = Orders("run"), ()
        self._ticket = self._link.join_stage(self._spec, self._node_id, 0, fetching, ())
        return self._ticket is not None

    def _report(self) -> NodeReport:
        assert self._ticket is not None
        with self._changed:
            self._new_here = set()
            if time.monotonic() < self._checking_until_s:
                self._step += 1
            needs = None if self._first_needs is None else self._still_needed()
            return NodeReport(
                self._spec.run,
                self._node_id,
                self._ticket,
                self._orders.serial,
                seen_nodes=len(self._ids),
                num_wanted=self._num_slots,
                failed=tuple(self._failed),
                lost=tuple(self._lost),
                fetch_bytes_per_s=self._fetch_meter.bytes_per_s,
                send_bytes_per_s=self._send_meter.bytes_per_s,
                fetched_bytes=self._fetch_meter.total_bytes,
                received_bytes=self._received.total_bytes,
                sent_bytes=self._send_meter.total_bytes,
                peak_store_bytes=self._into.peak_bytes + self._out_of.peak_bytes,
                step=self._step,
                finished=self._finished,
                notes=self._told_notes(),
                error=self._error,
                needs=needs,
                holds=self._has,
            )

    def _told_notes(self) -> tuple[str, ...]:
        notes = list(self._notes)
        if self._num_hashed:
            files = "1 file was" if self._num_hashed == 1 else f"{self._num_hashed} files were"
            notes.append(f"{files} hashed on the way, and right")
        if self._early_bytes:
            told = format_bytes(self._early_bytes)
            notes.append(f"{told} were fetched beside the stream, as loaders looked at values")
        return tuple(notes)

    def _follow(self, orders: Orders, report: NodeReport) -> None:
        with self._changed:
            del self._failed[: len(report.failed)]
            del self._lost[: len(report.lost)]
            self._ids += orders.nodes
            self._orders = orders
            if self._node_id in self._ids:
                self._queue.me = self._ids.index(self._node_id)
            for check in orders.checks:
                self._take_check(check)
            self._lease_order = tuple(chunk for chunk in orders.leases if chunk not in self._new_here)
            needed = self._still_needed()
            for route in map(unpack_route, orders.routes):
                wanted = needed >> route.chunk & 1 and route.chunk not in self._alive
                if wanted and self._queue.provider_of(route.chunk) != route.source:
                    self._queue.add(route)
            if orders.keep is not None:
                self._keep = orders.keep
            self._drop_unneeded()

    def _take_check(self, check: FileCheck) -> None:
        if check.file in self._checks:
            return
        bits, chunks = self._table.file_bits(check.file), self._table.chunks_of(check.file)
        # What passed an agent that was killed since can't be hashed any more.
        whole = check.whole and not bits & ~(self._first_needs or 0)
        self._checks[check.file] = whole
        if whole:
            file = self._remote[check.file]
            self._hashing[check.file] = _Hashing(file, bits, chunks.start, chunks.stop - 1)
            self._unhashed |= bits
        else:
            self._to_look_at.append(check)

    # --- chunks ---

    def _still_needed(self) -> int:
        needed = self._unhashed
        for lacks in self._lacks.values():
            needed |= lacks
        return needed

    def _bring(self, chunk: int) -> int:
        file, start, end = self._table.span(chunk)
        self._make_room(self._out_of, end - start)
        try:
            array, nbytes = self._fetched(self._remote[file], start, end)
            ref = self._link.put(array)
            del array
            self._arrived(chunk, _Held(ref, self._link.get(ref, _GET_S), self._out_of, True))
        except BaseException:
            self._out_of.free(end - start)
            raise
        return nbytes

    def _fetched(self, file: RemoteFile, start: int, end: int) -> tuple[Any, int]:
        """Bytes of a file as an array, and how many of them came from the source."""
        import numpy as np

        array = np.empty(end - start, dtype=np.uint8)
        memory, known = memoryview(array.data), self._heads.get(file.name, b"")[start:end]
        memory[: len(known)] = known
        position = start + len(known)

        def sink(at: int, block: bytes) -> None:
            nonlocal position
            memory[at - start : at - start + len(block)] = block
            position = at + len(block)

        if position < end:
            stream = partial(self._source.stream, file)
            fetch_range(stream, position, end, sink, self._source.limits(), self._stop)
        if position < end:
            raise SourceError(
                self._source.label(file.name), f"bytes {start} to {end} were asked for, and fewer came"
            )
        return array, end - start - len(known)

    def _make_room(self, window: Window, nbytes: int) -> None:
        """Takes room for a chunk that has room, but for what was just freed and must go first."""
        give_up_s = time.monotonic() + _ROOM_S
        while not window.take(nbytes, _WAIT_S):
            if self._stop.is_set():
                raise Stopped
            if time.monotonic() > give_up_s:
                # Another run of this node has it. Others wait for this chunk.
                window.exceed(nbytes)
                return

    def _here(self, chunk: int) -> None:
        """Nothing: `_arrived` was called."""

    def _arrived(self, chunk: int, held: _Held) -> None:
        with self._changed:
            self._queue.drop(chunk)
            before = self._alive.get(chunk)
            if self._stop.is_set() or (before is not None and not held.own):
                held.window.free(self._table.size(chunk))
                return
            if before is not None:
                before.window.free(self._table.size(chunk))
            self._alive[chunk] = held
            if held.own:
                self._has |= 1 << chunk
                self._new_here.add(chunk)
                self._lease_order = tuple(one for one in self._lease_order if one != chunk)
            if _NOBODY in self._lacks:
                self._lacks[_NOBODY] &= ~(1 << chunk)
            self._drop_unneeded()
            self._changed.notify_all()

    def _drop_unneeded(self) -> None:
        """Drops what nobody needs any more; the caller has the lock."""
        needed = self._still_needed()
        for chunk, held in list(self._alive.items()):
            if needed >> chunk & 1 or (held.own and self._keep >> chunk & 1):
                continue
            del self._alive[chunk]
            if held.own:
                self._has &= ~(1 << chunk)
            held.window.free(self._table.size(chunk))
            self._hurry.set()
        self._changed.notify_all()

    def _receive_loop(self) -> None:
        while (asked := self._next_question()) is not None:
            chunk, provider, node, queue = asked
            word = "lost"
            self._received.begin()
            try:
                word = self._receive(chunk, node)
            finally:
                nbytes = self._table.size(chunk)
                self._received.end(nbytes if word == "here" else 0)
                self._answered(chunk, provider, word, queue)
            if word == "here" and self._paces:
                self._stop.wait(max(pace.delay_s(nbytes) for pace in self._paces))

    def _receive(self, chunk: int, node: str) -> str:
        nbytes = self._table.size(chunk)
        try:
            word, refs = self._link.ask_chunk(node, self._spec.run, chunk, self._node_id, _WAIT_S)
        except Exception:
            return "lost"
        if word != "here":
            return word
        self._make_room(self._into, nbytes)
        try:
            ref = refs.pop()
            array = self._link.get(ref, _GET_S)
            if array.nbytes != nbytes:
                raise ValueError(f"chunk {chunk} has {nbytes} bytes, not {array.nbytes}")
        except Exception:
            self._into.free(nbytes)
            return "lost"
        self._arrived(chunk, _Held(ref, array, self._into, False))
        return "here"

    # --- checks ---

    def _check_loop(self) -> None:
        while (work := self._next_check()) is not None:
            self._checking_until_s = time.monotonic() + 60.0
            if isinstance(work, FileCheck):
                self._look_at(work)
            elif work.digest is None:
                self._begin_hash(work)
            else:
                self._hash(work, work.digest)
            with self._changed:
                self._checking_until_s = 0.0
                self._step += 1
                self._drop_unneeded()
        self._hurry.set()

    def _next_check(self) -> _Hashing | FileCheck | None:
        """A chunk that comes next in its file; at the end what is left to look at, and then nothing."""
        with self._changed:
            while not self._stop.is_set():
                for work in self._hashing.values():
                    if work.chunk in self._alive:
                        return work
                # The orders that settle it all bring the checks, too.
                if self._orders.keep is not None and self._still_needed() == 0 and not self._hashing:
                    if not self._to_look_at:
                        self._set_finished()
                        return None
                    return self._to_look_at.pop()
                self._changed.wait(_WAIT_S)
        return None

    def _begin_hash(self, work: _Hashing) -> None:
        known = self._source.hashes(work.file)
        kind = strongest(known)
        if kind is not None:
            work.digest, work.expected = Digest(kind, work.file.size), known[kind].lower()
            return
        with self._changed:
            index = self._table.files.index((work.file.name, work.file.size))
            del self._hashing[index]
            self._unhashed &= ~work.bits
            self._to_look_at.append(FileCheck(index, True))

    def _hash(self, work: _Hashing, digest: Digest) -> None:
        array = self._alive[work.chunk].array
        digest.update(memoryview(array))
        del array
        if work.chunk == work.last and digest.hex() != work.expected:
            raise CorruptFileError(
                self._source.label(work.file.name),
                None,
                f"the source sent other bytes than it announced: their hash is {digest.hex()}, expected "
                f"{work.expected}",
            )
        with self._changed:
            self._unhashed &= ~(1 << work.chunk)
            work.chunk += 1
            if work.chunk > work.last:
                self._num_hashed += 1
                index = self._table.files.index((work.file.name, work.file.size))
                del self._hashing[index]

    def _look_at(self, check: FileCheck) -> None:
        """Of a file that isn't hashed: asks the source whether it is still what was listed."""
        file = self._remote[check.file]
        if self._source.hashes(file) and not check.whole:
            self._note(f"{file.name}: not hashed, as no node gets all of it")

    def _end(self) -> None:
        super()._end()
        with self._changed:
            for chunk, held in self._alive.items():
                held.window.free(self._table.size(chunk))
            self._alive.clear()
            self._recent.clear()
