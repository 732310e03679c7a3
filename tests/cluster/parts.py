"""Models, and functions that run on ranks; the ranks import this module."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import nn

import raywl

ROWS, COLUMNS = 8, 4
SHARDS = {"embed.weight": raywl.Shard(0)}


def tensors_of(torch: Any) -> dict[str, Any]:
    """What the checkpoint holds."""
    return {
        "embed.weight": torch.arange(ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS),
        "norm.weight": torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16),
    }


class Part(nn.Module):
    """One parameter."""

    def __init__(self, *shape: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(*shape, dtype=dtype, device="meta"))


class Model(nn.Module):
    """Fits the checkpoint; `embed` is cut by tp."""

    def __init__(self, context: raywl.ParallelContext) -> None:
        super().__init__()
        assert raywl.current_context() == context
        self.embed = Part(ROWS // context.tp_size, COLUMNS)
        self.norm = Part(3, dtype=torch.bfloat16)


class Stage(nn.Module):
    """Of a pipeline of two: `embed` on the first stage, and nothing on the second but a bias."""

    def __init__(self, context: raywl.ParallelContext) -> None:
        super().__init__()
        if context.pp_rank == 0:
            self.embed = Part(ROWS, COLUMNS)
        else:
            self.head = nn.Linear(1, 1)


def too_much(context: raywl.ParallelContext) -> nn.Module:
    """Has a parameter, on the last rank only, that the checkpoint lacks."""
    model = Model(context)
    if context.rank == context.world_size - 1:
        model.extra = Part(2)
    return model


def fails_on_last(context: raywl.ParallelContext) -> nn.Module:
    """Raises on the last rank while all others wait for it in a collective."""
    if context.rank == context.world_size - 1:
        raise KeyError("no such layer: 17")
    dist.barrier()
    return Model(context)


def dies_on_last(context: raywl.ParallelContext) -> nn.Module:
    """Kills the last rank's process while all others wait for it in a collective."""
    if context.rank == context.world_size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
    return Model(context)


def never_ends(context: raywl.ParallelContext) -> nn.Module:
    """Waits for ever on the last rank."""
    if context.rank == context.world_size - 1:
        threading.Event().wait()
    return Model(context)


def no_module(context: raywl.ParallelContext) -> Any:
    """Returns what isn't a module."""
    return "a model"


class Unreadable(Exception):
    """An exception that pickles and can't be read again, as many in the wild."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} and {two}")


def raises_unreadable(context: raywl.ParallelContext) -> Any:
    """Raises it."""
    raise Unreadable("this", "that")


def facts(model: nn.Module) -> dict[str, Any]:
    """What a rank knows of itself."""
    import ray

    context = raywl.current_context()
    assert context is not None
    total = model.embed.weight.detach().sum()
    if dist.is_initialized():
        assert (dist.get_rank(), dist.get_world_size()) == (context.rank, context.world_size)
        dist.all_reduce(total)
    return {
        "context": context,
        "node_id": ray.get_runtime_context().get_node_id(),
        "pid": os.getpid(),
        "total": float(total),
        "embed": model.embed.weight.detach().clone(),
        "norm": model.norm.weight.detach().clone(),
        "cuda": torch.cuda.is_initialized(),
        "threads": torch.get_num_threads(),
    }


def pid_of(model: nn.Module) -> int:
    """The rank's process."""
    return os.getpid()


def fail_on_last(model: nn.Module) -> None:
    """Raises on the last rank while all others wait for it."""
    context = raywl.current_context()
    assert context is not None
    if context.rank == context.world_size - 1:
        raise ValueError("not today")
    dist.barrier()


def die_on_last(model: nn.Module) -> None:
    """Kills the last rank while all others wait for it."""
    context = raywl.current_context()
    assert context is not None
    if context.rank == context.world_size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def is_gone(pid: int) -> bool:
    """Whether a process of this machine has ended."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
