"""Loading takes little memory beside the parameters, however it is done."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from raywl.strategies import STRATEGIES
from tests.loading.memory_layouts import LAYOUTS, write

NUM, ROWS, COLUMNS = 6, 8192, 2048  # 6 x 64 MiB
SCRIPT = """
import json, resource, sys, torch, raywl
from raywl import Shard, ParallelContext
kind, folder = sys.argv[1:]
class Model(torch.nn.Module):
    def __init__(self, columns):
        super().__init__()
        for i in range(6): self.register_parameter(f"w{i}", torch.nn.Parameter(torch.ones(8192, columns)))
class Own(Model):
    def load_weights(self, weights):
        for name, w in weights: self.get_parameter(name).copy_(w)
class Looks(Model):
    def load_weights(self, weights):
        for name, w in weights:
            p = self.get_parameter(name)
            p.copy_(w)
            p[0, 0] = p[1].max()
cut = kind == "columns"
model = (Own if kind == "own" else Looks if kind == "looks" else Model)(1024 if cut else 2048)
checkpoint = raywl.open_checkpoint(folder)
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = peak()
more = {"shards": {"*": Shard(1)}, "parallel": ParallelContext(tp_size=2)} if cut else {}
raywl.load_into(model, checkpoint, **more)
print(json.dumps(peak() - before))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("big")
    for index in range(NUM):
        name = f"model-{index + 1:05}-of-{NUM:05}.safetensors"
        save_file({f"w{index}": torch.full((ROWS, COLUMNS), float(index))}, path / name)
    return path


@pytest.mark.parametrize("kind", ["declared", "columns", "own", "looks"])
def test_peak_memory_above_the_parameters(folder, kind):
    command = [sys.executable, "-c", SCRIPT, kind, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert json.loads(done.stdout) <= 128 << 20


LIMIT_BYTES = 256 << 20
"""Above the parameters: whatever the checkpoint, all of which here are larger."""


@pytest.fixture(scope="module")
def files_of(tmp_path_factory):
    """The folder of a layout's files, made once."""
    made = {}

    def folder_of(layout):
        if layout not in made:
            made[layout] = tmp_path_factory.mktemp("layout")
            write(LAYOUTS[layout], made[layout])
        return made[layout]

    return folder_of


CASES = [(layout, "auto") for layout in LAYOUTS] + [
    (layout, strategy)
    for layout in ("columns", "one huge tensor converted", "iterated")
    for strategy in STRATEGIES
    if strategy != "auto"
]


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "strategy"), CASES)
def test_peak_memory_of_every_layout(files_of, layout, strategy):
    """In a fresh process each; pages of mapped files count too."""
    command = [sys.executable, "-m", "tests.loading.memory_layouts", layout, strategy, files_of(layout)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    print(f"{layout}, {strategy}: {found['above'] / 2**20:.0f} MiB above the parameters")
    assert found["nbytes"] > LIMIT_BYTES
    assert found["above"] <= LIMIT_BYTES
