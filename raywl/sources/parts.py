"""A file under way: its bytes beside the final name, and a journal of which of them are there.

Each writer has a part file of its own, so that a result never depends on a lock (`flock` succeeds for
everybody on some cluster file systems). What a writer leaves behind when it is killed, the next one takes
over.

    <final name>.<random>.incomplete            the bytes, at their places
    <final name>.<random>.incomplete.journal    lines: {...} whose it is, "start end" written, "s" on the disk
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import socket
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any

from raywl.disk import sync_folder
from raywl.errors import CapacityError, RaywlError, SourceError

__all__ = ["PartFile", "Spans", "Unchecked", "disk_error", "sweep"]

Span = tuple[int, int]

_SUFFIX = ".incomplete"
_JOURNAL = ".journal"
_SYNC_BYTES = 256 << 20
"""Bytes between two marks in the journal of what is on the disk for sure."""
_ORPHAN_AGE_S = 900.0
"""After this time without a write, a part file of another machine is nobody's. Transfers that stall are cut
long before."""
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class Unchecked(Exception):
    """Whether a file's bytes are right couldn't be found out now."""

    def __init__(self, error: RaywlError) -> None:
        super().__init__(str(error))
        self.error = error


class Spans:
    """Half-open spans of whole numbers: a set that stays merged."""

    def __init__(self, spans: Iterable[Span] = ()) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        for start, end in spans:
            self.add(start, end)

    def add(self, start: int, end: int) -> int:
        """Adds `[start, end)`; returns how many of its numbers weren't there."""
        if start >= end:
            return 0
        first = bisect_right(self._ends, start - 1)
        last = bisect_right(self._starts, end)
        had = sum(self._ends[i] - self._starts[i] for i in range(first, last))
        if first < last:
            start, end = min(start, self._starts[first]), max(end, self._ends[last - 1])
        self._starts[first:last], self._ends[first:last] = [start], [end]
        return end - start - had

    def missing(self, start: int, end: int) -> list[Span]:
        """What of `[start, end)` isn't there, in order."""
        found = []
        for has_start, has_end in self:
            if has_start >= end:
                break
            if has_end > start:
                if has_start > start:
                    found.append((start, has_start))
                start = has_end
        if start < end:
            found.append((start, end))
        return found

    def __iter__(self) -> Iterator[Span]:
        return iter(zip(self._starts, self._ends, strict=True))

    @property
    def total(self) -> int:
        """How many numbers there are."""
        return sum(self._ends) - sum(self._starts)


class PartFile:
    """One file that is being fetched, by this process; several threads may write at once.

    1. `PartFile.open` makes one, or takes over what a dead process left of the same file.
    2. `missing` says what is to be fetched; `write` puts bytes at their place and notes them.
    3. `finish` checks the whole, and moves it to its final name in one step. Or `close` keeps what is there
       for the next try, and `discard` throws it away.
    """

    def __init__(self, target: str, part: str, size: int, fds: tuple[int, int], spans: Spans) -> None:
        self.target, self.path, self.size = target, part, size
        """Final name; where the bytes are meanwhile; bytes of the whole file."""
        self._fd, self._journal_fd = fds
        self._inode = os.fstat(self._fd).st_ino
        self._spans = spans
        self._unsynced_bytes = 0
        self._lock = threading.Lock()
        self._users, self._closed = 0, False

    @classmethod
    def open(cls, target: str, size: int) -> PartFile:
        """Makes the part file for `target`, whose folder exists.

        Args:
            target: The final name. It must stand for the very content: what was fetched of it before is used.
            size: Bytes of the whole file.

        Raises:
            CapacityError: The disk is full.
            SourceError: The folder can't be written.
        """
        part = f"{target}.{secrets.token_hex(4)}{_SUFFIX}"
        try:
            fd = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            with _OPEN_LOCK:
                _OPEN.add(part)
            trusted = Spans()
            try:
                if (found := _take_over(target, part, size, os.fstat(fd).st_mtime)) is not None:
                    os.close(fd)
                    fd, trusted = found
                journal_fd = os.open(
                    part + _JOURNAL, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o666
                )
                head = [json.dumps({"size": size, **_me()}), *(f"{start} {end}" for start, end in trusted)]
                os.write(journal_fd, "".join(f"{line}\n" for line in head).encode())
                os.ftruncate(fd, size)
            except BaseException:
                os.close(fd)
                _forget(part)
                raise
        except OSError as error:
            raise disk_error(error, part, size) from error
        return cls(target, part, size, (fd, journal_fd), trusted)

    @property
    def present_bytes(self) -> int:
        """Bytes that are there."""
        with self._lock:
            return self._spans.total

    def missing(self, start: int = 0, end: int | None = None) -> list[Span]:
        """The spans of `[start, end)` that aren't there, in order; of the whole file by default."""
        with self._lock:
            return self._spans.missing(start, self.size if end is None else end)

    def write(self, start: int, data: bytes | memoryview) -> int:
        """Puts bytes at their place, from byte `start` of the file on.

        Returns:
            How many of them weren't there yet.

        Raises:
            ValueError: They don't lie inside the file.
            CapacityError: The disk is full; what was written before stays.
            SourceError: It can't be written, was closed, or another process has taken it over.
        """
        view = memoryview(data).cast("B")
        end = start + view.nbytes
        if not 0 <= start <= end <= self.size:
            raise ValueError(f"bytes {start} to {end} don't lie in a file of {self.size}")
        try:
            if os.stat(self.path).st_ino != self._inode:
                raise FileNotFoundError
        except FileNotFoundError:
            raise SourceError(self.path, "another process took this download over meanwhile") from None
        try:
            with self._in_use() as fd:
                position = start
                while position < end:
                    position += os.pwrite(fd, view[position - start :], position)
                with self._lock:
                    os.write(self._journal_fd, f"{start} {end}\n".encode())
                    self._unsynced_bytes += end - start
                    if self._unsynced_bytes >= _SYNC_BYTES:
                        self._sync()
                    return self._spans.add(start, end)
        except OSError as error:
            if isinstance(error, SourceError):
                raise
            raise disk_error(error, self.path, self.size - self.present_bytes) from error

    def read(self, start: int, end: int) -> bytes:
        """Bytes `[start, end)`, which must be there."""
        if self.missing(start, end):
            raise ValueError(f"{self.path}: bytes {start} to {end} aren't all there")
        with self._in_use() as fd:
            return os.pread(fd, end - start, start)

    def finish(self, check: Callable[[str], object] | None = None) -> None:
        """Moves the whole file to its final name.

        Args:
            check: Called with the path of the bytes. What it raises means that they are wrong, and they are
                thrown away; but not with `Unchecked`, whose error is raised.

        Raises:
            ValueError: Bytes are missing.
            SourceError: It can't be moved.
        """
        if missing := self.missing():
            raise ValueError(f"{self.path}: {len(missing)} spans are missing, the first is {missing[0]}")
        try:
            with self._in_use() as fd:
                os.fsync(fd)
            if check is not None:
                check(self.path)
            os.replace(self.path, self.target)
        except Unchecked as unchecked:
            raise unchecked.error from None
        except OSError as error:
            self.discard()
            if isinstance(error, SourceError):
                raise
            raise disk_error(error, self.path, 0) from error
        except BaseException:
            self.discard()
            raise
        sync_folder(os.path.dirname(self.target))
        self.discard()

    def close(self) -> None:
        """Ends writing; what is there stays for the next one that fetches the file."""
        if not self.present_bytes and self.size:
            self.discard()
            return
        self._close()

    def discard(self) -> None:
        """Throws away what is there."""
        self._close()
        for path in (self.path, self.path + _JOURNAL):
            with contextlib.suppress(OSError):
                os.unlink(path)

    @contextlib.contextmanager
    def _in_use(self) -> Iterator[int]:
        """The descriptor. Nobody closes it before the block ends, when its number may be another file's."""
        with self._lock:
            if self._closed:
                raise SourceError(self.path, "the download was ended")
            self._users += 1
        try:
            yield self._fd
        finally:
            with self._lock:
                self._users -= 1
                self._close_if_unused()

    def _sync(self) -> None:
        os.fdatasync(self._fd)
        os.write(self._journal_fd, b"s\n")
        os.fdatasync(self._journal_fd)
        self._unsynced_bytes = 0

    def _close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                self._close_if_unused()

    def _close_if_unused(self) -> None:
        if self._closed and not self._users:
            os.close(self._fd)
            os.close(self._journal_fd)
            _forget(self.path)


_OPEN: set[str] = set()
"""Part files that this process writes to."""
_OPEN_LOCK = threading.Lock()


def _forget(part: str) -> None:
    with _OPEN_LOCK:
        _OPEN.discard(part)


def disk_error(error: OSError, path: str, needed_bytes: int) -> CapacityError | SourceError:
    """What to raise for a write that failed."""
    if error.errno in _FULL:
        try:
            stats = os.statvfs(os.path.dirname(path))
            free_bytes = stats.f_bavail * stats.f_frsize
        except OSError:
            free_bytes = 0
        return CapacityError(
            "disk space",
            needed_bytes,
            free_bytes,
            f"{path}: {error.strerror}; what was fetched is kept: make room, or give another cache_dir, and "
            "try again",
            unit="bytes",
        )
    where = error.filename or path
    return SourceError(
        path, f"the cache can't be written: {error.strerror} ({where}); give another cache_dir"
    )


# Whose a part file is.


@cache
def _machine() -> dict[str, str]:
    found = {"host": socket.gethostname(), "boot": "", "pids": ""}
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        found["boot"] = file.read().strip()
    with contextlib.suppress(OSError):
        # Containers of one host may count their processes apart.
        found["pids"] = os.readlink("/proc/self/ns/pid")
    return found


def _me() -> dict[str, Any]:
    return {**_machine(), "pid": os.getpid(), "began": _began(os.getpid())}


def _began(pid: int) -> str | None:
    """When a process began, in the kernel's own count, which tells it from a later one of the same number.

    `None` for one that isn't there, or that is dead and only waits for its parent to notice.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            facts = file.read().rpartition(b")")[2].split()
            return None if facts[0] in (b"Z", b"X") else facts[19].decode()
    except (OSError, IndexError):
        return None


def _is_dead(owner: dict[str, Any], part: str) -> bool | None:
    """Whether a part file's writer is gone; `None` where that can't be known from here."""
    here = _machine()
    if owner.get("boot") != here["boot"] or not here["boot"]:
        # The same machine, started anew: nobody of then is left.
        return True if owner.get("host") == here["host"] and here["boot"] else None
    if owner.get("pids") != here["pids"]:
        return None
    if owner.get("pid") == os.getpid() and owner.get("began") == _began(os.getpid()):
        with _OPEN_LOCK:
            return part not in _OPEN
    return _began(int(owner["pid"])) != owner.get("began")


def _take_over(target: str, part: str, size: int, now_s: float) -> tuple[int, Spans] | None:
    """Moves the best part file that a dead process left to `part`, and throws others of the dead away.

    Args:
        target: The final name.
        part: The new name of what is taken over.
        size: Of the whole file.
        now_s: The time by the file system's own clock.

    Returns:
        Its descriptor and the spans of it that can be trusted; `None` if there is none.
    """
    folder, base = os.path.split(target)
    left: list[tuple[int, str, Spans]] = []
    for name in os.listdir(folder):
        path = os.path.join(folder, name)
        if not (name.startswith(base + ".") and name.endswith(_SUFFIX)) or path == part:
            continue
        spans = _left_by_the_dead(path, size, now_s)
        if spans is not None:
            left.append((spans.total, path, spans))
    taken: Spans | None = None
    for nbytes, path, spans in sorted(left, key=lambda one: one[0], reverse=True):
        # Of several processes that find it, only one can move the journal, and has the bytes then.
        with contextlib.suppress(FileNotFoundError):
            if not nbytes:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path + _JOURNAL)
                os.unlink(path)
                continue
            os.rename(path + _JOURNAL, part + _JOURNAL)
            if taken is None:
                os.rename(path, part)
                taken = spans
            else:
                os.unlink(path)
    return None if taken is None else (os.open(part, os.O_RDWR | os.O_CLOEXEC), taken)


def sweep(folder: str) -> None:
    """Removes what the dead left of files that are whole by now. Errors don't matter."""
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            if not name.endswith(_SUFFIX + _JOURNAL):
                continue
            part = os.path.join(folder, name.removesuffix(_JOURNAL))
            target = part.removesuffix(_SUFFIX).rpartition(".")[0]
            if (os.path.exists(target) or not os.path.exists(part)) and _is_left(part):
                for path in (part, part + _JOURNAL):
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(path)


def _is_left(part: str) -> bool:
    try:
        with open(part + _JOURNAL, "rb") as file:
            return _is_dead(json.loads(file.readline()), part) is True
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _left_by_the_dead(path: str, size: int, now_s: float) -> Spans | None:
    """What can be trusted of a part file whose writer is gone; `None` while it may be alive."""
    age_s = 0.0
    try:
        age_s = now_s - os.stat(path).st_mtime
        age_s = now_s - os.stat(path + _JOURNAL).st_mtime
        with open(path + _JOURNAL, "rb") as file:
            lines = file.read().split(b"\n")[:-1]
        owner = json.loads(lines[0])
        dead = _is_dead(owner, path)
    except (OSError, ValueError, IndexError, KeyError, TypeError):
        # Just being made, or what is left of one that was killed then.
        return Spans() if age_s >= _ORPHAN_AGE_S else None
    if dead is False or (dead is None and age_s < _ORPHAN_AGE_S):
        return None
    if owner.get("size") != size:
        return Spans()
    same_memory = owner.get("boot") == _machine()["boot"] != ""
    spans = Spans()
    unsure: list[Span] = []
    for line in lines[1:]:
        if line == b"s":
            for span in unsure:
                spans.add(*span)
            unsure.clear()
            continue
        start, _, end = line.partition(b" ")
        if not (start.isdigit() and end.isdigit() and int(end) <= size):
            break
        unsure.append((int(start), int(end)))
    # What this very kernel was given is there; what another machine was, only once it was synced.
    for span in unsure if same_memory else ():
        spans.add(*span)
    return spans
