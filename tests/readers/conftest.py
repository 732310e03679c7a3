"""File systems of other kinds than this machine's: said to be there, or really mounted."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from raywl.node import mounts
from tests.fuse import FuseMount, why_not


def mounted(folder: Path, fs_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the table of mounts say that a folder is one, of a type."""
    table = folder.parent / f"{folder.name}-mounts"
    path = os.path.realpath(folder).replace(" ", "\\040")
    table.write_text(f"/dev/root / ext4 rw 0 0\nserver:/models {path} {fs_type} ro 0 0\n")
    monkeypatch.setattr(mounts, "MOUNTS_PATH", str(table))


@pytest.fixture
def fuse(tmp_path: Path) -> Iterator[FuseMount]:
    """A mounted FUSE file system over an empty folder, whose reads can be made to fail."""
    if reason := why_not():
        pytest.skip(reason)
    with FuseMount(tmp_path / "behind", tmp_path / "mounted") as mount:
        yield mount


def mappings_of(path: str) -> list[str]:
    """Lines of this process's memory map that are a file."""
    with open("/proc/self/maps") as file:
        return [line.rstrip() for line in file if path in line]


def reader_threads() -> list[str]:
    """Threads of raywl's that are alive."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("raywl")]
