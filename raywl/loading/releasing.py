"""The page cache of a checkpoint, given back once the last of a node's ranks has read it."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator

from raywl.checkpoint import Manifest
from raywl.errors import LockError
from raywl.locks import get_lock
from raywl.node.page_cache import release_checkpoint_page_cache
from raywl.report import LoadReport
from raywl.text import format_bytes

__all__ = ["released_after"]


@contextlib.contextmanager
def released_after(manifest: Manifest, report: LoadReport) -> Iterator[None]:
    """Drops the checkpoint's pages when the block is done, if no other process of this node is at it.

    The processes that read one checkpoint at the same time each hold a shared lock, which a dead one loses.
    Who is done tries to have it alone: that is only the last of them. A rank that hasn't begun by then
    reads from the disk again, which is slower, and not wrong. When the block fails, nothing is dropped.

    Args:
        manifest: The checkpoint.
        report: Takes the bytes that were dropped, or a note on why none were.
    """
    others = _Others(manifest.path(manifest.files[0].name)) if manifest.files else None
    try:
        yield
        if others is not None and others.are_there():
            report.notes.append("page cache kept: other processes of this node still read the checkpoint")
            return
        paths = [manifest.path(file.name) for file in manifest.files]
        report.released_bytes = release_checkpoint_page_cache(paths)
        report.notes.append(f"page cache: {format_bytes(report.released_bytes)} of the checkpoint released")
    finally:
        if others is not None:
            others.close()


class _Others:
    """Processes of this node that are at the same files."""

    def __init__(self, path: str) -> None:
        self._fd: int | None = None
        # Without a lock nobody can be seen: then everyone drops when it is done.
        with contextlib.suppress(LockError, OSError):
            self._file = f"{get_lock(path).lock_file.removesuffix('.lock')}.pages"
            self._fd = os.open(self._file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            fcntl.flock(self._fd, fcntl.LOCK_SH)

    def are_there(self) -> bool:
        """Whether there are any, once this process is done; it isn't counted any more after that."""
        if self._fd is None:
            return False
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
        # Who begins now doesn't wait for what is dropped.
        with contextlib.suppress(OSError):
            os.unlink(self._file)
        return False

    def close(self) -> None:
        """Isn't counted any more."""
        if self._fd is not None:
            os.close(self._fd)
