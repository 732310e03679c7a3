"""Which part of a weight this process keeps, when no argument says it."""

from __future__ import annotations

import torch.distributed as dist

from raywl.types import ParallelContext, current_context

__all__ = [
    "ambient_context",
    "get_tensor_model_parallel_rank",
    "get_tensor_model_parallel_world_size",
]


def ambient_context() -> ParallelContext:
    """The entered context, else tensor parallel over the default process group, else a lone rank."""
    context = current_context()
    if context is not None:
        return context
    if dist.is_available() and dist.is_initialized():
        return ParallelContext(tp_rank=dist.get_rank(), tp_size=dist.get_world_size())
    return ParallelContext()


def get_tensor_model_parallel_rank() -> int:
    """This process's rank among those that a dense weight is cut for."""
    return ambient_context().tp_rank


def get_tensor_model_parallel_world_size() -> int:
    """Number of parts that a dense weight is cut into."""
    return ambient_context().tp_size
