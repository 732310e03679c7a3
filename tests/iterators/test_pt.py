"""Files of `torch.save`: what is refused, what is unwrapped, what is mapped."""

from __future__ import annotations

import argparse
import os
import threading
import warnings
import zipfile
from pathlib import Path

import numpy
import pytest
import torch

from raywl import weight_utils
from raywl.errors import CheckpointError, CorruptFileError
from raywl.iterators import torch_files
from raywl.iterators.watched import Watched
from tests.iterators.checkpoints import collect, row

WAIT_S = 30.0
ITERATORS = [weight_utils.pt_weights_iterator, weight_utils.multi_thread_pt_weights_iterator]


@pytest.fixture(params=ITERATORS, ids=["pt", "threads"])
def iterate(request):
    return request.param


def save(folder: Path, state: object, name: str = "pytorch_model.bin", legacy: bool = False) -> str:
    path = folder / name
    torch.save(state, path, _use_new_zipfile_serialization=not legacy)
    return str(path)


class Runs:
    """Unpickles by running a command."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
@pytest.mark.parametrize(
    ("state", "name"),
    [
        ({"args": argparse.Namespace(), "model": {"a": torch.ones(2)}}, "argparse.Namespace"),
        ({"step": numpy.float64(1), "a": torch.ones(2)}, "multiarray.scalar"),
        ({"a": torch.ones(2), "f": argparse.ArgumentParser}, "argparse.ArgumentParser"),
    ],
    ids=["Namespace", "numpy-scalar", "class"],
)
def test_a_file_that_needs_code(iterate, state, name, legacy, tmp_path):
    """C86: refused before any tensor, with its path and the forbidden name."""
    paths = [save(tmp_path, {"0": torch.ones(1)}, "a.bin"), save(tmp_path, state, "b.bin", legacy)]
    with pytest.raises(CheckpointError, match=name) as caught:
        next(iterate(paths, False))
    assert caught.value.path == paths[1]
    assert "weights_only" in str(caught.value)


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_code_is_never_run(iterate, legacy, tmp_path, monkeypatch):
    """Whatever the environment says about torch's default."""
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    mark = tmp_path / "was-run"
    path = save(tmp_path, {"a": torch.ones(2), "b": Runs(f"touch {mark}")}, legacy=legacy)
    with pytest.raises(CheckpointError, match=r"posix\.system") as caught:
        list(iterate([path], False))
    assert caught.value.path == path
    assert not mark.exists()


def test_torchscript_is_refused(iterate, tmp_path):
    """It holds a program."""
    path = str(tmp_path / "model.pt")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), path)
    with pytest.raises(CheckpointError, match="TorchScript") as caught:
        next(iterate([path], False))
    assert caught.value.path == path


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_state_dict_is_unwrapped(iterate, legacy, tmp_path):
    """C86: nested under that key and no other; what stands beside it is said once, for all files."""
    inner = {"b": torch.ones(2), "a": torch.zeros(1), "n": None}
    one = save(tmp_path, {"state_dict": inner, "epoch": 3, "beside": torch.ones(1)}, "m-1.bin", legacy)
    two = save(
        tmp_path,
        {"c": torch.ones(1), "steps": 7, 5: torch.ones(1), "more": [torch.ones(1)]},
        "m-2.bin",
        legacy,
    )
    with pytest.warns(UserWarning, match="weights") as caught:
        given = list(iterate([one, two], False))
    assert [name for name, _ in given] == ["a", "b", "c"]
    about = [str(w.message) for w in caught]
    assert len(about) == 1
    assert all(word in about[0] for word in ("epoch", "beside", "n (", "steps", "5", "more", one, two))


def test_a_file_without_tensors(iterate, tmp_path):
    """As a trainer's arguments: nothing, and a warning; a tensor in a dict in a dict isn't looked for."""
    paths = [
        save(tmp_path, {"lr": 0.1, "model": {"a": torch.ones(2)}}),
        save(tmp_path, {"a": torch.ones(1)}, "z.bin"),
    ]
    with pytest.warns(UserWarning, match="lr"):
        assert [name for name, _ in iterate(paths, False)] == ["a"]


@pytest.mark.parametrize(
    "state", [[torch.ones(2)], torch.ones(2), 3, "a"], ids=["list", "tensor", "int", "text"]
)
def test_what_is_no_dict(iterate, state, tmp_path):
    path = save(tmp_path, state)
    with pytest.raises(CheckpointError, match="dict") as caught:
        next(iterate([path], False))
    assert caught.value.path == path


def maps_of(path: str) -> bool:
    return path in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("local", [True, False], ids=["local", "network"])
def test_only_zip_files_are_mapped(local, tmp_path, monkeypatch):
    """C84: both formats give equal tensors, and neither's reach the disk; on network file systems neither is
    mapped (C52)."""
    monkeypatch.setattr(torch_files, "fs_type", lambda files: "ext4" if local else "nfs4")
    state = {"a": torch.randn(1000), "b": torch.randn(3, 4).t()}
    rows = []
    for legacy in (False, True):
        path = save(tmp_path, state, f"legacy-{legacy}.bin", legacy)
        before = Path(path).read_bytes()
        weights = weight_utils.pt_weights_iterator([path], False)
        name, tensor = next(weights)
        assert maps_of(path) is (local and not legacy)
        rows.append([row(name, tensor)])
        tensor.add_(1)
        assert Path(path).read_bytes() == before
        name, tensor = next(weights)
        rows[-1].append(row(name, tensor))
        assert next(weights, None) is None
        del tensor
        assert not maps_of(path)
    assert rows[0] == rows[1] == [row(name, tensor) for name, tensor in sorted(state.items())]


def test_a_shared_mapping_is_never_used(tmp_path):
    """Even where the user has made that torch's default."""
    import mmap

    path = save(tmp_path, {"a": torch.zeros(1000)})
    before = Path(path).read_bytes()
    with torch.serialization.set_default_mmap_options(mmap.MAP_SHARED):
        ((_, tensor),) = weight_utils.pt_weights_iterator([path], False)
    tensor.add_(1)
    assert Path(path).read_bytes() == before


def test_views_parameters_and_ties(iterate, tmp_path):
    """Values are those that were saved; parameters come as plain tensors."""
    base = torch.randn(6, 8)
    state = {
        "whole": base,
        "tied": base,
        "turned": base.t(),
        "part": base[2:4, 3:5],
        "repeated": torch.ones(1).expand(5),
        "parameter": torch.nn.Parameter(torch.ones(3)),
        "complex": torch.randn(2, dtype=torch.complex128),
    }
    path = save(tmp_path, state)
    given = list(iterate([path], False))
    assert [row(*pair) for pair in given] == [row(name, state[name]) for name in sorted(state)]
    assert all(type(tensor) is torch.Tensor and not tensor.requires_grad for _, tensor in given)


def test_what_only_torch_can_read(iterate, tmp_path):
    """Sparse tensors are no plain bytes, but weights all the same."""
    state = {"sparse": torch.eye(3).to_sparse(), "a": torch.ones(2), "n": 3}
    path = save(tmp_path, state)
    with pytest.warns(UserWarning, match=r"n \(int\)"):
        given = dict(iterate([path], False))
    assert list(given) == ["a", "sparse"]
    assert torch.equal(given["sparse"].to_dense(), torch.eye(3))
    other = save(tmp_path, {"sparse": torch.eye(3).mul(2).to_sparse()}, "z.bin")
    with pytest.warns(UserWarning, match="int"), pytest.raises(CheckpointError, match="values") as caught:
        next(iterate([path, other], False))
    assert caught.value.tensor == "sparse"


def test_what_the_user_allows(iterate, tmp_path):
    """`torch.serialization.add_safe_globals` holds here, too."""
    path = save(tmp_path, {"args": argparse.Namespace(lr=1), "a": torch.ones(2)})
    with pytest.raises(CheckpointError, match="add_safe_globals"):
        next(iterate([path], False))
    with torch.serialization.safe_globals([argparse.Namespace]), pytest.warns(UserWarning, match="Namespace"):
        assert [name for name, _ in iterate([path], False)] == ["a"]


@pytest.mark.parametrize(
    "location",
    ["cpu", torch.device("cpu"), {"cpu": "cpu"}, lambda storage, location: storage, None],
    ids=["text", "device", "dict", "function", "none"],
)
def test_locations(iterate, location, tmp_path):
    """As `torch.load` takes them."""
    state = {"a": torch.randn(3)}
    for legacy in (False, True):
        path = save(tmp_path, state, f"{legacy}.bin", legacy)
        assert collect(iterate([path], False, location)) == [row("a", state["a"])]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_a_device_that_is_not_there(iterate, tmp_path):
    """The file is named, and not called damaged."""
    path = save(tmp_path, {"a": torch.ones(2)})
    with pytest.raises(CheckpointError, match="CUDA") as caught:
        list(iterate([path], False, "cuda"))
    assert caught.value.path == path
    assert not isinstance(caught.value, CorruptFileError)


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_other_pickle_protocols(iterate, protocol, tmp_path):
    """`torch.load` reads no newer one with `weights_only=True`: a refusal says so, and it is no damage."""
    path = str(tmp_path / "pytorch_model.bin")
    torch.save({"a": torch.ones(2)}, path, pickle_protocol=protocol)
    if protocol == 3:
        assert dict(iterate([path], False))["a"].tolist() == [1, 1]
        return
    with pytest.raises(CheckpointError, match=r"Unsupported operand \d+ \(`raywl convert`") as caught:
        list(iterate([path], False))
    assert not isinstance(caught.value, CorruptFileError)
    assert caught.value.path == path


def test_a_compressed_archive(iterate, tmp_path):
    """Its bytes aren't where tensors are."""
    path = save(tmp_path, {"a": torch.zeros(1000)})
    packed = tmp_path / "packed.bin"
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    with pytest.raises(CorruptFileError, match="compressed") as caught:
        next(iterate([str(packed)], False))
    assert caught.value.path == str(packed)


def test_a_pickle_that_claims_more_than_there_is(iterate, tmp_path):
    """A storage that would reach into the next record is refused, mapped or not."""
    path = save(tmp_path, {"a": torch.arange(4.0), "b": torch.arange(4.0)})
    bad = tmp_path / "bad.bin"
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(bad, "w", zipfile.ZIP_STORED) as new:
        for name in old.namelist():
            raw = old.read(name)
            new.writestr(name, raw.replace(b"K\x04", b"K\x28") if name.endswith("data.pkl") else raw)
    with pytest.raises(CheckpointError) as caught:
        list(iterate([str(bad)], False))
    assert caught.value.path == str(bad)


def test_closing_in_the_middle_of_a_file(tmp_path, monkeypatch):
    """Threads stop at their next read, not at the end of the file."""
    from raywl.iterators import watched

    monkeypatch.setattr(watched, "_READ_BYTES", 1000)
    paths = [save(tmp_path, {f"a{i}": torch.randn(300_000)}, f"{i}.bin") for i in range(3)]
    real, reached, gate, after = os.preadv, threading.Event(), threading.Event(), []

    def preadv(fd, *args):
        if os.readlink(f"/proc/self/fd/{fd}") == paths[1]:
            reached.set()
            assert gate.wait(WAIT_S)
            after.append(args)
        return real(fd, *args)

    monkeypatch.setattr(os, "preadv", preadv)
    weights = weight_utils.multi_thread_pt_weights_iterator(paths, False, "cpu", 2)
    next(weights)
    assert reached.wait(WAIT_S)
    closer = threading.Thread(target=weights.close)
    closer.start()
    # The pool says that it is closed before it waits for its threads.
    pool = weights.gi_frame.f_locals["pool"] if weights.gi_frame else None
    assert pool is None or pool._stop.wait(WAIT_S)
    gate.set()
    closer.join(WAIT_S)
    assert not closer.is_alive()
    assert len(after) == 1


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_a_file_that_is_cut_while_torch_reads_it(legacy, tmp_path, monkeypatch):
    """C52: an error with the file and the byte, in place of torch's own words."""
    path = save(tmp_path, {"a": torch.randn(200_000), "b": torch.randn(200_000)}, legacy=legacy)
    real, size = os.preadv, os.path.getsize(path)

    def preadv(fd, buffers, offset):
        if os.readlink(f"/proc/self/fd/{fd}") == path and offset > 100_000:
            os.truncate(path, 50_000)
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    with pytest.raises(CorruptFileError, match=rf"of {size}: it was cut") as caught:
        list(weight_utils.multi_thread_pt_weights_iterator([path], False))
    assert caught.value.path == path


def test_a_watched_file_is_as_any_other(tmp_path):
    """Seeking, telling and reading, at every place."""
    from raywl.iterators.files import find_files

    path = tmp_path / "f"
    path.write_bytes(bytes(range(256)) * 1000)
    (entry,) = find_files([str(path)])
    with Watched(entry) as file, open(path, "rb") as plain:
        for whence, offset, size in ((0, 7, 100), (1, 50, 70_000), (2, -9, 100), (2, 5, 10), (0, 0, -1)):
            assert file.seek(offset, whence) == plain.seek(offset, whence)
            assert file.read(size) == plain.read(size)
            assert file.tell() == plain.tell()
        assert file.raise_error() is None
