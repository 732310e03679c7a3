"""Open files of a checkpoint, read by position and checked for change under way."""

from __future__ import annotations

import hashlib
import os
import resource
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

from raywl.checkpoint import FileEntry, Manifest
from raywl.errors import CheckpointError, CorruptFileError, MissingFileError
from raywl.node.mounts import fs_type, is_local
from raywl.sources.local import stamp_of

__all__ = ["OpenFiles", "max_open_files"]

_MAX_OPEN = 256
_CHANGED = "changed while it was read; what was read may be mixed"
_MAX_BUFFERS = os.sysconf("SC_IOV_MAX")

Stamp = tuple[int, int, int]


def _stamp(info: os.stat_result) -> Stamp:
    return info.st_size, info.st_mtime_ns, info.st_ino


@dataclass(slots=True)
class _Open:
    """An open file."""

    fd: int
    stamp: Stamp
    users: int = 0
    direct_fd: int | None = None
    """The same file, read past the page cache, once that was asked for and where it is possible."""
    direct_refused: bool = False

    def close(self) -> None:
        os.close(self.fd)
        if self.direct_fd is not None:
            os.close(self.direct_fd)

    def open_direct(self) -> None:
        """By way of the descriptor: the path may lead to another file by now."""
        if self.direct_fd is None and not self.direct_refused:
            try:
                self.direct_fd = os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
            except (OSError, AttributeError):
                self.direct_refused = True


def max_open_files() -> int:
    """Files to hold open at once: a checkpoint may have more shards than a process may open files."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MAX_OPEN if soft == resource.RLIM_INFINITY else max(1, min(_MAX_OPEN, soft // 4))


def _written_since(before: str | None, now: str) -> bool:
    """Whether a file isn't what it was, as far as this node can tell: stamps of another mean nothing here."""
    return before is not None and before.partition(":")[0] == now.partition(":")[0] and before != now


class OpenFiles:
    """The files of one checkpoint on this node; opened when first read, closed together.

    Safe for use by several threads. Of many files, those that were used last stay open.
    `check_unchanged()` after the last read tells whether what was read belongs together: a file that was
    written to, cut or replaced meanwhile is an error.
    """

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._files = {file.name: file for file in manifest.files}
        self._open: OrderedDict[str, _Open] = OrderedDict()
        self._stamps: dict[str, Stamp] = {}
        self._lock = threading.Lock()
        self._max_open = max_open_files()
        self._fs_types: dict[int, str] = {}
        self._random = False

    @contextmanager
    def using(self, name: str) -> Iterator[int]:
        """The file's descriptor, open until the block ends.

        Raises:
            MissingFileError: The file is gone.
            CorruptFileError: Its size or its header aren't the manifest's any more.
            CheckpointError: It can't be opened, or isn't the file that was read before.
        """
        with self._using(name) as entry:
            yield entry.fd

    @contextmanager
    def using_direct(self, name: str) -> Iterator[int | None]:
        """As `using`, for reads past the page cache; `None` where the file system has no such reads."""
        with self._using(name) as entry:
            with self._lock:
                entry.open_direct()
            yield entry.direct_fd

    def fs_type(self, name: str) -> str:
        """Type of the file system that a file lies on; `""` where that can't be told."""
        with self.using(name) as fd:
            device = os.fstat(fd).st_dev
        if device not in self._fs_types:
            self._fs_types[device] = fs_type([self._manifest.path(name)])
        return self._fs_types[device]

    def is_local(self, name: str) -> bool:
        """Whether a file lies on a file system of this machine, and so may be mapped."""
        return is_local(self.fs_type(name))

    def expect_random(self) -> None:
        """Tells the kernel, for every file from now on, that what lies between reads isn't wanted."""
        with self._lock:
            self._random = True
            for entry in self._open.values():
                os.posix_fadvise(entry.fd, 0, 0, os.POSIX_FADV_RANDOM)

    @contextmanager
    def _using(self, name: str) -> Iterator[_Open]:
        with self._lock:
            entry = self._open.get(name)
            if entry is None:
                entry = self._open[name] = self._opened(name)
            elif len(self._stamps) > self._max_open:
                self._open.move_to_end(name)
            entry.users += 1
            if len(self._open) > self._max_open:
                self._close_unused()
        try:
            yield entry
        finally:
            with self._lock:
                entry.users -= 1

    def _close_unused(self) -> None:
        for name in [name for name, entry in self._open.items() if not entry.users]:
            if len(self._open) <= self._max_open:
                return
            self._open.pop(name).close()

    def _opened(self, name: str) -> _Open:
        # Whoever knows which files it needs fetches them before, all at once.
        self._manifest.fetch([name])
        path, expected = self._manifest.path(name), self._files[name]
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise MissingFileError(
                os.path.dirname(path), [name], "file has gone since it was opened"
            ) from None
        except OSError as error:
            raise CheckpointError(path, None, f"can't be opened: {error.strerror}") from error
        try:
            info = os.fstat(fd)
            stamp = _stamp(info)
            if stamp[0] != expected.size:
                reason = f"expected {expected.size} bytes, the file has {stamp[0]}"
                raise CorruptFileError(path, None, f"{reason}: it changed since its header was read")
            if name not in self._stamps:
                if _written_since(expected.stamp, stamp_of(info)):
                    raise CorruptFileError(path, None, "was written to or replaced since it was opened")
                _check_header(fd, path, expected)
            elif stamp != self._stamps[name]:
                raise CheckpointError(path, None, _CHANGED)
        except BaseException:
            os.close(fd)
            raise
        self._stamps[name] = stamp
        if self._random:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        return _Open(fd, stamp)

    def open_all(self, names: Iterable[str]) -> None:
        """Opens files before the first of them is read, so that one that is gone is known by then.

        Raises:
            As `using`.
        """
        for name in names:
            with self.using(name):
                pass

    def read_into(self, name: str, start: int, buffers: Sequence[memoryview]) -> None:
        """Fills `buffers`, in order, from byte `start` of a file.

        Raises:
            CorruptFileError: The file ends before.
            CheckpointError: The system can't read it; the message has file, offset and cause.
        """
        with self.using(name) as fd:
            self._fill(fd, name, start, [buffer for buffer in buffers if buffer.nbytes])

    def _fill(self, fd: int, name: str, position: int, rest: list[memoryview]) -> None:
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
            filled = 0
            while filled < len(rest) and done >= rest[filled].nbytes:
                done -= rest[filled].nbytes
                filled += 1
            del rest[:filled]
            if done:
                rest[0] = rest[0][done:]

    def check_unchanged(self) -> None:
        """Raises `CheckpointError` when a file that was read isn't the one that was opened any more."""
        with self._lock:
            for name, stamp in self._stamps.items():
                path, entry = self._manifest.path(name), self._open.get(name)
                try:
                    same = stamp == _stamp(os.stat(path))
                    same = same and (entry is None or stamp == _stamp(os.fstat(entry.fd)))
                except OSError:
                    same = False
                if not same:
                    raise CheckpointError(path, None, _CHANGED)

    def close(self) -> None:
        """Closes all files; further reads open them again."""
        with self._lock:
            for entry in self._open.values():
                entry.close()
            self._open.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _check_header(fd: int, path: str, expected: FileEntry) -> None:
    """A file of the same size may hold other tensors by now."""
    if not expected.header_sha256:
        return
    header = hashlib.sha256()
    for start, end in expected.header_spans:
        header.update(os.pread(fd, end - start, start))
    if header.hexdigest() != expected.header_sha256:
        raise CorruptFileError(path, None, "its header changed since it was opened: it is another file")
