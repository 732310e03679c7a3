"""The collectives of a group of ranks. With one rank each of them gives back what it got."""

from __future__ import annotations

import torch
import torch.distributed as dist

from raywl import ParallelContext


class Ranks:
    """Where this rank stands, and its sums and gathers with the others.

    Ranks are numbered as in `ParallelContext`: tensor parallel fastest, then data parallel. The process
    groups are made at the first collective, so that a model can be built, to look at its shapes, where
    there is no process group at all.
    """

    def __init__(self, context: ParallelContext) -> None:
        if context.pp_size > 1:
            raise ValueError(f"pp_size {context.pp_size}: this decoder has all layers on every rank")
        self.context = context
        self._groups: tuple[dist.ProcessGroup | None, dist.ProcessGroup | None] | None = None

    def tp_sum(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks that share each dense weight."""
        return x if self.context.tp_size == 1 else _sum(x, self._make_groups()[0])

    def tp_cat(self, x: torch.Tensor) -> torch.Tensor:
        """Those ranks' last dims, one after the other."""
        context = self.context
        return x if context.tp_size == 1 else _cat(x, -1, context.tp_size, self._make_groups()[0])

    def dp_cat(self, x: torch.Tensor) -> torch.Tensor:
        """Dim 0 of the ranks that have different batches; the batches must have the same shape."""
        context = self.context
        return x if context.dp_size == 1 else _cat(x, 0, context.dp_size, self._make_groups()[1])

    def dp_own(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's part of what `dp_cat` gave."""
        return x.chunk(self.context.dp_size)[self.context.dp_rank]

    def expert_sum(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over all ranks, which share the experts."""
        return x if self.context.world_size == 1 else _sum(x, dist.group.WORLD)

    def _make_groups(self) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
        # Each rank must make all groups of all ranks, in the same order.
        if self._groups is None:
            tp_size, dp_size = self.context.tp_size, self.context.dp_size
            rows = [[dp * tp_size + tp for tp in range(tp_size)] for dp in range(dp_size)]
            columns = [[dp * tp_size + tp for dp in range(dp_size)] for tp in range(tp_size)]
            tp_groups = [dist.new_group(ranks) for ranks in rows]
            dp_groups = [dist.new_group(ranks) for ranks in columns]
            self._groups = tp_groups[self.context.dp_rank], dp_groups[self.context.tp_rank]
        return self._groups


def _sum(x: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    x = x.contiguous()
    dist.all_reduce(x, group=group)
    return x


def _cat(x: torch.Tensor, dim: int, size: int, group: dist.ProcessGroup | None) -> torch.Tensor:
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(size)]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, dim)
