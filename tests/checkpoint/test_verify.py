"""`Checkpoint.verify` finds what changed since the opening; with `deep` it reads every byte."""

import hashlib
import os

import pytest

import raywl
from tests.hostile.folders import INDEX, ONE, TWO, index, tensors, write

FILES = {INDEX: index({"a": ONE, "b": TWO}), ONE: tensors("a"), TWO: tensors("b")}


@pytest.mark.parametrize("deep", [False, True])
def test_all_is_well(deep, tmp_path):
    """Files are counted; bytes only when they were read."""
    report = raywl.open_checkpoint(write(FILES, tmp_path)).verify(deep=deep)
    assert report.ok
    assert report.problems == []
    assert report.files_checked == 2
    assert report.bytes_checked == (len(FILES[ONE]) + len(FILES[TWO]) if deep else 0)
    assert report.to_dict()["ok"] is True


@pytest.mark.parametrize("name", ["x[1].safetensors", "x*.safetensors", "x?.safetensors", "ü 1.safetensors"])
def test_odd_file_names(name, tmp_path):
    """A name isn't a pattern."""
    write({name: tensors("a"), "other.safetensors": tensors("b")}, tmp_path)
    report = raywl.open_checkpoint(tmp_path).verify(deep=True)
    assert report.ok, report.problems
    assert set(report.sha256) == {name, "other.safetensors"}


def _cut(path):
    os.truncate(path, path.stat().st_size - 1)


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda folder: os.unlink(folder / TWO), "absent"),
        (lambda folder: _cut(folder / TWO), "short by 1 bytes"),
        (lambda folder: (folder / TWO).write_bytes(tensors("b", "c")), "header changed"),
        (lambda folder: (folder / TWO).write_bytes(b"x" * 100), "header"),
    ],
    ids=["removed", "truncated", "another-header", "overwritten"],
)
def test_changes_are_found(change, says, deep, tmp_path):
    """Each problem names the file."""
    checkpoint = raywl.open_checkpoint(write(FILES, tmp_path))
    change(tmp_path)
    report = checkpoint.verify(deep=deep)
    assert not report.ok
    assert any(TWO in problem and says in problem for problem in report.problems), report.problems


def test_a_blob_that_is_not_its_hash(tmp_path):
    """Where a file is a link to a blob that is named by its SHA-256, `deep` compares."""
    raw = tensors("a")
    good, bad = hashlib.sha256(raw).hexdigest(), hashlib.sha256(b"other").hexdigest()
    for name, blob in (("good", good), ("bad", bad)):
        folder = write({f"blobs/{blob}": raw}, tmp_path / name)
        os.symlink(f"blobs/{blob}", folder / "model.safetensors")
    report = raywl.open_checkpoint(tmp_path / "good").verify(deep=True)
    assert report.ok
    assert report.compared == ["model.safetensors"]
    (problem,) = raywl.open_checkpoint(tmp_path / "bad").verify(deep=True).problems
    assert good in problem
    assert bad in problem
    assert raywl.open_checkpoint(tmp_path / "bad").verify().ok
