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

from raywl.node import mounts


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


@pytest.fixture(params=["mapped", "unmapped"])
def mapped_or_not(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs a test twice: as it is, and with all files on a file system that isn't this machine's."""
    if request.param == "unmapped":
        on_network(tmp_path, monkeypatch)


def on_network(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the table of mounts say that all files are on NFS."""
    table = folder.with_name(f"{folder.name}-mounts")
    table.write_text("server:/ / nfs4 rw 0 0\n")
    monkeypatch.setattr(mounts, "MOUNTS_PATH", str(table))


_BEFORE: dict[str, set[object]] = {}
"""What was there when the test began: other tests of the process may have left some."""


@pytest.fixture(autouse=True)
def before() -> None:
    """Notes what is there, so that a test is asked only about its own leavings."""
    _BEFORE.clear()
    _BEFORE.update(fds=set(), maps=set(), threads=set())
    found: dict[str, set[object]] = {
        "fds": set(open_fds()),
        "maps": set(mappings()),
        "threads": set(threading.enumerate()),
    }
    _BEFORE.update(found)


def open_fds() -> set[str]:
    """Weight files that this process has opened since the test began."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        if target.endswith(".safetensors") or ".safetensors (deleted)" in target:
            found.add(target)
    return {target for target in found if target not in _BEFORE["fds"]}


def mappings() -> list[str]:
    """Lines of this process's memory map that are weight files, mapped since the test began."""
    with open("/proc/self/maps") as file:
        return [line for line in file if ".safetensors" in line and line not in _BEFORE["maps"]]


def reader_threads() -> list[str]:
    """Threads of raywl's that were started since the test began and are alive."""
    started = [thread for thread in threading.enumerate() if thread not in _BEFORE["threads"]]
    return [thread.name for thread in started if thread.name.startswith("raywl")]
