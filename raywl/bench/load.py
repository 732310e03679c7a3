"""`load_into` beside the raw limit, a `safe_open` loop and other libraries, on the same files, in turn."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from raywl.bench.words import PEERS
from raywl.checkpoint import Manifest
from raywl.node import page_cache
from raywl.node.prefetch import prefetch_checkpoint
from raywl.types import ParallelContext

__all__ = ["CONTESTANTS", "RELOADS", "LoadBenchmark"]

CONTESTANTS = ("raw-2", "raw-4", "raw-8", "load_into", "safe_open")
"""The raw limit is whichever number of threads has the best median."""

RELOADS = ("copy-1", "copy-2", "copy-4", "reload_into", "load_file")
"""For weights that go into a live model; the limit is copying from memory to memory."""

_LIMITS = ("raw-", "copy-")

_RUN_TIMEOUT_S = 900.0
_COLD_BYTES = 0.01
"""Share of a file that may be left in the page cache after it was dropped."""


@dataclass(slots=True)
class LoadBenchmark:
    """A benchmark: what to run, and what was measured so far."""

    manifest: Manifest
    ref: str
    source: Mapping[str, Any]
    """Keyword arguments of `open_checkpoint`."""
    cold: bool
    """Whether the page cache is dropped before each run; else it is filled."""
    tp_size: int = 1
    shards: Mapping[str, int] = field(default_factory=dict)
    """Tensor name to the dim that it is cut along."""
    contestants: Sequence[str] = CONTESTANTS
    """In the order of each repetition; at least one `raw` or `copy`."""
    runs: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """Measurements by contestant, in order."""
    folder: str = ""
    """For files of contestants' own, on the disk that is measured."""
    notes: list[str] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    """Peers that took no part, or not to the end, and why."""

    def run(self, num_repetitions: int, say: Callable[[str], None]) -> None:
        """Runs every contestant once in each repetition.

        Args:
            num_repetitions: At least 1.
            say: Called with a line about each run.

        Raises:
            RuntimeError: A contestant failed; its own words are in the message.
        """
        for repetition in range(num_repetitions):
            for name in self.contestants:
                if name in self.left_out:
                    continue
                try:
                    measured = self._run_one(name)
                except RuntimeError as error:
                    if name not in PEERS:
                        raise
                    # What another library can't do is a result too.
                    self.left_out[name] = str(error)
                    self.runs.pop(name, None)
                    say(f"{repetition + 1}/{num_repetitions} {name}: {error}")
                    continue
                self.runs.setdefault(name, []).append(measured)
                say(f"{repetition + 1}/{num_repetitions} {name}: {measured['seconds']:.3f} s")

    @property
    def identical(self) -> bool:
        """Whether all runs whose bytes can be compared brought the same ones."""
        found: dict[int, set[str]] = {}
        for runs in self.runs.values():
            for run in runs:
                for rank, digest in enumerate(run["digests"]):
                    if digest is not None:
                        found.setdefault(rank, set()).add(digest)
        return all(len(digests) == 1 for digests in found.values())

    def to_dict(self) -> dict[str, Any]:
        """Medians, spread and ratios to the raw limit, as JSON values."""
        medians = {
            name: statistics.median(run["seconds"] for run in runs) for name, runs in self.runs.items()
        }
        raw = min((name for name in medians if name.startswith(_LIMITS)), key=medians.__getitem__)
        return {
            "ref": self.ref,
            "identity": self.manifest.identity,
            "nbytes": self.manifest.nbytes,
            "cache": "cold" if self.cold else "warm",
            "tp_size": self.tp_size,
            "num_repetitions": len(self.runs[raw]),
            "raw": raw,
            "identical": self.identical,
            "contestants": {name: self._summary(name, medians[raw]) for name in self.runs},
            "left_out": self.left_out,
            "notes": self.notes,
            "machine": {
                "num_cpus": os.cpu_count(),
                "kernel": platform.release(),
                "python": platform.python_version(),
            },
        }

    def _summary(self, name: str, raw_s: float) -> dict[str, Any]:
        runs = self.runs[name]
        seconds = [run["seconds"] for run in runs]
        median_s = statistics.median(seconds)
        bytes_read = max(run["bytes_read"] for run in runs)
        disk = [run["disk_bytes"] for run in runs if run["disk_bytes"] is not None]
        peak = [run["peak_bytes"] for run in runs if run.get("peak_bytes") is not None]
        return {
            "median_s": median_s,
            "min_s": min(seconds),
            "max_s": max(seconds),
            "seconds": seconds,
            "bytes_read": bytes_read,
            "bytes_per_s": bytes_read / median_s,
            "ratio_to_raw": raw_s / median_s,
            "disk_bytes": statistics.median(disk) if disk else None,
            "peak_bytes": statistics.median(peak) if peak else None,
        }

    def _run_one(self, name: str) -> dict[str, Any]:
        workers = [_Worker(self._order(name, rank)) for rank in range(self.tp_size)]
        try:
            files = [worker.answer()["files"] for worker in workers]
            self._set_page_cache(dict.fromkeys(path for paths in files for path in paths))
            for worker in workers:
                worker.go()
            answers = [worker.answer() for worker in workers]
        finally:
            for worker in workers:
                worker.end()
        disk = [answer["disk_bytes"] for answer in answers]
        peak = [answer["peak_bytes"] for answer in answers]
        return {
            "seconds": max(a["end_s"] for a in answers) - min(a["start_s"] for a in answers),
            "bytes_read": sum(answer["bytes_read"] for answer in answers),
            "disk_bytes": None if None in disk else sum(disk),
            "peak_bytes": None if None in peak else max(peak),
            "digests": [answer["digest"] for answer in answers],
        }

    def _order(self, name: str, rank: int) -> dict[str, Any]:
        context = ParallelContext(
            tp_rank=rank, tp_size=self.tp_size, local_rank=rank, local_size=self.tp_size
        )
        return {
            "contestant": name,
            "ref": self.ref,
            "source": dict(self.source),
            "context": context.to_dict(),
            "shards": dict(self.shards),
            "folder": self.folder,
        }

    def _set_page_cache(self, more: Iterable[str]) -> None:
        """Drops or fills the checkpoint's pages, and those of further files, and looks."""
        for path in [*(self.manifest.path(file.name) for file in self.manifest.files), *more]:
            name, size = os.path.basename(path), os.path.getsize(path)
            (page_cache.drop if self.cold else prefetch_checkpoint)(path)
            resident = page_cache.resident_bytes(path)
            if resident is None:
                self._note(f"{name}: whether its pages are in memory can't be seen here")
            elif self.cold and resident > _COLD_BYTES * size:
                self._note(f"{name}: its pages can't be dropped here, so these runs aren't cold")
            elif not self.cold and resident < (1 - _COLD_BYTES) * size:
                self._note(f"{name}: not all of it stays in memory, so these runs aren't warm")

    def _note(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)


class _Worker:
    """The parent's end of one `raywl.bench.worker` process."""

    def __init__(self, order: Mapping[str, Any]) -> None:
        self._name = order["contestant"]
        # Libraries say much that is of no interest unless they fail.
        self._words = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the process)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "raywl.bench.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._words,
            text=True,
        )
        self._deadline = threading.Timer(_RUN_TIMEOUT_S, self._process.kill)
        self._deadline.start()
        self._send(json.dumps(order))

    def go(self) -> None:
        self._send("go")

    def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            self._tell()
            raise RuntimeError(f"contestant {self._name} ended with code {code}; its message is above")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            code = self._process.wait()
            self._tell()
            raise RuntimeError(f"contestant {self._name} ended with code {code}: {answer['error']}")
        return answer

    def _tell(self) -> None:
        """Shows what the process wrote to standard error."""
        self._words.seek(0)
        sys.stderr.write(self._words.read().decode(errors="replace"))

    def end(self) -> None:
        self._deadline.cancel()
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._words):
            if stream is not None:
                stream.close()

    def _send(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{line}\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            # It died; `answer` says so.
            pass
