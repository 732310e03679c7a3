"""Staging over several hosts, which are network namespaces of this machine, beside what one host can do."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from raywl.bench.hosts import Host, network_hosts
from raywl.bench.synthetic import make_checkpoint
from raywl.errors import ClusterError

__all__ = ["SITUATIONS", "ClusterBenchmark"]

MBIT = 1e6 / 8
SITUATIONS = {
    "a": (200 * MBIT, 0.0),
    "b": (0.0, 100 * MBIT),
    "c": (0.0, 0.0),
}
"""Bytes per second that the source sends in all, and to each host; 0: no limit. In (c) one host has all."""

_START_S = 120.0
_STAGE_S = 400.0
_STORE_BYTES = 2 << 30


@dataclass
class ClusterBenchmark:
    """What to measure, and what was measured so far. Runs as root, since it makes hosts."""

    num_bytes: int = 256 << 20
    sizes: Sequence[int] = (1, 2, 4)
    """Numbers of hosts."""
    situations: Sequence[str] = ("a", "b", "c")
    rate: str = "1gbit"
    """Of each host's link, as `tc` writes it."""
    runs: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def run(self, num_repetitions: int, say: Callable[[str], None]) -> None:
        """Measures every situation with every number of hosts, once in each repetition.

        Raises:
            ClusterError: This machine makes no hosts, or Ray doesn't start on them; what failed is said.
        """
        count = max(self.sizes)
        names = [f"h{number}" for number in range(1, count + 1)]
        with (
            tempfile.TemporaryDirectory(prefix="rwb") as folder,
            network_hosts([*names, "src"], self.rate) as made,
        ):
            *hosts, source = made
            checkpoint = os.path.join(folder, "checkpoint")
            # Files below 64 MiB, as shards of large models are many.
            make_checkpoint(checkpoint, self.num_bytes, num_files=max(2, self.num_bytes >> 25))
            with (
                _Worker(source.command(*_python("source"), checkpoint, source.address, "0", "0")) as server,
                _ray(hosts, folder, say) as address,
                contextlib.ExitStack() as stack,
            ):
                url = server.read()["url"]
                workers = [
                    stack.enter_context(_Worker(host.command(*_python("cluster_worker")), _env(folder, host)))
                    for host in hosts
                ]
                bench = _Bench(folder, url, address, hosts, server, workers)
                bench.warm_up()
                for repetition in range(num_repetitions):
                    for situation in self.situations:
                        for size in self.sizes:
                            if situation == "c" and size == 1:
                                continue
                            self._note(bench.stage(situation, size), repetition, num_repetitions, say)
                        if situation == "a":
                            self._note(bench.alone(situation, count), repetition, num_repetitions, say)

    def _note(
        self, run: dict[str, Any], repetition: int, num_repetitions: int, say: Callable[[str], None]
    ) -> None:
        self.runs.append(run)
        say(
            f"{repetition + 1}/{num_repetitions} ({run['situation']}) {run['what']}, N = {run['hosts']}: "
            f"{run['seconds']:.2f} s, source {run['source_ratio']:.3f} x, most sent by a host "
            f"{run['most_sent_ratio']:.2f} x"
        )

    def to_dict(self) -> dict[str, Any]:
        """Medians of all runs, as JSON values."""
        rows: dict[tuple[str, str, int], list[dict[str, Any]]] = {}
        for run in self.runs:
            rows.setdefault((run["situation"], run["what"], run["hosts"]), []).append(run)
        found = []
        for (situation, what, hosts), runs in rows.items():
            one = [r["seconds"] for r in rows.get((situation, "stage", 1), [])]
            seconds = [run["seconds"] for run in runs]
            found.append(
                {
                    "situation": situation,
                    "what": what,
                    "hosts": hosts,
                    "median_s": statistics.median(seconds),
                    "min_s": min(seconds),
                    "max_s": max(seconds),
                    "ratio_to_one": statistics.median(seconds) / statistics.median(one) if one else None,
                    **{
                        key: max(run[key] for run in runs)
                        for key in ("source_ratio", "most_sent_ratio", "most_wire_ratio", "peak_store_bytes")
                    },
                }
            )
        return {
            "num_bytes": self.num_bytes,
            "rate": self.rate,
            "cores": os.cpu_count(),
            "rows": found,
            "runs": self.runs,
            "notes": self.notes,
        }


@dataclass
class _Bench:
    """The hosts, with everything on them that is needed."""

    folder: str
    url: str
    address: str
    hosts: Sequence[Host]
    server: _Worker
    workers: Sequence[_Worker]

    def warm_up(self) -> None:
        """Has raywl's helpers started on all hosts, so that it isn't measured."""
        self._set_rates("c")
        self._ask(0, {"do": "stage", **self._order(len(self.hosts))})

    def stage(self, situation: str, size: int) -> dict[str, Any]:
        """One staging onto the first hosts."""
        self._forget()
        if situation == "c":
            # The first host has it already, from a source without limits.
            self._set_rates("c")
            self._ask(0, {"do": "stage", **self._order(1)})
        self._set_rates(situation)
        before = [host.sent_bytes() for host in self.hosts]
        answer = self._ask(0, {"do": "stage", **self._order(size)})
        wire = [host.sent_bytes() - was for host, was in zip(self.hosts, before, strict=True)]
        nbytes = answer["nbytes"]
        return {
            "situation": situation,
            "what": "stage",
            "hosts": size,
            "seconds": answer["seconds"],
            "phases": answer["phases"],
            "source_ratio": self._sent() / nbytes,
            "most_sent_ratio": max(node["sent_bytes"] for node in answer["nodes"]) / nbytes,
            "most_wire_ratio": max(wire) / nbytes,
            "sent_ratios": [node["sent_bytes"] / nbytes for node in answer["nodes"]],
            "peak_store_bytes": max(node["peak_store_bytes"] for node in answer["nodes"]),
            "notes": [note for node in answer["nodes"] for note in node["notes"]],
        }

    def alone(self, situation: str, size: int) -> dict[str, Any]:
        """Every host downloads by itself, all at once."""
        self._forget()
        self._set_rates(situation)
        for worker in self.workers[:size]:
            worker.write({"do": "fetch", "ref": self.url})
        answers = [_checked(worker.read()) for worker in self.workers[:size]]
        nbytes = max(answer["fetched_bytes"] for answer in answers)
        return {
            "situation": situation,
            "what": "alone",
            "hosts": size,
            "seconds": max(a["ended_s"] for a in answers) - min(a["began_s"] for a in answers),
            "source_ratio": self._sent() / nbytes,
            "most_sent_ratio": 0.0,
            "most_wire_ratio": 0.0,
            "peak_store_bytes": 0,
        }

    def _order(self, size: int) -> dict[str, Any]:
        nodes = [host.address for host in self.hosts[:size]]
        return {"ref": self.url, "nodes": nodes, "address": self.address}

    def _ask(self, worker: int, order: dict[str, Any]) -> dict[str, Any]:
        self.workers[worker].write(order)
        return _checked(self.workers[worker].read())

    def _set_rates(self, situation: str) -> None:
        in_all, to_each = SITUATIONS[situation]
        self.server.write_line(f"rates {in_all} {to_each}")
        self.server.read()

    def _sent(self) -> int:
        self.server.write_line("sent")
        return int(self.server.read()["sent_bytes"])

    def _forget(self) -> None:
        for host in self.hosts:
            shutil.rmtree(_cache(self.folder, host), ignore_errors=True)


def _checked(answer: dict[str, Any]) -> dict[str, Any]:
    if "error" in answer:
        raise ClusterError(f"a host of the benchmark failed: {answer['error']}")
    return answer


def _python(module: str) -> list[str]:
    return [sys.executable, "-m", f"raywl.bench.{module}"]


def _cache(folder: str, host: Host) -> str:
    return os.path.join(folder, "caches", host.name)


def _env(folder: str, host: Host) -> dict[str, str]:
    own = {
        "RAYWL_CACHE": _cache(folder, host),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": os.path.join(folder, "token"),
        "RAY_TMPDIR": folder,
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    return {**{key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}, **own}


@contextlib.contextmanager
def _ray(hosts: Sequence[Host], folder: str, say: Callable[[str], None]) -> Iterator[str]:
    """A Ray cluster with one node on each host; its processes end with the hosts."""
    with open(os.path.join(folder, "token"), "w") as file:
        file.write(os.urandom(32).hex())
    say(f"starting Ray on {len(hosts)} hosts")
    head, port = hosts[0], 6399
    address = f"{head.address}:{port}"
    for host in hosts:
        role = [f"--port={port}", "--head", "--include-dashboard=false"] if host is head else [
            f"--address={address}"
        ]  # fmt: skip
        words = [
            sys.executable, "-m", "ray.scripts.scripts", "start", *role, f"--node-ip-address={host.address}",
            "--num-cpus=1", f"--object-store-memory={_STORE_BYTES}", "--disable-usage-stats",
            *([f"--temp-dir={folder}/{host.name}"] if host is head else []),
        ]  # fmt: skip
        done = subprocess.run(
            host.command(*words), env=_env(folder, host), capture_output=True, text=True, timeout=_START_S
        )
        if done.returncode:
            raise ClusterError(f"ray start on {host.name}: {(done.stdout + done.stderr).strip()[-2000:]}")
    yield address


class _Worker:
    """A process that takes lines and answers with lines of JSON."""

    def __init__(self, command: Sequence[str], env: dict[str, str] | None = None) -> None:
        self._process = subprocess.Popen(
            command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self._told: list[str] = []
        threading.Thread(target=self._listen, daemon=True).start()

    def __enter__(self) -> _Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait(30)

    def write(self, order: dict[str, Any]) -> None:
        """Sends an order."""
        self.write_line(json.dumps(order))

    def write_line(self, line: str) -> None:
        """Sends a line."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def read(self, timeout_s: float = _STAGE_S) -> dict[str, Any]:
        """The next answer."""
        assert self._process.stdout is not None
        timer = threading.Timer(timeout_s, self._process.kill)
        timer.start()
        try:
            line = self._process.stdout.readline()
        finally:
            timer.cancel()
        if not line:
            time.sleep(0.1)
            raise ClusterError(f"a process of the benchmark ended: {''.join(self._told)[-2000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _listen(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._told.append(line)
            del self._told[:-100]
