"""What makes sure that something is on the disk."""

from __future__ import annotations

import contextlib
import os

__all__ = ["sync_folder"]


def sync_folder(folder: str) -> None:
    """Brings a folder's names to the disk: a new name is in its data. Not every file system can."""
    with contextlib.suppress(OSError):
        fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
