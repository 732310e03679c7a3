"""One rank of one contestant, in a process of its own: `python -m raywl.bench.worker`.

Life cycle, one JSON object a line:
    1. standard input: the work
    2. prepares, then standard output: `{"ready": true}`, and files of its own that it will read
    3. the parent drops or fills the page cache, then standard input: any line
    4. runs, then standard output: seconds, bytes, peak of memory, and digest
If anything fails: `{"error": ...}`, and the traceback on standard error.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time

from raywl.types import ParallelContext

__all__ = ["main"]


def main() -> None:
    """Takes the work from standard input."""
    try:
        _run()
    except Exception as error:
        _say({"error": f"{type(error).__name__}: {error}"})
        raise


def _run() -> None:
    from raywl.bench.contestants import Work, make_contestant

    order = json.loads(sys.stdin.readline())
    contestant = make_contestant(order["contestant"])
    work = Work(
        order["ref"], order["source"], ParallelContext(**order["context"]), order["shards"], order["folder"]
    )
    contestant.prepare(work)
    _say({"ready": True, "files": list(contestant.files)})
    sys.stdin.readline()
    disk_before, memory_before = _disk_bytes(), _memory_bytes("VmRSS")
    _forget_peak()
    start_s = time.monotonic()
    bytes_read = contestant.run()
    end_s = time.monotonic()
    disk_after, peak = _disk_bytes(), _memory_bytes("VmHWM")
    _say(
        {
            # One clock for all processes of the machine, so that the parent can take the group's time.
            "start_s": start_s,
            "end_s": end_s,
            "bytes_read": bytes_read,
            "disk_bytes": None if disk_before is None or disk_after is None else disk_after - disk_before,
            "peak_bytes": None if memory_before is None or peak is None else max(0, peak - memory_before),
            "digest": contestant.digest(),
        }
    )


def _say(value: dict[str, object]) -> None:
    print(json.dumps(value), flush=True)


def _disk_bytes() -> int | None:
    """Bytes that this process made the disks read; `None` where the system doesn't count them."""
    try:
        with open("/proc/self/io") as file:
            counts = dict(line.split(": ") for line in file.read().splitlines())
    except OSError:
        return None
    return int(counts["read_bytes"])


def _forget_peak() -> None:
    """Lets the peak of this process's memory begin anew."""
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def _memory_bytes(key: str) -> int | None:
    """Memory of this process by its key in the system's table; `None` where there is none."""
    try:
        with open("/proc/self/status") as file:
            lines = dict(line.split(":", 1) for line in file)
    except OSError:
        return None
    return int(lines[key].split()[0]) * 1024


if __name__ == "__main__":
    main()
