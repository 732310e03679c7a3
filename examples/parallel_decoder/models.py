"""The decoder, and what each family of checkpoints makes of it.

A new family is a subclass of `Decoder` in `FAMILIES`: it says what its parts are called, and which parts
it has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from raywl import ParallelContext
from raywl.loaders import sharded_weight_loader
from raywl.remap.experts import make_expert_params_mapping

from .config import DecoderConfig
from .layers import (
    Experts,
    MergedColumnLinear,
    QKVLinear,
    RMSNorm,
    RowParallelLinear,
    VocabParallelEmbedding,
    divide,
    parameter,
)
from .ranks import Ranks


def rotate(x: torch.Tensor, theta: float) -> torch.Tensor:
    """Rotary embedding of `(..., tokens, head_dim)`, the first token at position 0."""
    num_tokens, head_dim = x.shape[-2:]
    steps = torch.arange(0, head_dim, 2, dtype=torch.float32, device=x.device) / head_dim
    positions = torch.arange(num_tokens, dtype=torch.float32, device=x.device)
    angles = (positions[:, None] * (1.0 / theta**steps)).repeat(1, 2)
    first, second = x.chunk(2, dim=-1)
    return x * angles.cos().to(x.dtype) + torch.cat((-second, first), dim=-1) * angles.sin().to(x.dtype)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sliding_window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention.

    Args:
        q: `(batch, heads, tokens, head_dim)`.
        k: `(batch, kv heads, tokens, head_dim)`.
        v: As `k`.
        sliding_window: Tokens that a query sees, itself included.
        sinks: One score a head that takes its share of attention and gives no value.

    Returns:
        As `q`.
    """
    num_tokens, groups = q.shape[2], q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    scores = q @ k.transpose(2, 3) * q.shape[-1] ** -0.5
    age = torch.arange(num_tokens, device=q.device)
    age = age[:, None] - age
    hidden = age < 0
    if sliding_window is not None:
        hidden |= age >= sliding_window
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks[:, None, None].expand(*scores.shape[:3], 1)), dim=-1)
    return scores.softmax(-1, dtype=torch.float32).to(q.dtype)[..., :num_tokens] @ v


class Attention(nn.Module):
    def __init__(self, config: DecoderConfig, ranks: Ranks, with_sinks: bool = False) -> None:
        super().__init__()
        heads, width = config.num_attention_heads, config.head_dim
        self.theta, self.sliding_window = config.rope_theta, config.sliding_window
        self.qkv_proj = QKVLinear(
            config.hidden_size, heads, config.num_key_value_heads, width, config.attention_bias, ranks
        )
        self.o_proj = RowParallelLinear(heads * width, config.hidden_size, config.attention_bias, ranks)
        self.sinks = None
        if with_sinks:
            local = divide(heads, ranks.context.tp_size, "number of heads")
            self.sinks = parameter(local, weight_loader=sharded_weight_loader(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv_proj(x)
        q, k = rotate(q, self.theta), rotate(k, self.theta)
        return self.o_proj(attend(q, k, v, self.sliding_window, self.sinks).transpose(1, 2).flatten(2))


class GatedMLP(nn.Module):
    def __init__(self, config: DecoderConfig, ranks: Ranks) -> None:
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_up_proj = MergedColumnLinear(hidden, (inner, inner), bias, ranks)
        self.down_proj = RowParallelLinear(inner, hidden, bias, ranks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


class MixtureOfExperts(nn.Module):
    def __init__(self, config: DecoderConfig, ranks: Ranks) -> None:
        super().__init__()
        self.ranks, self.per_token, self.num_experts = ranks, config.num_experts_per_tok, config.num_experts
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = Experts(config.num_experts, config.hidden_size, config.intermediate_size, ranks)

    def get_expert_mapping(self) -> list[tuple[str, str, int, str]]:
        """How names of single experts in the checkpoint reach the parameters that hold all."""
        return make_expert_params_mapping("w1", "w2", "w3", self.num_experts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Experts lie on all ranks, so each has to see the tokens of all.
        tokens = self.ranks.dp_cat(x.flatten(0, 1))
        shares, chosen = self.gate(tokens).softmax(-1, dtype=torch.float32).topk(self.per_token)
        shares = (shares / shares.sum(-1, keepdim=True)).to(x.dtype)
        out = self.ranks.expert_sum(self.experts(tokens, chosen, shares))
        return self.ranks.dp_own(out).view_as(x)


class Layer(nn.Module):
    def __init__(self, family: type[Decoder], config: DecoderConfig, ranks: Ranks) -> None:
        super().__init__()
        self.mlp_name = family.mlp_name
        self.self_attn = Attention(config, ranks, family.attention_sinks)
        self.add_module(self.mlp_name, family.mlp(config, ranks))
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.get_submodule(self.mlp_name)(self.post_attention_layernorm(x))


class Stack(nn.Module):
    """What checkpoints call `model`: everything but the output layer."""

    def __init__(self, family: type[Decoder], config: DecoderConfig, ranks: Ranks) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, ranks)
        self.layers = nn.ModuleList(Layer(family, config, ranks) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class Decoder(nn.Module):
    """A causal language model: `(batch, tokens)` to logits `(batch, tokens, vocabulary)` on every rank."""

    stacked_params_mapping: ClassVar = [
        (".qkv_proj", ".q_proj", "q"),
        (".qkv_proj", ".k_proj", "k"),
        (".qkv_proj", ".v_proj", "v"),
        (".gate_up_proj", ".gate_proj", 0),
        (".gate_up_proj", ".up_proj", 1),
    ]
    """Name in the model, name in the checkpoint, and which part of the parameter that is."""
    mlp_name: ClassVar[str] = "mlp"
    mlp: ClassVar[Callable[[DecoderConfig, Ranks], nn.Module]]
    attention_sinks: ClassVar[bool] = False

    def __init__(self, config: DecoderConfig, context: ParallelContext) -> None:
        super().__init__()
        ranks = Ranks(context)
        self.model = Stack(type(self), config, ranks)
        self.lm_head = VocabParallelEmbedding(config.vocab_size, config.hidden_size, ranks)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.lm_head.logits(self.model(tokens))


class Llama(Decoder):
    mlp = GatedMLP


class Mixtral(Decoder):
    mlp_name = "block_sparse_moe"
    mlp = MixtureOfExperts


FAMILIES: dict[str, type[Decoder]] = {"llama": Llama, "mixtral": Mixtral}


def make_model(config: DecoderConfig, device: str = "meta") -> Callable[[ParallelContext], Decoder]:
    """What `raywl.launch` calls on each rank to make its model.

    Args:
        config: The whole model's sizes.
        device: Where parameters are made; on `meta` they take no memory until they are loaded.

    Raises:
        ValueError: A `model_type` that no family here has.
    """
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise ValueError(f"model_type {config.model_type!r}: the families here are {sorted(FAMILIES)}")

    def factory(context: ParallelContext) -> Decoder:
        with torch.device(device):
            model = family(config, context)
        return model.to(getattr(torch, config.dtype)).eval()

    return factory


def load_arguments(config: DecoderConfig) -> dict[str, Any]:
    """The arguments of `raywl.launch` and `load_into` that say how names reach fused parameters."""
    model = make_model(config)(ParallelContext())
    with_experts = [module for module in model.modules() if hasattr(module, "get_expert_mapping")]
    return {
        "stacked": model.stacked_params_mapping,
        "expert_mapping": with_experts[0].get_expert_mapping() if with_experts else None,
    }
