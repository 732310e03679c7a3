"""One lock of other processes for all that this process does at once."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

from raywl.sources.transfer import Stopped

__all__ = ["SharedLocks"]

_LOOK_S = 0.5


class SharedLocks:
    """Locks that keep other processes away, held once for all users of this one.

    Two stagings of one repository on the same nodes would otherwise wait for each other for ever: each would
    have the lock on one node, and need it on the other to get done.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders: dict[str, _Holder] = {}

    @contextlib.contextmanager
    def held(
        self, key: str, lock: Callable[[], AbstractContextManager[None]], stop: threading.Event
    ) -> Iterator[None]:
        """Has a lock held as long as the block lasts.

        Args:
            key: What it is for.
            lock: Takes it, and waits for it as long as may be.
            stop: Ends the waiting.

        Raises:
            Stopped: `stop` was set.
            LockError: As `lock`.
        """
        with self._lock:
            holder = self._holders.get(key)
            if holder is None:
                holder = self._holders[key] = _Holder(lock)
            holder.num_users += 1
        try:
            while not holder.tried.wait(_LOOK_S):
                if stop.is_set():
                    raise Stopped
            if holder.error is not None:
                raise holder.error
            yield
        finally:
            with self._lock:
                holder.num_users -= 1
                if holder.num_users == 0 or holder.error is not None:
                    # The next one takes it anew.
                    if self._holders.get(key) is holder:
                        del self._holders[key]
                    holder.release.set()


class _Holder:
    """A thread that takes a lock and gives it back: only the same one can."""

    def __init__(self, lock: Callable[[], AbstractContextManager[None]]) -> None:
        self.num_users = 0
        self.tried, self.release = threading.Event(), threading.Event()
        self.error: Exception | None = None
        threading.Thread(target=self._hold, args=(lock,), name="raywl-lock", daemon=True).start()

    def _hold(self, lock: Callable[[], AbstractContextManager[None]]) -> None:
        try:
            with lock():
                self.tried.set()
                self.release.wait()
        except Exception as error:
            self.error = error
            self.tried.set()
