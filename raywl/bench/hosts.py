"""Hosts to measure with on one machine: network namespaces joined by a bridge, with links of a rate."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from raywl.errors import ClusterError

__all__ = ["Host", "network_hosts"]

_END_S = 15.0


@dataclass(frozen=True, slots=True)
class Host:
    """One namespace: a network of its own, with the machine's files and processes."""

    name: str
    address: str

    def command(self, *words: str) -> list[str]:
        """A command that runs there."""
        return ["ip", "netns", "exec", self.name, *words]

    def pids(self) -> list[int]:
        """Processes there."""
        return [int(pid) for pid in _run("ip", "netns", "pids", self.name).split()]

    def sent_bytes(self) -> int:
        """All that its link has sent, headers included."""
        path = "/sys/class/net/eth0/statistics/tx_bytes"
        return int(_run("ip", "netns", "exec", self.name, "cat", path))


def _run(*words: str) -> str:
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)
    except OSError as error:
        raise ClusterError(f"{' '.join(words)}: {error}") from None
    if done.returncode:
        raise ClusterError(f"{' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


@contextlib.contextmanager
def network_hosts(names: Sequence[str], rate: str | None = "1gbit") -> Iterator[list[Host]]:
    """Hosts that reach each other and nothing else; gone at the end, with the processes in them.

    Args:
        names: What to call them.
        rate: Of what each of them can send, as `tc` writes it; `None` for no limit.

    Raises:
        ClusterError: This machine makes no namespaces: it takes root, `ip` and `tc`.
    """
    tag = secrets.token_hex(2)
    bridge = f"rwb{tag}"
    hosts = [Host(f"rw{tag}{name}", f"10.79.0.{number}") for number, name in enumerate(names, 1)]
    with contextlib.ExitStack() as stack:
        _run("ip", "link", "add", bridge, "type", "bridge")
        stack.callback(_run, "ip", "link", "del", bridge)
        _run("ip", "link", "set", bridge, "up")
        for number, host in enumerate(hosts):
            _run("ip", "netns", "add", host.name)
            stack.callback(_remove, host)
            outer = f"rwv{tag}{number}"
            _run("ip", "link", "add", outer, "type", "veth", "peer", "eth0", "netns", host.name)
            _run("ip", "link", "set", outer, "master", bridge, "up")
            inside = ("ip", "-n", host.name)
            _run(*inside, "link", "set", "lo", "up")
            _run(*inside, "address", "add", f"{host.address}/24", "dev", "eth0")
            _run(*inside, "link", "set", "eth0", "up")
            # Programs find their own address by the way to the rest of the world.
            _run(*inside, "route", "add", "default", "dev", "eth0")
            if rate is not None:
                shape = ("tc", "qdisc", "replace", "dev", "eth0", "root", "tbf", "rate", rate)
                _run(*host.command(*shape, "burst", "256kb", "latency", "50ms"))
        yield hosts


def _remove(host: Host) -> None:
    give_up_s = time.monotonic() + _END_S
    while (pids := host.pids()) and time.monotonic() < give_up_s:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    _run("ip", "netns", "del", host.name)
