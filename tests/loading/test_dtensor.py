"""DTensor and FSDP2 parameters on two real gloo ranks."""

from __future__ import annotations

import subprocess
import sys

from .dtensor_ranks import W


def test_distributed_parameters_get_their_parts(write, tmp_path):
    """Placements that can be loaded, also uneven and on meta; others refused by name; FSDP2's forward."""
    folder = write(W)
    (folder / "fsdp").mkdir()
    command = [sys.executable, "-m", "tests.loading.dtensor_ranks", str(folder)]
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store")], stdout=subprocess.PIPE,
                         stderr=subprocess.STDOUT, text=True)
        for rank in range(2)
    ]  # fmt: skip
    try:
        output = [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, text in zip(ranks, output, strict=True):
        assert rank.returncode == 0, text[-3000:]
        assert "all right" in text
