"""Deleting from the cache: only what nobody uses, on real files."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
import time
import zlib
from pathlib import Path

import pytest

from raywl.caches import list_cache, prune_cache
from raywl.locks import acquire_within, get_lock
from raywl.sources.cache import Repository, store_folder

DAY_S = 86400.0


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


def fill(
    cache: Path, url: str, version: str, files: dict[str, bytes], age_s: float = 10 * DAY_S
) -> Repository:
    """A version as fetching leaves it; its contents are named by what they are."""
    repository = Repository(store_folder(str(cache), url, None), version)
    repository.make()
    for name, data in files.items():
        key = f"key-{zlib.crc32(data):08x}"
        Path(repository.blob(key)).write_bytes(data)
        repository.link(name, key)
    grow_old(repository, age_s)
    (Path(repository.folder) / "latest.json").write_text(json.dumps({"url": url}))
    return repository


def grow_old(repository: Repository, age_s: float = 10 * DAY_S) -> None:
    """As if nobody had read its files since."""
    then_s = time.time() - age_s
    for path in Path(repository.snapshot).iterdir():
        os.utime(path, (then_s, then_s))


ONE = {"config.json": b"{}", "model.safetensors": b"a" * 100_000}


def test_what_is_there(cache):
    fill(cache, "s3://b/old", "v1", ONE, 20 * DAY_S)
    fill(cache, "s3://b/new", "v1", {"model.safetensors": b"b" * 50_000}, 2 * DAY_S)
    found = list_cache(str(cache))
    assert [(one.url, one.version) for one in found] == [("s3://b/old", "v1"), ("s3://b/new", "v1")]
    assert found[0].nbytes >= 100_000
    assert time.time() - found[0].used_s == pytest.approx(20 * DAY_S, abs=60)
    assert not list_cache(str(cache / "nothing"))


def test_by_age(cache):
    old = fill(cache, "s3://b/old", "v1", ONE, 20 * DAY_S)
    new = fill(cache, "s3://b/new", "v1", ONE, 2 * DAY_S)
    shown = prune_cache(str(cache), max_age_s=7 * DAY_S, dry_run=True)
    assert [one.url for one in shown.removed] == ["s3://b/old"]
    assert Path(old.path("model.safetensors")).is_file()
    report = prune_cache(str(cache), max_age_s=7 * DAY_S)
    assert [one.url for one in report.removed] == ["s3://b/old"]
    assert report.freed_bytes >= 100_000
    assert not Path(old.folder).exists()
    assert Path(new.path("model.safetensors")).read_bytes() == ONE["model.safetensors"]


def test_by_size(cache):
    """The longest unused go first, and no more than must."""
    for number in range(4):
        files = {"model.safetensors": bytes([number]) * 100_000}
        fill(cache, f"s3://b/{number}", "v1", files, (20 - number) * DAY_S)
    report = prune_cache(str(cache), max_bytes=250_000)
    assert [one.url for one in report.removed] == ["s3://b/0", "s3://b/1"]
    assert [one.url for one in list_cache(str(cache))] == ["s3://b/2", "s3://b/3"]


def test_another_version_has_the_same_file(cache):
    """A content that another version has stays, and counts for neither."""
    old = fill(cache, "s3://b/m", "v1", {**ONE, "extra.safetensors": b"x" * 30_000}, 20 * DAY_S)
    new = fill(cache, "s3://b/m", "v2", ONE, 2 * DAY_S)
    # The older version's own file is older than what both have.
    extra = Path(old.path("extra.safetensors")).resolve()
    assert 30_000 <= list_cache(str(cache))[0].nbytes < 60_000
    report = prune_cache(str(cache), max_bytes=1)
    assert {one.version for one in report.removed} == {"v1", "v2"}
    fill(cache, "s3://b/m", "v1", {**ONE, "extra.safetensors": b"x" * 30_000}, 20 * DAY_S)
    fill(cache, "s3://b/m", "v2", ONE, 20 * DAY_S)
    with open(new.path("model.safetensors"), "rb"):
        report = prune_cache(str(cache), max_age_s=DAY_S)
    assert not report.removed
    assert extra.exists()


@pytest.mark.parametrize("how", ["open", "mapped"])
def test_what_a_process_uses_stays(cache, how):
    """Another process has the file open, or only mapped: it is named, and goes when that has ended."""
    one = fill(cache, "s3://b/m", "v1", ONE)
    code = (
        "import mmap, sys\n"
        "file = open(sys.argv[1], 'rb')\n"
        "held = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if sys.argv[2] == 'mapped' else file\n"
        "if held is not file: file.close()\n"
        "print('ready', flush=True)\n"
        "sys.stdin.read()\n"
    )
    user = subprocess.Popen(
        [sys.executable, "-c", code, one.path("model.safetensors"), how],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert user.stdout.readline().strip() == "ready"
        grow_old(one)
        report = prune_cache(str(cache), max_age_s=DAY_S)
        assert not report.removed
        assert "open" in report.kept["s3://b/m (v1)"]
    finally:
        user.communicate(timeout=20)
    grow_old(one)
    assert prune_cache(str(cache), max_age_s=DAY_S).removed


def test_own_mapping(cache):
    """Of this very process."""
    one = fill(cache, "s3://b/m", "v1", ONE)
    with open(one.path("model.safetensors"), "rb") as file:
        held = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    grow_old(one)
    assert not prune_cache(str(cache), max_age_s=DAY_S).removed
    held.close()
    assert prune_cache(str(cache), max_age_s=DAY_S).removed


def test_what_is_being_fetched_stays(cache):
    one = fill(cache, "s3://b/m", "v1", ONE)
    lock = get_lock(one.folder, str(cache / "locks"))
    with acquire_within(lock, 1.0, "download"):
        report = prune_cache(str(cache), max_age_s=DAY_S)
    assert report.kept == {"s3://b/m (v1)": "it is being fetched"}


def test_what_was_used_just_now_stays(cache):
    fill(cache, "s3://b/m", "v1", ONE, 60.0)
    report = prune_cache(str(cache), max_bytes=1)
    assert report.kept == {"s3://b/m (v1)": "it was used within the hour"}


def test_what_is_named_stays(cache):
    one = fill(cache, "s3://b/m", "v1", ONE)
    report = prune_cache(str(cache), max_bytes=1, keep=[one.path("config.json")])
    assert report.kept == {"s3://b/m (v1)": "it is pinned or staged"}


def test_leftovers(cache):
    """Old parts of files that nobody goes on with."""
    one = fill(cache, "s3://b/m", "v1", ONE, 60.0)
    part = Path(one.blob("key.abcd.incomplete"))
    part.write_bytes(b"x" * 9000)
    fresh = Path(one.blob("key.ef01.incomplete"))
    fresh.write_bytes(b"x" * 9000)
    then_s = time.time() - 9 * DAY_S
    os.utime(part, (then_s, then_s))
    report = prune_cache(str(cache), max_age_s=7 * DAY_S)
    assert report.leftovers == 1
    assert not part.exists()
    assert fresh.exists()


def test_something_must_be_said(cache):
    with pytest.raises(ValueError, match="max_age_s or max_bytes"):
        prune_cache(str(cache))
