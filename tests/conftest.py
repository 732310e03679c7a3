"""What all tests stand on: no network, a Ray of each process's own, and nothing left running at the end."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import psutil
import pytest
from hypothesis import settings

# Before anything imports ray or a hub client. The path is short, since sockets lie below it.
_OWN = Path(tempfile.mkdtemp(prefix="rw", dir="/tmp"))
_TOKEN = _OWN / "token"
_TOKEN.write_text(secrets.token_hex(32))
os.environ.update(
    HF_HUB_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    RAY_AUTH_MODE="token",
    RAY_AUTH_TOKEN_PATH=str(_TOKEN),
    RAY_TMPDIR=str(_OWN),
    RAY_USAGE_STATS_ENABLED="0",
    TOKENIZERS_PARALLELISM="false",
)
os.environ.pop("RAY_ADDRESS", None)
# A run in the background ignores interrupts, and what it starts would too.
signal.signal(signal.SIGINT, signal.default_int_handler)
_LEAVE_S = 30.0
# How long an example takes says more about the machine.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


def _of_this_run() -> list[psutil.Process]:
    """Processes of a Ray that this run started: they have its folder in their environment."""
    found = []
    me = os.getpid()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            ours = process.environ().get("RAY_TMPDIR") == str(_OWN)
            # Python's own helpers end with this process.
            if ours and process.pid != me and "multiprocessing" not in " ".join(process.cmdline()):
                found.append(process)
    return found


_left: list[str] = []
"""What the worker processes of this run left running."""


def pytest_testnodedown(node, error) -> None:
    """A worker has ended (pytest-xdist)."""
    _left.extend(getattr(node, "workeroutput", {}).get("left_running", ()))


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """No process of this run may outlive it: ranks, agents or a Ray that a test forgot."""
    if ray := sys.modules.get("ray"):
        ray.shutdown()
    # What Ray ends takes a moment to go.
    _, alive = psutil.wait_procs(_of_this_run(), timeout=_LEAVE_S)
    for process in alive:
        with contextlib.suppress(psutil.Error):
            if process.is_running():
                _left.append(f"{process.pid} {process.cmdline()}")
                process.kill()
    shutil.rmtree(_OWN, ignore_errors=True)
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_running"] = _left
    elif _left:
        print("\nleft running:", *_left, sep="\n", file=sys.stderr)
        if exitstatus == 0:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
