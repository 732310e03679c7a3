"""Executes reads with several threads: straight into parameters, or through a small scratch buffer."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait

import torch

from raywl.pace import Pace
from raywl.plan.copies import Copy, split
from raywl.plan.reads import GAP_BYTES, Read
from raywl.readers.choose import num_threads_for
from raywl.readers.files import OpenFiles
from raywl.readers.memory import ByteView
from raywl.readers.staging import Stage, place, wait_for_devices
from raywl.readers.ways import SCRATCH_BYTES, Buffered, Scratch
from raywl.timeline import Span, Timeline

__all__ = ["READER_THREADS", "SCRATCH_BYTES", "choose_num_threads", "execute"]

READER_THREADS = "raywl-read"
"""How the names of the threads that read begin."""

_MAX_STAGING_THREADS = 6
"""Each has two buffers as long as the longest read."""


def choose_num_threads(local_size: int) -> int:
    """Threads for one rank that shares its node with `local_size` ranks, whatever it reads from."""
    return num_threads_for(num_cores(), local_size, warm=False)


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def execute(
    reads: Sequence[Read],
    files: OpenFiles,
    targets: Mapping[str, ByteView],
    *,
    num_threads: int,
    on_bytes: Callable[[int], None] | None = None,
    way: Buffered | None = None,
    timeline: Timeline | None = None,
    staged: bool | None = None,
    pace: Pace | None = None,
) -> None:
    """Makes all reads; returns when every byte is at its place.

    The reads are handed to the threads in order. The first failure stops all threads after the read
    that they are at.

    Args:
        reads: In the order to start them in.
        files: The checkpoint's files.
        targets: Where each target of the reads' pieces lies.
        num_threads: Reads under way at once.
        on_bytes: Called by the threads with the bytes of each read that is done.
        way: How bytes come to memory; by default through the page cache.
        timeline: Takes what each read took.
        staged: Whether all reads go through the buffers that devices copy out of; by default those do
            whose targets no read can reach.
        pace: What the disk may give.

    Raises:
        CheckpointError: A read failed; the destinations are partly written.
    """
    through = [read for read in reads if staged or not _in_reach(read, targets)]
    longest = max((read.end - read.start for read in through), default=None)
    if longest is not None:
        num_threads = min(num_threads, _MAX_STAGING_THREADS)
        wait_for_devices({targets[piece.target].device for read in through for piece in read.pieces})
    num_threads = max(1, min(num_threads, len(reads)))
    work = _Work(iter(reads), way or Buffered(files), targets, on_bytes, timeline, bool(staged), pace)
    if num_threads == 1:
        work.run(0, longest)
        return
    with ThreadPoolExecutor(num_threads, thread_name_prefix=READER_THREADS) as pool:
        futures = [pool.submit(work.run, number, longest) for number in range(num_threads)]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            work.stop.set()
    for future in futures:
        future.result()


def _in_reach(read: Read, targets: Mapping[str, ByteView]) -> bool:
    """Whether all of a read's targets are in memory of the host."""
    return all(targets[piece.target].in_reach for piece in read.pieces)


class _Work:
    """What the threads share."""

    def __init__(
        self,
        pending: Iterator[Read],
        way: Buffered,
        targets: Mapping[str, ByteView],
        on_bytes: Callable[[int], None] | None,
        timeline: Timeline | None,
        staged: bool,
        pace: Pace | None,
    ) -> None:
        self.way, self.targets, self.staged = way, targets, staged
        self.stop = threading.Event()
        self._pending, self._on_bytes, self._timeline = pending, on_bytes, timeline
        self._pace = pace
        self._lock = threading.Lock()

    def run(self, number: int, longest: int | None) -> None:
        """What each thread does; `longest` staged read in bytes, if there are any."""
        try:
            if longest is None:
                self._each(number, _Reads(self.way, self.targets))
                return
            stage = Stage(longest)
            try:
                self._each(number, _StagedReads(self.way, self.targets, stage, self.staged))
            finally:
                stage.close()
        except BaseException:
            self.stop.set()
            raise

    def _each(self, number: int, reads: _Reads) -> None:
        while not self.stop.is_set():
            with self._lock:
                read = next(self._pending, None)
            if read is None:
                return
            reads.read_s = reads.copy_s = reads.wait_s = 0.0
            start_s = time.perf_counter()
            reads.make(read)
            nbytes = read.end - read.start
            if self._timeline is not None:
                at_s = start_s - self._timeline.origin_s
                self._timeline.add(
                    Span(
                        number, read.file, read.start, nbytes, at_s, reads.read_s, reads.copy_s, reads.wait_s
                    )
                )
            if self._on_bytes is not None:
                self._on_bytes(nbytes)
            if self._pace is not None:
                self.stop.wait(self._pace.delay_s(nbytes))


class _Reads:
    """Makes reads into memory of the host, for one thread; its times are of the read it was at last."""

    def __init__(self, way: Buffered, targets: Mapping[str, ByteView]) -> None:
        self._way, self._targets = way, targets
        self._scratch = Scratch()
        self.read_s = self.copy_s = self.wait_s = 0.0

    def make(self, read: Read) -> None:
        """Makes one read."""
        if read.direct:
            self._direct(read)
        elif len(read.pieces) == 1:
            for step in split(read.pieces[0], self._way.step_bytes, GAP_BYTES):
                self._through(read.file, step.src_start, step.src_end, (step,))
        else:
            self._through(read.file, read.start, read.end, read.pieces)

    def _direct(self, read: Read) -> None:
        start_s = time.perf_counter()
        buffers: list[memoryview] = []
        position = read.start
        for piece in read.pieces:
            if piece.src_start > position:
                buffers.append(memoryview(bytearray(piece.src_start - position)))
            memory, start, nbytes = self._targets[piece.target].memory, piece.dst_start, piece.nbytes
            buffers.append(memory if nbytes == memory.nbytes else memory[start : start + nbytes])
            position = piece.src_start + nbytes
        self._way.fill(read.file, read.start, buffers)
        self.read_s += time.perf_counter() - start_s

    def _through(self, file: str, start: int, end: int, pieces: Sequence[Copy]) -> None:
        start_s = time.perf_counter()
        with self._way.window(file, start, end, self._scratch) as raw:
            read_s = time.perf_counter()
            for piece in pieces:
                place(piece, raw, start, self._targets[piece.target])
        self.read_s += read_s - start_s
        self.copy_s += time.perf_counter() - read_s


class _StagedReads(_Reads):
    """Makes reads through buffers that devices copy out of."""

    def __init__(self, way: Buffered, targets: Mapping[str, ByteView], stage: Stage, staged: bool) -> None:
        super().__init__(way, targets)
        self._stage, self._staged = stage, staged
        # The buffers lie near the device that most parameters are on: any will do, of one host.
        self._device = next(
            (view.device for view in targets.values() if not view.in_reach), torch.device("cpu")
        )

    def make(self, read: Read) -> None:
        """Makes one read; its copies may still be under way."""
        if not self._staged and _in_reach(read, self._targets):
            super().make(read)
            return
        start_s = time.perf_counter()
        buffer = self._stage.next_buffer(self._device)
        buffer.wait()
        waited_s = time.perf_counter()
        nbytes = read.end - read.start
        self._way.fill(read.file, read.start, [buffer.memory[:nbytes]])
        read_s = time.perf_counter()
        pieces = [(piece, self._targets[piece.target]) for piece in read.pieces]
        self._stage.send(buffer, nbytes, read.start, pieces)
        self.wait_s += waited_s - start_s
        self.read_s += read_s - waited_s
        self.copy_s += time.perf_counter() - read_s
