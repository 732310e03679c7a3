"""Where fetched files are kept: contents once, under names of their own, and snapshots that name them.

The layout of a repository's folder is that of the hub's own cache, which raywl shares with other tools:

    blobs/<key>                     a file's content; the hub's key is its hash
    blobs/<key>.<random>.incomplete what came of one so far; see `raywl.sources.parts`
    snapshots/<version>/<name>      a link to it

Stores have such folders in raywl's own cache, `RAYWL_CACHE`, one for each URL and endpoint:

    stores/<scheme>--<name>-<hash>/    with `latest.json`: what it is, and the files as last listed
    locks/                             of those that fetch
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from raywl.errors import CapacityError, SourceError
from raywl.sources.digest import Digest, strongest
from raywl.sources.parts import disk_error

__all__ = ["Repository", "cache_root", "check_hash", "check_room", "store_folder"]

_PLAIN = re.compile(r"[^A-Za-z0-9._-]+")
_MAX_READABLE = 80
_BLOCK_BYTES = 8 << 20


def cache_root(cache_dir: str | None) -> str:
    """raywl's own cache folder.

    Args:
        cache_dir: The user's choice; else `RAYWL_CACHE`, else a folder of the user's cache folder.
    """
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join("~", ".cache")
    chosen = cache_dir or os.environ.get("RAYWL_CACHE") or os.path.join(home, "raywl")
    return os.path.abspath(os.path.expanduser(chosen))


def store_folder(root: str, url: str, endpoint: str | None) -> str:
    """The folder of one URL's files at one endpoint in a cache."""
    scheme, _, rest = url.partition("://")
    readable = _PLAIN.sub("-", rest)[-_MAX_READABLE:].strip("-.")
    digest = hashlib.sha256(f"{endpoint or ''}\0{url}".encode()).hexdigest()
    return os.path.join(root, "stores", f"{scheme}--{readable}-{digest[:24]}")


@dataclass(frozen=True, slots=True)
class Repository:
    """One version of a repository or store in a cache."""

    folder: str
    """Of all its versions."""
    version: str
    """Name of the snapshot."""

    @property
    def snapshot(self) -> str:
        """Folder with the version's files under their names."""
        return os.path.join(self.folder, "snapshots", self.version)

    def path(self, name: str) -> str:
        """Where a file of the version is, or will be."""
        return os.path.join(self.snapshot, name)

    def blob(self, key: str) -> str:
        """Where a content is, or will be."""
        return os.path.join(self.folder, "blobs", key)

    def make(self) -> None:
        """Makes the folders.

        Raises:
            SourceError: They can't be made.
        """
        try:
            for folder in (os.path.join(self.folder, "blobs"), self.snapshot):
                os.makedirs(folder, exist_ok=True)
        except OSError as error:
            raise disk_error(error, self.folder, 0) from error

    def link(self, name: str, key: str) -> None:
        """Gives a content its name in the version; one that is there is replaced.

        Raises:
            SourceError: It can't be made.
        """
        path, blob = self.path(name), self.blob(key)
        temporary = f"{path}.{secrets.token_hex(4)}.incomplete"
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            try:
                os.symlink(os.path.relpath(blob, os.path.dirname(path)), temporary)
            except OSError:
                # File systems without symbolic links.
                os.link(blob, temporary)
            os.replace(temporary, path)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise disk_error(error, path, 0) from error


def size_of(path: str) -> int | None:
    """Bytes of a regular file, `None` where there is none."""
    try:
        return os.path.getsize(path) if os.path.isfile(path) else None
    except OSError:
        return None


def check_room(folder: str, blobs: Iterable[tuple[str, int]]) -> None:
    """Raises `CapacityError`, before anything is fetched, where it won't fit.

    Args:
        folder: Where blobs lie.
        blobs: Names and sizes of those to come.
    """
    wanted = dict(blobs)
    there = 0
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            # What came of them before has its place already.
            if entry.name.partition(".")[0] in wanted and entry.name.endswith(".incomplete"):
                there += entry.stat().st_blocks * 512
    try:
        stats = os.statvfs(folder)
    except OSError:
        return
    needed, free = sum(wanted.values()) - there, stats.f_bavail * stats.f_frsize
    if needed > free:
        raise CapacityError(
            "disk space",
            needed,
            free,
            f"in {folder}; make room, or give another cache_dir",
            unit="bytes",
        )


def check_hash(path: str, known: Mapping[str, str], wrong: Callable[[str], SourceError]) -> bool:
    """Compares a file with the strongest hash that is known of it.

    Args:
        path: The file.
        known: Hashes in hex, by name; `git` is that of a git object.
        wrong: Makes the error out of what is wrong.

    Returns:
        Whether there was one to compare with.
    """
    kind = strongest(known)
    if kind is None:
        return False
    got = _hash(path, kind)
    if got != known[kind].lower():
        raise wrong(f"its {kind.upper()} is {got}, expected {known[kind]}")
    return True


def _hash(path: str, kind: str) -> str:
    digest = Digest(kind, os.path.getsize(path))
    with open(path, "rb", buffering=0) as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hex()
