"""Ranks that save at once, in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import torch

import raywl

from .ranks import WHOLE, values


def test_distributed_parameters_of_ranks_in_a_group(tmp_path):
    """DTensors, uneven ones too, by their placements and by the record of a load; one rank finishes each."""
    size = 2
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.saving.ranks", str(tmp_path), str(rank), str(size),
             str(tmp_path / "store")], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(size)
    ]  # fmt: skip
    try:
        output = [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, text in zip(ranks, output, strict=True):
        assert rank.returncode == 0, text[-3000:]
    reports = [json.loads(text.splitlines()[-1]) for text in output]
    for number, name in enumerate(("made", "loaded")):
        assert sum(bool(rank[number]["files"]) for rank in reports) == 1
        saved = dict(raywl.open_checkpoint(tmp_path / name).iter_weights())
        assert saved.keys() == WHOLE.keys()
        for key, tensor in saved.items():
            assert torch.equal(tensor, values(key, 0) + number)
        assert not [entry for entry in os.listdir(tmp_path / name) if "unfinished" in entry]
    assert max(len(rank[1]["files"]) for rank in reports) == 3
