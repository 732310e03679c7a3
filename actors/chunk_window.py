"""How many bytes of chunks may be in the object store, and what is known of the rates that they move at."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from typing import Any

__all__ = ["Meter", "Offers", "Window"]

_LINGER_S = 1.0
"""The store keeps what was freed for so long."""


class Window:
    """A budget of bytes: those in use, and those that were freed within the last second."""

    def __init__(self, limit_bytes: int, now: Callable[[], float] = time.monotonic) -> None:
        """Args:
        limit_bytes: The most at once; a single larger piece is let in alone.
        now: A clock, for tests.
        """
        self.limit_bytes = limit_bytes
        self.peak_bytes = 0
        """The most that ever was in it."""
        self._now = now
        self._used_bytes = self._lingering_bytes = 0
        self._freed: deque[tuple[float, int]] = deque()
        self._changed = threading.Condition()

    def take(self, nbytes: int, timeout_s: float = 0.0) -> bool:
        """Takes room, if there is any within the time."""
        give_up_s = self._now() + timeout_s
        with self._changed:
            while not self._fits(nbytes):
                left_s = give_up_s - self._now()
                if left_s <= 0:
                    return False
                # What lingers leaves without a word.
                self._changed.wait(min(left_s, _LINGER_S / 8))
            self._used_bytes += nbytes
            self.peak_bytes = max(self.peak_bytes, self._used_bytes + self._lingering_bytes)
            return True

    def exceed(self, nbytes: int) -> None:
        """Takes room that isn't there: for what may not wait, since others wait for it."""
        with self._changed:
            self._used_bytes += nbytes
            self.peak_bytes = max(self.peak_bytes, self._used_bytes + self._lingering_bytes)

    def free(self, nbytes: int) -> None:
        """Gives room back, a second from now."""
        with self._changed:
            self._used_bytes -= nbytes
            self._lingering_bytes += nbytes
            self._freed.append((self._now() + _LINGER_S, nbytes))
            self._changed.notify_all()

    def _fits(self, nbytes: int) -> bool:
        while self._freed and self._freed[0][0] <= self._now():
            self._lingering_bytes -= self._freed.popleft()[1]
        held = self._used_bytes + self._lingering_bytes
        return held == 0 or held + nbytes <= self.limit_bytes


class Meter:
    """Bytes per second while there was anything to do, over the last few seconds of that."""

    def __init__(self, span_s: float, min_count: int, now: Callable[[], float] = time.monotonic) -> None:
        """Args:
        span_s: Busy time that the rate is taken over.
        min_count: Pieces in it that make a rate worth telling.
        now: A clock, for tests.
        """
        self.total_bytes = 0
        self._span_s, self._min_count, self._now = span_s, min_count, now
        self._num_busy = 0
        self._busy_since_s = self._busy_s = 0.0
        self._from_s = 0.0
        """Busy time that the rate is taken from."""
        self._done: deque[tuple[float, int]] = deque()
        self._lock = threading.Lock()

    def begin(self) -> None:
        """A piece is under way."""
        with self._lock:
            if self._num_busy == 0:
                self._busy_since_s = self._now()
            self._num_busy += 1

    def end(self, nbytes: int) -> None:
        """It is done; with 0 bytes, it came to nothing."""
        with self._lock:
            self._num_busy -= 1
            if self._num_busy == 0:
                self._busy_s += self._now() - self._busy_since_s
            if nbytes:
                self.total_bytes += nbytes
                busy_s = self._busy_until()
                self._done.append((busy_s, nbytes))
                while len(self._done) > self._min_count and self._done[0][0] < busy_s - self._span_s:
                    self._from_s = self._done.popleft()[0]

    @property
    def bytes_per_s(self) -> float:
        """The rate; 0 as long as too little is known."""
        with self._lock:
            if len(self._done) < self._min_count:
                return 0.0
            busy_s = self._done[-1][0] - self._from_s
            return sum(nbytes for _, nbytes in self._done) / busy_s if busy_s > 0 else 0.0

    def _busy_until(self) -> float:
        return self._busy_s + (self._now() - self._busy_since_s if self._num_busy else 0.0)


class Offers:
    """Chunks that this node has put for others, each once for all that ask for it meanwhile.

    What nobody fetches within the time is dropped: whoever asked for it is dead or asks again.
    """

    def __init__(
        self, window: Window, meter: Meter, keep_s: float, now: Callable[[], float] = time.monotonic
    ):
        """Args:
        window: Of what is put.
        meter: Told what was fetched.
        keep_s: How long something is offered.
        now: A clock, for tests.
        """
        self._window, self._meter, self._keep_s, self._now = window, meter, keep_s, now
        self._made: dict[Hashable, _Offer] = {}
        self._lock = threading.Lock()

    def offer(self, key: Hashable, to: str, nbytes: int, put: Callable[[], Any]) -> Any | None:
        """A reference to a chunk; `None` when there is no room.

        Args:
            key: The chunk.
            to: Who asks.
            nbytes: Its size.
            put: Puts it into the store.
        """
        self.drop_old()
        with self._lock:
            offer = self._made.get(key)
            if offer is None:
                if not self._window.take(nbytes):
                    return None
                offer = self._made[key] = _Offer(nbytes)
            if to not in offer.to:
                self._meter.begin()
            offer.to[to] = self._now() + self._keep_s
        # Others wait for the one that puts it, not for all chunks.
        with offer.lock:
            if offer.ref is None:
                try:
                    offer.ref = put()
                except BaseException:
                    self.done(key, to, fetched=False)
                    raise
            return offer.ref

    def done(self, key: Hashable, to: str, fetched: bool = True) -> None:
        """Somebody has a chunk now; harmless when repeated."""
        with self._lock:
            offer = self._made.get(key)
            if offer is None or offer.to.pop(to, None) is None:
                return
            self._meter.end(offer.nbytes if fetched else 0)
            if not offer.to:
                del self._made[key]
                offer.ref = None
                self._window.free(offer.nbytes)

    def drop_old(self) -> None:
        """Drops what was offered too long ago."""
        now_s = self._now()
        with self._lock:
            old = [
                (key, to) for key, o in self._made.items() for to, until_s in o.to.items() if until_s <= now_s
            ]
        for key, to in old:
            self.done(key, to, fetched=False)

    def drop_all(self) -> None:
        """Drops everything."""
        with self._lock:
            everything = [(key, to) for key, offer in self._made.items() for to in offer.to]
        for key, to in everything:
            self.done(key, to, fetched=False)


class _Offer:
    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.to: dict[str, float] = {}
        self.ref: Any = None
        self.lock = threading.Lock()
