"""The page cache of single files: how much of them is in it, and giving it back."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Iterable

__all__ = [
    "drop",
    "record_checkpoint_files",
    "release_checkpoint_page_cache",
    "resident_bytes",
    "resident_fraction",
    "resident_in",
]

_PAGES_AT_A_TIME = 1 << 20
_CACHESTAT = 451
"""Number of the system call (Linux 6.5), the same on every architecture that torch runs on."""

_recorded: dict[str, None] = {}
_recorded_lock = threading.Lock()


def drop(path: str) -> None:
    """Asks the kernel to forget a file's pages; those that were written lately go to disk first.

    Raises:
        OSError: The file can't be opened or written out.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def resident_bytes(path: str) -> int | None:
    """Bytes of a file that are in the page cache, counted by whole pages.

    Returns:
        At most the file's size; `None` where the kernel doesn't tell, as for files that the caller neither
        owns nor may write.

    Raises:
        OSError: The file can't be opened.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size_bytes = os.fstat(fd).st_size
        if size_bytes == 0:
            return 0
        if not os.access(path, os.W_OK):
            # `mincore` answers "all" then (Linux 5.2).
            return None
        num_pages = _mincore_pages(fd, size_bytes)
        return None if num_pages is None else min(size_bytes, num_pages * mmap.PAGESIZE)
    finally:
        os.close(fd)


def resident_fraction(path: str) -> float | None:
    """Part of a file that is in the page cache, from 0 to 1; 1 for an empty file.

    Returns:
        `None` where the kernel doesn't tell, as for `resident_bytes`.

    Raises:
        OSError: The file can't be opened.
    """
    size_bytes = os.path.getsize(path)
    if size_bytes == 0:
        return 1.0
    resident = resident_bytes(path)
    return None if resident is None else min(1.0, resident / size_bytes)


class _Range(ctypes.Structure):
    _fields_ = (("start", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _CacheStat(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint64) for name in ("cached", "dirty", "writeback", "evicted", "recent")
    )


def resident_in(fd: int, path: str, start: int, end: int) -> int | None:
    """Bytes of a range of an open file that are in the page cache, counted by whole pages.

    Args:
        fd: The file, open for reading.
        path: Its path, for what the kernel only tells to those who may write it.
        start: First byte.
        end: One past the last; more than `start`.

    Returns:
        At most the range's size; `None` where the kernel doesn't tell.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    found = _CacheStat()
    asked = _Range(start, end - start)
    if libc.syscall(_CACHESTAT, fd, ctypes.byref(asked), ctypes.byref(found), 0) == 0:
        return min(end - start, int(found.cached) * mmap.PAGESIZE)
    if not os.access(path, os.W_OK):
        # `mincore` answers "all" then (Linux 5.2).
        return None
    first = start - start % mmap.PAGESIZE
    num_pages = _mincore_pages(fd, end - first, first)
    return None if num_pages is None else min(end - start, num_pages * mmap.PAGESIZE)


def _mincore_pages(fd: int, size_bytes: int, first_byte: int = 0) -> int | None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_long,
    ]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    # By ctypes and not Python's mmap, whose read-only maps don't tell their address.
    address = libc.mmap(None, size_bytes, mmap.PROT_READ, mmap.MAP_SHARED, fd, first_byte)
    if address in (None, ctypes.c_void_p(-1).value):
        return None
    try:
        num_resident = 0
        total_pages = -(-size_bytes // mmap.PAGESIZE)
        lowest_bit = bytes(value & 1 for value in range(256))
        for first in range(0, total_pages, _PAGES_AT_A_TIME):
            num_pages = min(_PAGES_AT_A_TIME, total_pages - first)
            flags = ctypes.create_string_buffer(num_pages)
            start = address + first * mmap.PAGESIZE
            while libc.mincore(start, num_pages * mmap.PAGESIZE, flags):
                if ctypes.get_errno() != errno.EAGAIN:
                    return None
            # Only the lowest bit of each is defined.
            num_resident += flags.raw.translate(lowest_bit).count(1)
        return num_resident
    finally:
        libc.munmap(address, size_bytes)


def record_checkpoint_files(files: Iterable[str]) -> None:
    """Remembers files of a checkpoint that this process read, for `release_checkpoint_page_cache`."""
    with _recorded_lock:
        _recorded.update(dict.fromkeys(os.path.realpath(path) for path in files))


def release_checkpoint_page_cache(files: Iterable[str] | None = None) -> int:
    """Tells the kernel, once per file, that pages of read files are no longer needed, and forgets the files.

    To be called once all ranks of the node have loaded. Never fails a load: files that are gone or can't
    be opened are skipped. Pages stay that a process has mapped or pinned, or that aren't on the disk yet.

    Args:
        files: The files; `None` for all that were recorded.

    Returns:
        Bytes that left the page cache; those of files aren't counted of which the kernel doesn't tell.
    """
    with _recorded_lock:
        chosen = list(_recorded) if files is None else dict.fromkeys(map(os.path.realpath, files))
        for path in chosen:
            _recorded.pop(path, None)
    released_bytes = 0
    for path in chosen:
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                before = _resident(fd, path)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                released_bytes += max(0, before - _resident(fd, path))
            finally:
                os.close(fd)
    return released_bytes


def _resident(fd: int, path: str) -> int:
    size_bytes = os.fstat(fd).st_size
    return (resident_in(fd, path, 0, size_bytes) or 0) if size_bytes else 0
