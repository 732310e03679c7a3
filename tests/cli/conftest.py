"""The command as users run it: another process, with its own standard output and error."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

TIMEOUT_S = 120


@dataclass
class Ended:
    """What a command left."""

    code: int
    stdout: str
    stderr: str

    @property
    def json(self) -> Any:
        """Standard output, which must be exactly one JSON object on one line."""
        assert self.stdout.endswith("\n")
        assert self.stdout.count("\n") == 1
        value = json.loads(self.stdout)
        assert isinstance(value, dict)
        return value

    @property
    def error(self) -> dict[str, Any]:
        """The error that `--json` printed."""
        assert list(self.json) == ["error"]
        error = self.json["error"]
        assert error["exit_code"] == self.code
        assert error["message"] in self.stderr
        return error


@pytest.fixture
def raywl(tmp_path) -> Callable[..., Ended]:
    """Runs the command in a folder of its own."""

    def run(*words: str | Path, cwd: Path = tmp_path, timeout_s: float = TIMEOUT_S, **env: str) -> Ended:
        done = subprocess.run(
            [sys.executable, "-m", "raywl", *map(str, words)],
            cwd=cwd,
            env={**os.environ, **env},
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
        return Ended(done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Path:
    """Two files, an index, two dtypes, and a name that isn't harmless."""
    folder = tmp_path_factory.mktemp("checkpoint")
    generator = torch.Generator().manual_seed(0)
    one = {
        "layers.0.q_proj.weight": torch.randn(8, 4, generator=generator),
        "layers.0.o_proj.weight": torch.randn(4, 8, generator=generator),
        "<script>[red]": torch.randn(3, generator=generator),
    }
    two = {"layers.1.q_proj.weight": torch.randn(8, 4, generator=generator).bfloat16()}
    save_file(one, folder / "model-00001-of-00002.safetensors", {"format": "pt"})
    save_file(two, folder / "model-00002-of-00002.safetensors", {"format": "pt"})
    weight_map = {
        **dict.fromkeys(one, "model-00001-of-00002.safetensors"),
        **dict.fromkeys(two, "model-00002-of-00002.safetensors"),
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


@pytest.fixture
def damaged(tmp_path) -> Path:
    """A file whose header promises more than there is."""
    path = tmp_path / "damaged.safetensors"
    save_file({"weight": torch.zeros(64)}, path)
    path.write_bytes(path.read_bytes()[:-8])
    return path
