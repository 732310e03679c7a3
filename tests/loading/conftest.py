"""Small checkpoints, and models made of a few parameters."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn


class Model(nn.Module):
    """Parameters (or buffers) by name; `load` is its `load_weights`, when it is given."""

    def __init__(self, tensors: dict[str, torch.Tensor], load: Callable | None = None) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            if not isinstance(tensor, nn.Parameter):
                tensor = nn.Parameter(tensor, requires_grad=False)
            setattr(self, name, tensor)
        if load is not None:
            self.load_weights = lambda weights: load(self, weights)


def filled(*shape: int, dtype: torch.dtype = torch.float32, value: float = 7.0) -> torch.Tensor:
    """Memory whose values no checkpoint here has."""
    return torch.full(shape, value).to(dtype)


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Writes a checkpoint of one file, or of several when given several mappings; returns its folder."""

    def to(*files: dict[str, torch.Tensor]) -> Path:
        for index, tensors in enumerate(files):
            tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
            save_file(tensors, tmp_path / f"model-{index + 1:05}-of-{len(files):05}.safetensors")
        return tmp_path

    return to


def open_fds() -> set[str]:
    """What this process has open: regular files only."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        if target.endswith(".safetensors") or ".safetensors (deleted)" in target:
            found.add(target)
    return found


def mappings() -> list[str]:
    """Lines of this process's memory map that are weight files."""
    with open("/proc/self/maps") as file:
        return [line for line in file if ".safetensors" in line]


def reader_threads() -> list[str]:
    """Threads of raywl's that are alive."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("raywl")]
