"""One run on one node: what it fetches, gets from others, and gives to them."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from raywl.actors.chunk_queue import ChunkQueue
from raywl.actors.chunk_window import Meter, Offers, Window
from raywl.actors.markers import FolderMarker
from raywl.actors.shared_lock import SharedLocks
from raywl.actors.staged_files import DiskFailed, StagedFiles
from raywl.coordination import FetchFailure, NodeReport, Orders, Ticket, unpack_route
from raywl.errors import CheckpointError, ClusterError, RaywlError, SourceError, some_of
from raywl.pace import disk_pace, peer_pace
from raywl.sources.transfer import Stopped

if TYPE_CHECKING:
    from raywl.actors.chunks import MoverLink, StageRequest

__all__ = ["StageWork", "window_of"]

_MAX_WINDOW_BYTES = 1 << 30
_STORE_PART = 5
_RECEIVES = 6
_MIN_FETCHES, _MAX_FETCHES = 2, 8
_QUICK_S, _SLOW_S = 0.5, 1.5
"""Chunks that take less time are worth more fetches at once, those that take more are worth fewer."""
_WAIT_S = 1.0
_MAX_WAITERS = 24
_GET_S = 60.0
_OFFER_S = 90.0
_PATIENCE_S = 5.0
_MIN_GAP_S = 0.05
_ALONE_S = 120.0
_LOOK_S = 60.0
_END_S = 5.0
_SLOWEST_CHECK_BYTES_PER_S = 50e6


def window_of(store_bytes: int) -> int:
    """Bytes of chunks that may be in a node's object store: 1 GiB or a fifth of it, whichever is less, unless
    `RAYWL_STAGE_WINDOW_BYTES` says otherwise."""
    told = os.environ.get("RAYWL_STAGE_WINDOW_BYTES")
    return int(told) if told else min(_MAX_WINDOW_BYTES, store_bytes // _STORE_PART)


class StageWork:
    """A run as one node does it. Every method runs in the agent's process.

    `run` reports to the coordinator and follows its orders until the run is over. Meanwhile threads fetch
    leased chunks into part files, ask other nodes for theirs, and finish files that are whole; `give` and
    `thanked` are called by other nodes. The part files are the buffer: fetching never waits for the network.
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
        """Args:
        request: What is to be done.
        node_id: This node's.
        label: What to call it.
        link: The way to the cluster.
        windows: Room in the object store for what comes in, and for what goes out.
        locks: What keeps other processes from fetching the same.

        Raises:
            RaywlError: The source can't be opened here.
        """
        self._spec, self._table = request.spec, request.spec.table
        self._node_id, self._label, self._link = node_id, label, link
        self._into, self._out_of = windows
        self._locks = locks
        self._files = StagedFiles(request.pin.open(), self._table)
        source = self._files.source
        self._kind = source.kind
        self._marker = FolderMarker(os.path.dirname(source.repository.folder), self._spec.run, node_id)
        self._fetch_meter, self._send_meter = Meter(10.0, 1), Meter(5.0, 4)
        self._received = Meter(10.0, 1)
        self._offers = Offers(self._out_of, self._send_meter, _OFFER_S)
        self._paces = [pace for pace in (peer_pace(), disk_pace()) if pace is not None]
        self._changed = threading.Condition()
        self._hurry = threading.Event()
        self._stop = threading.Event()
        self._let_go = threading.Event()
        """Of the cache's lock."""
        self._ended = threading.Event()
        self._result = ""
        self._threads: list[threading.Thread] = []
        # Of the run.
        self._has = self._told = 0
        self._finished = self._may_work = self._is_locking = False
        self._error: Exception | None = None
        self._failed: list[FetchFailure] = []
        self._lost: list[tuple[int, int]] = []
        self._notes: list[str] = []
        self._unfinished = set(range(len(self._table.files)))
        self._spoiled: set[int] = set()
        self._checking_until_s = 0.0
        self._step = self._num_waiters = 0
        self._num_slots = _MIN_FETCHES
        self._fetching: set[int] = set()
        self._look_since_s: float | None = None
        self._alone_in_folder = False
        # As the coordinator knows this node.
        self._ticket: Ticket | None = None
        self._orders = Orders("run")
        self._ids: list[str] = []
        self._queue = ChunkQueue(_RECEIVES)
        self._lease_order: tuple[int, ...] = ()

    # --- what the agent calls ---

    def run(self) -> str:
        """Takes part until the run is over; returns why it is, empty when all was well.

        Raises:
            RaywlError: This node's own failure, which the coordinator was told.
        """
        try:
            self._marker.make()
            self._has = self._files.look()
            for loop in (
                *[self._fetch_loop] * _MAX_FETCHES,
                *[self._receive_loop] * _RECEIVES,
                self._finish_loop,
            ):
                thread = threading.Thread(target=self._guarded, args=(loop,), name="raywl-stage", daemon=True)
                self._threads.append(thread)
                thread.start()
            self._result = self._pilot()
            if self._error is not None:
                raise self._error
            return self._result
        finally:
            self._end()

    def wait(self) -> str:
        """Waits for `run`, which another call is in."""
        self._ended.wait()
        return self._result

    def stop(self, why: str) -> None:
        """Ends it here."""
        with self._changed:
            self._result = self._result or why
            self._stop.set()
            self._let_go.set()
            self._hurry.set()
            self._changed.notify_all()

    def give(self, chunk: int, asker: str, wait_s: float) -> tuple[str, list[Any]]:
        """A chunk for another node: see `ChunkMover.chunk`."""
        with self._changed:
            if not self._has >> chunk & 1 and self._is_coming(chunk) and self._num_waiters < _MAX_WAITERS:
                self._num_waiters += 1
                self._changed.wait_for(lambda: self._has >> chunk & 1 or self._stop.is_set(), wait_s)
                self._num_waiters -= 1
            if self._stop.is_set():
                return "gone", []
            if not self._has >> chunk & 1:
                return "later", []
        ref = self._offers.offer(chunk, asker, self._table.size(chunk), partial(self._put, chunk))
        return ("busy", []) if ref is None else ("here", [ref])

    def thanked(self, chunk: int, asker: str) -> None:
        """Another node has it."""
        self._offers.done(chunk, asker)

    def status(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "label": self._spec.label,
            "has_bytes": self._table.nbytes_of(self._has),
            "total_bytes": self._table.nbytes,
            "fetched_bytes": self._fetch_meter.total_bytes,
            "received_bytes": self._received.total_bytes,
            "sent_bytes": self._send_meter.total_bytes,
            "fetches": self._num_slots,
            "finished": self._finished,
        }

    def _is_coming(self, chunk: int) -> bool:
        # Others that lack it may be waiting for this very node: waiting for them could go in a circle.
        return chunk in self._lease_order or self._queue.is_under_way(chunk)

    def _put(self, chunk: int) -> Any:
        import numpy as np

        return self._link.put(np.frombuffer(self._files.read(chunk), dtype=np.uint8))

    # --- the coordinator ---

    def _pilot(self) -> str:
        answered_s = time.monotonic()
        while not self._stop.is_set():
            try:
                if self._ticket is None and not self._join():
                    return "the run was over"
                report = self._report()
                orders = self._link.report_stage(report)
            except Exception as error:
                # It may be starting again. What is leased and known goes on meanwhile.
                if isinstance(error, RaywlError) and not isinstance(error, ClusterError):
                    raise
                alone_s = time.monotonic() - answered_s
                if alone_s > _ALONE_S:
                    told = f"no coordinator answered for {alone_s:.0f} s: {type(error).__name__}: {error}"
                    raise ClusterError(told, node=self._label) from None
                self._stop.wait(0.5)
                continue
            answered_s = time.monotonic()
            if orders.state == "over":
                self._spoiled.update(orders.spoiled)
                return orders.why
            if orders.state == "join":
                self._ticket = None
                continue
            self._follow(orders, report)
            self._rest(orders.next_s)
        return self._result

    def _join(self) -> bool:
        with self._changed:
            has, fetching = self._has, tuple(self._fetching)
            self._ids, self._queue = [], ChunkQueue(_RECEIVES)
            self._orders, self._lease_order = Orders("run"), ()
        self._ticket = self._link.join_stage(self._spec, self._node_id, has, fetching, self._shares())
        self._told = has
        return self._ticket is not None

    def _shares(self) -> tuple[str, ...]:
        return () if self._alone_in_folder else self._marker.others()

    def _report(self) -> NodeReport:
        assert self._ticket is not None
        with self._changed:
            if time.monotonic() < self._checking_until_s:
                self._step += 1
            return NodeReport(
                self._spec.run,
                self._node_id,
                self._ticket,
                self._orders.serial,
                self._has & ~self._told,
                self._orders.seen_routes,
                len(self._ids),
                self._num_wanted() if self._may_work else 0,
                tuple(self._failed),
                tuple(self._lost),
                self._shares(),
                self._fetch_meter.bytes_per_s,
                self._send_meter.bytes_per_s,
                self._fetch_meter.total_bytes,
                self._received.total_bytes,
                self._send_meter.total_bytes,
                self._into.peak_bytes + self._out_of.peak_bytes,
                self._step,
                self._finished,
                tuple(self._notes),
                tuple(self._files.spoiled),
                self._error,
            )

    def _num_wanted(self) -> int:
        # Chunks that come quickly would run out before the next answer.
        rate, next_s = self._fetch_meter.bytes_per_s, self._orders.next_s
        ahead = int(rate * 2 * next_s / self._table.chunk_bytes)
        return self._num_slots + min(ahead, 8 * _MAX_FETCHES)

    def _follow(self, orders: Orders, report: NodeReport) -> None:
        with self._changed:
            self._told |= report.has
            del self._failed[: len(report.failed)]
            del self._lost[: len(report.lost)]
            self._ids += orders.nodes
            self._orders = orders
            if self._node_id in self._ids:
                self._queue.me = self._ids.index(self._node_id)
            for route in map(unpack_route, orders.routes):
                if not self._has >> route.chunk & 1:
                    self._queue.add(route)
            self._lease_order = orders.leases
            self._changed.notify_all()
        if orders.guest_of is not None:
            # After a pause, another node may be in its place, and need the lock.
            self._let_go.set()
            self._wait_for_host(orders)
        elif not self._is_locking:
            self._is_locking = True
            self._let_go.clear()
            threading.Thread(
                target=self._guarded, args=(self._hold_lock,), name="raywl-lock", daemon=True
            ).start()

    def _wait_for_host(self, orders: Orders) -> None:
        if not orders.look or self._finished:
            return
        now_s = time.monotonic()
        self._look_since_s = self._look_since_s or now_s
        if self._files.whole_again():
            self._set_finished()
        elif now_s - self._look_since_s > _LOOK_S:
            # A folder that looks shared and isn't; or one that shows others' files too late.
            self._alone_in_folder, self._ticket = True, None

    def _rest(self, next_s: float) -> None:
        """Until the next report is due, or there is something to say at once."""
        self._stop.wait(_MIN_GAP_S)
        if self._hurry.wait(max(0.0, next_s - _MIN_GAP_S)) and next_s > 4 * _MIN_GAP_S:
            # In a large cluster not everybody may speak at any time.
            self._stop.wait(next_s / 2)
        self._hurry.clear()

    # --- work ---

    def _guarded(self, loop: Callable[[], None]) -> None:
        try:
            loop()
        except Stopped:
            pass
        except DiskFailed as failed:
            self._fail(failed.error)
        except RaywlError as error:
            self._fail(error)
        except Exception as error:
            told = ClusterError(f"staging: {type(error).__name__}: {error}", node=self._label)
            self._fail(told.at(self._label))

    def _fail(self, error: RaywlError) -> None:
        """This node can't go on."""
        with self._changed:
            if self._error is None and not self._stop.is_set():
                self._error = error if error.where is not None else error.at(self._label)
            self._hurry.set()

    def _hold_lock(self) -> None:
        """Holds the cache's lock while the run lasts, so that other processes wait and find the files.

        Gives it back before where another node is to fill the folder.
        """
        try:
            self._work_with_lock()
        finally:
            with self._changed:
                self._is_locking = self._may_work = False

    def _work_with_lock(self) -> None:
        source = self._files.source
        if self._has == self._table.everything and self._files.whole_again():
            self._begin_work()
            self._let_go.wait()
            return
        began_s = time.monotonic()
        timer = threading.Timer(
            2.0, self._note, [f"{self._label} waits for another process that fetches the same"]
        )
        timer.daemon = True
        timer.start()
        with self._locks.held(source.repository.folder, source.lock, self._stop):
            timer.cancel()
            if time.monotonic() - began_s > 1.0:
                has = self._files.look()
                with self._changed:
                    self._has |= has
                    self._queue.drop_all(self._has)
            if self._has != self._table.everything:
                self._files.check_room()
            self._begin_work()
            self._let_go.wait()

    def _note(self, text: str) -> None:
        self._notes.append(text)

    def _begin_work(self) -> None:
        with self._changed:
            self._may_work = True
            self._changed.notify_all()
        self._hurry.set()

    def _here(self, chunk: int) -> None:
        """A chunk is on the disk."""
        with self._changed:
            self._has |= 1 << chunk
            self._queue.drop(chunk)
            self._changed.notify_all()

    def _fetch_loop(self) -> None:
        while (chunk := self._next_lease()) is not None:
            began_s, nbytes = time.monotonic(), 0
            self._fetch_meter.begin()
            try:
                nbytes = self._bring(chunk)
            except CheckpointError:
                raise
            except (RaywlError, OSError) as error:
                self._fetch_failed(chunk, error)
            else:
                self._here(chunk)
                self._adapt(nbytes, time.monotonic() - began_s)
            finally:
                self._fetch_meter.end(nbytes)
                with self._changed:
                    self._fetching.discard(chunk)
                    if not self._waiting_leases():
                        self._hurry.set()

    def _bring(self, chunk: int) -> int:
        """Fetches a chunk; returns the bytes that came from the source."""
        return self._files.fetch(chunk, self._stop)

    def _waiting_leases(self) -> list[int]:
        return [c for c in self._lease_order if not self._has >> c & 1 and c not in self._fetching]

    def _next_lease(self) -> int | None:
        with self._changed:
            while not self._stop.is_set():
                if self._may_work and len(self._fetching) < self._num_slots:
                    for chunk in self._waiting_leases():
                        self._fetching.add(chunk)
                        return chunk
                self._changed.wait()
        return None

    def _adapt(self, nbytes: int, seconds: float) -> None:
        """More fetches at once as long as chunks come quickly: the last ones of a run end together then."""
        if nbytes < self._table.chunk_bytes // 2:
            return
        most = min(_MAX_FETCHES, self._files.source.limits().streams)
        if seconds < _QUICK_S:
            self._num_slots = min(most, self._num_slots + 1)
        elif seconds > _SLOW_S:
            self._num_slots = max(min(most, _MIN_FETCHES), self._num_slots - 1)

    def _fetch_failed(self, chunk: int, error: Exception) -> None:
        if self._stop.is_set():
            return
        told = error if isinstance(error, RaywlError) else SourceError(self._spec.label, str(error))
        with self._changed:
            self._failed.append(FetchFailure(chunk, told if told.where is not None else told.at(self._label)))
            # It is this node's no more; the next answer says so, too.
            self._lease_order = tuple(c for c in self._lease_order if c != chunk)
        self._hurry.set()

    def _receive_loop(self) -> None:
        while (asked := self._next_question()) is not None:
            chunk, provider, node, queue = asked
            nbytes = self._table.size(chunk)
            if not self._into.take(nbytes, _WAIT_S):
                with self._changed:
                    queue.again(chunk, time.monotonic(), 0.0)
                continue
            word = "lost"
            self._received.begin()
            try:
                word = self._receive(chunk, node)
            finally:
                self._received.end(nbytes if word == "here" else 0)
                self._into.free(nbytes)
                self._answered(chunk, provider, word, queue)
            if word == "here" and self._paces:
                # Not before, when the chunk was still in the store.
                self._stop.wait(max(pace.delay_s(nbytes) for pace in self._paces))

    def _next_question(self) -> tuple[int, int, str, ChunkQueue] | None:
        with self._changed:
            while not self._stop.is_set():
                now_s = time.monotonic()
                asked = self._queue.next(now_s) if self._may_work else None
                if asked is not None:
                    return *asked, self._ids[asked[1]], self._queue
                self._changed.wait(self._queue.wait_s(now_s, 1.0))
        return None

    def _receive(self, chunk: int, node: str) -> str:
        run = self._spec.run
        try:
            word, refs = self._link.ask_chunk(node, run, chunk, self._node_id, _WAIT_S)
            if word != "here":
                return word
            array = self._link.get(refs.pop(), _GET_S)
        except Exception:
            return "lost"
        try:
            self._files.write(chunk, memoryview(array))
        except ValueError:
            return "lost"
        finally:
            # The store must not keep it for a variable that nobody looks at any more.
            del array
            with contextlib.suppress(Exception):
                self._link.thank_for_chunk(node, run, chunk, self._node_id)
        self._here(chunk)
        return "here"

    def _answered(self, chunk: int, provider: int, word: str, queue: ChunkQueue) -> None:
        with self._changed:
            now_s = time.monotonic()
            if word == "here":
                queue.done(chunk)
            else:
                in_vain_s = queue.again(chunk, now_s, {"busy": 0.05, "later": 0.1}.get(word, 1.0))
                if word in ("lost", "gone") or in_vain_s > _PATIENCE_S:
                    if queue is self._queue:
                        self._lost.append((chunk, provider))
                    queue.told(chunk)
            self._changed.notify_all()

    def _finish_loop(self) -> None:
        while (index := self._next_file()) is not None:
            size = self._table.files[index][1]
            self._checking_until_s = time.monotonic() + 60.0 + size / _SLOWEST_CHECK_BYTES_PER_S
            self._files.finish(index)
            with self._changed:
                self._checking_until_s = 0.0
                self._step += 1
                self._unfinished.discard(index)
                last = not self._unfinished
            if last:
                if unhashed := sorted(self._files.unhashed):
                    told = f"the source gives no hash of {len(unhashed)} files: {some_of(unhashed)}"
                    self._note(f"{told}; only their sizes were checked")
                self._files.source.fetched()
                self._set_finished()

    def _next_file(self) -> int | None:
        """A file that is whole and not under its name yet."""
        with self._changed:
            while not self._stop.is_set() and self._unfinished:
                if self._may_work:
                    for index in self._unfinished:
                        bits = self._table.file_bits(index)
                        if self._has & bits == bits:
                            return index
                self._changed.wait()
        return None

    def _set_finished(self) -> None:
        with self._changed:
            self._finished = True
        self._hurry.set()

    def _end(self) -> None:
        with self._changed:
            self._stop.set()
            self._let_go.set()
            self._changed.notify_all()
        give_up_s = time.monotonic() + _END_S
        for thread in self._threads:
            thread.join(max(0.0, give_up_s - time.monotonic()))
        self._files.throw_away(self._spoiled | self._files.spoiled)
        self._files.close()
        self._offers.drop_all()
        self._marker.remove()
        self._link.count_fetched(self._kind, self._fetch_meter.total_bytes)
        self._ended.set()
