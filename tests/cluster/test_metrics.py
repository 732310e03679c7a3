"""What ranks have read and how long it took is on the metrics port of their node."""

from __future__ import annotations

import contextlib
import re
import urllib.request

import pytest

import raywl
from tests.cluster.conftest import eventually
from tests.cluster.parts import SHARDS, Model

pytestmark = pytest.mark.usefixtures("driver")

LINE = re.compile(r"^(ray_raywl_\w+)\{(.*)\} ([\d.e+-]+)$", re.MULTILINE)


def _pages():
    """What the nodes publish; a node's port is known, and answers, some time after the node is there."""
    import ray

    for node in ray.nodes():
        url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
        with (
            contextlib.suppress(OSError),
            urllib.request.urlopen(url, timeout=10) as page,
        ):
            yield page.read().decode()


def _samples(group):
    """The counters of a group; others that were on the cluster have left theirs."""
    found = {}
    for text in _pages():
        for name, tags, value in LINE.findall(text):
            labels = dict(re.findall(r'(\w+)="([^"]*)"', tags))
            if labels.get("group") != group:
                continue
            found[
                name, labels.get("rank"), labels.get("work"), labels.get("source") or labels.get("phase")
            ] = float(value)
    return found


def test_bytes_and_seconds_of_every_rank(checkpoint):
    """Counters hold the report's own numbers, by rank, source and phase, for loads and reloads."""
    with raywl.launch(checkpoint, Model, tp_size=2, shards=SHARDS, timeout_s=100.0) as group:
        loaded = group.report
        assert loaded.bytes_by_source == {"files": loaded.bytes_read}
        group.reload(checkpoint)
        # What comes last of each rank; each of them publishes at a time of its own.
        last = {("ray_raywl_phase_seconds_total", str(rank), "reload", "read") for rank in range(2)}
        name = group.status()["name"]
        eventually(lambda: last <= set(_samples(name)), 90, "the counters of the last reload")
        samples = _samples(name)
    for rank, report in enumerate(loaded.ranks):
        assert samples["ray_raywl_bytes_total", str(rank), "load", "files"] == report.bytes_read
        for phase, seconds in report.phases.items():
            # What took no time isn't counted.
            shown = samples.get(("ray_raywl_phase_seconds_total", str(rank), "load", phase), 0.0)
            assert shown == pytest.approx(seconds, rel=1e-3)
