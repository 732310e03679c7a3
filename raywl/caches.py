"""What raywl's own cache on this machine holds, and deleting what nobody uses.

The hub's cache belongs to other tools as well, which have commands of their own for it (`hf cache`).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from raywl.errors import LockError
from raywl.sources.cache import cache_root

__all__ = ["CachedVersion", "PruneReport", "list_cache", "prune_cache"]

_JUST_NOW_S = 3600.0
"""Whatever was used within this time stays: somebody may have looked at it and be about to open it."""


@dataclass(frozen=True, slots=True)
class CachedVersion:
    """One state of one store that the cache has, or a part of it."""

    url: str
    version: str
    folder: str
    """Of all versions of the URL."""
    nbytes: int
    """On the disk, without what other versions have as well."""
    used_s: float
    """When it was last read or written, in seconds since 1970; to the day where the file system notes reads
    that rarely."""

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


@dataclass(slots=True)
class PruneReport:
    """What was deleted, and what was not."""

    removed: list[CachedVersion] = field(default_factory=list)
    kept: dict[str, str] = field(default_factory=dict)
    """URL and version of what should have gone, and why it stayed."""
    leftovers: int = 0
    """Parts of files that nobody goes on with, which were deleted too."""
    freed_bytes: int = 0
    dry_run: bool = False
    """Nothing was really deleted."""

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


def list_cache(cache_dir: str | None = None) -> list[CachedVersion]:
    """What the cache has, the longest unused first.

    Args:
        cache_dir: The cache; by default as the environment says.
    """
    found = []
    for folder in _folders(cache_dir):
        url = _url_of(folder)
        shared = _blobs_by_version(folder)
        for version, blobs in shared.items():
            others = {blob for other, names in shared.items() if other != version for blob in names}
            stats = [info for blob in blobs if (info := _stat(blob)) is not None]
            used_s = max((max(info.st_atime, info.st_mtime) for info in stats), default=0.0)
            nbytes = sum(map(_disk_bytes, blobs - others))
            found.append(CachedVersion(url, version, folder, nbytes, used_s))
    return sorted(found, key=lambda one: one.used_s)


def prune_cache(
    cache_dir: str | None = None,
    *,
    max_age_s: float | None = None,
    max_bytes: int | None = None,
    keep: Sequence[str] = (),
    dry_run: bool = False,
    now_s: float | None = None,
) -> PruneReport:
    """Deletes what nobody uses.

    What a process on this machine has open stays, and so does what is being fetched, what was used within the
    hour, and what is named.

    Args:
        cache_dir: The cache; by default as the environment says.
        max_age_s: Delete what wasn't used for so long.
        max_bytes: Delete the longest unused until no more than this is left.
        keep: Paths; a version that has one of these files stays.
        dry_run: Only say what would go.
        now_s: The time, in seconds since 1970.

    Raises:
        ValueError: Neither an age nor a size is given.
    """
    if max_age_s is None and max_bytes is None:
        raise ValueError("say what is to go: max_age_s or max_bytes")
    now_s = time.time() if now_s is None else now_s
    report = PruneReport(dry_run=dry_run)
    contents = _Contents(cache_dir)
    named = {os.path.realpath(path) for path in keep}
    for one in list_cache(cache_dir):
        too_old = max_age_s is not None and now_s - one.used_s > max_age_s
        too_much = max_bytes is not None and contents.nbytes > max_bytes
        if not (too_old or too_much):
            continue
        why = _why_kept(one, named, now_s, cache_dir)
        if why is None:
            with _alone(one.folder, cache_dir) as free:
                why = _in_use(one) if free else "it is being fetched"
                if why is None and not dry_run:
                    _remove(one)
        if why is None:
            report.removed.append(one)
            report.freed_bytes += contents.remove(one)
        else:
            report.kept[f"{one.url} ({one.version})"] = why
    if max_age_s is not None:
        _remove_leftovers(report, cache_dir, now_s - max(max_age_s, _JUST_NOW_S))
    return report


class _Contents:
    """All contents of a cache, and the versions that have each."""

    def __init__(self, cache_dir: str | None) -> None:
        self._holders: dict[str, set[tuple[str, str]]] = {}
        for folder in _folders(cache_dir):
            for version, blobs in _blobs_by_version(folder).items():
                for blob in blobs:
                    self._holders.setdefault(blob, set()).add((folder, version))
        self._sizes = {blob: _disk_bytes(blob) for blob in self._holders}
        self.nbytes = sum(self._sizes.values())
        """On the disk, each content once."""

    def remove(self, one: CachedVersion) -> int:
        """A version is gone; returns the bytes that nobody has any more."""
        freed_bytes = 0
        for blob, holders in self._holders.items():
            if (one.folder, one.version) in holders:
                holders.discard((one.folder, one.version))
                freed_bytes += 0 if holders else self._sizes[blob]
        self.nbytes -= freed_bytes
        return freed_bytes


def _disk_bytes(path: str) -> int:
    info = _stat(path)
    return 0 if info is None else info.st_blocks * 512


def _why_kept(one: CachedVersion, named: set[str], now_s: float, cache_dir: str | None) -> str | None:
    if now_s - one.used_s < _JUST_NOW_S:
        return "it was used within the hour"
    if named & _blobs_by_version(one.folder).get(one.version, set()):
        return "it is pinned or staged"
    return None


def _folders(cache_dir: str | None) -> list[str]:
    stores = os.path.join(cache_root(cache_dir), "stores")
    with contextlib.suppress(OSError), os.scandir(stores) as entries:
        return sorted(entry.path for entry in entries if entry.is_dir() and not entry.name.startswith("."))
    return []


def _url_of(folder: str) -> str:
    try:
        with open(os.path.join(folder, "latest.json"), encoding="utf-8") as file:
            return str(json.load(file)["url"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return os.path.basename(folder)


def _blobs_by_version(folder: str) -> dict[str, set[str]]:
    """Real paths of the contents that each version's names lead to."""
    found: dict[str, set[str]] = {}
    snapshots = os.path.join(folder, "snapshots")
    with contextlib.suppress(OSError):
        for version in os.listdir(snapshots):
            paths = (
                os.path.join(inside, name)
                for inside, _, names in os.walk(os.path.join(snapshots, version))
                for name in names
            )
            found[version] = {os.path.realpath(path) for path in paths}
    return found


def _stat(path: str) -> os.stat_result | None:
    with contextlib.suppress(OSError):
        return os.stat(path)
    return None


def _remove(one: CachedVersion) -> None:
    by_version = _blobs_by_version(one.folder)
    mine = by_version.pop(one.version, set())
    blobs = os.path.realpath(os.path.join(one.folder, "blobs"))
    # The names first: a content without a name is found by nobody, a name without content is damage.
    shutil.rmtree(os.path.join(one.folder, "snapshots", one.version), ignore_errors=True)
    for blob in mine - {blob for others in by_version.values() for blob in others}:
        if os.path.dirname(blob) == blobs:
            with contextlib.suppress(OSError):
                os.unlink(blob)
    if not by_version:
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(one.folder, "latest.json"))
        for folder in (os.path.join(one.folder, "snapshots"), blobs, one.folder):
            with contextlib.suppress(OSError):
                os.rmdir(folder)


def _remove_leftovers(report: PruneReport, cache_dir: str | None, before_s: float) -> None:
    for folder in _folders(cache_dir):
        with contextlib.suppress(OSError), _alone(folder, cache_dir) as free:
            names = os.listdir(os.path.join(folder, "blobs")) if free else []
            for name in names:
                path = os.path.join(folder, "blobs", name)
                info = _stat(path)
                if info is None or ".incomplete" not in name or info.st_mtime > before_s:
                    continue
                report.leftovers += name.endswith(".incomplete")
                report.freed_bytes += info.st_blocks * 512
                if not report.dry_run:
                    os.unlink(path)


@contextlib.contextmanager
def _alone(folder: str, cache_dir: str | None) -> Iterator[bool]:
    """Holds the lock that fetching takes, if it is free."""
    from raywl.locks import acquire_within, get_lock

    try:
        lock = get_lock(folder, os.path.join(cache_root(cache_dir), "locks"))
        with acquire_within(lock, 0.0, "prune"):
            yield True
    except LockError:
        yield False


def _in_use(one: CachedVersion) -> str | None:
    """Why a version can't go, as far as this machine's processes are concerned."""
    for blob in _blobs_by_version(one.folder).get(one.version, set()):
        if _is_open(blob):
            return f"a process has {os.path.basename(blob)} open"
    return None


def _is_open(path: str) -> bool:
    """Whether any process has a file open or mapped. By asking for a lease on it, which the kernel gives to
    the only one that has it open; where there are no leases, by what processes say."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        if threading.current_thread() is threading.main_thread():
            # A lease that is broken at this very moment sends SIGIO, which ends a process by default.
            before = signal.signal(signal.SIGIO, signal.SIG_IGN)
        try:
            fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
            return False
        except BlockingIOError:
            return True
        except OSError:
            return _is_open_by_proc(path)
        finally:
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGIO, before)
    finally:
        os.close(fd)


def _is_open_by_proc(path: str) -> bool:
    info = os.stat(path)
    me = str(os.getpid())
    for pid in (name for name in os.listdir("/proc") if name.isdigit() and name != me):
        with contextlib.suppress(OSError):
            for fd in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    other = os.stat(f"/proc/{pid}/fd/{fd}")
                    if (other.st_dev, other.st_ino) == (info.st_dev, info.st_ino):
                        return True
        with contextlib.suppress(OSError), open(f"/proc/{pid}/maps") as lines:
            if any(line.rstrip().endswith(path) for line in lines):
                return True
    return False
