"""Sources whose files are fetched into a cache when they are used, and read by ranges before."""

from __future__ import annotations

import os
import posixpath
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial

from raywl.errors import MissingFileError, SourceError
from raywl.sources.base import RemoteFile, Report
from raywl.sources.cache import Repository, check_hash, check_room, size_of
from raywl.sources.local import LocalSource, stamp_of
from raywl.sources.parts import PartFile, Unchecked, disk_error, sweep
from raywl.sources.selection import companions
from raywl.sources.transfer import Job, Limits, read_range, run_jobs

__all__ = ["CachedSource", "Heads"]

_MAX_HEAD_BYTES = 16 << 20


class Heads:
    """First bytes of files that were read to look at them, so that they are fetched once; of this process."""

    def __init__(self) -> None:
        self._heads: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def get(self, name: str) -> bytes:
        """What is known of a file's beginning."""
        return self._heads.get(name, b"")

    def note(self, name: str, start: int, data: bytes) -> None:
        """Takes bytes that were read, if they go on from what is known."""
        with self._lock:
            head = self._heads.get(name, b"")
            if start <= len(head) < start + len(data) <= _MAX_HEAD_BYTES:
                self._heads[name] = head[:start] + data

    def drop(self, name: str) -> None:
        """Forgets a file that is local now."""
        with self._lock:
            self._heads.pop(name, None)

    def __reduce__(self) -> tuple[type[Heads], tuple[()]]:
        return Heads, ()


@dataclass(frozen=True)
class CachedSource(ABC):
    """A version of a remote folder, with a place for it in this node's cache.

    Headers are read from the remote end until a file is local. Then nobody is asked any more.
    """

    ref: str
    kind: str
    repository: Repository
    inside: str
    """Folder inside the version that holds the checkpoint; empty for all of it."""
    only: str | None
    identity: str | None
    files: Mapping[str, RemoteFile] = field(repr=False)
    """By path inside the checkpoint's folder."""
    offline: bool = False
    heads: Heads = field(default_factory=Heads, compare=False, repr=False)

    def __hash__(self) -> int:
        return hash((self.ref, self.identity))

    # What the kinds differ in.

    @abstractmethod
    def stream(
        self, file: RemoteFile, start: int, end: int, stop: threading.Event
    ) -> Generator[bytes, None, None]:
        """Bytes of a file from the remote end; see `Remote.stream`."""

    @abstractmethod
    def hashes(self, file: RemoteFile) -> Mapping[str, str]:
        """What the remote end knows of a file's content; see `check_hash`."""

    @abstractmethod
    def key(self, file: RemoteFile) -> str:
        """The name of a file's content in the cache."""

    @abstractmethod
    def limits(self) -> Limits:
        """How the remote end is treated."""

    @abstractmethod
    def lock(self) -> AbstractContextManager[None]:
        """Held while files are fetched, by one process of those that share the cache."""

    @abstractmethod
    def wrong(self, name: str, why: str) -> SourceError:
        """The error for a download that brought other bytes than were announced."""

    @abstractmethod
    def fetched(self) -> None:
        """Called when files have come, or were all there."""

    # What a source is.

    @property
    def folder(self) -> str:
        """The checkpoint's folder on this node."""
        return os.path.join(self.repository.snapshot, self.inside).rstrip("/")

    @property
    def base(self) -> str:
        """The checkpoint's folder at the remote end, for messages."""
        return posixpath.join(self.ref, self.inside)

    @property
    def is_remote(self) -> bool:
        return not self.offline

    def list(self) -> list[str]:
        if self.only is not None:
            return [self.only]
        return sorted(name for name in self.files if "/" not in name)

    def size(self, name: str) -> int | None:
        file = self.files.get(posixpath.normpath(name))
        return None if file is None else file.size

    def stamp(self, name: str) -> str | None:
        try:
            return stamp_of(os.stat(self.path(name))) if self.has(name) else None
        except OSError:
            return None

    def path(self, name: str) -> str:
        return os.path.join(self.folder, name)

    def label(self, name: str) -> str:
        return self.path(name) if self.has(name) else posixpath.join(self.base, name).rstrip("/")

    def has(self, name: str) -> bool:
        """Whether a file is local, and as large as it must be."""
        size = size_of(self.path(name))
        file = self.files.get(posixpath.normpath(name))
        return size is not None and (file is None or file.size == size)

    def read(self, name: str, start: int, end: int) -> bytes:
        file = self.files.get(posixpath.normpath(name))
        if file is None or self.has(name):
            return LocalSource(self.ref, self.folder).read(name, start, end)
        if not self.offline and size_of(blob := self.repository.blob(self.key(file))) == file.size:
            # Of another version, which has the same file.
            return LocalSource(self.ref, os.path.dirname(blob)).read(os.path.basename(blob), start, end)
        end = min(end, file.size)
        head = self.heads.get(file.name)
        if end <= len(head):
            return head[start:end]
        if self.offline:
            raise self.not_cached([file.name])
        # What is known already isn't asked for again.
        known = head[start:] if start < len(head) else b""
        data = read_range(partial(self.stream, file), start + len(known), end, self.limits())
        self.heads.note(file.name, start + len(known), data)
        return known + data

    def known_hashes(self, name: str) -> Mapping[str, str]:
        file = self.files.get(posixpath.normpath(name))
        return {} if file is None or self.offline else self.hashes(file)

    # Fetching.

    def companions(self) -> Sequence[RemoteFile]:
        """Configs, tokenizers and other small files that come along; none with a single file."""
        return [] if self.only is not None else [self.files[name] for name in companions(self.files)]

    def lacking(self, names: Iterable[str]) -> Sequence[RemoteFile]:
        """Those of the named files that aren't local, in order.

        Raises:
            MissingFileError: There are none by these names at the remote end either.
        """
        wanted = list(dict.fromkeys(map(posixpath.normpath, names)))
        unknown = [name for name in wanted if name not in self.files and not self.has(name)]
        if unknown:
            raise MissingFileError(self.ref, unknown, "there are no such files")
        return [self.files[name] for name in wanted if name in self.files and not self.has(name)]

    def fetch(self, names: Iterable[str], report: Report | None = None) -> int:
        wanted = [file.name for file in self.companions()] + list(names)
        if self.offline:
            # The small ones are nothing that weights need.
            if absent := self.lacking(names):
                raise self.not_cached([file.name for file in absent])
            return 0
        if not self.lacking(wanted):
            self.fetched()
            return 0
        with self.lock():
            num_bytes = self.bring(self.lacking(wanted), report)
            self.fetched()
            return num_bytes

    def bring(self, files: Sequence[RemoteFile], report: Report | None = None) -> int:
        """Fetches files, whoever has the lock; returns the bytes that came."""
        if not files:
            return 0
        self.repository.make()
        jobs = []
        for file in files:
            if size_of(self.repository.blob(self.key(file))) == file.size:
                self.link(file)
            else:
                jobs.append(self._job(file))
        if not jobs:
            return 0
        to_come = [file for file in files if not self.has(file.name)]
        blobs = os.path.join(self.repository.folder, "blobs")
        check_room(blobs, [(self.key(file), file.size) for file in to_come])
        total = sum(file.size for file in to_come)
        num_bytes = run_jobs(jobs, self.limits(), _counter(total, report))
        sweep(blobs)
        return num_bytes

    def _job(self, file: RemoteFile) -> Job:
        return Job(
            open=partial(self.open_part, file),
            stream=partial(self.stream, file),
            check=partial(self.check, file),
            done=partial(self.link, file),
            ranged=file.ranged,
        )

    # The steps, for those that distribute files otherwise.

    def open_part(self, file: RemoteFile) -> PartFile:
        """The part file of this process for a file, with what came of it before."""
        part = PartFile.open(self.repository.blob(self.key(file)), file.size)
        head = self.heads.get(file.name)
        for start, end in part.missing(0, len(head)):
            part.write(start, head[start:end])
        return part

    def check(self, file: RemoteFile, path: str) -> bool:
        """Compares the bytes of a whole file with what the remote end knows of it.

        Returns:
            Whether it knows a hash.

        Raises:
            SourceError: They are wrong.
            CheckpointError: It isn't the file that was listed any more.
            Unchecked: The remote end can't be asked.
        """
        try:
            known = self.hashes(file)
        except SourceError as error:
            raise Unchecked(error) from None
        try:
            return check_hash(path, known, partial(self._thrown_away, file))
        except OSError as error:
            if isinstance(error, SourceError):
                raise
            raise disk_error(error, path, 0) from error

    def _thrown_away(self, file: RemoteFile, why: str) -> SourceError:
        # The wrong bytes may be among those that were read at first.
        self.heads.drop(file.name)
        return self.wrong(file.name, why)

    def link(self, file: RemoteFile) -> None:
        """Gives a file whose content is in the cache its name there."""
        self.repository.link(os.path.join(self.inside, file.name), self.key(file))
        self.heads.drop(file.name)

    def not_cached(self, names: Sequence[str]) -> MissingFileError:
        """The error for files that would have to be fetched while working offline."""
        return MissingFileError(
            self.ref,
            names,
            f"working offline, and {len(names)} files are absent from the cache {self.repository.folder}",
        )


def _counter(total_bytes: int, report: Report | None) -> Callable[[int], None]:
    """Adds up what comes, for a display."""
    done_bytes = 0

    def count(nbytes: int) -> None:
        nonlocal done_bytes
        done_bytes += nbytes
        if report is not None:
            report(min(done_bytes, total_bytes), total_bytes, "fetch")

    if report is not None:
        report(0, total_bytes, "fetch")
    return count
