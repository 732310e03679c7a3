"""Checkpoints of many layouts, and the peak of memory above the parameters while one is loaded.

Run as a program, in a fresh process: `python -m tests.loading.memory_layouts LAYOUT STRATEGY FOLDER` prints a
JSON object. The files have no blocks on the disk: only their sizes count here.
"""

from __future__ import annotations

import json
import math
import struct
import sys
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

import raywl

MIB = 1 << 20


class Layout(NamedTuple):
    """What the files hold, and how a parameter takes a tensor."""

    num_files: int
    num_tensors: int
    """In each file."""
    shape: tuple[int, ...]
    dtype: str = "F32"
    param: str = ""
    """Dtype of the parameters, by torch's name; by default that of the file."""
    tp_size: int = 1
    """Ranks that tensors are cut for, along dim 1."""
    how: str = ""
    """`turned`: by a loader that turns them; `looks`: by one that looks at every value; `flat`: parts of one
    buffer; `together`: into a part of one large parameter each; `iterated`: without a model."""


LAYOUTS = {
    "one huge tensor": Layout(1, 1, (512 * MIB // 4096, 1024)),
    "1,000 files": Layout(1000, 1, (128, 1024)),
    "100,000 tensors": Layout(4, 25_000, (1024,)),
    "100,000 parts of a buffer": Layout(4, 25_000, (1024,), how="flat"),
    "100,000 by loaders": Layout(4, 25_000, (1024,), how="loaders"),
    "fp8": Layout(2, 64, (1024, 4096), "F8_E4M3"),
    "columns": Layout(2, 8, (8192, 1024), tp_size=4),
    "columns of one huge tensor": Layout(1, 1, (512 * MIB // 8192, 2048), tp_size=2),
    "converted": Layout(2, 16, (4096, 2048), "BF16", "float32"),
    "one huge tensor converted": Layout(1, 1, (73728, 2048), "BF16", "float32"),
    "turned": Layout(2, 16, (4096, 1024), how="turned"),
    "experts": Layout(2, 128, (512, 1024), how="together"),
    "looked at": Layout(2, 16, (4096, 1024), how="looks"),
    "iterated": Layout(2, 64, (1024, 1024), how="iterated"),
}
_WIDTHS = {"F32": ("float32", 4), "BF16": ("bfloat16", 2), "F8_E4M3": ("float8_e4m3fn", 1)}


def write(layout: Layout, folder: Path) -> None:
    """Files of zeros that take no room."""
    nbytes = math.prod(layout.shape) * _WIDTHS[layout.dtype][1]
    for file in range(layout.num_files):
        header = {
            f"w{file * layout.num_tensors + index}": {
                "dtype": layout.dtype,
                "shape": layout.shape,
                "data_offsets": [index * nbytes, (index + 1) * nbytes],
            }
            for index in range(layout.num_tensors)
        }
        raw = json.dumps(header).encode()
        raw += b" " * (-len(raw) % 8)
        with open(folder / f"model-{file + 1:05}-of-{layout.num_files:05}.safetensors", "wb") as out:
            out.write(struct.pack("<Q", len(raw)) + raw)
            out.truncate(8 + len(raw) + layout.num_tensors * nbytes)


class Model(nn.Module):
    """A parameter for each tensor, or one for all of them."""

    def __init__(self, layout: Layout) -> None:
        super().__init__()
        dtype = getattr(torch, layout.param or _WIDTHS[layout.dtype][0])
        num = layout.num_files * layout.num_tensors
        rows, *columns = layout.shape
        shape = (rows, *(size // layout.tp_size for size in columns))
        if layout.how == "turned":
            shape = shape[::-1]
        if layout.how == "together":
            self.register_parameter("w", self._made((num, *shape), dtype))
            return
        flat = self._made((num * math.prod(shape),), dtype).data if layout.how == "flat" else None
        for index, part in enumerate([None] * num if flat is None else flat.view(num, *shape).unbind()):
            parameter = self._made(shape, dtype) if part is None else nn.Parameter(part, requires_grad=False)
            if layout.how in ("turned", "looks", "loaders"):
                parameter.weight_loader = LOADERS[layout.how]
            self.register_parameter(f"w{index}", parameter)

    def _made(self, shape: tuple[int, ...], dtype: torch.dtype) -> nn.Parameter:
        """Memory that was touched, and holds no zeros."""
        return nn.Parameter(torch.ones(shape, dtype=torch.float32).to(dtype), requires_grad=False)


class Together(Model):
    """Takes each tensor as one of its experts."""

    def load_weights(self, weights) -> None:
        for name, weight in weights:
            self.w.data[int(name[1:])].copy_(weight)


def _look(parameter, weight) -> None:
    assert weight.max() == 0
    parameter.data.copy_(weight)


LOADERS = {
    "turned": lambda parameter, weight: parameter.data.copy_(weight.t()),
    "looks": _look,
    "loaders": lambda parameter, weight: parameter.data.copy_(weight),
}


def status(key: str) -> int:
    """Bytes of memory by a line of the kernel's."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(key))


def main(name: str, strategy: str, folder: str) -> None:
    """Loads, and prints the peak above what was there before."""
    layout = LAYOUTS[name]
    checkpoint = raywl.open_checkpoint(folder)
    model = None
    if layout.how != "iterated":
        model = (Together if layout.how == "together" else Model)(layout)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak counts from here
    before = status("VmRSS")
    if model is None:
        before += max(entry.nbytes for entry in checkpoint.tensors.values())
        num = sum(not tensor.any() for _, tensor in checkpoint.iter_weights(strategy=strategy))
        assert num == len(checkpoint.tensors)
    else:
        context = raywl.ParallelContext(tp_size=layout.tp_size)
        shards = {"*": raywl.Shard(1)} if layout.tp_size > 1 else None
        raywl.load_into(model, checkpoint, parallel=context, shards=shards, strategy=strategy)
    print(json.dumps({"above": status("VmHWM") - before, "nbytes": checkpoint.nbytes}))
    if model is not None:
        assert not any(parameter.view(torch.uint8).any() for parameter in model.parameters())


if __name__ == "__main__":
    main(*sys.argv[1:])
