"""Hosts for tests: network namespaces of this machine, joined by a bridge."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest


@dataclass(frozen=True)
class NetworkHost:
    """One namespace: a network of its own, with the machine's files and processes."""

    name: str
    address: str

    def pids(self) -> list[int]:
        """Processes in it."""
        return [int(pid) for pid in _ip("netns", "pids", self.name).split()]


def _ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=30, check=False)
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


@contextlib.contextmanager
def network_hosts(count: int) -> Iterator[list[NetworkHost]]:
    """Hosts that reach each other and nothing else; skips the test where the machine forbids them.

    At the end they are removed, with the processes in them.
    """
    tag = secrets.token_hex(3)
    bridge = f"rwb{tag}"
    hosts = [NetworkHost(f"rw{tag}h{n}", f"10.77.0.{n}") for n in range(1, count + 1)]
    with contextlib.ExitStack() as stack:
        try:
            _ip("link", "add", bridge, "type", "bridge")
            stack.callback(_ip, "link", "del", bridge)
            _ip("link", "set", bridge, "up")
            for number, host in enumerate(hosts):
                _ip("netns", "add", host.name)
                stack.callback(_remove, host)
                _ip("link", "add", f"rwv{tag}{number}", "type", "veth", "peer", "eth0", "netns", host.name)
                _ip("link", "set", f"rwv{tag}{number}", "master", bridge, "up")
                _ip("-n", host.name, "link", "set", "lo", "up")
                _ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", "eth0")
                _ip("-n", host.name, "link", "set", "eth0", "up")
        except OSError as error:
            pytest.skip(f"this machine makes no network namespaces: {error}")
        yield hosts


def _remove(host: NetworkHost) -> None:
    give_up_s = time.monotonic() + 10.0
    while (pids := host.pids()) and time.monotonic() < give_up_s:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    _ip("netns", "del", host.name)
