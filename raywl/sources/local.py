"""Folders and files on this machine's file systems."""

from __future__ import annotations

import errno
import os
import socket
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

from raywl.errors import NotFoundError, SourceError
from raywl.sources.base import Report

__all__ = ["LocalSource", "stamp_of"]

_NOTHING_THERE = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG}


def stamp_of(info: os.stat_result) -> str:
    """A file's state on this very node since it was started: another one's stamps are never equal."""
    return f"{_boot_id()}:{info.st_dev}:{info.st_ino}:{info.st_size}:{info.st_mtime_ns}"


@cache
def _boot_id() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return socket.gethostname()


@dataclass(frozen=True, slots=True)
class LocalSource:
    """A folder of this node, or one file of it."""

    ref: str
    folder: str
    """Absolute path."""
    only: str | None = None
    """The one file that was asked for, by name, or `None` for the folder."""
    identity: str | None = None
    kind: ClassVar[str] = "local"
    is_remote: ClassVar[bool] = False

    @classmethod
    def open(cls, ref: str, subfolder: str | None = None) -> LocalSource:
        """The source for a path.

        Raises:
            NotFoundError: Nothing is there.
        """
        if not ref:
            raise NotFoundError(ref, "an empty path names no checkpoint", local=True)
        path = os.path.abspath(os.path.expanduser(ref))
        if subfolder:
            path = os.path.join(path, subfolder)
        if os.path.isdir(path):
            return cls(ref, path)
        if os.path.isfile(path):
            return cls(ref, os.path.dirname(path), os.path.basename(path))
        raise NotFoundError(path, "path not found: there is no such folder or file", local=True)

    def list(self) -> list[str]:
        if self.only is not None:
            return [self.only]
        try:
            with os.scandir(self.folder) as entries:
                return sorted(entry.name for entry in entries if not _is_folder(entry))
        except OSError as error:
            raise SourceError(self.folder, f"can't be listed: {error.strerror}") from error

    def size(self, name: str) -> int | None:
        try:
            info = os.stat(self.path(name))
        except OSError as error:
            if error.errno in _NOTHING_THERE:
                return None
            raise SourceError(self.path(name), f"can't be read: {error.strerror}") from error
        return info.st_size if stat.S_ISREG(info.st_mode) else None

    def stamp(self, name: str) -> str | None:
        try:
            return stamp_of(os.stat(self.path(name)))
        except OSError:
            return None

    def read(self, name: str, start: int, end: int) -> bytes:
        path = self.path(name)
        try:
            with open(path, "rb", buffering=0) as file:
                os.lseek(file.fileno(), start, os.SEEK_SET)
                pieces = []
                while start < end and (piece := file.read(end - start)):
                    pieces.append(piece)
                    start += len(piece)
                return b"".join(pieces)
        except OSError as error:
            raise SourceError(path, f"can't be read at byte {start}: {error.strerror}") from error

    def path(self, name: str) -> str:
        return os.path.join(self.folder, name)

    def label(self, name: str) -> str:
        return self.path(name)

    def fetch(self, names: Iterable[str], report: Report | None = None) -> int:
        return 0

    def known_hashes(self, name: str) -> Mapping[str, str]:
        return {}


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        # A link in a circle, or one that leads where nobody may look.
        return False
