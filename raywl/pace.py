"""Bytes per second that a process allows itself, so that loading can run beside live serving."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

__all__ = ["Pace", "disk_pace", "environment_number", "peer_pace", "shared_pace"]


class Pace:
    """Lets bytes by at a rate, for all threads that share it."""

    def __init__(self, max_bytes_per_s: float, now: Callable[[], float] = time.monotonic) -> None:
        self._rate, self._now = max_bytes_per_s, now
        self._free_at_s = now()
        self._lock = threading.Lock()

    def delay_s(self, nbytes: int) -> float:
        """Counts bytes that came, and says how long to wait before more are asked for."""
        with self._lock:
            now_s = self._now()
            self._free_at_s = max(self._free_at_s, now_s) + nbytes / self._rate
            return self._free_at_s - now_s


_PACES: dict[tuple[str, float], Pace] = {}
_PACES_LOCK = threading.Lock()


def shared_pace(what: str, max_bytes_per_s: float | None) -> Pace | None:
    """The process's own pace of something at a rate; `None` without one."""
    if not max_bytes_per_s:
        return None
    with _PACES_LOCK:
        return _PACES.setdefault((what, max_bytes_per_s), Pace(max_bytes_per_s))


def disk_pace(num_sharing: int = 1) -> Pace | None:
    """What `RAYWL_MAX_DISK_BYTES_PER_S` allows this process.

    Args:
        num_sharing: Processes of this node that read at the same time, and have the same part of it each.

    Raises:
        ValueError: It isn't a number of at least 0.
    """
    return shared_pace("disk", environment_number("RAYWL_MAX_DISK_BYTES_PER_S", 0.0) / num_sharing)


def peer_pace() -> Pace | None:
    """What `RAYWL_MAX_PEER_BYTES_PER_S` allows this process to take from other nodes.

    Raises:
        ValueError: It isn't a number of at least 0.
    """
    return shared_pace("peers", environment_number("RAYWL_MAX_PEER_BYTES_PER_S", 0.0))


def environment_number(name: str, default: float) -> float:
    """A variable of the environment as a number.

    Raises:
        ValueError: It isn't a number of at least 0.
    """
    text = os.environ.get(name)
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise ValueError(f"{name}={text!r} is not a number of at least 0")
    return value
