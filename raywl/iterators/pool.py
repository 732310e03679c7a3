"""Files read ahead by several threads, in order and within bounds."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Generic, Self, TypeVar

from raywl.node.memory import give_back_freed

__all__ = ["FilePool", "Stopped"]

_KEPT_BYTES = 16 << 20
"""Freed memory that isn't worth giving back."""

Item = TypeVar("Item")
Result = TypeVar("Result")


class Stopped(Exception):
    """Raised inside of the pool's threads once nobody wants what they read."""


class FilePool(Generic[Item, Result]):
    """Reads one item after the other by `max_workers` threads; results come in the order of the items.

    Never more than `max_workers + 1` items are being read, waiting, or in use: the one that was taken last,
    and as many ahead of it. One more is begun only by `begin_next`, which is to be called once nothing of
    the item before is in use any more.

    Args:
        read: Reads one item. Called by the pool's threads with the item and a function that raises `Stopped`
            once the pool is closed, to be called now and then.
        items: In order.
        max_workers: Threads.
    """

    def __init__(
        self,
        read: Callable[[Item, Callable[[], None]], Result],
        items: Sequence[Item],
        max_workers: int,
    ) -> None:
        self._read = read
        self._rest: Iterator[Item] = iter(items)
        self._stop = threading.Event()
        self._begun: deque[Future[Result]] = deque()
        self._freed_bytes = 0
        self._threads = ThreadPoolExecutor(max_workers, thread_name_prefix="raywl-files")
        for _ in range(max_workers):
            self.begin_next()

    def _check_stop(self) -> None:
        if self._stop.is_set():
            raise Stopped

    def begin_next(self, freed_bytes: int = 0) -> None:
        """Begins with one more item, if any are left.

        Args:
            freed_bytes: What the items that nobody uses any more took since the last call.
        """
        self._freed_bytes += freed_bytes
        if self._freed_bytes >= _KEPT_BYTES:
            # What the threads allocate, the consumer frees, and the allocator would keep.
            give_back_freed()
            self._freed_bytes = 0
        for item in self._rest:
            self._begun.append(self._threads.submit(self._read, item, self._check_stop))
            return

    def take(self) -> Result:
        """Waits for the next item.

        Raises:
            Whatever reading it raised.
        """
        return self._begun.popleft().result()

    def close(self) -> None:
        """Drops what was read and waits for the threads, which end at their next check."""
        self._stop.set()
        self._threads.shutdown(cancel_futures=True)
        self._begun.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
