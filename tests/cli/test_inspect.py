"""`raywl inspect` and `raywl verify`."""

from __future__ import annotations

import json
import os
import pty
import shutil
import struct
import subprocess
import sys
import termios

import pytest
import torch
from safetensors.torch import save_file


def test_inspect_tells_what_there_is(raywl, checkpoint):
    done = raywl("inspect", checkpoint, "--json")
    found = done.json
    assert done.code == 0
    assert done.stderr == ""
    assert [file["name"] for file in found["files"]] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]
    assert [file["size"] for file in found["files"]] == [
        os.path.getsize(checkpoint / file["name"]) for file in found["files"]
    ]
    assert found["dtypes"] == {
        "BF16": {"num_tensors": 1, "nbytes": 64},
        "F32": {"num_tensors": 3, "nbytes": 268},
    }
    assert found["nbytes"] == 332
    assert found["metadata"] == {"format": "pt"}
    assert found["problems"] == []
    entry = found["tensors"]["layers.1.q_proj.weight"]
    assert (entry["dtype"], entry["shape"]) == ("BF16", [8, 4])
    assert entry["end"] - entry["start"] == 64


def test_inspect_in_words(raywl, checkpoint):
    done = raywl("inspect", checkpoint, "--tensors")
    assert done.code == 0
    assert done.stderr == ""
    for shown in (
        "4 tensors, 332 B",
        "BF16",
        "layers.0.q_proj.weight",
        "8x4",
        "<script>[red]",
        "no problems",
    ):
        assert shown in done.stdout


def test_a_terminal_gets_drawn_tables_with_names_as_they_are(checkpoint, tmp_path):
    """Through a real terminal pair, with `rich`: brackets in a name are no markup."""
    pytest.importorskip("rich")
    leader, follower = pty.openpty()
    termios.tcsetwinsize(follower, (50, 200))
    command = [sys.executable, "-m", "raywl", "inspect", str(checkpoint), "--tensors"]
    subprocess.run(command, stdout=follower, cwd=tmp_path, check=True, timeout=60)
    os.close(follower)
    shown = os.read(leader, 1 << 16).decode()
    os.close(leader)
    assert "<script>[red]" in shown
    assert "─" in shown


def test_unindexed_tensors_and_unused_files_are_noted(raywl, checkpoint, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(checkpoint, folder)
    index = folder / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    del weight_map["<script>[red]"]
    index.write_text(json.dumps({"weight_map": weight_map}))
    save_file({"other": torch.zeros(1)}, folder / "other.safetensors")
    for command in ("inspect", "verify"):
        done = raywl(command, folder, "--json")
        assert done.code == 0
        assert done.json["problems"] == []
        unindexed, unused = done.json["notes"]
        assert "<script>[red]" in unindexed
        assert "other.safetensors" in unused
        assert f"note: {unused}\n" in raywl(command, folder).stdout


def test_inspect_of_a_thousand_tensors_needs_neither_torch_nor_ray(tmp_path):
    header, start = {}, 0
    for number in range(1000):
        header[f"model.layers.{number}.weight"] = {
            "dtype": "F32",
            "shape": [2, 2],
            "data_offsets": [start, start + 16],
        }
        start += 16
    raw = json.dumps(header).encode()
    path = tmp_path / "thousand.safetensors"
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(start))
    script = (
        "import sys\n"
        "from raywl.cli import main\n"
        f"code = main(['inspect', {str(path)!r}])\n"
        "print(sorted({'torch', 'ray', 'transformers'} & set(sys.modules)), file=sys.stderr)\n"
        "sys.exit(code)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "1000 tensors" in done.stdout
    assert done.stderr == "[]\n"


def test_allow_pattern_and_subfolder_choose_files(raywl, checkpoint, tmp_path):
    found = raywl("inspect", checkpoint, "--json", "--allow-pattern", "*-00002-of-*").json
    assert list(found["tensors"]) == ["layers.1.q_proj.weight"]
    shutil.copytree(checkpoint, tmp_path / "outer" / "inner")
    found = raywl("inspect", tmp_path / "outer", "--json", "--subfolder", "inner").json
    assert found["num_tensors"] == 4


@pytest.mark.parametrize("deep", [False, True])
def test_verify_of_a_whole_checkpoint(raywl, checkpoint, deep):
    done = raywl("verify", checkpoint, "--json", *(["--deep"] if deep else []))
    assert done.code == 0
    assert done.json["ok"]
    assert done.json["files_checked"] == 2
    assert (done.json["bytes_checked"] > 0) == deep
    assert raywl("verify", checkpoint).stdout.endswith("ok\n")


def test_a_deep_check_finds_changed_bytes_where_the_hash_is_known(raywl, tmp_path):
    """A file of the hub's cache: its blob is named by its hash."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    blob = blobs / ("0" * 64)
    save_file({"weight": torch.zeros(4)}, blob)
    (snapshot / "model.safetensors").symlink_to(blob)
    assert raywl("verify", snapshot, "--json").code == 0
    done = raywl("verify", snapshot, "--json", "--deep")
    assert done.code == 3
    assert not done.json["ok"]
    assert "SHA-256" in done.json["problems"][0]
