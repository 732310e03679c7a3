"""What is left after a group, after a driver, after a crash: what the design says, and no more."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

import raywl
from raywl.actors.names import NAMESPACE, agent_name, coordinator_name
from tests.cluster.conftest import connected, eventually
from tests.cluster.parts import Model, is_gone, pid_of

ROOT = str(Path(__file__).parents[2])
SCRIPT = """
    import os, sys
    import raywl
    from tests.cluster.parts import Model, pid_of
    group = raywl.launch(sys.argv[1], Model, address=sys.argv[2], agent_idle_s=1.0, timeout_s=60.0)
    print(*group.run(pid_of), flush=True)
    sys.stdin.readline()
"""


def helpers() -> list[str]:
    """Names of raywl's actors."""
    from ray.util import list_named_actors

    return [a["name"] for a in list_named_actors(all_namespaces=True) if a["namespace"] == NAMESPACE]


def start_driver(checkpoint: str, address: str) -> tuple[subprocess.Popen[str], int]:
    """A driver of its own process that has launched a group; and its rank's pid."""
    driver = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(SCRIPT), checkpoint, address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert driver.stdout is not None
    for line in driver.stdout:
        if line.strip().isdecimal():
            return driver, int(line)
    raise AssertionError(f"the driver ended: {driver.wait()}")


def test_helpers_end_by_themselves_when_idle(driver, checkpoint):
    """After `shutdown` they stay for the idle time, then end; a later launch works."""
    raywl.launch(checkpoint, Model, agent_idle_s=3.0).shutdown(agents=True)
    assert helpers() == []
    group = raywl.launch(checkpoint, Model, agent_idle_s=3.0)
    (pid,) = group.run(pid_of)
    group.shutdown()
    assert coordinator_name() in helpers()
    assert len(helpers()) == 2
    eventually(lambda: is_gone(pid), 10.0, "the rank's process ends")
    eventually(lambda: not helpers(), 30.0, "the helpers end")
    with raywl.launch(checkpoint, Model) as again:
        assert len(again.run(pid_of)) == 1
    again.shutdown(agents=True)
    assert helpers() == []


def test_a_driver_that_is_killed(cluster, checkpoint):
    """Its ranks go at once; its lease runs out; the helpers end after the idle time."""
    with connected(cluster.address):
        other, pid = start_driver(checkpoint, cluster.address)
        other.kill()
        other.wait()
        eventually(lambda: is_gone(pid), 20.0, "the rank's process ends")
        eventually(lambda: not helpers(), 40.0, "the helpers end")


def test_a_driver_that_ends_without_shutdown(cluster, checkpoint):
    """At its end it gives the group back, so that nobody waits for the lease."""
    with connected(cluster.address):
        other, pid = start_driver(checkpoint, cluster.address)
        assert other.stdin is not None
        other.stdin.close()
        assert other.wait(timeout=30) == 0
        start_s = time.monotonic()
        eventually(lambda: is_gone(pid), 20.0, "the rank's process ends")
        eventually(lambda: not helpers(), 9.0, "the helpers end before a lease could have run out")
        assert time.monotonic() - start_s < 10


def test_helpers_that_are_killed(driver, checkpoint):
    """Ray starts them again; the coordinator learns the group from the next heartbeat, and launches work."""
    import ray

    with raywl.launch(checkpoint, Model, agent_idle_s=3.0) as group:
        names = [coordinator_name(), agent_name(group.status()["agents"][0]["node_id"])]
        for name in names:
            handle = ray.get_actor(name, namespace=NAMESPACE)
            pid = ray.get(handle.__ray_call__.remote(lambda self: os.getpid()))
            os.kill(pid, signal.SIGKILL)
        name = group.status()["name"]

        def known_again() -> bool:
            told = group.status()["coordinator"]
            return told is not None and name in told["groups"]

        eventually(known_again, 30.0, "the coordinator knows the group again")
        assert len(group.run(pid_of)) == 1
        with raywl.launch(checkpoint, Model) as second:
            assert len(second.run(pid_of)) == 1


def test_a_user_who_leaves_the_cluster_first(cluster, checkpoint):
    """`ray.shutdown()` before the group's: no call joins a cluster again behind the user's back."""
    import ray

    with connected(cluster.address):
        group = raywl.launch(checkpoint, Model)
        (pid,) = group.run(pid_of)
        ray.shutdown()
        with pytest.raises(raywl.errors.ClusterError, match="left"):
            group.run(pid_of)
        assert not group.status()["alive"]
        group.shutdown()
        assert not ray.is_initialized()
    eventually(lambda: is_gone(pid), 20.0, "the rank's process ends")


def test_a_cluster_of_our_own_ends_with_its_last_group(checkpoint, monkeypatch):
    """It serves both, and leaves no process."""
    import ray

    assert not ray.is_initialized()
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    before = {p.pid for p in psutil.Process().children(recursive=True)}
    first = raywl.launch(checkpoint, Model, timeout_s=100.0)
    assert any("started a local Ray cluster" in note for note in first.report.notes)
    second = raywl.launch(checkpoint, Model, timeout_s=100.0)
    own = [p for p in psutil.Process().children(recursive=True) if p.pid not in before]
    assert own
    first.shutdown()
    assert len(second.run(pid_of)) == 1
    second.shutdown()
    assert not ray.is_initialized()
    _, alive = psutil.wait_procs(own, timeout=20)
    assert not alive


def test_a_failed_launch_ends_a_cluster_of_our_own(tmp_path):
    """Nothing of it stays behind the error."""
    import ray

    before = {p.pid for p in psutil.Process().children(recursive=True)}
    with pytest.raises(raywl.errors.NotFoundError):
        raywl.launch(tmp_path / "none", Model, address="local", timeout_s=100.0)
    assert not ray.is_initialized()
    own = [p for p in psutil.Process().children(recursive=True) if p.pid not in before]
    _, alive = psutil.wait_procs(own, timeout=20)
    assert not alive
