"""The page cache of single files: dropped, filled, and looked at, so that "cold" and "warm" are facts."""

from __future__ import annotations

import ctypes
import mmap
import os

import numpy as np

__all__ = ["drop", "resident_bytes", "warm"]

_BLOCK_BYTES = 16 << 20


def drop(path: str) -> None:
    """Asks the kernel to forget the file's pages; those that were written lately go to disk first."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def warm(path: str) -> None:
    """Reads the file once."""
    buffer = bytearray(_BLOCK_BYTES)
    with open(path, "rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def resident_bytes(path: str) -> int | None:
    """Bytes of the file's pages that are in memory, or `None` where the kernel doesn't tell.

    `mincore` says "all" of a file that its caller neither owns nor may write (Linux 5.2).
    """
    if not os.access(path, os.W_OK):
        return None
    size = os.path.getsize(path)
    if size == 0:
        return 0
    mincore = ctypes.CDLL(None, use_errno=True).mincore
    mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    num_pages = -(-size // mmap.PAGESIZE)
    pages = np.zeros(num_pages, np.uint8)
    with open(path, "rb") as file, mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ) as mapping:
        view = np.frombuffer(mapping, np.uint8)
        failed = mincore(view.ctypes.data, size, pages.ctypes.data)
        # The mapping can't be closed while a view of it is left.
        del view
    return None if failed else int((pages & 1).sum()) * mmap.PAGESIZE
