"""How far a load is: the callable that loaders report to, and a default that prints to standard error."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, TextIO

from raywl.text import format_bytes

__all__ = ["Progress", "make_progress"]

Progress = Callable[[int, int, str], None]
"""Called as `progress(done_bytes, total_bytes, phase)`, possibly from several threads at a time."""

_MAX_LINES = 10
_NUM_COLUMNS, _NUM_ROWS = 80, 24
_MIN_LINE_INTERVAL_S = 1.0


def make_progress(progress: bool | Progress | None) -> Progress | None:
    """What to call for each step of a load.

    Args:
        progress: `True` for the default display, a bar on a terminal and a few plain lines elsewhere;
            a callable to be called itself; `None` or `False` for none.

    Raises:
        TypeError: It is none of these.
    """
    if progress is None or progress is False:
        return None
    if progress is True:
        if sys.stderr is None:
            # A process without a terminal may have none.
            return None
        return _Bar(sys.stderr) if sys.stderr.isatty() else _Lines(sys.stderr)
    if not callable(progress):
        raise TypeError(f"progress must be True, None or a callable, not {type(progress).__name__}")
    return progress


class _Display:
    """Orders the calls of all threads: within a phase the count only grows, and its end is shown once."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lock = threading.Lock()
        self._current: tuple[str, int] | None = None
        self._done_bytes = 0
        self._finished: set[tuple[str, int]] = set()

    def __call__(self, done_bytes: int, total_bytes: int, phase: str) -> None:
        key = (phase, total_bytes)
        with self._lock:
            if done_bytes == 0 and total_bytes:
                self._finished.discard(key)
            if key in self._finished:
                # A slower thread's older count, after the end was shown.
                return
            if key != self._current:
                if self._current is not None:
                    self._close()
                self._current, self._done_bytes = key, 0
                self._open(phase, total_bytes)
            self._done_bytes = max(self._done_bytes, done_bytes)
            self._show(self._done_bytes, total_bytes, phase)
            if self._done_bytes >= total_bytes:
                self._close()
                self._current = None
                self._finished.add(key)

    def _open(self, phase: str, total_bytes: int) -> None: ...

    def _show(self, done_bytes: int, total_bytes: int, phase: str) -> None:
        raise NotImplementedError

    def _close(self) -> None: ...


class _Bar(_Display):
    _bar: Any = None

    def _open(self, phase: str, total_bytes: int) -> None:
        from tqdm import tqdm

        self._bar = tqdm(
            total=total_bytes, desc=phase, unit="B", unit_scale=True, unit_divisor=1024, file=self._stream,
            **_size(self._stream),
        )  # fmt: skip

    def _show(self, done_bytes: int, total_bytes: int, phase: str) -> None:
        self._bar.update(done_bytes - self._bar.n)

    def _close(self) -> None:
        self._bar.close()


def _size(terminal: TextIO) -> dict[str, int]:
    """For `tqdm`, of a terminal that has no size, as in some containers: it would show nothing there. Any
    other one tells by itself."""
    with contextlib.suppress(OSError, ValueError):
        if 0 in os.get_terminal_size(terminal.fileno()):
            return {"ncols": _NUM_COLUMNS, "nrows": _NUM_ROWS}
    return {}


class _Lines(_Display):
    _next_step = 0
    _last_s = 0.0

    def _open(self, phase: str, total_bytes: int) -> None:
        self._next_step, self._last_s = 1, time.monotonic()

    def _show(self, done_bytes: int, total_bytes: int, phase: str) -> None:
        finished = done_bytes >= total_bytes
        step = _MAX_LINES if finished else done_bytes * _MAX_LINES // total_bytes
        now_s = time.monotonic()
        if not finished and (step < self._next_step or now_s - self._last_s < _MIN_LINE_INTERVAL_S):
            return
        self._next_step, self._last_s = step + 1, now_s
        percent = 100 if finished else done_bytes * 100 // total_bytes
        print(
            f"{phase}: {percent} % ({format_bytes(done_bytes)} of {format_bytes(total_bytes)})",
            file=self._stream,
            flush=True,
        )
