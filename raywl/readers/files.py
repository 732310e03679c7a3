"""Open files of a checkpoint, read by position and checked for change under way."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Sequence
from typing import Self

from raywl.checkpoint import Manifest
from raywl.errors import CheckpointError, CorruptFileError, MissingFileError

__all__ = ["OpenFiles"]

_MAX_BUFFERS = os.sysconf("SC_IOV_MAX")

Stamp = tuple[int, int, int]


def _stamp(info: os.stat_result) -> Stamp:
    return info.st_size, info.st_mtime_ns, info.st_ino


class OpenFiles:
    """The files of one checkpoint on this node; opened when first read, closed together.

    Safe for use by several threads. `check_unchanged()` after the last read tells whether what was read
    belongs together: a file that was written to, cut or replaced meanwhile is an error.
    """

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._sizes = {file.name: file.size for file in manifest.files}
        self._open: dict[str, tuple[int, Stamp]] = {}
        self._lock = threading.Lock()

    def fd(self, name: str) -> int:
        """The file's descriptor.

        Raises:
            MissingFileError: The file is gone.
            CorruptFileError: Its size isn't the manifest's any more.
        """
        with self._lock:
            if name not in self._open:
                self._open[name] = self._opened(name)
            return self._open[name][0]

    def _opened(self, name: str) -> tuple[int, Stamp]:
        path = self._manifest.path(name)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise MissingFileError(
                os.path.dirname(path), [name], "file has gone since it was opened"
            ) from None
        except OSError as error:
            raise CheckpointError(path, None, f"can't be opened: {error.strerror}") from error
        stamp = _stamp(os.fstat(fd))
        if stamp[0] != self._sizes[name]:
            os.close(fd)
            raise CorruptFileError(
                path,
                None,
                f"expected {self._sizes[name]} bytes, the file has {stamp[0]}: "
                "it changed since its header was read",
            )
        return fd, stamp

    def open_all(self, names: Iterable[str]) -> None:
        """Opens files before the first of them is read, so that one that is gone is known by then.

        Raises:
            As `fd`.
        """
        for name in names:
            self.fd(name)

    def read_into(self, name: str, start: int, buffers: Sequence[memoryview]) -> None:
        """Fills `buffers`, in order, from byte `start` of a file.

        Raises:
            CorruptFileError: The file ends before.
            CheckpointError: The system can't read it; the message has file, offset and cause.
        """
        fd, position = self.fd(name), start
        rest = [buffer for buffer in buffers if buffer.nbytes]
        while rest:
            try:
                done = os.preadv(fd, rest[:_MAX_BUFFERS], position)
            except OSError as error:
                raise CheckpointError(
                    self._manifest.path(name), None, f"can't be read at byte {position}: {error.strerror}"
                ) from error
            if done == 0:
                wanted = sum(buffer.nbytes for buffer in rest)
                raise CorruptFileError(
                    self._manifest.path(name),
                    None,
                    f"ends at byte {position}, {wanted} bytes before the end of a read: it was cut meanwhile",
                )
            position += done
            while rest and done >= rest[0].nbytes:
                done -= rest.pop(0).nbytes
            if done:
                rest[0] = rest[0][done:]

    def check_unchanged(self) -> None:
        """Raises `CheckpointError` when a file that was read isn't the one that was opened any more."""
        with self._lock:
            for name, (fd, stamp) in self._open.items():
                path = self._manifest.path(name)
                try:
                    same = stamp == _stamp(os.fstat(fd)) == _stamp(os.stat(path))
                except OSError:
                    same = False
                if not same:
                    raise CheckpointError(path, None, "changed while it was read; what was read may be mixed")

    def close(self) -> None:
        """Closes all files; further reads open them again."""
        with self._lock:
            for fd, _ in self._open.values():
                os.close(fd)
            self._open.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
