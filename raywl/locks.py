"""Locks between processes, and files that appear whole or not at all.

A lock only saves work: `flock` succeeds for everybody on some cluster file systems (Lustre, GPFS, NFS without
its lock service), so nothing may be right only because a lock was held.
"""

from __future__ import annotations

import contextlib
import errno
import getpass
import hashlib
import json
import os
import re
import secrets
import socket
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

import filelock

from raywl.disk import sync_folder
from raywl.errors import LockError

__all__ = ["acquire_within", "atomic_writer", "get_lock"]

_PLAIN = re.compile(r"[^A-Za-z0-9._-]+")
_MAX_READABLE = 120
_LOCK_MODE = 0o666
"""Of lock files, whatever the umask: they hold nothing, and other users must be able to open them."""


def get_lock(
    model_name_or_path: str | os.PathLike[str], cache_dir: str | os.PathLike[str] | None = None
) -> filelock.FileLock:
    """The lock of one model, for all processes that use the same `cache_dir`.

    Not taken yet: use it as a context manager, or through `acquire_within`, which has a deadline. In a
    sticky folder such as `/tmp`, where one user's files can't be locked by another, each user has a folder of
    their own, so that locks there are between processes of one user.

    Args:
        model_name_or_path: A repository's name, or a local folder; all spellings of one folder, links and
            relative ones included, give one lock.
        cache_dir: Where the lock file is; created if need be. The system's temporary folder by default.

    Returns:
        A `filelock.FileLock`. Where its file can't be locked, taking it raises `LockError`.

    Raises:
        LockError: The folder can't be made, or somebody else owns what should be this user's.
    """
    # Absolute, since it may be taken after a change of the current folder.
    folder = os.path.abspath(
        os.path.expanduser(os.fsdecode(tempfile.gettempdir() if cache_dir is None else cache_dir))
    )
    try:
        os.makedirs(folder, exist_ok=True)
        if os.stat(folder).st_mode & stat.S_ISVTX:
            folder = _own_folder(folder)
    except LockError:
        raise
    except OSError as error:
        raise LockError(
            folder,
            f"can't hold locks: {error.strerror}; give another cache_dir, or make this one writable",
        ) from error
    return _ModelLock(os.path.join(folder, _file_name(os.fsdecode(model_name_or_path))), mode=_LOCK_MODE)


def _own_folder(folder: str) -> str:
    """This user's folder inside a sticky one."""
    path = os.path.join(folder, f"raywl-locks-{os.geteuid()}")
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise LockError(
            path,
            f"is no folder of user {os.geteuid()}, whose locks go there, but belongs to user {found.st_uid}; "
            "have it removed, or give a cache_dir of your own",
        )
    return path


def _file_name(model: str) -> str:
    path = os.path.expanduser(model)
    if os.path.isabs(path) or model.startswith(".") or os.path.lexists(path):
        key, shown = f"path:{os.path.realpath(path)}", os.path.basename(os.path.realpath(path))
    else:
        shown = model.rstrip("/")
        key = f"name:{shown}"
    # The hash tells `a-b/c` from `a/b-c`; the rest is for people.
    digest = hashlib.sha256(os.fsencode(key)).hexdigest()
    return f"{_PLAIN.sub('-', shown)[:_MAX_READABLE].strip('-.') or 'model'}-{digest[:40]}.lock"


class _ModelLock(filelock.FileLock):
    """Raises `LockError` where its file can't be opened or locked."""

    def _acquire(self) -> None:
        try:
            super()._acquire()
        except (OSError, NotImplementedError) as error:
            if isinstance(error, LockError | TimeoutError):
                raise
            raise LockError(self.lock_file, f"can't be locked: {error}; {_remedy(error)}") from error


def _remedy(error: BaseException) -> str:
    number = error.errno if isinstance(error, OSError) else errno.ENOSYS
    if number in (errno.EACCES, errno.EPERM):
        return "make it writable for this user, have its owner remove it, or give another cache_dir"
    if number in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
        return "give a cache_dir on a file system that has locks"
    return "give another cache_dir"


@contextmanager
def acquire_within(lock: filelock.BaseFileLock, timeout_s: float, what: str) -> Iterator[None]:
    """Holds a lock; while it is held, a note beside it tells other processes by whom.

    Args:
        lock: As `get_lock` gives it.
        timeout_s: How long to wait for it.
        what: What it is wanted for, for the message.

    Raises:
        LockError: It wasn't free in time, naming who holds it: by their note, which also says since when,
            else, for a process of this machine, as the kernel knows it; or it can't be locked.
    """
    try:
        lock.acquire(timeout=timeout_s)
    except filelock.Timeout:
        raise LockError(
            lock.lock_file,
            f"{what}: waited {timeout_s:g} s for the lock; end the process that holds it, or allow more time",
            holder=_holder(lock.lock_file) or _holder_here(lock.lock_file) or "an unknown process",
        ) from None
    except RuntimeError as error:
        # filelock sees that this thread has it already, through another object.
        raise LockError(lock.lock_file, f"{what}: {error}", holder="this thread") from error
    note = _note_path(lock.lock_file)
    try:
        with contextlib.suppress(OSError), atomic_writer(note) as file:
            json.dump(_me(), file)
        yield
    finally:
        with contextlib.suppress(OSError):
            os.unlink(note)
        lock.release()


def _me() -> dict[str, Any]:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        # A user id without a name, as in containers.
        user = str(os.geteuid())
    return {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "user": user,
        "since": time.strftime("%Y-%m-%d %H:%M:%S %z"),
    }


def _note_path(lock_file: str) -> str:
    return lock_file.removesuffix(".lock") + ".holder"


def _holder(lock_file: str) -> str | None:
    """Who holds a lock by the note beside it; `None` if there is none, or it is a dead process's."""
    try:
        with open(_note_path(lock_file), encoding="utf-8") as file:
            note = json.load(file)
        if note["host"] == socket.gethostname() and not _is_alive(int(note["pid"])):
            return None
        return f"process {note['pid']} of {note['user']} on {note['host']} since {note['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _holder_here(lock_file: str) -> str | None:
    """Who holds a lock by the kernel's list, which knows this machine's processes alone."""
    try:
        found = os.stat(lock_file)
        place = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
        with open("/proc/locks", encoding="utf-8") as file:
            lines = [line.split() for line in file]
    except (OSError, ValueError):
        return None
    # `1: FLOCK ADVISORY WRITE pid major:minor:inode 0 EOF`; those who wait have `->` behind the number.
    pids = [line[4] for line in lines if len(line) > 5 and line[1] == "FLOCK" and line[5] == place]
    # Of another container's processes it tells 0 or less.
    return f"process {pids[0]} on {socket.gethostname()}" if pids and int(pids[0]) > 0 else None


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


@contextmanager
def atomic_writer(
    filepath: str | os.PathLike[str], mode: str = "w", encoding: str | None = None
) -> Iterator[IO[Any]]:
    """Writes a file that appears under its name whole or not at all.

    What is written goes to a temporary file beside the target, is flushed to disk, and replaces the target
    in one step when the block ends. After any exception, `KeyboardInterrupt` included, the target is as it
    was and the temporary file is gone. An existing file keeps its permissions; a new one gets `0666` less
    the umask.

    Args:
        filepath: The target. A symbolic link is replaced itself, not what it leads to.
        mode: A writing mode of `open`: `"w"`, `"wb"`, `"w+"`, ...
        encoding: Of text; as for `open`.

    Yields:
        The open temporary file.

    Raises:
        ValueError: `mode` doesn't write a file anew.
        OSError: The folder isn't there, isn't writable, or is full.
    """
    if "w" not in mode:
        raise ValueError(f"mode {mode!r} doesn't write a file anew; use 'w' or 'wb'")
    target = os.path.abspath(os.fsdecode(filepath))
    folder, name = os.path.split(target)
    temporary = os.path.join(folder, f".{name[:40]}.{secrets.token_hex(8)}.tmp")
    # 0666 here, and the kernel takes the umask off, or applies the folder's default ACL.
    descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        # First of all, so that what only few may read is never open to more.
        with contextlib.suppress(FileNotFoundError):
            os.fchmod(descriptor, stat.S_IMODE(os.stat(target).st_mode))
        with open(temporary, mode, encoding=encoding, opener=lambda *_: os.dup(descriptor)) as file:
            yield file
        os.fsync(descriptor)
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    finally:
        os.close(descriptor)
    sync_folder(folder)
