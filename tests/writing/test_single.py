"""`convert_bin_to_safetensor_file`: one file, its contract, and where older utilities failed."""

from __future__ import annotations

import os

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from raywl.errors import CheckpointError, CorruptFileError, NotFoundError
from raywl.weight_utils import convert_bin_to_safetensor_file
from raywl.writing import files as writing_files
from tests.torch_states import KINDS, bits


def converted(state, folder, **how) -> dict[str, torch.Tensor]:
    torch.save(state, folder / "model.bin", **how)
    assert (
        convert_bin_to_safetensor_file(str(folder / "model.bin"), str(folder / "model.safetensors")) is None
    )
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_come_out_as_they_were(kind, tmp_path):
    state = {
        "a": torch.randn(30, 40),
        "b": torch.randn(300).bfloat16(),
        "c": torch.tensor(3),
        "d": torch.ones(0, 3),
    }
    found = converted(state, tmp_path, **KINDS[kind])
    assert {name: bits(tensor) for name, tensor in found.items()} == {n: bits(t) for n, t in state.items()}


def test_a_state_dict_is_unwrapped(tmp_path):
    with pytest.warns(UserWarning, match=r"epoch \(int\)"):
        found = converted({"state_dict": {"a": torch.ones(500)}, "epoch": 3}, tmp_path)
    assert list(found) == ["a"]


def test_the_first_name_of_one_view_is_kept(tmp_path):
    """The same storage, offset, shape and strides: one of them; in the order of the file, not of names."""
    x = torch.randn(30, 40)
    found = converted({"lm_head": x, "embed": x, "again": x[:]}, tmp_path)
    assert list(found) == ["lm_head"]
    assert torch.equal(found["lm_head"], x)


def test_other_views_are_written_in_full(tmp_path):
    """MUST DIFFER: `x[:2]` beside `x` has the same address and used to be dropped."""
    x = torch.randn(3000, 2)
    state = {"x": x, "front": x[:2], "turned": x[:3].t(), "flat": x[:2].view(-1)}
    found = converted(state, tmp_path)
    assert sorted(found) == sorted(state)
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())


def test_not_a_number_equals_itself(tmp_path):
    """MUST DIFFER: the comparison is of bits, so that NaNs of every kind come through."""
    bits_of = torch.tensor([0x7FC00000, 0x7F800001, -1, 0x7F800000], dtype=torch.int32).view(torch.float32)
    state = {"nan": bits_of, "more": torch.full((300,), float("nan"))}
    found = converted(state, tmp_path)
    assert bits(found["nan"]) == bits(bits_of)


def test_one_percent_larger_is_refused(tmp_path):
    """Views in full may make the output larger, by 1 % at most; no output is left."""
    x = torch.randn(10_000)
    converted({"x": x, "part": x[:50]}, tmp_path)
    os.unlink(tmp_path / "model.safetensors")
    with pytest.raises(RuntimeError, match="more than 1 % over"):
        converted({"x": x, "part": x[:5000]}, tmp_path)
    assert os.listdir(tmp_path) == ["model.bin"]


def test_a_difference_is_refused_and_leaves_nothing(tmp_path, monkeypatch):
    """MUST DIFFER: the file used to stay behind."""
    fine = writing_files._write_all

    def flipping(fd, data):
        raw = bytearray(data)
        if data[8:9] != b"{":
            raw[5] ^= 1
        fine(fd, memoryview(raw))

    monkeypatch.setattr(writing_files, "_write_all", flipping)
    with pytest.raises(RuntimeError, match="tensor 'a' isn't what was written, bit by bit"):
        converted({"a": torch.ones(300)}, tmp_path)
    assert os.listdir(tmp_path) == ["model.bin"]


def test_a_name_that_the_format_keeps_for_itself(tmp_path):
    with pytest.raises(CheckpointError, match="can have this name") as caught:
        converted({"a": torch.ones(300), "__metadata__": torch.ones(1)}, tmp_path)
    assert (caught.value.path, caught.value.tensor) == (str(tmp_path / "model.bin"), "__metadata__")
    assert os.listdir(tmp_path) == ["model.bin"]


def test_files_that_need_code_are_refused(tmp_path):
    import argparse

    with pytest.raises(CheckpointError, match=r"argparse\.Namespace") as caught:
        converted({"args": argparse.Namespace(), "a": torch.ones(3)}, tmp_path)
    assert caught.value.path == str(tmp_path / "model.bin")
    assert os.listdir(tmp_path) == ["model.bin"]


def test_damage_is_refused(tmp_path):
    torch.save({"a": torch.ones(300)}, tmp_path / "model.bin")
    (tmp_path / "model.bin").write_bytes((tmp_path / "model.bin").read_bytes()[:-40])
    with pytest.raises(CorruptFileError):
        convert_bin_to_safetensor_file(tmp_path / "model.bin", tmp_path / "model.safetensors")
    assert os.listdir(tmp_path) == ["model.bin"]


def test_damage_is_found_by_checksums(tmp_path):
    """A byte that has changed in a record is damage, and not a weight to be written on."""
    torch.save({"a": torch.ones(300), "b": torch.ones(300)}, tmp_path / "model.bin")
    raw = bytearray((tmp_path / "model.bin").read_bytes())
    raw[raw.rindex(torch.ones(300).numpy().tobytes())] ^= 1
    (tmp_path / "model.bin").write_bytes(raw)
    with pytest.raises(CorruptFileError, match=r"damaged, as their checksums tell: model/data/1"):
        convert_bin_to_safetensor_file(tmp_path / "model.bin", tmp_path / "model.safetensors")
    assert os.listdir(tmp_path) == ["model.bin"]


def test_paths(tmp_path, monkeypatch):
    """Bare names, folders that are made, a file that is replaced; folders and safetensors are refused."""
    monkeypatch.chdir(tmp_path)
    torch.save({"a": torch.ones(300)}, "model.bin")
    convert_bin_to_safetensor_file("model.bin", "model.safetensors")
    convert_bin_to_safetensor_file("model.bin", "model.safetensors")
    convert_bin_to_safetensor_file("model.bin", "new/folder/x.safetensors")
    assert sorted(os.listdir()) == ["model.bin", "model.safetensors", "new"]
    assert os.listdir("new/folder") == ["x.safetensors"]
    with pytest.raises(NotFoundError):
        convert_bin_to_safetensor_file("absent.bin", "y.safetensors")
    with pytest.raises(ValueError, match="is a folder"):
        convert_bin_to_safetensor_file("new", "y.safetensors")
    save_file({"a": torch.ones(3)}, "x.safetensors")
    with pytest.raises(ValueError, match="is a safetensors file already"):
        convert_bin_to_safetensor_file("x.safetensors", "y.safetensors")


def test_ordinary_permissions(tmp_path):
    """A new file may be read by whom the umask lets."""
    before = os.umask(0o022)
    try:
        converted({"a": torch.ones(300)}, tmp_path)
    finally:
        os.umask(before)
    assert (tmp_path / "model.safetensors").stat().st_mode & 0o777 == 0o644
