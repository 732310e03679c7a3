"""What happened during a load: plain values that pickle, print and become a page."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from raywl import html
from raywl.timeline import Timeline, trace

if TYPE_CHECKING:
    from raywl.plan import LoadPlan
    from raywl.types import ParallelContext

__all__ = ["GroupReport", "LoadReport"]


@dataclass(slots=True)
class LoadReport:
    """One rank's load."""

    ref: str
    """The checkpoint as the user named it."""
    identity: str
    """The checkpoint's identity."""
    context: ParallelContext
    """Where the rank stands."""
    loaded: list[str] = field(default_factory=list)
    """Checkpoint tensors of which at least a part ended in the model."""
    missing: list[str] = field(default_factory=list)
    """Parameters and persistent buffers that nothing set."""
    unexpected: list[str] = field(default_factory=list)
    """Checkpoint tensors that have no place in the model."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Checkpoint tensors left out on purpose, with the reason."""
    partial: dict[str, str] = field(default_factory=dict)
    """Parameters that were set only in part, with what is known about the rest."""
    unused_shards: list[str] = field(default_factory=list)
    """Names and patterns of `shards` that match no parameter that is cut by them."""
    notes: list[str] = field(default_factory=list)
    """What was chosen automatically, and why."""
    bytes_read: int = 0
    """Bytes asked of the source."""
    bytes_loaded: int = 0
    """Bytes that ended in parameters and buffers, counted in the checkpoint's dtype."""
    bytes_by_file: dict[str, int] = field(default_factory=dict)
    """Of `bytes_read`, by file."""
    bytes_by_source: dict[str, int] = field(default_factory=dict)
    """Bytes by where they came from: `files` of this node; `chunks` of a stream; `hub`, what was downloaded
    for this load."""
    seconds: float = 0.0
    """Wall time of the whole call."""
    phases: dict[str, float] = field(default_factory=dict)
    """Seconds by phase: `open`, `plan`, `read`, `copy`, `wait`, `post`. While several threads read, the time
    is shared out as they spent theirs: in system calls, copying from scratch, or waiting."""
    plan: LoadPlan | None = None
    """The reads that were made."""
    node: str | None = None
    """Address of the node it ran on, when on a cluster."""
    timeline: Timeline = field(default_factory=Timeline)
    """What its threads did, and when."""
    limit_bytes_per_s: float | None = None
    """What the disk gave in a probe; `None` where there was none."""
    released_bytes: int = 0
    """Bytes of the checkpoint that left the page cache at the end, where that was asked for."""

    @property
    def read_bytes_per_s(self) -> float | None:
        """Rate of the reading alone; `None` where nothing was read."""
        seconds = sum(self.phases.get(part, 0.0) for part in ("read", "copy", "wait"))
        return self.bytes_read / seconds if self.bytes_read and seconds > 0 else None

    @property
    def limit_ratio(self) -> float | None:
        """`read_bytes_per_s` beside the limit; `None` where that isn't known."""
        rate, limit = self.read_bytes_per_s, self.limit_bytes_per_s
        return None if rate is None or not limit else rate / limit

    def to_dict(self) -> dict[str, Any]:
        """Everything but the plan's single reads, as JSON values."""
        left_out = ("plan", "context", "timeline")
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in left_out}
        values["context"] = self.context.to_dict()
        values["read_bytes_per_s"], values["limit_ratio"] = self.read_bytes_per_s, self.limit_ratio
        values["slowest_files"] = [
            {"file": file, "nbytes": times.nbytes, "seconds": times.seconds}
            for file, times in self.timeline.slowest_files()
        ]
        values["plan"] = None if self.plan is None else self.plan.summary()
        return values

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Writes a self-contained page; an earlier one is replaced whole.

        Raises:
            OSError: The folder doesn't exist or can't be written to.
        """
        html.write_page(path, html.page(f"Load of {self.ref}", html.report_sections(self)))

    def to_trace(self, path: str | os.PathLike[str]) -> None:
        """Writes what its threads did, in the Chrome trace format.

        Raises:
            OSError: The folder doesn't exist or can't be written to.
        """
        html.write_page(path, trace({html.rank_title(self): (self.context.rank, self.timeline)}))

    def _repr_html_(self) -> str:
        return html.fragment(self)


@dataclass(slots=True)
class GroupReport:
    """A group's load: the reports of its ranks in rank order, and what only all of them together know."""

    ref: str
    """The checkpoint as the user named it."""
    identity: str
    """The checkpoint's identity, the same on every node."""
    ranks: list[LoadReport] = field(default_factory=list)
    """In rank order; with replicas, one replica after the other."""
    unexpected: list[str] = field(default_factory=list)
    """Checkpoint tensors that have no place on any rank."""
    seconds: float = 0.0
    """Wall time from the call of `launch` until the last rank was done."""
    phases: dict[str, float] = field(default_factory=dict)
    """Seconds by phase of the launch: connect, place, agents, load."""
    notes: list[str] = field(default_factory=list)
    """What was chosen automatically, and why."""
    fetched_bytes: dict[str, int] = field(default_factory=dict)
    """Bytes that nodes downloaded for it, by source."""
    released_bytes: int = 0
    """Bytes of the checkpoint that left the nodes' page caches at the end, where that was asked for."""

    @property
    def bytes_read(self) -> int:
        """Bytes asked of the source by all ranks."""
        return sum(rank.bytes_read for rank in self.ranks)

    @property
    def bytes_by_source(self) -> dict[str, int]:
        """Bytes by where they came from: what nodes downloaded, and what ranks read."""
        found = dict(self.fetched_bytes)
        for rank in self.ranks:
            for source, nbytes in rank.bytes_by_source.items():
                found[source] = found.get(source, 0) + nbytes
        return found

    @property
    def bytes_loaded(self) -> int:
        """Bytes that ended in parameters, over all ranks."""
        return sum(rank.bytes_loaded for rank in self.ranks)

    @property
    def loaded(self) -> list[str]:
        """Tensors of which some rank loaded at least a part."""
        return list(dict.fromkeys(name for rank in self.ranks for name in rank.loaded))

    @property
    def missing(self) -> list[str]:
        """Parameters that some rank was left with unset."""
        return list(dict.fromkeys(name for rank in self.ranks for name in rank.missing))

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON values."""
        return {
            "ref": self.ref,
            "identity": self.identity,
            "ranks": [rank.to_dict() for rank in self.ranks],
            "unexpected": self.unexpected,
            "missing": self.missing,
            "bytes_read": self.bytes_read,
            "bytes_loaded": self.bytes_loaded,
            "bytes_by_source": self.bytes_by_source,
            "released_bytes": self.released_bytes,
            "seconds": self.seconds,
            "phases": self.phases,
            "notes": self.notes,
        }

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Writes a self-contained page; an earlier one is replaced whole.

        Raises:
            OSError: The folder doesn't exist or can't be written to.
        """
        html.write_page(path, html.page(f"Load of {self.ref}", html.report_sections(self)))

    def to_trace(self, path: str | os.PathLike[str]) -> None:
        """Writes what the threads of all ranks did, in the Chrome trace format; ranks are its processes.

        Raises:
            OSError: The folder doesn't exist or can't be written to.
        """
        timelines = {
            f"{number}: {html.rank_title(rank)}": (number, rank.timeline)
            for number, rank in enumerate(self.ranks)
        }
        html.write_page(path, trace(timelines))

    def _repr_html_(self) -> str:
        return html.fragment(self)
