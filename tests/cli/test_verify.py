"""`raywl verify` of checkpoints that aren't whole, and of what isn't there."""

from __future__ import annotations

import os
import shutil

import pytest

ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture
def truncated(checkpoint, tmp_path):
    """Both files are short, and something lies beside them."""
    folder = tmp_path / "truncated"
    shutil.copytree(checkpoint, folder)
    for name in (ONE, TWO):
        os.truncate(folder / name, os.path.getsize(folder / name) - 8)
    (folder / "optimizer.pt").write_bytes(b"x")
    return folder


@pytest.mark.parametrize("deep", [False, True])
def test_all_problems_are_listed(raywl, truncated, deep):
    """As the report, not as an error; the exit code says that there are problems."""
    done = raywl("verify", truncated, "--json", *(["--deep"] if deep else []))
    assert done.code == 3
    assert done.stderr == ""
    found = done.json
    assert found["ok"] is False
    assert found["deep"] is deep
    assert found["files_checked"] == 2
    assert [problem.split(":")[0] for problem in found["problems"]] == [
        str(truncated / ONE),
        str(truncated / TWO),
    ]
    assert all("short by 8 bytes" in problem for problem in found["problems"])
    assert "optimizer.pt" in found["notes"][0]


def test_in_words(raywl, truncated):
    done = raywl("verify", truncated)
    assert done.code == 3
    lines = done.stdout.splitlines()
    assert lines[0] == f"{truncated}: 2 files checked"
    assert [line.split(":")[0] for line in lines[1:4]] == ["problem", "problem", "note"]
    assert lines[4:] == ["2 problems"]


def test_a_single_damaged_file(raywl, damaged):
    done = raywl("verify", damaged, "--json")
    assert done.code == 3
    (problem,) = done.json["problems"]
    assert str(damaged) in problem


def test_a_pattern_leaves_the_rest_out(raywl, truncated):
    (problem,) = raywl("verify", truncated, "--json", "--allow-pattern", "*-00002-of-*").json["problems"]
    assert TWO in problem


def test_a_folder_without_weights(raywl, tmp_path):
    done = raywl("verify", tmp_path, "--json")
    assert done.code == 3
    (problem,) = done.json["problems"]
    assert "no weights here" in problem


def test_a_hub_that_can_not_be_reached_is_4(raywl, tmp_path):
    """Nothing was checked, so that there is no report."""
    done = raywl(
        "verify", "org/name", "--json", "--cache-dir", tmp_path, HF_ENDPOINT="http://127.0.0.1:9", HF_TOKEN=""
    )
    assert done.code == 4
    assert done.error["exit_code"] == 4
