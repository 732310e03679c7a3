"""Bytes from a source to part files: in parallel ranges, tried again from where they stopped, at a pace."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Self, TypeVar

from raywl.errors import RaywlError, SourceError
from raywl.pace import Pace, disk_pace, environment_number, shared_pace
from raywl.sources.parts import PartFile

__all__ = [
    "Interrupted",
    "Job",
    "Limits",
    "Stopped",
    "StreamRange",
    "again",
    "fetch_range",
    "joined",
    "read_range",
    "retry_after_s",
    "run_jobs",
]

StreamRange = Callable[[int, int, threading.Event], Generator[bytes, None, None]]
"""Gives the bytes `[start, end)` of a file in blocks, in order, and no others. Ends when the event is set, by
`Stopped` or early; raises `Interrupted` where another try may help; is closed where it isn't read up."""

T = TypeVar("T")

_RANGE_BYTES = 16 << 20
_LONGEST_PAUSE_S = 30.0
_LONGEST_RETRY_AFTER_S = 120.0
_WAKE_S = 0.5
_LEAVE_S = 1.0
"""How long those are waited for that were just finishing, when it ends early."""
_RETRIES_OF_CALLS = 2
_TRANSIENT = {408, 425, 429, 500, 502, 503, 504}


class Stopped(Exception):
    """Another transfer failed, or the caller was interrupted."""


class Interrupted(Exception):
    """A transfer broke off, for a reason that may pass."""

    def __init__(self, error: RaywlError, retry_after_s: float | None = None) -> None:
        super().__init__(str(error))
        self.error, self.retry_after_s = error, retry_after_s

    @classmethod
    def if_transient(cls, error: RaywlError, retry_after_s: float | None = None) -> Self | RaywlError:
        """The error itself, where trying again is no use: a refusal, or what isn't there."""
        if type(error) is SourceError and (error.status is None or error.status in _TRANSIENT):
            return cls(error, retry_after_s)
        return error


def retry_after_s(header: str | None) -> float | None:
    """Seconds of a `Retry-After` header, which has a number or a date."""
    if not header:
        return None
    if header.strip().isdecimal():
        return float(header)
    import email.utils

    try:
        return max(0.0, email.utils.parsedate_to_datetime(header).timestamp() - time.time())
    except ValueError:
        return None


@dataclass(frozen=True, slots=True)
class Limits:
    """How a source is treated; the environment has the defaults."""

    stall_s: float = 30.0
    """A transfer that brings no byte for so long is cut, and tried again."""
    retries: int = 5
    """How often a transfer is tried again that brings nothing."""
    max_bytes_per_s: float | None = None
    """For all transfers of a process together."""
    streams: int = 8
    """Transfers at a time."""

    @classmethod
    def of_environment(cls) -> Self:
        """As `RAYWL_STALL_S`, `RAYWL_RETRIES`, `RAYWL_MAX_BYTES_PER_S` and `RAYWL_STREAMS` say.

        Raises:
            ValueError: One of them isn't a number of the kind.
        """
        plain = cls()
        return cls(
            stall_s=environment_number("RAYWL_STALL_S", plain.stall_s) or plain.stall_s,
            retries=int(environment_number("RAYWL_RETRIES", plain.retries)),
            max_bytes_per_s=environment_number("RAYWL_MAX_BYTES_PER_S", 0.0) or None,
            streams=max(1, int(environment_number("RAYWL_STREAMS", plain.streams))),
        )


def fetch_range(
    stream: StreamRange,
    start: int,
    end: int,
    sink: Callable[[int, bytes], object],
    limits: Limits,
    stop: threading.Event | None = None,
    sink_pace: Pace | None = None,
) -> None:
    """Brings the bytes `[start, end)`; goes on from the byte where it stopped after each break.

    Args:
        stream: The source of the file.
        start: First byte.
        end: One past the last byte.
        sink: Takes each block with its first byte's place in the file.
        limits: How often to try, and how fast.
        stop: Ends it when set.
        sink_pace: Of what the sink writes to.

    Raises:
        Stopped: `stop` was set.
        RaywlError: As the source says; of what may pass, after the last try.
    """
    stop = stop or threading.Event()
    paces = [pace for pace in (shared_pace("source", limits.max_bytes_per_s), sink_pace) if pace is not None]
    failures = 0
    while start < end:
        try:
            with closing(stream(start, end, stop)) as blocks:
                for block in blocks:
                    if stop.is_set():
                        raise Stopped
                    sink(start, block)
                    start, failures = start + len(block), 0
                    delay_s = max((pace.delay_s(len(block)) for pace in paces), default=0.0)
                    if delay_s and stop.wait(delay_s):
                        raise Stopped
            if start < end and stop.is_set():
                raise Stopped
            return
        except Interrupted as broken:
            failures += 1
            _pause(broken, failures, limits.retries, stop)


def _pause(broken: Interrupted, failures: int, retries: int, stop: threading.Event) -> None:
    """Waits before the next try, or raises the error where there is none."""
    if failures > retries or (broken.retry_after_s or 0) > _LONGEST_RETRY_AFTER_S:
        raise broken.error from None
    pause_s = min(_LONGEST_PAUSE_S, 2.0 ** (failures - 2)) * random.uniform(0.5, 1)
    if stop.wait(max(pause_s, broken.retry_after_s or 0)):
        raise Stopped from None


def again(call: Callable[[], T], limits: Limits) -> T:
    """The result of a short call, such as a listing, that is tried again a few times.

    Fewer than a transfer under way: an endpoint that doesn't exist should be known soon.
    """
    failures = 0
    while True:
        try:
            return call()
        except Interrupted as broken:
            failures += 1
            _pause(broken, failures, min(limits.retries, _RETRIES_OF_CALLS), threading.Event())


def joined(pieces: Iterable[bytes], nbytes: int = 256 << 10) -> Iterator[bytes]:
    """Small pieces as larger blocks; of a stream that breaks off, all that came before."""
    held: list[bytes] = []
    size = 0
    try:
        for piece in pieces:
            held.append(piece)
            size += len(piece)
            if size >= nbytes:
                block, held, size = b"".join(held), [], 0
                yield block
    except Exception:
        if held:
            yield b"".join(held)
        raise
    if held:
        yield b"".join(held)


def read_range(stream: StreamRange, start: int, end: int, limits: Limits) -> bytes:
    """The bytes `[start, end)`; raises as `fetch_range`."""
    blocks: list[bytes] = []
    fetch_range(stream, start, end, lambda _, block: blocks.append(block), limits)
    return b"".join(blocks)


@dataclass(eq=False)
class Job:
    """One file to fetch."""

    open: Callable[[], PartFile]
    """Its part file; called when its turn has come, since a checkpoint may have more files than a process may
    open."""
    stream: StreamRange
    check: Callable[[str], object] | None = None
    """Raises when the whole has the wrong bytes; see `PartFile.finish`."""
    done: Callable[[], None] = lambda: None
    """Called when the file is under its final name."""
    ranged: bool = True
    """Whether the source gives ranges; else the file comes in one piece."""


def run_jobs(
    jobs: Sequence[Job],
    limits: Limits,
    on_bytes: Callable[[int], None] = lambda _: None,
    stop: threading.Event | None = None,
) -> int:
    """Fetches files, several ranges at once, in the order of the jobs; the first failure stops all.

    Whatever happens, no part file stays open, and what came of a file that isn't whole stays for the next
    try.

    Args:
        jobs: What to fetch; of each, what isn't there.
        limits: How.
        on_bytes: Called with the bytes that came or were there, by one thread at a time.
        stop: Ends it when set.

    Returns:
        Bytes that came.

    Raises:
        Stopped: `stop` was set.
        RaywlError: Of the first file that failed.
    """
    return _Run(jobs, limits, on_bytes, stop or threading.Event()).run()


class _Open:
    """A job under way."""

    def __init__(self, job: Job, part: PartFile) -> None:
        self.job, self.part = job, part
        self.spans = _spans_to_fetch(job, part)
        self.num_left = len(self.spans)


class _Run:
    def __init__(
        self,
        jobs: Sequence[Job],
        limits: Limits,
        on_bytes: Callable[[int], None],
        stop: threading.Event,
    ) -> None:
        self._limits, self._on_bytes, self._stop = limits, on_bytes, stop
        self._disk = disk_pace()
        self._num_threads = limits.streams if jobs else 0
        self._open: set[_Open] = set()
        self._ranges = self._all_ranges(jobs)
        self._taking, self._changed = threading.Lock(), threading.Condition()
        self._num_running = 0
        self._num_bytes = 0
        self._failure: BaseException | None = None

    def run(self) -> int:
        self._num_running = self._num_threads
        try:
            for index in range(self._num_threads):
                # Not of a pool, which Python waits for when it ends: a read may hang for as long as a stall.
                threading.Thread(target=self._work, name=f"raywl-fetch-{index}", daemon=True).start()
            with self._changed:
                while self._num_running and not self._failure and not self._stop.is_set():
                    self._changed.wait(_WAKE_S)
            if self._failure is not None:
                raise self._failure
            if self._stop.is_set():
                raise Stopped
            return self._num_bytes
        finally:
            # Threads that are in the middle of a read find their part file closed.
            with self._changed:
                self._stop.set()
                for one in self._open:
                    one.part.close()
                self._changed.wait_for(lambda: not self._num_running, _LEAVE_S)

    def _all_ranges(self, jobs: Sequence[Job]) -> Iterator[tuple[_Open, int, int]]:
        for job in jobs:
            one = _Open(job, job.open())
            with self._changed:
                self._open.add(one)
                if self._stop.is_set():
                    one.part.close()
                    return
                self._on_bytes(one.part.present_bytes)
            for start, end in one.spans:
                yield one, start, end

    def _work(self) -> None:
        try:
            while not self._stop.is_set():
                with self._taking:
                    one, start, end = next(self._ranges, (None, 0, 0))
                if one is None:
                    return
                take = partial(self._take, one)
                fetch_range(one.job.stream, start, end, take, self._limits, self._stop, self._disk)
                self._end_range(one)
        except Stopped:
            pass
        except BaseException as error:
            with self._changed:
                if not self._stop.is_set():
                    self._failure = self._failure or error
        finally:
            with self._changed:
                self._num_running -= 1
                self._changed.notify_all()

    def _take(self, one: _Open, start: int, block: bytes) -> None:
        fresh_bytes = one.part.write(start, block)
        with self._changed:
            self._num_bytes += len(block)
            if not self._stop.is_set():
                self._on_bytes(fresh_bytes)

    def _end_range(self, one: _Open) -> None:
        with self._changed:
            one.num_left -= 1
            if one.num_left:
                return
        one.part.finish(one.job.check)
        one.job.done()
        with self._changed:
            self._open.discard(one)


def _spans_to_fetch(job: Job, part: PartFile) -> list[tuple[int, int]]:
    missing = part.missing()
    if not missing:
        # Nothing to fetch, but to finish.
        return [(0, 0)]
    if not job.ranged:
        return [(missing[0][0], part.size)]
    return [
        (first, min(first + _RANGE_BYTES, end))
        for start, end in missing
        for first in range(start, end, _RANGE_BYTES)
    ]
