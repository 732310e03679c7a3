"""Models of two ranks or two stages for reloads; the ranks import this module."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import raywl
from tests.cluster.parts import COLUMNS, ROWS, Part


def values(seed: int, rows: int = ROWS) -> dict[str, torch.Tensor]:
    """A checkpoint's tensors; every one of every seed is different."""
    random = torch.Generator().manual_seed(seed)
    return {
        "embed.weight": torch.randn(rows, COLUMNS, generator=random),
        "norm.weight": torch.randn(3, generator=random).to(torch.bfloat16),
        "gain.weight": torch.randn(4, generator=random),
        "head.weight": torch.randn(2, 4, generator=random),
    }


def doubling(param: nn.Parameter, weight: torch.Tensor) -> None:
    """Computes, and puts the parameter into other memory."""
    param.data = weight.clone() * 2


class Whole(nn.Module):
    """Everything; `embed` is cut by tp, `gain` is computed by a loader that rebinds."""

    def __init__(self, context: raywl.ParallelContext) -> None:
        super().__init__()
        self.embed = Part(ROWS // context.tp_size, COLUMNS)
        self.norm = Part(3, dtype=torch.bfloat16)
        self.gain = nn.Module()
        self.gain.weight = nn.Parameter(torch.empty(4))
        self.gain.weight.weight_loader = doubling
        self.head = Part(2, 4)


class Staged(nn.Module):
    """Of a pipeline of two: `head` is on the second stage alone."""

    def __init__(self, context: raywl.ParallelContext) -> None:
        super().__init__()
        self.embed = Part(ROWS, COLUMNS)
        if context.pp_rank == 1:
            self.head = Part(2, 4)


class Waiting(nn.Module):
    """`norm` has a loader that, once there is a file of that name, waits for ever on the last rank."""

    def __init__(self, context: raywl.ParallelContext, file: str) -> None:
        super().__init__()
        self.embed = Part(ROWS // context.tp_size, COLUMNS)
        self.norm = Part(3, dtype=torch.bfloat16)
        last = context.rank == context.world_size - 1

        def load(param: nn.Parameter, weight: torch.Tensor) -> None:
            if last and Path(file).exists() and param.device.type != "meta":
                Path(file + ".reached").write_text(str(os.getpid()))
                threading.Event().wait()
            param.data.copy_(weight)

        self.norm.weight = nn.Parameter(torch.empty(3, dtype=torch.bfloat16))
        self.norm.weight.weight_loader = load


def derive(model: nn.Module) -> None:
    """Gives a loaded model a tensor that shares a parameter's memory."""
    model.part = model.gain.weight.detach()[1:3]


def state(model: nn.Module) -> dict[str, Any]:
    """Addresses and values."""
    named = dict(model.named_parameters())
    found: dict[str, Any] = {
        "addresses": {name: (id(p), p.data_ptr(), p.stride()) for name, p in named.items()},
        "values": {name: p.detach().clone() for name, p in named.items()},
        "pid": os.getpid(),
    }
    if hasattr(model, "part"):
        found["part"] = model.part.clone()
    return found


def slow(model: nn.Module, file: str) -> int:
    """Runs until there is a file of that name."""
    Path(file + ".running").touch()
    give_up_s = time.monotonic() + 60
    while not Path(file).exists():
        assert time.monotonic() < give_up_s
        time.sleep(0.02)
    return os.getpid()


def die(model: nn.Module) -> None:
    os.kill(os.getpid(), signal.SIGKILL)
