"""The launch script on two hosts, which are network namespaces of this machine."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.conftest import eventually
from tests.examples.conftest import EXAMPLES
from tests.examples.hosts import network_hosts

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def hosts():
    with network_hosts(2) as made:
        yield made


@pytest.fixture
def free_hosts(hosts):
    """Hosts on which nothing runs, before and after."""
    yield hosts
    eventually(lambda: not any(host.pids() for host in hosts), 60.0, "everything on the hosts has ended")


def launch(hosts, *command, options=("--ray=--num-cpus=1 --object-store-memory=100000000",)):
    """The script, started."""
    return subprocess.Popen(
        [
            sys.executable,
            str(EXAMPLES / "launch" / "launch.py"),
            *(f"{host.name}={host.address}" for host in hosts),
            *("--via", "ip netns exec {host}"),
            *("--setup", f"export PATH={Path(sys.executable).parent}:$PATH"),
            *options,
            "--",
            *command,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_loads_over_two_hosts(free_hosts, model_folder, tmp_path):
    """A rank on each, whose layers add up over the network to what the model is in one piece."""
    load, page = EXAMPLES / "launch" / "load.py", tmp_path / "load.html"
    command = ["python", str(load), str(model_folder), "--report", str(page)]
    script = launch(free_hosts, *command)
    out, err = script.communicate(timeout=200)
    assert script.returncode == 0, out + err
    ranks = re.findall(r"^rank (\d) on (\S+): read ([\d,]+) bytes, kept ([\d,]+)$", out, re.MULTILINE)
    assert [rank for rank, *_ in ranks] == ["0", "1"]
    assert {node for _, node, *_ in ranks} == {host.address for host in free_hosts}
    whole = (model_folder / "model.safetensors").stat().st_size
    for _, _, read, kept in ranks:
        assert int(kept.replace(",", "")) < 0.8 * whole
        assert int(read.replace(",", "")) < 0.95 * whole
    assert "largest difference from the model in one piece" in out
    assert all(host.address in page.read_text() for host in free_hosts)


def test_the_exit_code_is_the_commands(free_hosts):
    """It has the cluster's address; its words and its code come through."""
    script = launch(free_hosts[:1], "bash", "-c", 'echo "$1 at $RAY_ADDRESS"; exit 7', "-", 'it\'s "here"')
    out, err = script.communicate(timeout=100)
    assert (script.returncode, out) == (7, f'it\'s "here" at {free_hosts[0].address}:6379\n'), err


def test_a_host_that_does_not_start(free_hosts):
    """It is named, with what Ray said there, and those that had started are ended."""
    script = launch(free_hosts, "true", options=("--ray=--no-such-option",))
    out, err = script.communicate(timeout=100)
    assert script.returncode == 1, out
    assert f"Ray on {free_hosts[0].name} failed" in err
    assert "--no-such-option" in err


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL], ids=lambda how: how.name)
def test_nothing_stays_when_the_script_is_ended(free_hosts, how):
    """Not even when it has no time to clean up: the hosts see that it is gone."""
    script = launch(free_hosts[:1], "bash", "-c", "echo running; exec sleep 1000")
    assert script.stdout.readline() == "running\n"
    script.send_signal(how)
    assert script.wait(60) == (130 if how == signal.SIGINT else -how)
