"""What ranks have read and how long it took is on the metrics port of their node."""

from __future__ import annotations

import re
import urllib.request

import pytest

import raywl
from tests.cluster.conftest import eventually
from tests.cluster.parts import SHARDS, Model

pytestmark = pytest.mark.usefixtures("driver")

LINE = re.compile(r"^(ray_raywl_\w+)\{(.*)\} ([\d.e+-]+)$", re.MULTILINE)


def _samples(addresses):
    found = {}
    for address in addresses:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        for name, tags, value in LINE.findall(text):
            labels = dict(re.findall(r'(\w+)="([^"]*)"', tags))
            found[
                name, labels.get("rank"), labels.get("work"), labels.get("source") or labels.get("phase")
            ] = float(value)
    return found


def test_bytes_and_seconds_of_every_rank(checkpoint):
    """Counters hold the report's own numbers, by rank, source and phase, for loads and reloads."""
    import ray

    with raywl.launch(checkpoint, Model, tp_size=2, shards=SHARDS, timeout_s=100.0) as group:
        loaded = group.report
        assert loaded.bytes_by_source == {"files": loaded.bytes_read}
        group.reload(checkpoint)
        addresses = [
            f"{node['NodeManagerAddress']}:{node['MetricsExportPort']}"
            for node in ray.nodes()
            if node["Alive"]
        ]
        last = ("ray_raywl_phase_seconds_total", "1", "reload", "read")
        eventually(lambda: last in _samples(addresses), 60, "the counters of the last reload")
        samples = _samples(addresses)
    for rank, report in enumerate(loaded.ranks):
        assert samples["ray_raywl_bytes_total", str(rank), "load", "files"] == report.bytes_read
        for phase, seconds in report.phases.items():
            shown = samples["ray_raywl_phase_seconds_total", str(rank), "load", phase]
            assert shown == pytest.approx(seconds, rel=1e-3)
