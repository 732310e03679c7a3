"""`raywl convert`, and the other commands on files of `torch.save`."""

from __future__ import annotations

import argparse
import json
import os

import pytest
import torch
from safetensors.torch import load_file

from raywl.cli import main
from raywl.writing import convert
from tests.torch_states import save_sharded


@pytest.fixture
def folder(tmp_path):
    """Two files with an index, a tie, a view, a config, and a trainer's state."""
    x = torch.arange(24.0).view(4, 6)
    shards = {
        "pytorch_model-00001-of-00002.bin": {"embed": x, "lm_head": x},
        "pytorch_model-00002-of-00002.bin": {"proj": x.t()},
    }
    save_sharded(shards, tmp_path / "in")
    (tmp_path / "in" / "config.json").write_text("{}")
    torch.save({"step": 3}, tmp_path / "in" / "optimizer.pt")
    return tmp_path / "in"


def told(capsys, *words, code=0) -> dict:
    """What a command prints as JSON, run in this process."""
    assert main([*map(str, words), "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_as_text(raywl, folder, tmp_path):
    done = raywl("convert", folder, tmp_path / "out", "--max-shard-size", "100B")
    assert done.code == 0, done.stderr
    for words in (
        "2 tensors, 192 B, compared bit by bit",
        "model-00002-of-00002.safetensors",
        "copied: config.json",
        "left out: lm_head, the same view of the same bytes as embed",
        "note: left out, as a trainer's state and no weights: optimizer.pt",
    ):
        assert words in done.stdout
    assert "check" in done.stderr
    found = load_file(tmp_path / "out" / "model-00002-of-00002.safetensors")
    assert torch.equal(found["proj"], torch.arange(24.0).view(4, 6).t())


def test_as_json(folder, tmp_path, capsys):
    report = told(capsys, "convert", folder, tmp_path / "out", "--quiet")
    assert report["path"] == str(tmp_path / "out")
    assert report["tied"] == {"lm_head": "embed"}
    assert list(report["files"]) == ["model.safetensors"]
    assert report["companions"] == ["config.json"]
    assert (report["num_tensors"], report["nbytes"]) == (2, 192)
    assert report["identity"] == told(capsys, "inspect", tmp_path / "out")["identity"]


REFUSED = [
    (["in", "in"], 2, "not empty: nothing is written over"),
    (["nowhere", "out"], 3, "path not found"),
    (["in", "out", "--max-shard-size", "much"], 2, "'much' is no size"),
    (["st", "out"], 2, "of safetensors files already"),
    (["damaged.bin", "out"], 3, "incomplete download"),
    (["code.pt", "out"], 3, "argparse.Namespace"),
    (["c128.pt", "out"], 3, "tensor 'a': is complex128"),
    (["in"], 2, "OUT"),
]
"""Words after the command, the exit code, and what is said."""


def test_refusals(folder, tmp_path, monkeypatch, capsys):
    """The exit code and the words; and nothing is written."""
    monkeypatch.chdir(tmp_path)
    convert("in/pytorch_model-00001-of-00002.bin", "st")
    torch.save({"a": torch.ones(100)}, "damaged.bin")
    (tmp_path / "damaged.bin").write_bytes((tmp_path / "damaged.bin").read_bytes()[:-50])
    torch.save({"a": torch.ones(3), "args": argparse.Namespace()}, "code.pt")
    torch.save({"a": torch.ones(3, dtype=torch.complex128)}, "c128.pt")
    before = sorted(os.listdir())
    for words, code, says in REFUSED:
        assert main(["convert", *words, "--json"]) == code, words
        assert says in json.loads(capsys.readouterr().out)["error"]["message"]
        assert sorted(os.listdir()) == before


def test_nothing_to_measure_beside(folder, capsys):
    """`bench load` compares with readers of safetensors files, which don't take these."""
    assert main(["bench", "load", str(folder), "--json"]) == 2
    assert "raywl convert" in json.loads(capsys.readouterr().out)["error"]["message"]


def test_inspect_and_verify(folder, capsys):
    """Both take such a folder, say what they left out, and find damage by the archives' checksums."""
    assert main(["inspect", str(folder), "--tensors"]) == 0
    shown = capsys.readouterr().out
    for words in (": torch, 3 tensors, 288 B", "pytorch_model-00001-of-00002.bin", "optimizer.pt", "6x4"):
        assert words in shown
    found = told(capsys, "inspect", folder)
    assert found["format"] == "torch"
    assert "strides" not in found["tensors"]["embed"]
    assert found["tensors"]["proj"]["strides"] == [4, 24]
    assert set(found["files"][0]) == {"name", "size", "num_tensors", "data_start", "header_sha256"}
    assert told(capsys, "verify", folder, "--deep")["ok"]
    path = folder / "pytorch_model-00002-of-00002.bin"
    raw = bytearray(path.read_bytes())
    raw[found["tensors"]["proj"]["start"]] ^= 1
    path.write_bytes(raw)
    report = told(capsys, "verify", folder, "--deep", code=3)
    assert "records are damaged" in report["problems"][0]
    assert told(capsys, "verify", folder)["ok"]


def test_plan(folder, tmp_path, capsys):
    """Cuts of what is stored turned cost what lies between the rows, and no more."""
    (tmp_path / "plan.json").write_text('{"embed": "colwise", "proj": "rowwise"}')
    ranks = told(capsys, "plan", folder, "--tp", "2", "--tp-plan", tmp_path / "plan.json")["ranks"]
    assert [rank["nbytes_kept"] for rank in ranks] == [48 + 96 + 48] * 2
    assert all(rank["nbytes"] == rank["nbytes_kept"] for rank in ranks)
