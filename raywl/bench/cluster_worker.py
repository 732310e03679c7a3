"""Stages on a host of the benchmark, or downloads alone: `python -m raywl.bench.cluster_worker`.

Life cycle, one JSON object a line:
    1. standard input: `{"do": "stage", "ref": ..., "nodes": [...], "address": ...}` or
       `{"do": "fetch", "ref": ...}`; standard output: what came of it
    2. again, until standard input ends
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

__all__ = ["main"]


def main() -> None:
    """Takes orders from standard input."""
    for line in sys.stdin:
        order = json.loads(line)
        try:
            answer = _fetch(order) if order["do"] == "fetch" else _stage(order)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


def _stage(order: dict[str, Any]) -> dict[str, Any]:
    import raywl

    began_s = time.monotonic()
    report = raywl.stage(
        order["ref"], nodes=order["nodes"], address=order["address"], prefetch=False, timeout_s=300.0
    )
    return {"began_s": began_s, "ended_s": time.monotonic(), **report.to_dict()}


def _fetch(order: dict[str, Any]) -> dict[str, Any]:
    from raywl.opening import open_checkpoint

    began_s = time.monotonic()
    nbytes = open_checkpoint(order["ref"]).fetch()
    return {"began_s": began_s, "ended_s": time.monotonic(), "fetched_bytes": nbytes}


if __name__ == "__main__":
    main()
