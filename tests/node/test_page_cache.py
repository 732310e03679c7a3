"""The page cache of real files on this machine's own disk."""

import mmap
import os
import subprocess
import sys
import tempfile

import pytest

from raywl.node import page_cache
from raywl.node.mounts import fs_type
from raywl.node.page_cache import (
    drop,
    record_checkpoint_files,
    release_checkpoint_page_cache,
    resident_bytes,
    resident_fraction,
    resident_in,
)

NUM_BYTES = (1 << 20) + 100


@pytest.fixture
def folder(tmp_path):
    """A folder on a disk: files in memory can't leave it."""
    if fs_type([str(tmp_path)]) != "tmpfs":
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=os.path.dirname(__file__)) as path:
        yield type(tmp_path)(path)


@pytest.fixture
def file(folder):
    path = folder / "weights"
    path.write_bytes(os.urandom(NUM_BYTES))
    drop(str(path))
    return str(path)


def read(path, num_bytes=-1):
    """Without the kernel reading ahead."""
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    with open(fd, "rb", buffering=0) as file:
        file.read(num_bytes)


@pytest.mark.parametrize("old_kernel", [False, True])
def test_what_of_a_range_is_resident(file, old_kernel, monkeypatch):
    """The same with and without `cachestat`, which kernels before 6.5 lack."""
    if old_kernel:
        monkeypatch.setattr(page_cache, "_CACHESTAT", 1 << 20)
    page = mmap.PAGESIZE
    read(file, 10 * page)
    fd = os.open(file, os.O_RDONLY)
    try:
        assert resident_in(fd, file, 0, 4 * page) == 4 * page
        assert resident_in(fd, file, 8 * page, 20 * page) == 2 * page
        assert resident_in(fd, file, 8 * page + 5, 8 * page + 100) == 95
        assert resident_in(fd, file, 20 * page, NUM_BYTES) == 0
    finally:
        os.close(fd)


def test_what_is_resident(file):
    assert resident_bytes(file) == 0
    assert resident_fraction(file) == 0
    read(file, 10 * mmap.PAGESIZE)
    assert resident_bytes(file) == 10 * mmap.PAGESIZE
    read(file)
    assert resident_bytes(file) == NUM_BYTES
    assert resident_fraction(file) == 1
    drop(file)
    assert resident_bytes(file) == 0


def test_dropping_takes_what_was_just_written_along(folder):
    """Pages that aren't on the disk yet can't be forgotten."""
    path = folder / "fresh"
    path.write_bytes(bytes(NUM_BYTES))
    drop(str(path))
    assert resident_bytes(str(path)) == 0
    assert path.read_bytes() == bytes(NUM_BYTES)


def test_empty_and_absent_files(folder):
    path = folder / "empty"
    path.touch()
    assert resident_bytes(str(path)) == 0
    assert resident_fraction(str(path)) == 1
    with pytest.raises(FileNotFoundError):
        resident_bytes(str(folder / "absent"))


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
def test_files_of_others_tell_nothing(file):
    """The kernel says "all" of them, which would be wrong."""
    os.chmod(file, 0o644)
    read(file, mmap.PAGESIZE)
    # Opened before, since the way to the file is closed to others.
    code = f"""
import os
from raywl.node import page_cache
file = os.open({file!r}, os.O_RDONLY)
os.setuid(65534)
path = f"/proc/self/fd/{{file}}"
print(os.access(path, os.R_OK), page_cache.resident_bytes(path))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split()[-1] == "None"


def test_released_files_leave_the_cache_and_are_forgotten(folder, monkeypatch):
    paths = [str(folder / f"{i}") for i in range(3)]
    for path in paths:
        with open(path, "wb") as out:
            out.write(os.urandom(NUM_BYTES))
            os.fsync(out.fileno())
    link = folder / "link"
    link.symlink_to(paths[0])
    absent = str(folder / "absent")
    # What earlier tests of this process have read.
    release_checkpoint_page_cache()
    told = []
    advise = os.posix_fadvise
    monkeypatch.setattr(os, "posix_fadvise", lambda *args: (told.append(args), advise(*args)))
    record_checkpoint_files([*paths, paths[0], str(link), absent])
    record_checkpoint_files(iter(paths))

    release_checkpoint_page_cache([paths[1], paths[1]])
    assert [resident_bytes(path) for path in paths] == [NUM_BYTES, 0, NUM_BYTES]
    assert len(told) == 1
    release_checkpoint_page_cache()
    assert [resident_bytes(path) for path in paths] == [0, 0, 0]
    assert len(told) == 3
    release_checkpoint_page_cache()
    assert len(told) == 3


def test_a_release_never_fails(folder, monkeypatch):
    path = folder / "there"
    path.touch()

    def refuse(*args):
        raise OSError(22, "no")

    monkeypatch.setattr(os, "posix_fadvise", refuse)
    record_checkpoint_files([str(path), str(folder), str(folder / "gone")])
    release_checkpoint_page_cache()
    release_checkpoint_page_cache([str(path)])
