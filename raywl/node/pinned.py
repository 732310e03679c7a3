"""Files that stay in memory: locked in the page cache where that is allowed, else read again and again."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Sequence

from raywl.node.page_cache import resident_fraction
from raywl.node.prefetch import FileRange, prefetch

__all__ = ["PinnedFiles"]

_AGAIN_S = 30.0
_THREADS = 4


class PinnedFiles:
    """Files whose bytes stay in this machine's memory until `close`.

    They are read once, and locked (`mlock`). Where locking isn't allowed (`RLIMIT_MEMLOCK`), a thread looks
    every half minute what the kernel has pushed out, and reads it again.
    """

    def __init__(self, paths: Sequence[str], again_s: float = _AGAIN_S) -> None:
        """Reads the files.

        Args:
            paths: The files; they are not to change.
            again_s: Between two looks, where they can't be locked.

        Raises:
            OSError: A file can't be opened.
        """
        self.paths = tuple(paths)
        self.nbytes = sum(map(os.path.getsize, self.paths))
        self.locked = False
        """Whether the kernel can't push them out."""
        self._again_s = again_s
        self._maps: list[tuple[int, int]] = []
        self._stop = threading.Event()
        self._read(self.paths)
        try:
            for path in self.paths:
                self._lock(path)
            self.locked = True
        except OSError:
            self._unlock()
            threading.Thread(target=self._keep, name="raywl-pin", daemon=True).start()

    def close(self) -> None:
        """Lets go of them; what is in memory stays there as long as the kernel likes."""
        self._stop.set()
        self._unlock()

    def _read(self, paths: Sequence[str]) -> None:
        ranges = [FileRange(path, 0, os.path.getsize(path)) for path in paths]
        prefetch(ranges, {path: path for path in paths}, num_threads=_THREADS, stop=self._stop)

    def _lock(self, path: str) -> None:
        size = os.path.getsize(path)
        if size == 0:
            return
        libc = _libc()
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            address = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
        finally:
            os.close(fd)
        if address in (None, ctypes.c_void_p(-1).value):
            raise OSError(ctypes.get_errno(), f"{path} can't be mapped")
        self._maps.append((address, size))
        if libc.mlock(address, size) != 0:
            raise OSError(ctypes.get_errno(), f"{path} can't be locked in memory")

    def _unlock(self) -> None:
        libc = _libc()
        while self._maps:
            libc.munmap(*self._maps.pop())

    def _keep(self) -> None:
        while not self._stop.wait(self._again_s):
            try:
                self._read([path for path in self.paths if resident_fraction(path) not in (1.0, None)])
            except OSError:
                # Deleted: there is nothing to keep.
                return


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
    ]  # fmt: skip
    libc.munmap.argtypes = libc.mlock.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return libc
