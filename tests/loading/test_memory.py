"""Loading takes little memory beside the parameters, however it is done."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

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
