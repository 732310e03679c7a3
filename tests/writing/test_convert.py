"""`convert`: safetensors files that hold, bit by bit, what the files of `torch.save` held."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

import raywl
from raywl.errors import CapacityError, CheckpointError, CorruptFileError, NotFoundError
from raywl.text import parse_bytes
from raywl.writing import convert
from raywl.writing import files as writing_files
from tests.hostile.pickles import FILES, write
from tests.torch_states import DTYPES, INDEX, KINDS, bits, save_sharded, states, storage

UNKNOWN = {
    "torch.complex128",
    "torch.complex32",
    *(f"torch.bits{kind}" for kind in ("8", "16", "1x8", "2x4", "4x2")),
}
"""What safetensors can't hold."""


def read_back(folder) -> dict[str, torch.Tensor]:
    """What the library finds in a folder's files."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            assert file.metadata() == {"format": "pt"}
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


def same_views(state) -> dict[str, str]:
    """Names of a state that are the same view as one before, with that one's."""
    first, same = {}, {}
    for name, tensor in state.items():
        place = tensor.untyped_storage()._cdata, tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
        kept = first.setdefault(place, name)
        if kept != name:
            same[name] = kept
    return same


@given(state=states(), kind=st.sampled_from(sorted(KINDS)), limit=st.sampled_from([1, 100, 10_000]))
@settings(max_examples=60, deadline=None)
def test_any_state(tmp_path_factory, state, kind, limit):
    """The library reads back every tensor; the same views are left out by name; shards keep to the limit."""
    state = {name: tensor for name, tensor in state.items() if str(tensor.dtype) not in UNKNOWN}
    state = {n: t for n, t in state.items() if t.dim() or t.dtype != torch.float4_e2m1fn_x2}
    folder = tmp_path_factory.mktemp("state")
    torch.save(state, folder / "model.pt", **KINDS[kind])
    report = convert(folder, folder / "out", max_shard_size=limit)
    found = read_back(folder / "out")
    for name, tensor in found.items():
        assert bits(tensor) == bits(state[name])
    # Where nothing tells two views of no elements apart, one may do for both.
    same = same_views(state)
    assert same.items() <= report.tied.items()
    for name, kept in report.tied.items():
        assert bits(state[name]) == bits(state[kept])
    assert sorted([*found, *report.tied]) == sorted(state)
    assert report.num_tensors == len(found)
    for size in report.files:
        held = [e for e in raywl.open_checkpoint(folder / "out").tensors.values() if e.file == size]
        assert sum(entry.nbytes for entry in held) <= limit or len([e for e in held if e.nbytes]) == 1
    assert raywl.open_checkpoint(folder / "out").verify(deep=True).problems == []
    assert raywl.open_checkpoint(folder / "out").identity == report.identity


@pytest.mark.filterwarnings("ignore:ComplexHalf:UserWarning")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(dtype, tmp_path):
    """What safetensors has a name for is written; what it hasn't is refused by name, before anything is."""
    base = storage(dtype, 24)
    torch.save({"a": base.view(4, 6), "b": base.view(4, 6).t(), "none": base[:0]}, tmp_path / "model.pt")
    if str(dtype) in UNKNOWN:
        with pytest.raises(CheckpointError, match="which safetensors can't hold") as caught:
            convert(tmp_path, tmp_path / "out")
        assert caught.value.tensor == "a"
        assert os.listdir(tmp_path) == ["model.pt"]
        return
    convert(tmp_path, tmp_path / "out")
    found = read_back(tmp_path / "out")
    assert bits(found["a"]) == bits(base.view(4, 6))
    assert bits(found["b"]) == bits(base.view(4, 6).t())


def test_a_set_with_companions(tmp_path):
    """Shards of their own size, one index, configs and tokenizers, and nothing about the old files."""
    one, two = "pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"
    state = {f"layers.{i}.weight": torch.randn(10, 10) for i in range(10)}
    names = list(state)
    folder = save_sharded(
        {one: {n: state[n] for n in names[:6]}, two: {n: state[n] for n in names[6:]}}, tmp_path / "in"
    )
    small = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer.model", "vocab.txt"]
    (tmp_path / "blob").write_text("linked")
    for name in small[1:]:
        (folder / name).write_text(name)
    (folder / "config.json").symlink_to(tmp_path / "blob")
    for name in ("modeling.py", "trainer_state.json", "tf.h5"):
        (folder / name).write_text("x")
    torch.save({"step": 1}, folder / "optimizer.pt")
    seen = []
    with pytest.warns(UserWarning, match=r"a trainer's state and no weights: optimizer\.pt"):
        report = convert(
            folder, tmp_path / "out", max_shard_size="1KB", progress=lambda *step: seen.append(step)
        )
    shards = [f"model-{i:05}-of-00005.safetensors" for i in range(1, 6)]
    assert sorted(os.listdir(tmp_path / "out")) == sorted([*small, *shards, "model.safetensors.index.json"])
    assert (tmp_path / "out" / "config.json").read_text() == "linked"
    assert not (tmp_path / "out" / "config.json").is_symlink()
    assert list(report.files) == shards
    assert report.companions == small
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == report.nbytes == 4000
    assert index["weight_map"]["layers.9.weight"] == shards[4]
    found = read_back(tmp_path / "out")
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())
    assert seen[-1] == (4000, 4000, "check")
    assert {phase for _, _, phase in seen} == {"write", "check"}
    assert sorted(os.listdir(tmp_path)) == ["blob", "in", "out"]
    module = torch.nn.Module()
    module.layers = torch.nn.ModuleList([torch.nn.Linear(10, 10, bias=False) for _ in range(10)])
    raywl.load_into(module, tmp_path / "out", strict="exact")
    assert torch.equal(module.layers[9].weight, state["layers.9.weight"])


def test_ties_and_views(tmp_path):
    """The first name of a tie is kept and the other is told; parts of a tensor are written in full."""
    x = torch.arange(12.0)
    state = {"z": x, "a": x, "part": x[:6], "turned": x.view(3, 4).t()}
    torch.save(state, tmp_path / "model.bin")
    report = convert(tmp_path / "model.bin", tmp_path / "out")
    assert report.tied == {"a": "z"}
    found = read_back(tmp_path / "out")
    assert sorted(found) == ["part", "turned", "z"]
    assert all(torch.equal(found[name], state[name]) for name in found)


def test_one_file(tmp_path):
    """A path that ends in .safetensors is one file, in a folder that is made, in place of an older one."""
    torch.save({"state_dict": {"a": torch.ones(3)}, "epoch": 1}, tmp_path / "last.ckpt")
    target = tmp_path / "new" / "model.safetensors"
    for _ in range(2):
        with pytest.warns(UserWarning, match="epoch"):
            report = convert(tmp_path / "last.ckpt", target, max_shard_size=1)
    assert report.files == {"model.safetensors": target.stat().st_size}
    assert "epoch (int)" in report.notes[0]
    assert os.listdir(tmp_path / "new") == ["model.safetensors"]
    assert read_back(tmp_path / "new")["a"].tolist() == [1, 1, 1]
    (tmp_path / "x.safetensors").mkdir()
    with pytest.raises(ValueError, match="is a folder"):
        convert(tmp_path / "last.ckpt", tmp_path / "x.safetensors")


@pytest.mark.parametrize("out", ["full", "file"])
def test_nothing_is_written_over(out, tmp_path):
    torch.save({"a": torch.ones(3)}, tmp_path / "model.pt")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("mine")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="not empty: nothing is written over"):
        convert(tmp_path / "model.pt", tmp_path / out)
    convert(tmp_path / "model.pt", tmp_path / "empty")
    assert os.listdir(tmp_path / "empty") == ["model.safetensors"]


def test_what_is_refused(tmp_path):
    """Before anything is written: safetensors, nothing there, nonsense for a size, too small a disk."""
    torch.save({"a": torch.ones(3)}, tmp_path / "model.pt")
    convert(tmp_path / "model.pt", tmp_path / "out")
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(ValueError, match="of safetensors files already"):
        convert(tmp_path / "out", tmp_path / "again")
    with pytest.raises(NotFoundError):
        convert(tmp_path / "nowhere", tmp_path / "again")
    for size in ("", "many", "0", "-1", 0, True, "1.5.2GB", "iB"):
        with pytest.raises(ValueError, match="no size"):
            convert(tmp_path / "model.pt", tmp_path / "again", max_shard_size=size)
    torch.save({"a": torch.zeros(1).expand(1 << 28)}, tmp_path / "model.pt")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1 << 20))
        with pytest.raises(CapacityError, match="1073741824 bytes needed, 1048576 bytes available"):
            convert(tmp_path / "model.pt", tmp_path / "again")
    assert sorted(os.listdir(tmp_path)) == before


def test_sizes():
    assert [parse_bytes(size) for size in (1, "1", "5GB", "4GiB", "0.5 kB", "2M", " 7 B ")] == [
        1, 1, 5 * 10**9, 4 << 30, 500, 2 * 10**6, 7,
    ]  # fmt: skip


@pytest.mark.parametrize("where", ["write", "check", "rename"])
@pytest.mark.parametrize("error", [OSError("disk"), KeyboardInterrupt()], ids=["failure", "interrupt"])
@pytest.mark.parametrize("out", ["out", "out.safetensors"])
def test_a_failure_leaves_nothing(out, error, where, tmp_path, monkeypatch):
    """Wherever it stops, the output isn't there and no part of it is."""
    torch.save({"a": torch.ones(3), "b": torch.ones(4)}, tmp_path / "model.pt")

    def fail(*_):
        raise error

    if where == "write":
        monkeypatch.setattr(writing_files.os, "write", fail)
    elif where == "check":
        monkeypatch.setattr(writing_files.OpenFiles, "check_unchanged", fail)
    else:
        monkeypatch.setattr(os, "rename", fail)
        monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(type(error)):
        convert(tmp_path / "model.pt", tmp_path / out)
    assert os.listdir(tmp_path) == ["model.pt"]


def test_a_full_disk_is_told_with_the_numbers(tmp_path, monkeypatch):
    torch.save({"a": torch.ones(3)}, tmp_path / "model.pt")

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(writing_files.os, "write", full)
    with pytest.raises(CapacityError, match=r"12 bytes needed, .* No space left on device"):
        convert(tmp_path / "model.pt", tmp_path / "out")
    assert os.listdir(tmp_path) == ["model.pt"]


def test_two_at_once(tmp_path, monkeypatch):
    """Of two conversions to one folder, the second to end leaves the first one's alone."""
    torch.save({"a": torch.ones(3)}, tmp_path / "model.pt")
    step = writing_files.check_file

    def slower(*arguments):
        step(*arguments)
        monkeypatch.undo()
        convert(tmp_path / "model.pt", tmp_path / "out")

    monkeypatch.setattr("raywl.writing.converting.check_file", slower)
    with pytest.raises(ValueError, match="made by somebody else meanwhile"):
        convert(tmp_path / "model.pt", tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == ["model.pt", "out"]
    assert read_back(tmp_path / "out")["a"].tolist() == [1, 1, 1]


def test_damage_is_found_by_checksums(tmp_path):
    torch.save({"a": torch.ones(300)}, tmp_path / "model.pt")
    raw = bytearray((tmp_path / "model.pt").read_bytes())
    raw[raw.rindex(torch.ones(300).numpy().tobytes())] ^= 1
    (tmp_path / "model.pt").write_bytes(raw)
    with pytest.raises(CorruptFileError, match="damaged, as their checksums tell: model/data/0"):
        convert(tmp_path, tmp_path / "out")
    assert os.listdir(tmp_path) == ["model.pt"]


def test_a_bit_that_flips_on_its_way_is_found(tmp_path, monkeypatch):
    """What is on the disk is compared, not what was meant to be written."""
    torch.save({"a": torch.ones(300)}, tmp_path / "model.pt")
    real = os.write

    def flipping(fd, data):
        raw = bytearray(data)
        raw[len(raw) // 2] ^= 1
        return real(fd, raw)

    fine = writing_files._write_all
    monkeypatch.setattr(
        writing_files,
        "_write_all",
        lambda fd, data: fine(fd, data) if data[8:9] == b"{" else flipping(fd, data),
    )
    with pytest.raises(RuntimeError, match="tensor 'a' isn't what was written, bit by bit"):
        convert(tmp_path / "model.pt", tmp_path / "out")
    assert os.listdir(tmp_path) == ["model.pt"]


def test_a_source_that_changes_meanwhile(tmp_path, monkeypatch):
    """Files that are written to while they are converted are an error, and nothing is left."""
    torch.save({"a": torch.ones(3)}, tmp_path / "model.pt")
    step = writing_files.check_file

    def touched(*arguments):
        step(*arguments)
        raw = (tmp_path / "model.pt").read_bytes()
        (tmp_path / "model.pt").write_bytes(raw)
        os.utime(tmp_path / "model.pt", ns=(1, 1))

    monkeypatch.setattr("raywl.writing.converting.check_file", touched)
    with pytest.raises(CheckpointError, match="changed while it was read"):
        convert(tmp_path / "model.pt", tmp_path / "out")
    assert os.listdir(tmp_path) == ["model.pt"]


_MEASURED = """
import resource, sys
from raywl.writing import convert
def peak_kib():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
convert(sys.argv[1] + "/small.pt", sys.argv[1] + "/first")
before = peak_kib()
convert(sys.argv[1] + "/model.pt", sys.argv[1] + "/out", max_shard_size="60MB")
print(peak_kib() - before)
"""


def test_memory_is_that_of_one_tensor(tmp_path):
    """A file of 96 MiB in 12 tensors, turned or not, takes far less than that, or than one shard."""
    base = torch.zeros(12, 2 << 20)
    state = {f"t{i}": base[i].view(1024, 2048).t() if i % 2 else base[i] for i in range(12)}
    torch.save(state, tmp_path / "model.pt")
    torch.save({"a": torch.ones(3)}, tmp_path / "small.pt")
    done = subprocess.run(
        [sys.executable, "-c", _MEASURED, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert int(done.stdout) < 45 << 10
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 2


def test_hostile_files_are_refused(tmp_path):
    for case in FILES[::9]:
        path = write(case, tmp_path)
        with pytest.raises(case.error):
            convert(path, tmp_path / "out")
        path.unlink()
        assert os.listdir(tmp_path) == []


def test_damage_of_the_index(tmp_path):
    """C01: nothing is written of a checkpoint that isn't whole."""
    save_sharded({"pytorch_model.bin": {"a": torch.ones(3)}}, tmp_path / "in")
    (tmp_path / "in" / INDEX).write_text("{")
    with pytest.raises(CorruptFileError):
        convert(tmp_path / "in", tmp_path / "out")
    assert os.listdir(tmp_path) == ["in"]


def test_nothing_is_warned_of_a_plain_checkpoint(tmp_path):
    torch.save({"a": torch.ones(3)}, tmp_path / "model.pt")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert convert(tmp_path / "model.pt", tmp_path / "out").notes == []
