"""Fills the page cache: byte ranges of files in a given order, each byte once, by several threads."""

from __future__ import annotations

import logging
import os
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Self

from raywl.node.mounts import is_network
from raywl.node.page_cache import resident_in
from raywl.pace import disk_pace
from raywl.text import format_bytes
from raywl.types import current_context

__all__ = [
    "Covered",
    "FilePrefetch",
    "FileRange",
    "PrefetchDecision",
    "PrefetchResult",
    "checkpoints_size_bytes",
    "local_rank_and_size",
    "prefetch",
    "prefetch_all_checkpoints",
    "prefetch_checkpoint",
    "should_prefetch",
]

_log = logging.getLogger(__name__)
_NUM_TENTHS_OF_RAM = 9
_NUM_STEPS = 10


class FileRange(NamedTuple):
    """Bytes of one file."""

    file: str
    """Its name, or its path."""
    start: int
    """First byte."""
    end: int
    """One past the last."""


@dataclass(frozen=True, slots=True)
class PrefetchDecision:
    """Whether a checkpoint is prefetched, and why."""

    on: bool
    reason: str
    """For a log or a warning."""
    warn: bool = False
    """Whether it goes against what was asked for or what the file system would call for."""


def checkpoints_size_bytes(files: Iterable[str]) -> int:
    """Sum of the sizes of files, 0 for none.

    Raises:
        OSError: A file is absent.
    """
    return sum(map(os.path.getsize, files))


def should_prefetch(
    fs_type: str, size_bytes: int, available_bytes: int, asked: bool | None = None
) -> PrefetchDecision:
    """Whether to read a checkpoint into the page cache before it is used.

    Args:
        fs_type: Type of the file system that it lies on.
        size_bytes: Its size.
        available_bytes: Memory that is available on this node.
        asked: `True` or `False` when the caller decided; `None` leaves it to the file system and size: on
            for network file systems, if it takes at most 90 % of the memory.
    """
    sizes = f"{format_bytes(size_bytes)} of checkpoint, {format_bytes(available_bytes)} of memory available"
    fits = size_bytes * 10 <= available_bytes * _NUM_TENTHS_OF_RAM
    if asked is False:
        return PrefetchDecision(False, "prefetch was asked to be off")
    if asked:
        if fits:
            return PrefetchDecision(True, f"prefetch was asked for ({sizes})")
        reason = f"prefetch was asked for, though more than 90 % of memory would be used ({sizes})"
        return PrefetchDecision(True, reason, warn=True)
    where = f"on {fs_type}" if fs_type else "on an unknown file system"
    if not is_network(fs_type):
        return PrefetchDecision(
            False, f"no prefetch {where}, which is no network file system known to need it"
        )
    if fits:
        return PrefetchDecision(True, f"prefetch {where} ({sizes})")
    return PrefetchDecision(
        False, f"no prefetch {where}: more than 90 % of memory needed ({sizes})", warn=True
    )


class Covered:
    """The bytes of files that were asked for already."""

    def __init__(self) -> None:
        self._ends: dict[str, tuple[list[int], list[int]]] = {}

    def add(self, file: str, start: int, end: int) -> list[FileRange]:
        """Adds a range.

        Returns:
            The parts of it that weren't covered, in the order of the file.
        """
        if start >= end:
            return []
        starts, ends = self._ends.setdefault(file, ([], []))
        # Known ranges are apart and in order; those from `first` to `last` touch the new one.
        first, last = bisect_left(ends, start), bisect_left(starts, end + 1)
        fresh, at = [], start
        for known_start, known_end in zip(starts[first:last], ends[first:last], strict=True):
            if at < known_start:
                fresh.append(FileRange(file, at, known_start))
            at = max(at, known_end)
        if at < end:
            fresh.append(FileRange(file, at, end))
        if first < last:
            start, end = min(start, starts[first]), max(end, ends[last - 1])
        starts[first:last], ends[first:last] = [start], [end]
        return fresh


@dataclass(slots=True)
class PrefetchResult:
    """What a prefetch did."""

    bytes_read: int = 0
    """Bytes that are in the page cache now because of it, or were already."""
    failed: dict[str, str] = field(default_factory=dict)
    """Files that couldn't be read to the end, and why; the others were read all the same."""
    stopped: bool = False
    """Whether it was stopped before its end."""


def _check_counts(num_threads: int, block_bytes: int) -> None:
    if num_threads < 1:
        raise ValueError(f"prefetch needs at least 1 thread, not {num_threads}")
    if block_bytes < 1:
        raise ValueError(f"prefetch needs blocks of at least 1 byte, not {block_bytes}")


def prefetch(
    ranges: Iterable[tuple[str, int, int]],
    files: Mapping[str, str],
    *,
    num_threads: int = 8,
    block_bytes: int = 16 << 20,
    stop: threading.Event | None = None,
    on_read: Callable[[int], None] | None = None,
) -> PrefetchResult:
    """Reads byte ranges of files into the page cache, in the order given, and each byte once.

    Runs in the calling thread until all is read; threads take block after block off one queue, so that
    what comes first is read first. Holds one block of memory for each thread.

    Args:
        ranges: `(file, start, end)` in bytes, `end` exclusive; may overlap. Taken as they are needed.
        files: Path of each file that the ranges name.
        num_threads: Threads that read.
        block_bytes: Most bytes of one read.
        stop: Once set, threads end after the block that they are at.
        on_read: Called with the number of bytes of each read, possibly by several threads at a time.

    Raises:
        ValueError: Fewer than 1 thread, or a block under 1 byte.
        KeyError: A range names a file that `files` lacks.
    """
    _check_counts(num_threads, block_bytes)
    work = _Work(_blocks(ranges, block_bytes), files, stop or threading.Event(), on_read)
    # Daemons, so that a slow file system can't keep a process from ending.
    threads = [
        threading.Thread(target=work.run, name=f"raywl-prefetch-{i}", daemon=True) for i in range(num_threads)
    ]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        work.abandoned = True
    if work.error is not None:
        raise work.error
    return work.result


def _blocks(ranges: Iterable[tuple[str, int, int]], block_bytes: int) -> Iterator[FileRange]:
    covered = Covered()
    for file, start, end in ranges:
        for fresh in covered.add(file, start, end):
            for at in range(fresh.start, fresh.end, block_bytes):
                yield FileRange(file, at, min(at + block_bytes, fresh.end))


class _Work:
    """The queue that prefetching threads share."""

    def __init__(
        self,
        blocks: Iterator[FileRange],
        files: Mapping[str, str],
        stop: threading.Event,
        on_read: Callable[[int], None] | None,
    ) -> None:
        self._blocks, self._files = blocks, files
        self._stop, self._on_read = stop, on_read
        self._pace = disk_pace(local_rank_and_size()[1])
        self._lock = threading.Lock()
        self.abandoned = False
        self.error: BaseException | None = None
        self.result = PrefetchResult()

    def _next(self) -> FileRange | None:
        with self._lock:
            if self.abandoned or self.error is not None:
                return None
            for block in self._blocks:
                if self._stop.is_set():
                    self.result.stopped = True
                    return None
                if block.file not in self.result.failed:
                    return block
        return None

    def run(self) -> None:
        """Reads blocks until there are none left; what one thread is at stays open between blocks."""
        buffer = memoryview(bytearray(0))
        open_file, fd = "", -1
        try:
            while (block := self._next()) is not None:
                try:
                    if block.file != open_file or fd < 0:
                        if fd >= 0:
                            os.close(fd)
                            fd = -1
                        fd = os.open(self._files[block.file], os.O_RDONLY | os.O_CLOEXEC)
                        open_file = block.file
                    if len(buffer) < block.end - block.start:
                        buffer = memoryview(bytearray(block.end - block.start))
                    self._read(fd, block, buffer)
                except OSError as error:
                    self._fail(block.file, error.strerror or str(error))
        except BaseException as error:
            with self._lock:
                self.error = self.error or error
        finally:
            if fd >= 0:
                os.close(fd)

    def _read(self, fd: int, block: FileRange, buffer: memoryview) -> None:
        at = block.start
        # What is in memory already costs the disk nothing.
        pace = None if self._pace is None or self._is_there(fd, block) else self._pace
        while at < block.end:
            num_bytes = os.preadv(fd, [buffer[: block.end - at]], at)
            if num_bytes == 0:
                self._fail(block.file, f"ends at byte {at}, before byte {block.end}")
                return
            at += num_bytes
            with self._lock:
                self.result.bytes_read += num_bytes
            if self._on_read is not None:
                self._on_read(num_bytes)
            if pace is not None:
                self._stop.wait(pace.delay_s(num_bytes))

    def _is_there(self, fd: int, block: FileRange) -> bool:
        there = resident_in(fd, self._files[block.file], block.start, block.end)
        return there == block.end - block.start

    def _fail(self, file: str, reason: str) -> None:
        with self._lock:
            if file in self.result.failed:
                return
            self.result.failed[file] = reason
        _log.warning("can't prefetch %s: %s", self._files[file], reason)


def prefetch_checkpoint(path: str, block_size: int = 16 << 20) -> None:
    """Reads one file into the page cache.

    Args:
        path: The file.
        block_size: Bytes of one read.

    Raises:
        ValueError: `block_size` is under 1.
        OSError: It can't be read.
    """
    _check_counts(1, block_size)
    buffer = bytearray(min(block_size, max(1, os.path.getsize(path))))
    with open(path, "rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def local_rank_and_size() -> tuple[int, int]:
    """This process among those of its node that load together.

    Returns:
        `(rank, size)` of the entered context, else of the variables `LOCAL_RANK` and `LOCAL_WORLD_SIZE`,
        else `(0, 1)`.
    """
    context = current_context()
    if context is not None:
        return context.local_rank, context.local_size
    try:
        rank, size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    except (KeyError, ValueError):
        return 0, 1
    # A part that can't be told is no part: then each reads all.
    return (rank, size) if 0 <= rank < size else (0, 1)


class FilePrefetch:
    """Files that a background thread reads into the page cache; whoever uses them closes it at the end."""

    def __init__(self, files: Sequence[str], num_threads: int, block_bytes: int) -> None:
        self._files = list(files)
        self._num_threads, self._block_bytes = num_threads, block_bytes
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._done_bytes = self._total_bytes = self._num_steps_logged = 0
        self.result: PrefetchResult | None = None
        """What was done, once it is done."""
        self._thread = threading.Thread(target=self._run, name="raywl-prefetch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        ranges = []
        for path in self._files:
            try:
                ranges.append(FileRange(path, 0, os.path.getsize(path)))
            except OSError as error:
                _log.warning("can't prefetch %s: %s", path, error.strerror)
        self._total_bytes = sum(row.end for row in ranges)
        self.result = prefetch(
            ranges,
            {row.file: row.file for row in ranges},
            num_threads=self._num_threads,
            block_bytes=self._block_bytes,
            stop=self._stop,
            on_read=self._count,
        )

    def _count(self, num_bytes: int) -> None:
        with self._lock:
            self._done_bytes += num_bytes
            num_steps = self._done_bytes * _NUM_STEPS // self._total_bytes
            if num_steps > self._num_steps_logged:
                self._num_steps_logged = num_steps
                _log.info(
                    "prefetch: %d %% (%s of %s)",
                    num_steps * 100 // _NUM_STEPS,
                    format_bytes(self._done_bytes),
                    format_bytes(self._total_bytes),
                )

    @property
    def is_running(self) -> bool:
        """Whether it still reads."""
        return self._thread.is_alive()

    def join(self, timeout_s: float | None = None) -> bool:
        """Waits for the end; `False` when it hasn't come in that time."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def close(self) -> None:
        """Lets the threads end after the block that they are at; doesn't wait for them."""
        self._stop.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def prefetch_all_checkpoints(
    sorted_files: Sequence[str], num_prefetch_threads: int = 8, block_size: int = 16 << 20
) -> FilePrefetch:
    """Starts to read this rank's share of files into the page cache, in the background.

    The ranks of a node take every so many-th file each, so that together they read each file once.

    Args:
        sorted_files: All files, in the order in which they are used.
        num_prefetch_threads: Threads that read.
        block_size: Most bytes of one read.

    Returns:
        The running prefetch, to be closed when its files are no longer wanted. Progress is logged at each
        10 %; a file that fails is a warning in the log.

    Raises:
        ValueError: Fewer than 1 thread, or a block under 1 byte.
    """
    _check_counts(num_prefetch_threads, block_size)
    rank, size = local_rank_and_size()
    return FilePrefetch(sorted_files[rank::size], num_prefetch_threads, block_size)
