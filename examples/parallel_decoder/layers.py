"""Parallel layers. Each parameter is made in this rank's shape and carries the loader that fills it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from raywl.loaders import ExpertLoader, MergedColumnLoader, QKVLoader, VocabLoader, sharded_weight_loader
from raywl.remap.experts import determine_expert_map

from .config import DecoderConfig
from .ranks import Ranks

VOCAB_MULTIPLE = 64
"""Vocabularies are padded to a multiple of this, so that they can be cut."""


def parameter(*shape: int, weight_loader: Callable[..., object] | None = None) -> nn.Parameter:
    """An unset parameter; without a loader it takes a weight of its own shape."""
    param = nn.Parameter(torch.empty(shape), requires_grad=False)
    if weight_loader is not None:
        param.weight_loader = weight_loader
    return param


def divide(total: int, parts: int, what: str) -> int:
    """`total / parts`, which must be whole."""
    if total % parts:
        raise ValueError(f"{what} {total} doesn't divide into {parts} parts")
    return total // parts


class ColumnParallelLinear(nn.Module):
    """`x @ W.T` with the rows of `W` cut: each rank has some of the outputs."""

    def __init__(
        self,
        in_features: int,
        local_out: int,
        bias: bool,
        weight_loader: Callable[..., object],
    ) -> None:
        super().__init__()
        self.weight = parameter(local_out, in_features, weight_loader=weight_loader)
        self.bias = parameter(local_out, weight_loader=weight_loader) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


class MergedColumnLinear(ColumnParallelLinear):
    """Several column-parallel layers on one input, as one."""

    def __init__(self, in_features: int, sizes: Sequence[int], bias: bool, ranks: Ranks) -> None:
        tp_size = ranks.context.tp_size
        local = sum(divide(size, tp_size, "output size") for size in sizes)
        super().__init__(in_features, local, bias, MergedColumnLoader(sizes))


class QKVLinear(ColumnParallelLinear):
    """Queries, keys and values of this rank's heads; ranks beyond the kv heads share one."""

    def __init__(
        self, in_features: int, num_heads: int, num_kv_heads: int, head_dim: int, bias: bool, ranks: Ranks
    ) -> None:
        tp_size = ranks.context.tp_size
        self.num_heads = divide(num_heads, tp_size, "number of heads")
        if tp_size <= num_kv_heads:
            self.num_kv_heads = divide(num_kv_heads, tp_size, "number of key-value heads")
        else:
            self.num_kv_heads = 1
        self.head_dim = head_dim
        local = (self.num_heads + 2 * self.num_kv_heads) * head_dim
        super().__init__(in_features, local, bias, QKVLoader(num_heads, num_kv_heads, head_dim))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`(batch, tokens, features)` to q, k and v of `(batch, heads, tokens, head_dim)`."""
        heads = super().forward(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        return heads.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=1)


class RowParallelLinear(nn.Module):
    """`x @ W.T` with the columns of `W` cut: each rank has some of the inputs, and all sum up."""

    def __init__(self, in_features: int, out_features: int, bias: bool, ranks: Ranks) -> None:
        super().__init__()
        self.ranks = ranks
        local = divide(in_features, ranks.context.tp_size, "input size")
        self.weight = parameter(out_features, local, weight_loader=sharded_weight_loader(1))
        self.bias = parameter(out_features) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.ranks.tp_sum(F.linear(x, self.weight))
        return out if self.bias is None else out + self.bias


class VocabParallelEmbedding(nn.Module):
    """Token embeddings with the vocabulary cut. Its weight can serve as output layer too."""

    def __init__(self, num_embeddings: int, features: int, ranks: Ranks) -> None:
        super().__init__()
        self.ranks, self.num_embeddings = ranks, num_embeddings
        loader = VocabLoader(num_embeddings, VOCAB_MULTIPLE)
        local = divide(loader.num_padded, ranks.context.tp_size, "padded vocabulary")
        self.start = ranks.context.tp_rank * local
        self.weight = parameter(local, features, weight_loader=loader)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        local = tokens - self.start
        elsewhere = (local < 0) | (local >= len(self.weight))
        found = F.embedding(local.masked_fill(elsewhere, 0), self.weight)
        return self.ranks.tp_sum(found.masked_fill(elsewhere[..., None], 0))

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Scores of all tokens, on every rank."""
        return self.ranks.tp_cat(F.linear(x, self.weight))[..., : self.num_embeddings]


class RMSNorm(nn.Module):
    def __init__(self, features: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = parameter(features), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class Experts(nn.Module):
    """This rank's experts, or its part of each, over all tokens; the caller sums over the ranks."""

    loader_options: ClassVar[Mapping[str, Any]] = {}
    """How the checkpoint has them, as `ExpertLoader` takes it."""
    with_bias: ClassVar[bool] = False

    def __init__(self, config: DecoderConfig, ranks: Ranks) -> None:
        super().__init__()
        self.config, self.context = config, ranks.context
        num_experts, hidden, inner = config.num_experts, config.hidden_size, config.intermediate_size
        num_local, expert_map = determine_expert_map(self.context.ep_size, self.context.ep_rank, num_experts)
        self.ids = list(range(num_experts))
        if expert_map is not None:
            self.ids = [expert for expert, place in enumerate(expert_map.tolist()) if place >= 0]
        options = dict(self.loader_options)
        local = config.pad_experts_to
        if local is None:
            local = divide(inner, self.context.moe_tp_size, "intermediate size of an expert")
        else:
            options["intermediate_size"] = inner
        loader = ExpertLoader(num_experts, expert_map, **options)
        self.w13_weight = parameter(num_local, 2 * local, hidden, weight_loader=loader)
        self.w2_weight = parameter(num_local, hidden, local, weight_loader=loader)
        self.w13_bias = self.w2_bias = None
        if self.with_bias:
            self.w13_bias = parameter(num_local, 2 * local, weight_loader=loader)
            self.w2_bias = parameter(num_local, hidden, weight_loader=loader)

    def activate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """`(tokens, 2 * width)` to `(tokens, width)`; zeros, which are padding, must stay zeros."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        """
        Args:
            x: `(tokens, features)`.
            chosen: Expert ids, `(tokens, experts per token)`.
            shares: What each of them counts, of the same shape.
        """
        out = torch.zeros_like(x)
        for place, expert in enumerate(self.ids):
            token, slot = torch.where(chosen == expert)
            bias = None if self.w13_bias is None else self.w13_bias[place]
            y = self.activate(F.linear(x[token], self.w13_weight[place], bias))
            # All ranks that share an expert have its output bias, and one of them adds it.
            adds = self.w2_bias is not None and self.context.moe_tp_rank == 0
            y = F.linear(y, self.w2_weight[place], self.w2_bias[place] if adds else None)
            out.index_add_(0, token, y * shares[token, slot, None])
        return out


class ClampedExperts(Experts):
    """Experts of gpt-oss: all in one tensor `(experts, in, out)`, gate and up in turns, clamped."""

    loader_options: ClassVar = {"transposed": True, "interleaved": True}
    with_bias = True

    def activate(self, gate_up: torch.Tensor) -> torch.Tensor:
        limit = self.config.swiglu_limit
        gate = gate_up[..., ::2].clamp(max=limit)
        up = gate_up[..., 1::2].clamp(-limit, limit)
        return (up + 1) * gate * torch.sigmoid(gate * self.config.swiglu_alpha)


class RoutedExperts(nn.Module):
    """The experts one module deeper, where many serving engines register them."""

    def __init__(self, experts: Experts) -> None:
        super().__init__()
        self.routed_experts = experts

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        return self.routed_experts(x, chosen, shares)
