"""The table benchmark reads what it shared, and counts memory."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

COMMAND = [sys.executable, "-m", "raywl", "bench", "table"]


@pytest.mark.slow
def test_the_command():
    """Two processes read one copy; both ways brought the same rows, or it had failed."""
    done = subprocess.run(
        [*COMMAND, "--size", "128MiB", "--batch", "512", "--repeat", "2", "--json"],
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["table_bytes"] == 128 << 20
    assert found["copies"] == pytest.approx(1.0, abs=0.05)
    low, high = found["spread"]["gather"]
    assert 0 < low <= found["rows_per_s"]["gather"] <= high
    assert found["ratio_to_embedding"] > 0


def test_rows_that_are_no_rows():
    done = subprocess.run([*COMMAND, "--row-bytes", "3"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "--row-bytes 3" in done.stderr
