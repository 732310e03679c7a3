"""Files of `torch.save`: the same tensors as torch itself gives, from pickle and directory alone."""

import argparse
import io
import json
import pickle
import shutil
import struct
import subprocess
import sys
import warnings
import zipfile

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import raywl
from raywl.checkpoint import Manifest
from raywl.checkpoint.dtypes import torch_dtype, torch_shape
from raywl.checkpoint.torch_files import read_torch_header
from raywl.errors import CheckpointError, CorruptFileError, MissingFileError, SourceError
from raywl.sources import resolve
from raywl.sources.local import LocalSource
from tests.torch_states import DTYPES, INDEX, KINDS, bits, save_sharded, states, storage


def iterated(path, **how) -> dict[str, torch.Tensor]:
    return dict(raywl.open_checkpoint(path).iter_weights(**how))


@pytest.mark.filterwarnings("ignore:ComplexHalf:UserWarning")
@given(state=states(), kind=st.sampled_from(sorted(KINDS)), wrapped=st.booleans())
@settings(max_examples=100, deadline=None)
def test_any_state_is_read_as_it_was(tmp_path_factory, state, kind, wrapped):
    """Names, dtypes, shapes and bits of every view, whatever it shares its storage with."""
    path = tmp_path_factory.mktemp("state") / "model.pt"
    torch.save({"state_dict": state} if wrapped else state, path, **KINDS[kind])
    found = iterated(path)
    assert list(found) == sorted(state)
    for name, tensor in state.items():
        assert bits(found[name]) == bits(tensor)
        assert found[name].is_contiguous()
    if kind == "zip":  # of the others, torch itself doesn't read them all
        theirs = torch.load(path, weights_only=True)
        theirs = theirs["state_dict"] if wrapped else theirs
        assert {name: bits(tensor) for name, tensor in theirs.items()} == {
            n: bits(t) for n, t in found.items()
        }
    checkpoint = raywl.open_checkpoint(path)
    assert checkpoint.format == "torch"
    assert checkpoint.nbytes == sum(tensor.numel() * tensor.itemsize for tensor in state.values())


@pytest.mark.filterwarnings("ignore:ComplexHalf:UserWarning")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(dtype, kind, tmp_path):
    """Whatever torch saves is read: rows, a turned view, a scalar, and nothing."""
    base = storage(dtype, 24)
    state = {"rows": base.view(4, 6), "turned": base.view(4, 6).t(), "one": base[5], "none": base[:0]}
    torch.save(state, tmp_path / "model.bin", **KINDS[kind])
    checkpoint = raywl.open_checkpoint(tmp_path / "model.bin")
    for name, tensor in checkpoint.iter_weights():
        entry = checkpoint.tensors[name]
        assert bits(tensor) == bits(state[name])
        assert torch_dtype(entry.dtype) == dtype
        assert torch_shape(entry.dtype, entry.shape) == tuple(state[name].shape)
    module = torch.nn.Module()
    for name, tensor in state.items():
        module.register_buffer(name, torch.empty(tensor.shape, dtype=dtype))
    raywl.load_into(module, checkpoint)
    for name, tensor in state.items():
        assert bits(module.get_buffer(name)) == bits(tensor)


def test_views_that_follow_each_other_are_ranges(tmp_path):
    """Rows of a storage, and the storage under another shape, need no strides; tied names share a range."""
    base = torch.arange(24.0).view(4, 6)
    state = {"all": base, "tied": base, "rows": base[1:3], "flat": base.view(-1), "wide": base[:, :2]}
    torch.save(state, tmp_path / "model.bin")
    found = raywl.open_checkpoint(tmp_path / "model.bin").tensors
    raw = (tmp_path / "model.bin").read_bytes()
    assert found["all"] == found["tied"]
    assert [name for name, entry in found.items() if entry.strides] == ["wide"]
    assert found["wide"].strides == (24, 4)
    for name in ("all", "rows", "flat"):
        assert raw[found[name].start : found[name].end] == state[name].numpy().tobytes()


@pytest.mark.parametrize("kind", ["zip", "before-1.6"])
def test_no_data_is_read_to_open(kind, tmp_path, monkeypatch):
    """Of a file of 8 MiB only the pickle, the directory and what stands before each storage."""
    torch.save({f"t{i}": torch.zeros(1 << 18) for i in range(8)}, tmp_path / "model.bin", **KINDS[kind])
    asked = []
    read = LocalSource.read
    monkeypatch.setattr(
        LocalSource, "read", lambda self, *what: asked.append(what[2] - what[1]) or read(self, *what)
    )
    checkpoint = raywl.open_checkpoint(tmp_path / "model.bin")
    assert checkpoint.nbytes == 8 << 20
    limit = 64 << 10 if kind == "zip" else (1 << 20) + (8 << 10)
    assert sum(asked) <= limit


@pytest.mark.parametrize("kind", ["zip", "before-1.6"])
def test_few_reads_of_a_remote_file(kind):
    """Over a network each read costs a round trip: their number doesn't grow with that of the tensors."""
    out = io.BytesIO()
    state = {f"t{i}": torch.full((i % 70,), float(i)) for i in range(300)}
    torch.save(state, out, **KINDS[kind])
    raw, asked = out.getvalue(), []

    def read(start: int, end: int) -> bytes:
        asked.append((start, end))
        return raw[start:end]

    local = read_torch_header(read, len(raw), path="p", file="f")
    assert len(asked) > 70 or kind == "zip"
    asked.clear()
    assert read_torch_header(read, len(raw), path="p", file="f", is_remote=True) == local
    assert len(asked) < 30


def _with_gap(raw: bytes, name: str, gap: int) -> bytes:
    """An archive with bytes of nobody before one of its records, as some tools leave them."""
    with zipfile.ZipFile(io.BytesIO(raw)) as archive:
        place, start = archive.getinfo(name).header_offset, archive.start_dir
    directory = bytearray(raw[start:])
    at = 0
    while directory[at : at + 4] == b"PK\1\2":
        lengths = struct.unpack_from("<HHH", directory, at + 28)
        (offset,) = struct.unpack_from("<I", directory, at + 42)
        struct.pack_into("<I", directory, at + 42, offset + gap * (offset >= place))
        at += 46 + sum(lengths)
    end = directory.rindex(b"PK\5\6")
    struct.pack_into("<I", directory, end + 16, start + gap)
    # What torch writes for large files, which nobody needs here.
    return raw[:place] + bytes(gap) + raw[place:start] + bytes(directory[:at]) + bytes(directory[end:])


def test_archives_that_torch_would_write_otherwise_are_read_by_all_their_headers():
    """Written by another library, or with gaps: nothing is supposed that isn't so, far away either."""
    out, again = io.BytesIO(), io.BytesIO()
    torch.save({f"t{i}": torch.full((5,), float(i)) for i in range(40)}, out)
    with zipfile.ZipFile(out) as theirs, zipfile.ZipFile(again, "w") as ours:
        for name in theirs.namelist():
            ours.writestr(name, theirs.read(name))
    raws = [
        again.getvalue(),
        *(_with_gap(out.getvalue(), "archive/data/20", gap) for gap in (1, 16, 64, 128)),
    ]
    for raw in (out.getvalue(), *raws):
        local, remote = (
            read_torch_header(lambda s, e, raw=raw: raw[s:e], len(raw), path="p", file="f", is_remote=far)
            for far in (False, True)
        )
        assert local == remote
        for i in range(40):
            entry = remote.tensors[f"t{i}"]
            assert raw[entry.start : entry.end] == torch.full((5,), float(i)).numpy().tobytes()


def test_inspecting_imports_no_torch(tmp_path):
    """The command shows such a checkpoint without torch and numpy."""
    torch.save({"a": torch.zeros(2, 3), "b": torch.zeros(3).half()}, tmp_path / "model.bin")
    code = (
        "import sys; from raywl.cli import main; code = main(['inspect', sys.argv[1]]); "
        "sys.exit(code or ('torch' in sys.modules) * 10 or ('numpy' in sys.modules) * 20)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "torch, 2 tensors" in done.stdout


# Which files.


def test_a_set_with_its_index(tmp_path):
    one, two = "pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"
    folder = save_sharded({one: {"a": torch.ones(3)}, two: {"b": torch.zeros(2, 2)}}, tmp_path)
    torch.save({"other": torch.ones(1)}, tmp_path / "adapter.bin")
    checkpoint = raywl.open_checkpoint(folder)
    assert {name: entry.file for name, entry in checkpoint.tensors.items()} == {"a": one, "b": two}
    report = checkpoint.verify(deep=True)
    assert report.ok
    assert report.notes == ["1 *.bin and *.pt and *.pth files of the folder are not used: adapter.bin"]
    (tmp_path / two).unlink()
    with pytest.raises(MissingFileError, match=two):
        raywl.open_checkpoint(folder)
    (tmp_path / INDEX).unlink()
    with pytest.raises(MissingFileError, match=two):
        raywl.open_checkpoint(folder)


def test_shared_tensors_may_be_counted_once(tmp_path):
    """Some writers' `total_size` counts a storage once, some each of its tensors: neither is a mistake."""
    x = torch.ones(4)
    save_sharded({"pytorch_model.bin": {"a": x, "b": x}}, tmp_path)
    index = json.loads((tmp_path / INDEX).read_text())
    for total, notes in ((32, 0), (16, 0), (20, 1)):
        index["metadata"]["total_size"] = total
        (tmp_path / INDEX).write_text(json.dumps(index))
        assert len(raywl.open_checkpoint(tmp_path).verify().notes) == notes


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        (["pytorch_model.bin"], ["pytorch_model.bin"]),
        (["pytorch_model.bin", "tokenizer.bin", "model.pt"], ["pytorch_model.bin"]),
        (["a.bin", "b.bin"], ["a.bin", "b.bin"]),
        (["model.pt", "model.pth"], ["model.pt"]),
        (["consolidated.00.pth"], ["consolidated.00.pth"]),
        (["model.safetensors", "pytorch_model.bin"], ["model.safetensors"]),
        (["pytorch_model-00002-of-00002.bin", "pytorch_model-00001-of-00002.bin"], None),
        (["sub/pytorch_model.bin", "model.pt"], ["model.pt"]),
    ],
    ids=str,
)
def test_files_that_count(names, chosen, tmp_path):
    from safetensors.torch import save_file

    for i, name in enumerate(names):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        save = save_file if name.endswith(".safetensors") else torch.save
        save({f"t{i}": torch.zeros(1)}, tmp_path / name)
    found = [file.name for file in raywl.open_checkpoint(tmp_path).files]
    assert found == (sorted(names) if chosen is None else chosen)


def test_patterns_choose_the_other_format(tmp_path):
    """With both formats there, safetensors counts, unless only the other one is allowed."""
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    torch.save({"a": torch.ones(1)}, tmp_path / "pytorch_model.bin")
    assert raywl.open_checkpoint(tmp_path).format == "safetensors"
    other = raywl.open_checkpoint(tmp_path, allow_patterns="*.bin")
    assert other.format == "torch"
    assert dict(other.iter_weights())["a"].item() == 1
    with pytest.raises(CheckpointError, match=r"matches \['\*\.gguf'\]"):
        raywl.open_checkpoint(tmp_path, allow_patterns="*.gguf")


def test_an_index_of_files_that_are_absent_is_no_reason_to_take_others(tmp_path):
    """C01: an unfinished download of one format isn't made good by the other one."""
    torch.save({"a": torch.ones(1)}, tmp_path / "pytorch_model.bin")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-00001-of-00001.safetensors"}}))
    with pytest.raises(MissingFileError, match="model-00001-of-00001"):
        raywl.open_checkpoint(tmp_path)
    index.write_text(json.dumps({"weight_map": {}}))
    assert raywl.open_checkpoint(tmp_path).format == "torch"


def test_what_a_trainer_left_is_dropped_and_said(tmp_path):
    """C07."""
    left = [
        "training_args.bin",
        "optimizer.bin",
        "optimizer.pt",
        "scheduler.pt",
        "scaler.pt",
        "rng_state.pth",
    ]
    for name in left:
        torch.save({"step": 1, "args": [1, 2]}, tmp_path / name)
    torch.save({"a": torch.ones(1)}, tmp_path / "pytorch_model.bin")
    with pytest.warns(UserWarning, match="a trainer's state"):
        checkpoint = raywl.open_checkpoint(tmp_path)
    assert [file.name for file in checkpoint.files] == ["pytorch_model.bin"]
    (note,) = checkpoint.notes
    assert all(name in note for name in left)
    assert checkpoint.verify().notes == [note]
    model = torch.nn.Module()
    model.a = torch.nn.Parameter(torch.zeros(1))
    assert note in raywl.load_into(model, checkpoint).notes


def test_a_name_in_two_files_is_refused(tmp_path):
    """Parts of one model under equal names, as some of Meta's checkpoints have them."""
    for i in range(2):
        torch.save({"a": torch.zeros(1)}, tmp_path / f"consolidated.0{i}.pth")
    with pytest.raises(
        CheckpointError, match=r"is in two files, consolidated\.00\.pth and consolidated\.01\.pth"
    ):
        raywl.open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["last.ckpt", "0a1b2c3d", "model.pt"])
def test_one_file_by_any_name(name, tmp_path):
    torch.save({"state_dict": {"a": torch.ones(2)}, "epoch": 3}, tmp_path / name)
    with pytest.warns(UserWarning, match=r"beside its state_dict: epoch \(int\)"):
        checkpoint = raywl.open_checkpoint(tmp_path / name)
    assert list(checkpoint.tensors) == ["a"]


# What is in them.


def test_what_is_no_tensor_is_said(tmp_path):
    """C86: numbers, texts, nested dicts and `None` are no weights; the warning and the report name them."""
    inner = {
        "a": torch.ones(2),
        "n": 3,
        "none": None,
        "text": "x",
        "deep": {"b": torch.ones(1)},
        7: torch.ones(1),
    }
    torch.save({"state_dict": inner, "epoch": 3, "ema": torch.ones(1)}, tmp_path / "model.pt")
    with pytest.warns(UserWarning, match="left out") as warned:
        checkpoint = raywl.open_checkpoint(tmp_path)
    assert len(warned) == 1
    assert list(checkpoint.tensors) == ["a"]
    beside, others = checkpoint.notes
    assert beside == "model.pt: left out, as they stand beside its state_dict: epoch (int), ema (a tensor)"
    for said in ("n (int)", "none (None)", "text (str)", "deep (dict of 1)", "7 (a tensor)"):
        assert said in others
    for note in checkpoint.notes:
        assert note in str(warned[0].message)
        assert note in checkpoint.verify().notes


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({"args": argparse.Namespace(lr=1), "model": {"a": torch.ones(1)}}, "argparse.Namespace"),
        ({"step": numpy.float64(1.5), "a": torch.ones(1)}, "numpy"),
        ({"a": torch.nn.Linear(1, 1)}, "torch.nn.modules.linear.Linear"),
        ({"a": print}, "print"),
    ],
    ids=["namespace", "numpy", "module", "function"],
)
@pytest.mark.parametrize("kind", ["zip", "before-1.6"])
def test_what_needs_code_is_refused(value, says, kind, tmp_path):
    """C86: the file and the name that it wants are told."""
    torch.save(value, tmp_path / "model.pt", **KINDS[kind])
    with pytest.raises(CheckpointError, match=says) as caught:
        raywl.open_checkpoint(tmp_path)
    assert caught.value.path == str(tmp_path / "model.pt")
    assert "never run" in str(caught.value)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (torch.ones(2), "holds a tensor, expected a dict"),
        ([torch.ones(2)], "holds list of 1"),
        (3, "holds int"),
        ({"model": {"a": torch.ones(1)}, "epoch": 1}, r"no tensors at its top, but model \(dict of 1\)"),
        ({"state_dict": {"epoch": 1}}, r"no tensors at its top, but epoch \(int\)"),
    ],
    ids=["tensor", "list", "number", "nested", "empty"],
)
def test_what_is_no_state_dict(value, says, tmp_path):
    torch.save(value, tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match=says):
        raywl.open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("tensor", "says"),
    [
        (torch.ones(2, dtype=torch.complex64).conj(), r"save what resolve_conj\(\) gives"),
        (torch.ones(2, dtype=torch.complex64).conj().imag, r"save what resolve_neg\(\) gives"),
        (torch.ones(2, 2).to_sparse(), "a sparse tensor"),
        (torch.empty(2, device="meta"), "a tensor on meta"),
    ],
    ids=["conjugated", "negated", "sparse", "meta"],
)
def test_what_is_no_range_of_bytes_is_refused_by_name(tensor, says, tmp_path):
    """Not read as if its bytes were its values, and not left out."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.save({"fine": torch.ones(1), "odd": tensor}, tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match=says) as caught:
        raywl.open_checkpoint(tmp_path)
    assert caught.value.tensor == "odd"


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_quantised_tensors_are_refused_by_name(tmp_path):
    torch.save({"odd": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)}, tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match="a quantised tensor") as caught:
        raywl.open_checkpoint(tmp_path)
    assert caught.value.tensor == "odd"


def test_parameters_attributes_and_metadata(tmp_path):
    """Parameters, tensors with attributes of their own, and a module's `_metadata` are read past."""
    module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    state = module.state_dict(keep_vars=True)
    state["0.weight"].note = "kept elsewhere"
    torch.save(state, tmp_path / "model.pt")
    found = iterated(tmp_path)
    assert {name: bits(tensor) for name, tensor in found.items()} == {n: bits(t) for n, t in state.items()}


def test_a_number_of_python_2(tmp_path):
    """Texts of Python 2 are bytes in its pickles; names come out as text all the same."""
    torch.save({"wé": torch.ones(2)}, tmp_path / "new.pt", **KINDS["before-1.6"])
    raw = (tmp_path / "new.pt").read_bytes()
    name = "wé".encode()
    assert raw.count(b"X\3\0\0\0" + name) == 1
    (tmp_path / "old.pt").write_bytes(raw.replace(b"X\3\0\0\0" + name, b"U\3" + name))
    assert list(raywl.open_checkpoint(tmp_path / "old.pt").tensors) == ["wé"]


def test_storages_of_cuda_and_parts_of_storages(tmp_path):
    """Where a storage was means nothing; before torch 0.4, a tensor's storage could be part of another."""
    path = tmp_path / "model.pt"
    torch.save({"a": torch.arange(6.0)}, path, **KINDS["before-1.6"])
    raw = path.read_bytes()
    # The last field of the persistent id: no part, `(key, 2, 4)` instead; and the tensor has 4 elements.
    changed = raw.replace(b"K\6Ntq", b"K\6X\1\0\0\0vK\2K\4\x87tq").replace(b"K\6\x85", b"K\4\x85")
    changed = changed.replace(b"ctorch\nFloatStorage", b"ctorch.cuda\nFloatStorage")
    assert len(changed) == len(raw) + 15
    path.write_bytes(changed)
    assert iterated(path)["a"].tolist() == [2, 3, 4, 5]


# Whether it is still the same.


@pytest.mark.parametrize("kind", ["zip", "before-1.6"])
def test_identity(kind, tmp_path):
    """Equal for copies and by sizes and pickles; another tensor's name makes another checkpoint."""
    for name in ("one", "two", "other"):
        (tmp_path / name).mkdir()
    torch.save({"a": torch.ones(3)}, tmp_path / "one" / "model.bin", **KINDS[kind])
    shutil.copy(tmp_path / "one" / "model.bin", tmp_path / "two" / "model.bin")
    torch.save({"b": torch.ones(3)}, tmp_path / "other" / "model.bin", **KINDS[kind])
    one, two, other = (raywl.open_checkpoint(tmp_path / name) for name in ("one", "two", "other"))
    assert one.identity == two.identity != other.identity
    again = pickle.loads(pickle.dumps(one))
    assert again == one
    assert again.tensors == one.tensors
    assert again.notes == one.notes


@pytest.mark.parametrize("kind", ["zip", "before-1.6"])
def test_a_file_that_changed_is_refused(kind, tmp_path):
    """Another file of the same size in its place, and one that was cut."""
    path = tmp_path / "model.bin"
    torch.save({"a": torch.ones(3)}, path, **KINDS[kind])
    checkpoint = raywl.open_checkpoint(path)
    raw = path.read_bytes()
    other = Manifest.__getstate__(checkpoint)
    other["files"] = tuple(file._replace(stamp=None) for file in checkpoint.files)
    elsewhere = object.__new__(type(checkpoint))
    elsewhere.__setstate__(other)
    path.write_bytes(raw.replace(b"X\1\0\0\0a", b"X\1\0\0\0b"))
    with pytest.raises(CorruptFileError, match="header changed"):
        list(elsewhere.iter_weights())
    assert "header changed" in checkpoint.verify().problems[0] or kind == "zip"
    path.write_bytes(raw[:-1])
    with pytest.raises(CorruptFileError):
        list(elsewhere.iter_weights())


def test_deep_verification_finds_damage_by_checksums(tmp_path):
    """Archives have a checksum of each record: a changed byte is found, and which record it is in."""
    path = tmp_path / "model.bin"
    state = {"a": torch.ones(300_000), "b": torch.zeros(3), "c": torch.ones(5)}
    torch.save(state, path)
    checkpoint = raywl.open_checkpoint(path)
    assert checkpoint.verify(deep=True).ok
    raw = bytearray(path.read_bytes())
    raw[checkpoint.tensors["b"].start] ^= 1
    path.write_bytes(raw)
    (problem,) = checkpoint.verify(deep=True).problems
    assert "1 of 4 records are damaged" in problem
    assert "model/data/1" in problem
    assert checkpoint.verify().ok


def test_files_over_4_gib(tmp_path, monkeypatch):
    """Sizes and places that take 64 bits in the archive: the places are those that torch itself works out."""
    path = tmp_path / "model.pt"
    state = {
        "first": torch.arange(3.0),
        "huge": torch.empty(5 << 30, dtype=torch.uint8),
        "rows": torch.arange(12.0).view(3, 4)[1:],
        "last": torch.arange(7),
    }
    with torch.serialization.skip_data():
        torch.save(state, path)
    assert path.stat().st_size > 5 << 30
    assert path.stat().st_blocks < 10_000
    found = raywl.open_checkpoint(path).tensors
    monkeypatch.setattr("raywl.checkpoint.zips._FEW", 2)
    monkeypatch.setattr(LocalSource, "is_remote", True)
    assert raywl.open_checkpoint(path).tensors == found
    for name, tensor in torch.load(path, map_location="meta", weights_only=True).items():
        start = tensor.untyped_storage()._checkpoint_offset + tensor.storage_offset() * tensor.itemsize
        assert (found[name].start, found[name].end) == (start, start + tensor.numel() * tensor.itemsize)


def test_archives_without_checksums(tmp_path):
    """torch can leave them out, and then writes zeros, which are no damage."""
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"a": torch.ones(3)}, tmp_path / "model.bin")
    finally:
        torch.serialization.set_crc32_options(True)
    with zipfile.ZipFile(tmp_path / "model.bin") as archive:
        assert {info.CRC for info in archive.infolist()} == {0}
    checkpoint = raywl.open_checkpoint(tmp_path)
    assert checkpoint.verify(deep=True).ok
    assert dict(checkpoint.iter_weights())["a"].tolist() == [1, 1, 1]


def test_all_problems_are_listed(tmp_path):
    """A damaged file doesn't hide another one's damage."""
    names = [f"pytorch_model-0000{i}-of-00003.bin" for i in (1, 2, 3)]
    save_sharded({name: {f"t{i}": torch.ones(3)} for i, name in enumerate(names)}, tmp_path)
    (tmp_path / names[0]).write_bytes(b"")
    (tmp_path / names[1]).write_bytes((tmp_path / names[1]).read_bytes()[:-30])
    (tmp_path / names[2]).unlink()
    from raywl.verifying import verify_source

    report = verify_source(resolve(tmp_path))
    assert [sum(name in problem for problem in report.problems) for name in names] == [1, 1, 1]


def test_a_hundred_thousand_tensors(tmp_path):
    """Time grows with their number: the pickle's opcodes are run once."""
    import time

    base = torch.zeros(1)
    times = []
    for count in (5_000, 20_000):
        torch.save({f"layers.{i}.weight": base for i in range(count)}, tmp_path / "model.pt")
        start = time.process_time()
        assert len(raywl.open_checkpoint(tmp_path).tensors) == count
        times.append(time.process_time() - start)
    assert times[1] < 10 * times[0]


def test_what_cant_be_read_is_no_damage(tmp_path, monkeypatch):
    """An error of the disk is told as one, and not as an archive that is cut."""
    torch.save({"a": torch.ones(3)}, tmp_path / "model.bin")

    def fail(self, name, start, end):
        if start:
            raise SourceError(self.path(name), f"can't be read at byte {start}: Input/output error")
        return read(self, name, start, end)

    read = LocalSource.read
    monkeypatch.setattr(LocalSource, "read", fail)
    with pytest.raises(SourceError, match="Input/output error"):
        raywl.open_checkpoint(tmp_path)
