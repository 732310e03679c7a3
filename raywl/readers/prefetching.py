"""The page cache filled ahead of the reads."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar

from raywl.checkpoint import Manifest
from raywl.node.prefetch import FileRange, prefetch
from raywl.plan import Read

__all__ = ["Prefetcher", "prefetch_with", "prefetching"]

Prefetcher = Callable[[Manifest, Sequence[FileRange]], AbstractContextManager[None]]
"""Starts to fill the page cache with ranges of a checkpoint's files, in order; ends when it is left."""

_NODES: ContextVar[Prefetcher | None] = ContextVar("raywl_prefetcher", default=None)


@contextlib.contextmanager
def prefetch_with(prefetcher: Prefetcher) -> Iterator[None]:
    """Lets loads in the block prefetch through something that acts for the whole node."""
    token = _NODES.set(prefetcher)
    try:
        yield
    finally:
        _NODES.reset(token)


@contextlib.contextmanager
def prefetching(manifest: Manifest, reads: Sequence[Read]) -> Iterator[None]:
    """Fills the page cache while the block reads.

    Args:
        manifest: The checkpoint.
        reads: What the block is about to read, in its order.
    """
    ranges = [FileRange(read.file, read.start, read.end) for read in reads]
    with (_NODES.get() or _in_this_process)(manifest, ranges):
        yield


@contextlib.contextmanager
def _in_this_process(manifest: Manifest, ranges: Sequence[FileRange]) -> Iterator[None]:
    stop = threading.Event()
    paths = {file.name: manifest.path(file.name) for file in manifest.files}
    thread = threading.Thread(
        target=prefetch, args=(ranges, paths), kwargs={"stop": stop}, name="raywl-prefetch", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
