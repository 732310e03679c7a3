"""The benchmark of staging: hosts, source and measurement, small."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request

import pytest

from raywl.bench.hosts import network_hosts
from raywl.bench.plots import write_times
from raywl.errors import ClusterError


def test_a_source_at_a_rate(tmp_path):
    """Ranges are right, what was sent is counted, rates hold."""
    data = bytes(range(256)) * 4096
    (tmp_path / "model.safetensors").write_bytes(data)
    server = subprocess.Popen(
        [sys.executable, "-m", "raywl.bench.source", str(tmp_path), "127.0.0.1", "0", "0"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        url = json.loads(server.stdout.readline())["url"]

        def get(path: str, **headers: str):
            request = urllib.request.Request(f"{url}/{path}", headers=headers)
            with urllib.request.urlopen(request, timeout=30) as answer:
                return answer.status, dict(answer.headers), answer.read()

        assert b'href="model.safetensors"' in get("")[2]
        status, headers, body = get("model.safetensors", Range="bytes=1000-1999")
        assert (status, body) == (206, data[1000:2000])
        assert headers["Content-Range"] == f"bytes 1000-1999/{len(data)}"
        server.stdin.write("rates 10000000 0\n")
        server.stdin.flush()
        assert json.loads(server.stdout.readline())["sent_bytes"] == 1000
        assert get("model.safetensors")[2] == data
    finally:
        server.kill()
        server.wait(30)


def test_a_picture(tmp_path):
    rows = [
        {"situation": "a", "what": "stage", "hosts": 1, "median_s": 11.0},
        {"situation": "a", "what": "alone", "hosts": 4, "median_s": 44.0},
        {"situation": "c", "what": "stage", "hosts": 2, "median_s": 3.0},
    ]
    write_times(tmp_path / "times.svg", {"rows": rows})
    text = (tmp_path / "times.svg").read_text()
    assert text.count("<rect") == 3
    assert "4 hosts, each alone" in text


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_benchmark_runs():
    """Two hosts, each a network of its own; skipped where the machine makes none."""
    try:
        with network_hosts(["x"], "1gbit"):
            pass
    except ClusterError as error:
        pytest.skip(f"this machine makes no hosts: {error}")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "raywl", "bench", "cluster", "--size", "48MiB", "--hosts", "1,2"),
            *("--situation", "b", "--situation", "c", "--repeat", "1", "--json"),
        ],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    rows = {(row["situation"], row["hosts"]): row for row in json.loads(done.stdout)["rows"]}
    assert set(rows) == {("b", 1), ("b", 2), ("c", 2)}
    assert all(row["source_ratio"] <= 1.02 for row in rows.values())
    assert rows["c", 2]["source_ratio"] <= 0.02
    assert rows["b", 2]["median_s"] < rows["b", 1]["median_s"]
    assert all(row["most_sent_ratio"] <= 1.05 for row in rows.values())
