"""Iterators over weight files beside each other: how long they take, and how much memory.

Each runs in a process of its own: `python -m raywl.bench.iterate` takes one JSON object from standard input,
and prints one.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from raywl.node import page_cache
from raywl.node.prefetch import prefetch_checkpoint

__all__ = ["ITERATORS", "IterateBenchmark", "measure"]

ITERATORS = ("lazy", "eager", "prefetch", "threads", "safe_open")
"""raywl's strategies and its pool of threads, and the loop that is usually written."""

_RUN_TIMEOUT_S = 900.0


@dataclass(slots=True)
class IterateBenchmark:
    """A benchmark: what to run, and what was measured so far."""

    paths: Sequence[str]
    """Safetensors files."""
    cold: bool = False
    """Whether the page cache is dropped before each run; else it is filled."""
    max_workers: int = 4
    """Threads of `threads`."""
    pause_s: float = 0.0
    """How long the consumer is at each tensor, beside copying it."""
    iterators: Sequence[str] = ITERATORS
    """In the order of each repetition."""
    runs: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """Measurements by iterator, in order."""

    def run(self, num_repetitions: int, say: Callable[[str], None]) -> None:
        """Runs every iterator once in each repetition.

        Args:
            num_repetitions: At least 1.
            say: Called with a line about each run.

        Raises:
            RuntimeError: An iterator failed; its own words are on standard error.
        """
        for repetition in range(num_repetitions):
            for name in self.iterators:
                for path in self.paths:
                    (page_cache.drop if self.cold else prefetch_checkpoint)(path)
                found = self._run_one(name)
                self.runs.setdefault(name, []).append(found)
                say(f"{repetition + 1}/{num_repetitions} {name}: {found['seconds']:.3f} s")

    def _run_one(self, name: str) -> dict[str, Any]:
        order = {
            "name": name,
            "paths": list(self.paths),
            "max_workers": self.max_workers,
            "pause_s": self.pause_s,
        }
        done = subprocess.run(
            [sys.executable, "-m", "raywl.bench.iterate"],
            input=json.dumps(order),
            stdout=subprocess.PIPE,
            text=True,
            timeout=_RUN_TIMEOUT_S,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{name} ended with code {done.returncode}; its message is above")
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def to_dict(self) -> dict[str, Any]:
        """Medians, as JSON values."""
        return {
            "num_files": len(self.paths),
            "largest_file_bytes": max(map(os.path.getsize, self.paths)),
            "cache": "cold" if self.cold else "warm",
            "max_workers": self.max_workers,
            "pause_s": self.pause_s,
            "iterators": {name: _summary(runs) for name, runs in self.runs.items()},
        }


def _summary(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    median_s = statistics.median(run["seconds"] for run in runs)
    return {
        "median_s": median_s,
        "num_tensors": runs[0]["num_tensors"],
        "nbytes": runs[0]["nbytes"],
        "bytes_per_s": runs[0]["nbytes"] / median_s,
        "peak_bytes": max(run["peak_bytes"] for run in runs),
    }


def measure(name: str, paths: Sequence[str], max_workers: int, pause_s: float) -> dict[str, Any]:
    """Iterates in this process, and copies each tensor into memory that was touched before.

    Args:
        name: One of `ITERATORS`.
        paths: The files.
        max_workers: Threads of `threads`.
        pause_s: How long the consumer is at each tensor.

    Returns:
        Seconds, tensors, bytes, and the peak of resident memory above that at the start.

    Raises:
        ValueError: No such iterator.
    """
    import torch

    make = _make(name, paths, max_workers)
    into = torch.zeros(max(map(os.path.getsize, paths)), dtype=torch.uint8, device="cpu")
    num_tensors = nbytes = 0
    before = _reset_peak()
    start_s = time.monotonic()
    for _, tensor in make():
        if tensor.numel():
            into[: tensor.nbytes].copy_(tensor.contiguous().view(-1).view(torch.uint8))
        num_tensors, nbytes = num_tensors + 1, nbytes + tensor.nbytes
        if pause_s:
            time.sleep(pause_s)
    seconds = time.monotonic() - start_s
    peak_bytes = max(0, _status_bytes("VmHWM") - before)
    return {"seconds": seconds, "num_tensors": num_tensors, "nbytes": nbytes, "peak_bytes": peak_bytes}


def _make(name: str, paths: Sequence[str], max_workers: int) -> Callable[[], Iterator[tuple[str, Any]]]:
    from raywl.iterators.safetensors import (
        multi_thread_safetensors_weights_iterator,
        safetensors_weights_iterator,
    )

    if name in ("lazy", "eager", "prefetch"):
        return lambda: safetensors_weights_iterator(paths, False, name)
    if name == "threads":
        return lambda: multi_thread_safetensors_weights_iterator(paths, False, max_workers)
    if name == "safe_open":
        return lambda: _by_safe_open(paths)
    raise ValueError(f"unknown iterator {name!r}: {', '.join(ITERATORS)}")


def _by_safe_open(paths: Sequence[str]) -> Iterator[tuple[str, Any]]:
    from safetensors import safe_open

    for path in paths:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                yield name, file.get_tensor(name)


def _reset_peak() -> int:
    """Makes the kernel count the peak anew; returns what is resident now."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    return _status_bytes("VmRSS")


def _status_bytes(key: str) -> int:
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith(f"{key}:"):
                return int(line.split()[1]) << 10
    raise RuntimeError(f"/proc/self/status has no {key}")


if __name__ == "__main__":
    print(json.dumps(measure(**json.load(sys.stdin))))
