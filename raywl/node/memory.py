"""How much memory this process may still take without pushing anything out."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator

from raywl.node.mounts import read_mountinfo

__all__ = ["available_ram_bytes", "give_back_freed", "group_allowances", "want_huge_pages"]

_NO_LIMIT_BYTES = 1 << 62
"""Version 1 writes "no limit" as the largest number of whole pages, which differs by page size."""
_FILES_V1 = {
    "limit": "memory.limit_in_bytes",
    "usage": "memory.usage_in_bytes",
    # Sums over the groups below, as the usage is; the plain keys are of one group alone.
    "cache": "total_active_file total_inactive_file",
}
_FILES_V2 = {"limit": "memory.max", "usage": "memory.current", "cache": "active_file inactive_file"}


def available_ram_bytes(proc_path: str = "/proc") -> int:
    """The smaller of what the host has available and what the control groups still allow.

    Page cache counts as free in both, as the kernel gives it back when memory is asked for.

    Args:
        proc_path: Where the process file system is, for the control groups.
    """
    import psutil

    return min([int(psutil.virtual_memory().available), *group_allowances(proc_path)])


def give_back_freed() -> bool:
    """Gives memory that this process has freed back to the system, where its allocator keeps some.

    glibc keeps what is below a block in use, in an arena for each thread, and so comes to hold several times
    what is in use where some threads allocate and another one frees. Takes milliseconds.

    Returns:
        Whether the allocator has been told; `False` where it isn't glibc's.
    """
    import ctypes

    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError):
        return False
    return True


def want_huge_pages(address: int, num_bytes: int) -> bool:
    """Asks the kernel to back memory that was just allocated, and not touched, with huge pages where it can.

    A page fault for each 4 KiB takes longer than the copying of what is read into them.

    Args:
        address: First byte.
        num_bytes: Length; the pages that lie in it whole are meant.

    Returns:
        Whether the kernel took it; `False` where it has no such pages.
    """
    import ctypes

    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (address + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE - start
    try:
        madvise, advice = ctypes.CDLL(None).madvise, mmap.MADV_HUGEPAGE
    except (AttributeError, OSError):
        return False
    return length > 0 and madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), advice) == 0


def group_allowances(proc_path: str = "/proc") -> Iterator[int]:
    """Bytes that each control group of this process with a limit still allows, those above it included.

    Args:
        proc_path: Where the process file system is; its `self/cgroup` names the groups, and its
            `self/mountinfo` where they are mounted.

    Yields:
        One number for each limit, 0 where more is used than it allows.
    """
    for path, top, files in _groups(proc_path):
        while True:
            allowed = _allowance(path, files)
            if allowed is not None:
                yield allowed
            if path == top:
                break
            path = os.path.dirname(path)


def _groups(proc_path: str) -> Iterator[tuple[str, str, dict[str, str]]]:
    """`(folder of a group, folder of the topmost visible one, file names)` for each memory hierarchy."""
    names: dict[bool, str] = {}
    try:
        with open(os.path.join(proc_path, "self/cgroup"), encoding="utf-8") as lines:
            for line in lines:
                number, controllers, name = line.rstrip("\n").split(":", 2)
                if number == "0" or "memory" in controllers.split(","):
                    names[number == "0"] = name
    except OSError:
        return
    for mount in read_mountinfo(os.path.join(proc_path, "self/mountinfo")):
        is_v2 = mount.fs_type == "cgroup2"
        is_v1 = mount.fs_type == "cgroup" and "memory" in mount.super_options.split(",")
        if (is_v1 or is_v2) and is_v2 in names:
            below = _below(names[is_v2], mount.root)
            yield (
                os.path.join(mount.path, below) if below else mount.path,
                mount.path,
                (_FILES_V2 if is_v2 else _FILES_V1),
            )


def _below(name: str, root: str) -> str:
    """Path of a group below the folder that is mounted; a container may see only that one folder."""
    relative = os.path.relpath(name, root)
    return "" if relative == "." or relative.split("/")[0] == ".." else relative


def _allowance(path: str, files: dict[str, str]) -> int | None:
    """Bytes that one group still allows, or `None` where it has no limit."""
    try:
        limit_text = _read(path, files["limit"]).strip()
        if limit_text == "max" or int(limit_text) >= _NO_LIMIT_BYTES:
            return None
        usage_bytes = int(_read(path, files["usage"]))
        stat = dict(line.split() for line in _read(path, "memory.stat").splitlines())
        cache_bytes = sum(int(stat.get(key, 0)) for key in files["cache"].split())
    except (OSError, ValueError):
        # The topmost group has no limit file, and groups come and go.
        return None
    return max(0, int(limit_text) - max(0, usage_bytes - cache_bytes))


def _read(folder: str, name: str) -> str:
    with open(os.path.join(folder, name), encoding="utf-8") as file:
        return file.read()
