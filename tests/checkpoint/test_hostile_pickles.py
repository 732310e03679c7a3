"""Files of `torch.save` that lie are refused by name, without running or unpacking anything of them."""

import builtins
import importlib
import io
import os
import pickle
import resource
import struct
import sys
import time
import zipfile

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import raywl
from raywl.checkpoint.pickles import read_pickle
from raywl.checkpoint.torch_files import read_torch_header
from raywl.checkpoint.torch_globals import GLOBALS
from raywl.errors import CheckpointError, CorruptFileError
from tests.hostile.pickles import FILES, GOOD, HostilePickle, archive, legacy, state, storage, tensor, write


def header(raw: bytes, path: str = "model.bin"):
    return read_torch_header(lambda start, end: raw[start:end], len(raw), path=path, file="model.bin")


@pytest.mark.parametrize("case", FILES, ids=lambda case: case.name)
def test_refused_by_name(case: HostilePickle, tmp_path):
    """The error has the right class, names file and tensor, and says what is wrong."""
    path = write(case, tmp_path)
    with pytest.raises(case.error) as caught:
        raywl.open_checkpoint(path)
    error = caught.value
    assert type(error) is case.error
    assert error.path == str(path)
    assert error.tensor == case.tensor or case.tensor is None
    for words in (str(path), *case.says):
        assert words in str(error)
    assert len(str(error)) < 1500


def test_the_good_ones_are_good():
    """What the hostile files are made of is read, but for what makes them hostile."""
    for raw in (GOOD, legacy(state(a=tensor())), archive(state(a=tensor()), prefix="model")):
        assert header(raw).tensors["a"].shape == (2,)
    part = legacy(state(a=tensor(storage(size=2, more=b"(X\1\0\0\0vK\1K\1t"), shape=(1,))))
    entry = header(part).tensors["a"]
    assert part[entry.start : entry.end] == bytes([4, 5, 6, 7])


def test_nothing_is_called_imported_or_changed(tmp_path, monkeypatch):
    """Neither by the files that try, nor by any other: no import, no command, no change of what is shared."""
    calls = []
    monkeypatch.setattr(os, "system", lambda *a: calls.append(a))
    monkeypatch.setattr(builtins, "eval", lambda *a: calls.append(a))
    monkeypatch.setattr(importlib, "import_module", lambda *a: calls.append(a))
    monkeypatch.setattr(pickle, "loads", lambda *a: calls.append(a))
    before = {name: repr(value) for name, value in GLOBALS.items()}
    modules = set(sys.modules)
    for case in FILES:
        with pytest.raises(case.error):
            header(case.content)
    assert not calls
    assert set(sys.modules) - modules <= {"raywl.checkpoint.torch_files"}
    assert {name: repr(value) for name, value in GLOBALS.items()} == before
    assert not os.path.exists("/tmp/raywl-was-here")


def test_nothing_is_read_out_of_a_hostile_file(tmp_path):
    """Neither the iterator nor a load gets to the first tensor; the model stays as it was."""
    model = torch.nn.Module()
    model.a = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    for case in FILES[::7]:
        path = write(case, tmp_path)
        with pytest.raises(case.error):
            raywl.load_into(model, path)
        assert model.a.tolist() == [1.0, 2.0]


def test_bombs_cost_little(tmp_path):
    """Compressed zeros, a million marks, lists in lists, and sizes out of thin air: no time, no memory."""
    bombs = [
        archive(bytes(64 << 20), {}, compression=zipfile.ZIP_DEFLATED, compresslevel=9),
        archive(b"\x80\2" + b"(" * 200_000 + b"."),
        archive(b"\x80\2" + b"]" * 100_000 + b"a" * 99_999 + b"."),
        archive(b"\x80\2)" + b"q\0h\0\x86" * 100_000 + b"."),
        archive(state(a=tensor(storage(size=1 << 62), shape=(1 << 62,)))),
        legacy(b"\x80\2}.", keys=tuple(map(str, range(10_000)))),
    ]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    for raw in bombs:
        with pytest.raises(CheckpointError):
            header(raw)
    assert time.process_time() - start < 30
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400 << 10


def test_opcodes_are_counted():
    """Whatever a pickle does, it ends."""
    with pytest.raises(CorruptFileError, match="more than 1000 opcodes"):
        read_pickle(
            io.BytesIO(b"\x80\2" + b"N0" * 1000 + b"}."),
            GLOBALS,
            lambda _: None,
            path="p",
            what="pickle",
            max_opcodes=1000,
        )


def test_a_directory_over_the_limit_is_not_read(tmp_path, monkeypatch):
    """The end of a file may claim a directory as large as the file."""
    monkeypatch.setattr("raywl.checkpoint.zips.MAX_DIRECTORY_BYTES", 1000)
    raw = archive(state(a=tensor()), {"data/0": bytes(8), **{f"x/{i}": b"" for i in range(100)}})
    with pytest.raises(CorruptFileError, match="over the limit of 1000"):
        header(raw)


@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_any_change_is_read_or_refused(data):
    """Flipped, cut, doubled and swapped bytes give tensors inside the file, or an error of the right kind."""
    source = bytearray(data.draw(st.sampled_from(_SEEDS)))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(source) - 1))
        kind = data.draw(st.sampled_from(["flip", "cut", "insert", "number"]))
        if kind == "flip":
            source[at] ^= 1 << data.draw(st.integers(0, 7))
        elif kind == "cut":
            del source[at : at + data.draw(st.integers(1, 9))]
        elif kind == "insert":
            source[at:at] = data.draw(st.binary(min_size=1, max_size=9))
        else:
            source[at : at + 4] = struct.pack("<I", data.draw(st.integers(0, (1 << 32) - 1)))
        if not source:
            break
    try:
        found = header(bytes(source))
    except CheckpointError:
        return
    for entry in found.tensors.values():
        assert 0 <= entry.start <= entry.end <= len(source)


@given(raw=st.binary(max_size=200), front=st.sampled_from([b"\x80\2", b"PK\3\4", b"\x80\4\x95", b""]))
@settings(max_examples=300, deadline=None)
def test_any_bytes_are_refused(raw, front):
    with pytest.raises(CheckpointError):
        header(front + raw)


def _saved(value: object, **how) -> bytes:
    out = io.BytesIO()
    torch.save(value, out, **how)
    return out.getvalue()


_BASE = torch.arange(12.0).view(3, 4)
_SEEDS = [
    GOOD,
    legacy(state(a=tensor(), b=tensor(shape=(1,)))),
    _saved({"a": _BASE, "b": _BASE.t(), "c": torch.zeros(2).half(), "n": 3}),
    _saved({"a": _BASE, "b": _BASE[1]}, _use_new_zipfile_serialization=False),
]
