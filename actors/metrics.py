"""What ranks and agents count, on each node's metrics port as Ray publishes it.

Ray prefixes names with `ray_` and gives counters the suffix `_total`: `ray_raywl_bytes_total` and
`ray_raywl_phase_seconds_total`.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from ray.util.metrics import Counter

if TYPE_CHECKING:
    from raywl.report import LoadReport

__all__ = ["count_fetched", "count_load"]


@cache
def _bytes() -> Any:
    return Counter(
        "raywl_bytes",
        description="Bytes that raywl has read, by where from: files of the node, or a hub",
        tag_keys=("source", "group", "rank", "work"),
    )


@cache
def _seconds() -> Any:
    return Counter(
        "raywl_phase_seconds",
        description="Seconds that ranks have spent loading, by phase",
        tag_keys=("phase", "group", "rank", "work"),
    )


def count_load(report: LoadReport, group: str, rank: int, work: str) -> None:
    """Counts one rank's load. Runs in the rank's process.

    Args:
        report: What it did.
        group: The name of the rank's group.
        rank: Counted over all replicas.
        work: `"load"` or `"reload"`.
    """
    tags = {"group": group, "rank": str(rank), "work": work}
    for source, nbytes in report.bytes_by_source.items():
        if nbytes:  # a counter refuses 0
            _bytes().inc(nbytes, {**tags, "source": source})
    for phase, seconds in report.phases.items():
        if seconds > 0:
            _seconds().inc(seconds, {**tags, "phase": phase})


def count_fetched(source: str, nbytes: int) -> None:
    """Counts what a node's agent has downloaded. Runs in the agent's process."""
    if nbytes:
        _bytes().inc(nbytes, {"source": source, "group": "", "rank": "", "work": "open"})
