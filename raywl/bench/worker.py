"""One rank of one contestant, in a process of its own: `python -m raywl.bench.worker`.

Life cycle, one JSON object a line:
    1. standard input: the work
    2. prepares, then standard output: `{"ready": true}`
    3. the parent drops or fills the page cache, then standard input: any line
    4. runs, then standard output: seconds and digest
"""

from __future__ import annotations

import json
import sys
import time

from raywl.types import ParallelContext

__all__ = ["main"]


def main() -> None:
    """Takes the work from standard input."""
    from raywl.bench.contestants import Work, make_contestant

    order = json.loads(sys.stdin.readline())
    contestant = make_contestant(order["contestant"])
    contestant.prepare(
        Work(order["ref"], order["source"], ParallelContext(**order["context"]), order["shards"])
    )
    _say({"ready": True})
    sys.stdin.readline()
    disk_before = _disk_bytes()
    start_s = time.monotonic()
    bytes_read = contestant.run()
    end_s = time.monotonic()
    disk_after = _disk_bytes()
    disk_bytes = None if disk_before is None or disk_after is None else disk_after - disk_before
    _say(
        {
            # One clock for all processes of the machine, so that the parent can take the group's time.
            "start_s": start_s,
            "end_s": end_s,
            "bytes_read": bytes_read,
            "disk_bytes": disk_bytes,
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


if __name__ == "__main__":
    main()
