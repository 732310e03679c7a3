"""The page cache is given back when the last process of a node has read a checkpoint, and only if asked."""

from __future__ import annotations

import glob
import os
import subprocess
import sys
import tempfile

import pytest
import torch

import raywl
from raywl.node import page_cache
from raywl.text import format_bytes

from .conftest import Model, filled

ROWS, COLUMNS = 512, 1024


@pytest.fixture
def paths(write):
    """Two files of 2 MiB, all in the page cache, on a disk that lets go of it."""
    tensors = [{name: torch.randn(ROWS, COLUMNS)} for name in ("a", "b")]
    folder = write(*tensors)
    found = sorted(str(path) for path in folder.glob("*.safetensors"))
    for path in found:
        page_cache.drop(path)
        if page_cache.resident_bytes(path) != 0:
            pytest.skip("this file system keeps its pages")
        with open(path, "rb") as file:
            file.read()
    return found


def resident(paths):
    return sum(page_cache.resident_bytes(path) for path in paths)


def model():
    return Model({name: filled(ROWS, COLUMNS) for name in ("a", "b")})


def load(paths, **more):
    return raywl.load_into(model(), os.path.dirname(paths[0]), **more)


def lock_files():
    folder = os.path.join(tempfile.gettempdir(), f"raywl-locks-{os.geteuid()}")
    return glob.glob(os.path.join(folder, "*.pages"))


def test_only_when_asked(paths):
    """Then all files leave the cache, the report says how many bytes did, and no lock is left."""
    size = sum(map(os.path.getsize, paths))
    report = load(paths)
    assert (resident(paths), report.released_bytes) == (size, 0)
    before = set(lock_files())
    report = load(paths, release_page_cache=True)
    assert resident(paths) == 0
    assert report.released_bytes == report.to_dict()["released_bytes"] == size
    assert f"page cache: {format_bytes(size)} of the checkpoint released" in report.notes
    assert set(lock_files()) <= before


@pytest.mark.parametrize("strategy", ["buffered", "mmap", "prefetch"])
def test_values_that_loaders_looked_at(paths, strategy):
    """Whatever was mapped for them isn't by then."""

    def look(model, weights):
        for name, weight in weights:
            model.get_parameter(name).copy_(weight)
            assert weight.abs().max() > 0

    target = Model({name: filled(ROWS, COLUMNS) for name in ("a", "b")}, look)
    raywl.load_into(target, os.path.dirname(paths[0]), strategy=strategy, release_page_cache=True)
    assert resident(paths) == 0


def test_a_reload(paths):
    target, folder = model(), os.path.dirname(paths[0])
    raywl.load_into(target, folder)
    assert raywl.reload_into(target, folder, release_page_cache=True).released_bytes > 0
    assert resident(paths) == 0


def test_the_last_one_does(paths):
    """One that is done while another still reads leaves the pages to it, and says so."""
    inner = []

    def meanwhile(done, total, phase):
        if not inner:
            inner.append(load(paths, release_page_cache=True))
            inner.append(resident(paths))

    outer = load(paths, release_page_cache=True, progress=meanwhile)
    size = sum(map(os.path.getsize, paths))
    assert inner[0].released_bytes == 0
    assert any("other processes of this node still read" in note for note in inner[0].notes)
    assert inner[1] == size
    assert outer.released_bytes == size
    assert resident(paths) == 0


CHILD = """
import os, sys, torch, raywl
from tests.loading.test_releasing import model
def progress(*told):
    print("reading", flush=True)
    sys.stdin.read()
raywl.load_into(model(), sys.argv[1], release_page_cache=True, progress=progress)
"""


def test_a_dead_process_is_not_waited_for(paths):
    """While it lived it was counted."""
    command = [sys.executable, "-c", CHILD, os.path.dirname(paths[0])]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout.readline() == "reading\n"
            assert load(paths, release_page_cache=True).released_bytes == 0
            assert resident(paths) > 0
        finally:
            child.kill()
    assert load(paths, release_page_cache=True).released_bytes > 0
    assert resident(paths) == 0


def test_without_locks(paths, monkeypatch):
    """Where nobody can be seen, the pages go all the same."""
    monkeypatch.setattr(tempfile, "tempdir", "/proc")
    assert load(paths, release_page_cache=True).released_bytes > 0
    assert resident(paths) == 0


def test_a_failed_load_drops_nothing(paths):
    folder = os.path.dirname(paths[0])
    with pytest.raises(raywl.errors.MissingWeightsError):
        raywl.load_into(Model({"c": filled(3)}), folder, strict="exact", release_page_cache=True)
    assert resident(paths) == sum(map(os.path.getsize, paths))


def test_files_that_were_read_are_recorded(paths):
    """So that they can be released later; of several files those that were read."""
    page_cache.release_checkpoint_page_cache()
    with pytest.warns(UserWarning, match="no place"):
        raywl.load_into(Model({"a": filled(ROWS, COLUMNS)}), os.path.dirname(paths[0]))
    assert page_cache.release_checkpoint_page_cache() == os.path.getsize(paths[0])
    assert [page_cache.resident_bytes(path) for path in paths] == [0, os.path.getsize(paths[1])]
