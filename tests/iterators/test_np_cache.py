"""Dumps as numpy files: whole or not there, of these files, and never led astray by a name."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from raywl import weight_utils
from raywl.errors import CheckpointError, CorruptFileError
from raywl.iterators import np_cache
from tests.iterators.checkpoints import Row, collect, row

WAIT_S = 60.0
STATE = {
    "b": torch.randn(30, 4).to(torch.bfloat16),
    "a": torch.arange(12.0).view(3, 4).t(),
    "scalar": torch.tensor(True),
    "empty": torch.empty(0, 3, dtype=torch.float16),
    "c": torch.randn(7, dtype=torch.complex64),
}


def save(folder: Path, state: dict, name: str = "pytorch_model.bin") -> str:
    torch.save(state, folder / name)
    return str(folder / name)


def iterate(folder: Path, paths: list[str] | None = None, progress=False):
    return weight_utils.np_cache_weights_iterator(
        "org/model", folder / "locks", folder, paths or [str(folder / "pytorch_model.bin")], progress
    )


def rows(state: dict) -> list[Row]:
    return [row(name, state[name]) for name in sorted(state)]


def dumps(folder: Path) -> list[Path]:
    """The folders with dumps."""
    return sorted(path for path in (folder / "np").iterdir() if path.is_dir())


def everything(folder: Path) -> dict[str, int]:
    """All files below a folder, with their times."""
    return {
        str(path.relative_to(folder)): path.stat().st_mtime_ns
        for path in folder.rglob("*")
        if path.is_file() and "locks" not in path.parts
    }


NAMES = ["../x", "a/b", "/abs", "..", "", "x" * 300, "~", "np/index.json", "0.npy", "ü💡\n", "a", "A"]


def test_a_name_never_becomes_a_path(tmp_path):
    """MUST DIFFER: whatever the names, files have numbers, and all lie in the folder's `np`."""
    folder = tmp_path / "model"
    folder.mkdir()
    state = {name: torch.full((2,), float(number)) for number, name in enumerate(NAMES)}
    save(folder, state)
    assert collect(iterate(folder)) == rows(state)
    (dump,) = dumps(folder)
    assert sorted(path.name for path in dump.iterdir()) == sorted(f"{i}.npy" for i in range(len(NAMES)))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]
    assert sorted(path.name for path in folder.iterdir()) == ["locks", "np", "pytorch_model.bin"]


@pytest.mark.parametrize(
    "dtype",
    "bfloat16 float8_e4m3fn float8_e5m2 float8_e8m0fnu float4_e2m1fn_x2 complex32 complex128 uint16 uint64 "
    "bool bits16".split(),
)
def test_every_dtype_survives(dtype, tmp_path):
    """MUST DIFFER: those too that numpy lacks, bit by bit, NaNs and all."""
    kind = getattr(torch, dtype)
    raw = torch.arange(256, dtype=torch.int64).to(torch.uint8)
    state = {"a": (raw % 2 if dtype == "bool" else raw).view(kind)}
    save(tmp_path, state)
    for _ in range(2):
        ((name, tensor),) = iterate(tmp_path)
        assert (name, tensor.dtype, tensor.shape) == ("a", kind, state["a"].shape)
        assert bytes(tensor.view(torch.uint8).numpy()) == bytes(state["a"].view(torch.uint8).numpy())


def test_numpy_reads_the_files(tmp_path):
    """They are what their names say."""
    save(tmp_path, {"a": torch.arange(12.0).view(3, 4), "b": torch.ones(2, dtype=torch.bfloat16)})
    list(iterate(tmp_path))
    (dump,) = dumps(tmp_path)
    assert np.array_equal(np.load(dump / "0.npy"), np.arange(12.0, dtype=np.float32).reshape(3, 4))
    assert np.load(dump / "1.npy").dtype == np.uint16


def test_dumped_once(tmp_path, monkeypatch):
    """The second time nothing is written, and the weight files aren't read."""
    (path,) = [save(tmp_path, STATE)]
    assert collect(iterate(tmp_path)) == rows(STATE)
    before = everything(tmp_path)
    monkeypatch.setattr(np_cache, "pt_weights_iterator", None)
    assert collect(iterate(tmp_path, [path])) == rows(STATE)
    assert everything(tmp_path) == before


@pytest.mark.parametrize(
    "how", ["values", "same size and time", "another file list", "truncated and whole again"]
)
def test_a_changed_source_refreshes(how, tmp_path):
    """And the old dump is gone."""
    path = save(tmp_path, STATE)
    assert collect(iterate(tmp_path)) == rows(STATE)
    old, info = dumps(tmp_path), os.stat(path)
    state = {name: tensor if tensor.dtype == torch.bool else -tensor for name, tensor in STATE.items()}
    paths = [path]
    if how == "same size and time":
        new = save(tmp_path, state, "new")
        os.utime(new, ns=(info.st_atime_ns, info.st_mtime_ns))
        os.replace(new, path)
        assert os.stat(path).st_mtime_ns == info.st_mtime_ns
    elif how == "another file list":
        paths.append(save(tmp_path, {"z": torch.ones(2)}, "pytorch_model-2.bin"))
        state = STATE | {"z": torch.ones(2)}
    else:
        save(tmp_path, state)
    given = collect(iterate(tmp_path, paths))
    assert sorted(given) == sorted(rows(state))
    assert len(dumps(tmp_path)) == 1
    assert dumps(tmp_path) != old


@pytest.mark.parametrize("what", ["cut", "longer", "gone", "all gone", "no index"])
def test_a_dump_that_isnt_whole_is_made_again(what, tmp_path):
    save(tmp_path, STATE)
    list(iterate(tmp_path))
    (dump,) = dumps(tmp_path)
    file = dump / "2.npy"
    if what == "cut":
        os.truncate(file, file.stat().st_size - 1)
    elif what == "longer":
        file.write_bytes(file.read_bytes() + b"x")
    elif what == "gone":
        file.unlink()
    elif what == "all gone":
        shutil.rmtree(dump)
    else:
        (tmp_path / "np" / "index.json").unlink()
    assert collect(iterate(tmp_path)) == rows(STATE)
    assert collect(iterate(tmp_path)) == rows(STATE)


def in_process(function: Callable[..., None], *args: object) -> multiprocessing.Process:
    """A copy of this process, which needn't import anything again."""
    process = multiprocessing.get_context("fork").Process(target=function, args=args, daemon=True)
    process.start()
    return process


def dump_and_die(folder: Path) -> None:
    real, count = np_cache._dump_one, [0]

    def dump_one(*args):
        count[0] += 1
        if count[0] == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args)

    np_cache._dump_one = dump_one
    list(iterate(folder))


def test_a_dump_that_was_killed_half_way(tmp_path):
    """It counts for nothing, and goes with the next one."""
    save(tmp_path, STATE)
    process = in_process(dump_and_die, tmp_path)
    process.join(WAIT_S)
    assert process.exitcode == -signal.SIGKILL
    (left,) = dumps(tmp_path)
    assert len(list(left.iterdir())) == 2
    assert collect(iterate(tmp_path)) == rows(STATE)
    assert left not in dumps(tmp_path)
    assert len(dumps(tmp_path)) == 1


def test_another_processs_dump_is_left_alone(tmp_path):
    """One that may still be under way: its process is alive, or of another node, and it isn't old."""
    save(tmp_path, STATE)
    np_folder = tmp_path / "np"
    own = np_folder / f"dump-{np_cache._host()}-{os.getpid()}-{'0' * 16}"
    other = np_folder / f"dump-{'0' * 8}-1-{'0' * 16}"
    old = np_folder / f"dump-{'1' * 8}-1-{'0' * 16}"
    strange = np_folder / "something-else"
    for folder in (own, other, old, strange):
        folder.mkdir(parents=True)
    os.utime(old, (1, 1))
    list(iterate(tmp_path))
    assert own.exists()
    assert other.exists()
    assert strange.exists()
    assert not old.exists()


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt(), RuntimeError("x")],
    ids=repr,
)
def test_a_dump_that_fails_leaves_nothing(error, tmp_path, monkeypatch):
    save(tmp_path, STATE)
    real, count = np.save, [0]

    def save_array(*args, **options):
        count[0] += 1
        if count[0] == 3:
            raise error
        return real(*args, **options)

    monkeypatch.setattr(np_cache.np, "save", save_array)
    expected = CheckpointError if isinstance(error, OSError) else type(error)
    with pytest.raises(expected) as caught:
        next(iterate(tmp_path))
    assert isinstance(error, KeyboardInterrupt) or str(error.args[-1]) in str(caught.value)
    assert dumps(tmp_path) == []
    monkeypatch.undo()
    assert collect(iterate(tmp_path)) == rows(STATE)


@pytest.mark.parametrize(
    "change",
    [
        {"folder": "../../outside"},
        {"folder": ["dump"]},
        {"raywl_np": 2},
        {"tensors": [["a", "load", [1], 4, 132]]},
        {"tensors": [["a", "float32", [1 << 40], 4, 132]]},
        {"tensors": [["a", "float32", [-1], -4, 132]]},
        {"tensors": [["a"]]},
        {"tensors": 3},
        {"sources": []},
        None,
        [],
    ],
    ids=str,
)
def test_a_forged_index_is_no_index(change, tmp_path):
    """A downloaded repository may have such a folder, too."""
    save(tmp_path, STATE)
    list(iterate(tmp_path))
    path = tmp_path / "np" / "index.json"
    index = json.loads(path.read_text())
    path.write_text(json.dumps({**index, **change} if isinstance(change, dict) else change))
    assert collect(iterate(tmp_path)) == rows(STATE)


def test_an_index_that_is_no_json(tmp_path):
    save(tmp_path, STATE)
    (tmp_path / "np").mkdir()
    for text in ("", "{", "[" * 100_000):
        (tmp_path / "np" / "index.json").write_text(text)
        assert collect(iterate(tmp_path)) == rows(STATE)


def test_a_dump_that_goes_while_it_is_read(tmp_path):
    """An error that says why, and names the tensor."""
    save(tmp_path, STATE)
    weights = iterate(tmp_path)
    next(weights)
    shutil.rmtree(dumps(tmp_path)[0])
    with pytest.raises(CheckpointError, match="gone") as caught:
        next(weights)
    assert caught.value.tensor == "b"


def test_a_dump_that_is_cut_while_it_is_read(tmp_path):
    save(tmp_path, STATE)
    weights = iterate(tmp_path)
    next(weights)
    cut = dumps(tmp_path)[0] / "1.npy"
    os.truncate(cut, cut.stat().st_size - 10)
    with pytest.raises(CorruptFileError, match=r"1\.npy"):
        next(weights)


@pytest.mark.parametrize(
    "tensor", [torch.eye(2).to_sparse(), torch.empty(2, device="meta")], ids=["sparse", "meta"]
)
def test_what_no_array_can_hold(tensor, tmp_path):
    save(tmp_path, {"a": torch.ones(2), "s": tensor})
    with pytest.raises(CheckpointError, match="no array") as caught:
        next(iterate(tmp_path))
    assert caught.value.tensor == "s"
    assert dumps(tmp_path) == []


def test_files_of_both_kinds(tmp_path):
    path = tmp_path / "m.safetensors"
    save_file({"a": torch.ones(1)}, path)
    with pytest.raises(ValueError, match="not both"):
        iterate(tmp_path, [save(tmp_path, STATE), str(path)])


def test_a_folder_that_cannot_hold_it(tmp_path):
    save(tmp_path, STATE)
    (tmp_path / "np").write_text("a file")
    with pytest.raises(CheckpointError, match="can't hold a dump") as caught:
        next(iterate(tmp_path))
    assert caught.value.path == str(tmp_path / "np")


def dump_or_wait(folder: Path, rank: int, start: Any) -> None:
    """Writes down how many dumps this process made, and how many tensors it read."""
    real, made = np_cache._write, []

    def write(*args):
        made.append(1)
        return real(*args)

    np_cache._write = write
    start.wait(WAIT_S)
    num_tensors = len(list(iterate(folder)))
    (folder / f"rank-{rank}").write_text(f"{len(made)} {num_tensors}")


def test_one_process_dumps_and_all_read(tmp_path):
    """Under the model's lock."""
    save(tmp_path, STATE)
    start = multiprocessing.get_context("fork").Barrier(3)
    ranks = [in_process(dump_or_wait, tmp_path, rank, start) for rank in range(3)]
    for process in ranks:
        process.join(WAIT_S)
        assert process.exitcode == 0
    said = sorted((tmp_path / f"rank-{rank}").read_text() for rank in range(3))
    assert said == ["0 5", "0 5", "1 5"]
    assert len(dumps(tmp_path)) == 1


def test_progress_of_both_halves(tmp_path):
    """The dump, and the reading of it."""
    save(tmp_path, STATE)
    seen = []
    list(iterate(tmp_path, progress=lambda *args: seen.append(args)))
    ends = {phase: (done, total) for done, total, phase in seen}
    size = os.path.getsize(tmp_path / "pytorch_model.bin")
    assert ends == {
        "dump": (size, size),
        "read": (rows_bytes := sum(t.nbytes for t in STATE.values()), rows_bytes),
    }
