"""Which file system a path lies on, from the kernel's tables of mounts."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

__all__ = [
    "LOCAL_FILE_SYSTEMS",
    "MOUNTS_PATH",
    "NETWORK_FILE_SYSTEMS",
    "Mount",
    "fs_type",
    "is_local",
    "is_network",
    "read_mountinfo",
]

MOUNTS_PATH = "/proc/mounts"
"""The kernel's table of mounts, as this process sees them."""

NETWORK_FILE_SYSTEMS = ("nfs", "nfs4", "lustre", "virtiofs", "fuse.*", "ceph", "gpfs", "beegfs", "9p")
"""Those that are slow to read in small pieces; `*` stands for any ending."""

LOCAL_FILE_SYSTEMS = tuple(
    "bcachefs btrfs erofs ext2 ext3 ext4 f2fs overlay ramfs squashfs tmpfs xfs zfs".split()
)
"""Those whose files may be mapped: a page of theirs is there when it is touched, or the disk is broken."""

_ESCAPED = re.compile(r"\\([0-7]{3})")


def fs_type(files: Sequence[str], mounts_path: str | None = None) -> str:
    """Type of the file system that the first file lies on, links resolved.

    Args:
        files: Paths; the others are taken to lie beside the first.
        mounts_path: The table of mounts; by default `MOUNTS_PATH`.

    Returns:
        The type of the mount with the longest path that contains the file, of equal ones the last (it
        hides those before it); `""` without files, without a table, or where nothing matches.
    """
    if not files:
        return ""
    path = os.path.realpath(files[0])
    best, best_length = "", -1
    try:
        with open(
            mounts_path or MOUNTS_PATH, encoding="utf-8", errors="surrogateescape", newline="\n"
        ) as lines:
            for line in lines:
                # Blanks in paths are escaped; other white space is not.
                fields = line.rstrip("\n").split(" ")
                if len(fields) < 3:
                    continue
                mount = _unescaped(fields[1])
                if len(mount) >= best_length and _contains(mount, path):
                    best, best_length = fields[2], len(mount)
    except OSError:
        # Not Linux, or not allowed to look.
        return ""
    return best


def is_network(fs_type: str) -> bool:
    """Whether a type of file system is one of `NETWORK_FILE_SYSTEMS`."""
    return any(
        fs_type.startswith(name[:-1]) if name.endswith("*") else fs_type == name
        for name in NETWORK_FILE_SYSTEMS
    )


def is_local(fs_type: str) -> bool:
    """Whether a type of file system is one of `LOCAL_FILE_SYSTEMS`; an unknown one isn't."""
    return fs_type in LOCAL_FILE_SYSTEMS


@dataclass(frozen=True, slots=True)
class Mount:
    """One row of `/proc/self/mountinfo`."""

    root: str
    """Folder of the file system that is seen at `path`."""
    path: str
    """Where it is mounted."""
    fs_type: str
    """Type of the file system."""
    super_options: str
    """Its options, separated by commas."""


def read_mountinfo(path: str = "/proc/self/mountinfo") -> Iterator[Mount]:
    """The mounts that this process sees; none where there is no such table."""
    try:
        with open(path, encoding="utf-8", errors="surrogateescape", newline="\n") as lines:
            for line in lines:
                # A number of optional fields stands before the lone dash.
                front, dash, back = line.rstrip("\n").partition(" - ")
                fields, rest = front.split(" "), back.split(" ")
                if dash and len(fields) >= 6 and len(rest) >= 3:
                    yield Mount(_unescaped(fields[3]), _unescaped(fields[4]), rest[0], rest[2])
    except OSError:
        return


def _unescaped(text: str) -> str:
    """The kernel writes spaces, tabs, line ends and backslashes in paths as octal numbers."""
    return _ESCAPED.sub(lambda found: chr(int(found.group(1), 8)), text)


def _contains(folder: str, path: str) -> bool:
    return path == folder or path.startswith(folder if folder.endswith("/") else folder + "/")
