"""What the threads of one rank's load did, and when: small enough to keep always, and written as a trace."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

__all__ = ["MAX_SPANS", "FileTimes", "Phase", "Span", "Timeline", "trace"]

MAX_SPANS = 20_000
"""Reads that are kept one by one, which take a few MiB; later ones only count in the sums."""

_LOCK = threading.Lock()


class Span(NamedTuple):
    """One read by one thread. Times are in seconds; the parts follow each other, possibly many times."""

    thread: int
    """Number of the thread, from 0."""
    file: str
    start: int
    """First byte in the file."""
    nbytes: int
    at_s: float
    """When it began, from the start of the load."""
    read_s: float
    """In system calls."""
    copy_s: float
    """From scratch to where the bytes belong."""
    wait_s: float
    """For a buffer that a device was still copying out of."""

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.read_s + self.copy_s + self.wait_s


class Phase(NamedTuple):
    """One phase of a load."""

    name: str
    at_s: float
    """When it began, from the start of the load."""
    seconds: float


@dataclass(slots=True)
class FileTimes:
    """What reading one file took, over all threads."""

    nbytes: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class Timeline:
    """One rank's load in time. Threads add to it; afterwards it is plain data that pickles."""

    started_at: float = field(default_factory=time.time)
    """Seconds since the epoch, by this node's clock."""
    origin_s: float = field(default_factory=time.perf_counter)
    """The same moment by the clock that measures; means nothing in another process."""
    phases: list[Phase] = field(default_factory=list)
    """In order."""
    spans: list[Span] = field(default_factory=list)
    """Reads, as they ended."""
    num_left_out: int = 0
    """Reads beyond `MAX_SPANS`."""
    read_s: float = 0.0
    """Of all reads and threads; so are the next two."""
    copy_s: float = 0.0
    wait_s: float = 0.0
    files: dict[str, FileTimes] = field(default_factory=dict)

    def add(self, span: Span) -> None:
        """Adds a read; any thread may."""
        with _LOCK:
            self.read_s += span.read_s
            self.copy_s += span.copy_s
            self.wait_s += span.wait_s
            times = self.files.setdefault(span.file, FileTimes())
            times.nbytes += span.nbytes
            times.seconds += span.seconds
            if len(self.spans) < MAX_SPANS:
                self.spans.append(span)
            else:
                self.num_left_out += 1

    def note_phase(self, name: str) -> float:
        """Ends a phase that began where the one before it ended.

        Returns:
            How long it took, in seconds.
        """
        at_s = self.phases[-1].at_s + self.phases[-1].seconds if self.phases else 0.0
        seconds = time.perf_counter() - self.origin_s - at_s
        self.phases.append(Phase(name, at_s, seconds))
        return seconds

    @property
    def parts(self) -> tuple[float, float, float]:
        """`read_s`, `copy_s` and `wait_s` so far."""
        return self.read_s, self.copy_s, self.wait_s

    def parts_of(
        self, wall_s: float, num_threads: int, since: tuple[float, float, float]
    ) -> dict[str, float]:
        """Wall time of a phase of reading, shared out as the threads spent theirs.

        Args:
            wall_s: What the phase took.
            num_threads: Threads that read.
            since: `parts` when it began.

        Returns:
            Seconds of `read`, `copy` and `wait`, which sum up to `wall_s`. A thread that has nothing to do
            waits.
        """
        read_s, copy_s, wait_s = (now - then for now, then in zip(self.parts, since, strict=True))
        total_s = max(wall_s * num_threads, read_s + copy_s + wait_s, 1e-9)
        read_s, copy_s = wall_s * read_s / total_s, wall_s * copy_s / total_s
        return {"read": read_s, "copy": copy_s, "wait": wall_s - read_s - copy_s}

    def slowest_files(self, count: int = 5) -> list[tuple[str, FileTimes]]:
        """The files that came at the lowest rates, the slowest first."""
        rows = [(file, times) for file, times in self.files.items() if times.nbytes]
        return sorted(rows, key=lambda row: row[1].nbytes / max(row[1].seconds, 1e-9))[:count]


def trace(timelines: Mapping[str, tuple[int, Timeline]]) -> str:
    """Timelines in the Chrome trace format, which `chrome://tracing` and Perfetto show.

    Args:
        timelines: Title of each process to its number and what it did. Clocks of several nodes are taken
            to agree.
    """
    first = min((timeline.started_at for _, timeline in timelines.values()), default=0.0)
    events = [
        event
        for title, (number, timeline) in timelines.items()
        for event in _events(title, number, timeline, timeline.started_at - first)
    ]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _events(title: str, number: int, timeline: Timeline, late_s: float) -> Iterator[dict[str, Any]]:
    """The events of one process; its thread 0 has the phases, its readers come after."""

    def named(kind: str, thread: int, name: str) -> dict[str, Any]:
        return {"ph": "M", "pid": number, "tid": thread, "name": kind, "args": {"name": name}}

    yield named("process_name", 0, title)
    yield named("thread_name", 0, "phases")
    for thread in sorted({span.thread for span in timeline.spans}):
        yield named("thread_name", thread + 1, f"reader {thread}")
    for phase in timeline.phases:
        yield _event(number, 0, "phase", phase.name, phase.at_s + late_s, phase.seconds, {})
    for span in timeline.spans:
        args = {
            "start": span.start,
            "bytes": span.nbytes,
            "read_ms": span.read_s * 1e3,
            "copy_ms": span.copy_s * 1e3,
            "wait_ms": span.wait_s * 1e3,
        }
        yield _event(number, span.thread + 1, "read", span.file, span.at_s + late_s, span.seconds, args)


def _event(
    number: int, thread: int, kind: str, name: str, at_s: float, seconds: float, args: dict[str, Any]
) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": number,
        "tid": thread,
        "cat": kind,
        "name": name,
        "ts": at_s * 1e6,
        "dur": seconds * 1e6,
        "args": args,
    }
