"""A plan's file is the old one or the whole new one."""

from __future__ import annotations

import os
import subprocess

import pytest

from raywl import LoadPlan, ParallelContext
from raywl.errors import CapacityError
from raywl.plan.copies import straight
from raywl.plan.plan import TargetInfo


def plan_of(num):
    return LoadPlan(
        identity="local:0",
        context=ParallelContext(),
        files=("f",),
        copies=tuple(straight("t", "f", "t", 8 * i, 8 * i, 2, "float32") for i in range(num)),
        targets={"t": TargetInfo("float32", (2 * num,), (1,))},
    )


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 64 KiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(folder)], capture_output=True, check=False
    )
    if made.returncode:
        pytest.skip(f"this machine mounts no tmpfs: {made.stderr!r}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_on_a_full_disk(small_disk):
    """An error with both sizes; what was there is still there, whole, and nothing beside it."""
    path = small_disk / "plan.json"
    plan_of(10).save(path)
    large = plan_of(2000)
    with pytest.raises(CapacityError, match=r"disk space: \d+ bytes needed, \d+ bytes available") as caught:
        large.save(path)
    assert str(path) in str(caught.value)
    assert caught.value.needed > 64 << 10 > caught.value.available
    assert os.listdir(small_disk) == ["plan.json"]
    assert LoadPlan.load(path) == plan_of(10)


def test_where_there_is_no_folder(tmp_path):
    with pytest.raises(FileNotFoundError):
        plan_of(1).save(tmp_path / "absent" / "plan.json")


def test_a_plan_comes_back_as_it_was(tmp_path):
    plan_of(3).save(tmp_path / "plan.json")
    assert LoadPlan.load(tmp_path / "plan.json") == plan_of(3)
