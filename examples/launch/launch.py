"""Starts a Ray cluster on some hosts, runs a command on the first of them, and ends the cluster.

    python launch.py HOST HOST ... [options] -- COMMAND ...

A HOST is an address that the others reach, or NAME=ADDRESS where the host is called otherwise in `--via`.
The command finds the cluster by RAY_ADDRESS; its exit code is this script's.

Each host's Ray lasts as long as this script's connection to it, however this script ends. Nothing is stopped
but what was started here, so other Rays on the hosts go on.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import secrets
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

_STARTED = "Ray runtime started"
_END_S = 30.0
# `bash` reads this from its standard input, where no list of processes shows the token: the whole function
# before its first line is run, so that what follows on the input is left to `read`. That ends with the
# connection, and the command with it.
_SCRIPT = """
raywl_on_host() {{
{environment}
{setup} || return $?
{command} </dev/null &
job=$!
(while read -r _; do :; done <&3; kill $job) >/dev/null 2>&1 &
watch=$!
wait $job
code=$?
kill $watch
{cleanup}
return $code
}}
exec 3<&0; raywl_on_host; exit $?
"""
# Ray leaves the address of the cluster behind, and the host's next Ray would be looked for there.
_FORGET = """
latest=${{RAY_TMPDIR:-/tmp}}/ray/ray_current_cluster
grep -qsFx {address} $latest && rm -f $latest
"""


class LaunchError(Exception):
    """A host's Ray didn't start."""


@dataclass(frozen=True)
class Host:
    """One machine."""

    name: str
    """For `--via`."""
    address: str
    """Where the others reach it."""

    @classmethod
    def parse(cls, text: str) -> Host:
        name, _, address = text.rpartition("=")
        return cls(name or address, address)


@dataclass(frozen=True)
class Way:
    """How commands are run on hosts."""

    via: str
    setup: str
    token: str

    def open(
        self, host: Host, command: str, *, cleanup: str = "", address: str = "", **streams: Any
    ) -> subprocess.Popen[str]:
        """A command that runs on a host until it ends or its standard input is closed here."""
        values = {
            # Ray's processes must all have a token, and the same one.
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": self.token,
            # The command is over when Ray is ended: nothing to wait for.
            "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
        }
        if address:
            values["RAY_ADDRESS"] = address
        script = _SCRIPT.format(
            environment="\n".join(f"export {name}={shlex.quote(value)}" for name, value in values.items()),
            setup=self.setup,
            command=command,
            cleanup=cleanup,
        )
        # A session of its own: Ctrl-C reaches this script alone, which then ends the rest in order.
        job = subprocess.Popen(
            [*shlex.split(self.via.format(host=host.name)), "bash", "-s"],
            stdin=subprocess.PIPE,
            text=True,
            start_new_session=True,
            **streams,
        )
        with contextlib.suppress(BrokenPipeError):
            job.stdin.write(script)
            job.stdin.flush()
        return job


def end(job: subprocess.Popen[str], what: str) -> None:
    """Closes the connection, at which the command ends, and waits for that."""
    with contextlib.suppress(BrokenPipeError):
        job.stdin.close()
    try:
        job.wait(_END_S)
    except subprocess.TimeoutExpired:
        print(f"{what} did not end within {_END_S:g} s", file=sys.stderr)
        job.kill()
        job.wait()


class Node:
    """Ray on one host, until `end` or until this process is gone."""

    def __init__(self, host: Host, way: Way, head: str, options: str) -> None:
        self.host = host
        command = f"ray start {options} --node-ip-address={host.address} --disable-usage-stats --block"
        self._job = way.open(
            host,
            command,
            cleanup=_FORGET.format(address=head),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self._told: collections.deque[str] = collections.deque(maxlen=20)
        self._decided, self._started = threading.Event(), False
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        for line in self._job.stdout:
            self._told.append(line)
            if _STARTED in line:
                self._started = True
                self._decided.set()
        self._decided.set()

    def wait(self, timeout_s: float) -> None:
        """Until Ray has started there."""
        decided = self._decided.wait(timeout_s)
        if not self._started:
            how = "failed" if decided else f"did not start within {timeout_s:g} s"
            raise LaunchError(f"Ray on {self.host.name} {how}:\n{''.join(self._told)}")

    def end(self) -> None:
        """Ends Ray there."""
        end(self._job, f"Ray on {self.host.name}")


@contextlib.contextmanager
def cluster(hosts: Sequence[Host], way: Way, *, port: int, options: str, timeout_s: float) -> Iterator[str]:
    """Ray on all hosts, the first one the head; yields its address."""
    head = f"{hosts[0].address}:{port}"
    nodes: list[Node] = []
    try:
        # One after the other: many that join at the same moment make some of them time out.
        for host in hosts:
            role = f"--address={head}" if nodes else f"--head --port={port} --include-dashboard=false"
            nodes.append(Node(host, way, head, f"{role} {options}"))
            nodes[-1].wait(timeout_s)
            print(f"Ray runs on {host.name} ({host.address})", file=sys.stderr)
        yield head
    finally:
        # The head last, or the others would miss it.
        for node in reversed(nodes):
            node.end()


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], usage="%(prog)s HOST [HOST ...] [options] -- COMMAND ..."
    )
    parser.add_argument("hosts", nargs="+", type=Host.parse, metavar="HOST", help="ADDRESS or NAME=ADDRESS")
    parser.add_argument(
        "--via",
        default="ssh -o BatchMode=yes {host}",
        help="how a command is run on a host; {host} is its name (default: %(default)s)",
    )
    parser.add_argument(
        "--setup",
        default=":",
        help="shell line to run first on each host, such as 'cd project && . venv/bin/activate'",
    )
    parser.add_argument(
        "--ray", default="", metavar="OPTIONS", help="more options of `ray start`, on each host"
    )
    parser.add_argument("--port", type=int, default=6379, help="of the head (default: %(default)s)")
    parser.add_argument(
        "--timeout", type=float, default=60, metavar="S", help="for each host's start (default: %(default)s)"
    )
    split = argv.index("--") if "--" in argv else len(argv)
    args, command = parser.parse_args(argv[:split]), argv[split + 1 :]
    if not command:
        parser.error("no command: it goes after --")

    way = Way(args.via, args.setup, secrets.token_hex(32))
    try:
        with cluster(args.hosts, way, port=args.port, options=args.ray, timeout_s=args.timeout) as address:
            job = way.open(args.hosts[0], shlex.join(command), address=address)
            try:
                return job.wait()
            finally:
                end(job, "the command")
    except LaunchError as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
