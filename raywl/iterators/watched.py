"""A file that other people's readers read, in steps between which reading can be ended."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from typing import Any

from raywl.checkpoint import FileEntry
from raywl.errors import CheckpointError, CorruptFileError

__all__ = ["Watched"]

_READ_BYTES = 16 << 20
_BUFFER_BYTES = 64 << 10


class Watched(io.BufferedReader):
    """A file for a reader that isn't made for exceptions of others: what goes wrong is kept, and it sees the
    file's end.

    Args:
        file: The file, as it was when it was planned with.
        check_stop: Called before each read; what it raises ends the reading.

    Raises:
        CheckpointError: It can't be opened.
    """

    def __init__(self, file: FileEntry, check_stop: Callable[[], None] | None = None) -> None:
        self._steps = _Steps(file, check_stop)
        super().__init__(self._steps, _BUFFER_BYTES)

    def raise_error(self) -> None:
        """Raises what went wrong, if anything did."""
        if self._steps.error is not None:
            raise self._steps.error


class _Steps(io.RawIOBase):
    """Reads of at most `_READ_BYTES`."""

    def __init__(self, file: FileEntry, check_stop: Callable[[], None] | None) -> None:
        super().__init__()
        self._path, self._size, self._check_stop = file.name, file.size, check_stop
        self._position = 0
        self.error: BaseException | None = None
        try:
            self._fd = os.open(file.name, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise CheckpointError(file.name, None, f"can't be opened: {error.strerror}") from error

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        self._position = max(0, base + offset)
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        wanted = memoryview(buffer).cast("B")[: min(_READ_BYTES, max(0, self._size - self._position))]
        if self.error is not None or not wanted.nbytes:
            return 0
        try:
            if self._check_stop is not None:
                self._check_stop()
            done = os.preadv(self._fd, [wanted], self._position)
            if not done:
                reason = f"ends at byte {self._position} of {self._size}: it was cut meanwhile"
                raise CorruptFileError(self._path, None, reason)
        except OSError as error:
            reason = f"can't be read at byte {self._position}: {error.strerror}"
            self.error = CheckpointError(self._path, None, reason)
            return 0
        except BaseException as error:
            self.error = error
            return 0
        self._position += done
        return done

    def close(self) -> None:
        if not self.closed:
            os.close(self._fd)
        super().close()
