"""Files that stay in memory."""

from __future__ import annotations

import resource

import pytest

from raywl.node.page_cache import drop, resident_fraction
from raywl.node.pinned import PinnedFiles


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "weights"
    path.write_bytes(b"w" * 3_000_000)
    drop(str(path))
    if resident_fraction(str(path)) != 0:
        pytest.skip("this file system doesn't drop pages")
    return str(path)


def until(holds, timeout_s=20.0):
    import time

    give_up_s = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < give_up_s
        time.sleep(0.01)


def test_locked(path, tmp_path):
    """The kernel can't drop them, until they are let go."""
    (tmp_path / "empty").touch()
    pinned = PinnedFiles([path, str(tmp_path / "empty")])
    if not pinned.locked:
        pytest.skip("memory can't be locked here")
    assert pinned.nbytes == 3_000_000
    drop(path)
    assert resident_fraction(path) == 1.0
    pinned.close()
    drop(path)
    assert resident_fraction(path) == 0.0


def test_read_again_where_locking_is_not_allowed(path, monkeypatch):
    """As for most users: what was pushed out comes back."""
    from raywl.node import pinned as module

    class NoLocks:
        """libc of a process that may lock nothing."""

        def __init__(self, libc):
            self._libc = libc

        def __getattr__(self, name):
            return (lambda *_: -1) if name == "mlock" else getattr(self._libc, name)

    libc = module._libc
    monkeypatch.setattr(module, "_libc", lambda: NoLocks(libc()))
    pinned = PinnedFiles([path], again_s=0.02)
    try:
        assert not pinned.locked
        assert resident_fraction(path) == 1.0
        drop(path)
        until(lambda: resident_fraction(path) == 1.0)
    finally:
        pinned.close()
    assert resource.getrlimit(resource.RLIMIT_MEMLOCK)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError):
        PinnedFiles([str(tmp_path / "none")])
