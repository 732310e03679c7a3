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
from raywl.loaders.sinks import make_attention_sink
from raywl.remap.experts import make_expert_params_mapping
from raywl.remap.moe_names import get_moe_expert_mapping

from .config import DecoderConfig
from .layers import (
    ClampedExperts,
    Experts,
    MergedColumnLinear,
    QKVLinear,
    RMSNorm,
    RoutedExperts,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from .ranks import Ranks


def pad_heads(x: torch.Tensor, num_heads: int) -> torch.Tensor:
    """`(batch, heads, tokens, head_dim)` with heads of zeros behind."""
    return F.pad(x, (0, 0, 0, 0, 0, num_heads - x.shape[1]))


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
    def __init__(self, family: type[Decoder], config: DecoderConfig, ranks: Ranks, layer: int) -> None:
        super().__init__()
        hidden, heads, kv_heads = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
        width, bias = config.head_dim, config.attention_bias
        self.rope, self.window = config.rope, config.windows[layer]
        self.qkv_proj = QKVLinear(hidden, heads, kv_heads, width, bias or family.qkv_bias, ranks)
        self.o_proj = RowParallelLinear(heads * width, hidden, bias, ranks)
        self.q_norm = RMSNorm(width, config.rms_norm_eps) if family.qk_norm else None
        self.k_norm = RMSNorm(width, config.rms_norm_eps) if family.qk_norm else None
        self.num_heads = self.qkv_proj.num_heads
        self.num_padded = config.pad_heads_to or self.num_heads
        self.group = self.num_heads // self.qkv_proj.num_kv_heads
        if self.num_padded < self.num_heads or self.num_padded % self.group:
            raise ValueError(
                f"{self.num_heads} heads in groups of {self.group} can't be padded to {self.num_padded}"
            )
        # Padding gets -inf: 0 would be a sink like any other.
        self.sinks = make_attention_sink(self.num_padded) if family.attention_sinks else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv_proj(x)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = self.rope.rotate(q), self.rope.rotate(k)
        q, num_kv = pad_heads(q, self.num_padded), self.num_padded // self.group
        out = attend(q, pad_heads(k, num_kv), pad_heads(v, num_kv), self.window, self.sinks)
        return self.o_proj(out[:, : self.num_heads].transpose(1, 2).flatten(2))


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
    """Sends each token to the experts that suit it best. What scores them is the subclass's."""

    def __init__(self, config: DecoderConfig, ranks: Ranks, experts: nn.Module) -> None:
        super().__init__()
        self.ranks, self.per_token, self.num_experts = ranks, config.num_experts_per_tok, config.num_experts
        self.experts = experts

    def score(self, tokens: torch.Tensor) -> torch.Tensor:
        """`(tokens, features)` to `(tokens, experts)`."""
        raise NotImplementedError

    def get_expert_mapping(self) -> list[tuple[str, str, int | None, str]]:
        """How names of experts in the checkpoint reach the parameters that hold all of a rank."""
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Experts lie on all ranks, so each has to see the tokens of all.
        tokens = self.ranks.dp_cat(x.flatten(0, 1))
        shares, chosen = self.score(tokens).softmax(-1, dtype=torch.float32).topk(self.per_token)
        shares = (shares / shares.sum(-1, keepdim=True)).to(x.dtype)
        out = self.ranks.expert_sum(self.experts(tokens, chosen, shares))
        return self.ranks.dp_own(out).view_as(x)


class MixtralMixture(MixtureOfExperts):
    """In the checkpoint, each expert has tensors of its own."""

    def __init__(self, config: DecoderConfig, ranks: Ranks) -> None:
        super().__init__(config, ranks, Experts(config, ranks))
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)

    def score(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.gate(tokens)

    def get_expert_mapping(self) -> list[tuple[str, str, int | None, str]]:
        return make_expert_params_mapping("w1", "w2", "w3", self.num_experts)


class GptOssMixture(MixtureOfExperts):
    """In the checkpoint, one tensor has all experts; here, they are one module deeper."""

    def __init__(self, config: DecoderConfig, ranks: Ranks) -> None:
        super().__init__(config, ranks, RoutedExperts(ClampedExperts(config, ranks)))
        self.router = nn.Linear(config.hidden_size, config.num_experts)

    def score(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.router(tokens)

    def get_expert_mapping(self) -> list[tuple[str, str, int | None, str]]:
        return [
            ("experts.routed_experts.w13_weight", "experts.gate_up_proj", None, "w1"),
            ("experts.routed_experts.w13_bias", "experts.gate_up_proj_bias", None, "w1"),
            ("experts.routed_experts.w2_weight", "experts.down_proj", None, "w2"),
            ("experts.routed_experts.w2_bias", "experts.down_proj_bias", None, "w2"),
        ]


class Layer(nn.Module):
    def __init__(self, family: type[Decoder], config: DecoderConfig, ranks: Ranks, layer: int) -> None:
        super().__init__()
        self.mlp_name = family.mlp_name
        self.self_attn = Attention(family, config, ranks, layer)
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
        self.layers = nn.ModuleList(
            Layer(family, config, ranks, layer) for layer in range(config.num_hidden_layers)
        )
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
    qkv_bias: ClassVar[bool] = False
    """Whether q, k and v have biases that the config doesn't mention."""
    qk_norm: ClassVar[bool] = False

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


class Qwen2(Llama):
    qkv_bias = True


class Qwen3(Llama):
    qk_norm = True


class Mixtral(Decoder):
    mlp_name = "block_sparse_moe"
    mlp = MixtralMixture


class GptOss(Decoder):
    mlp = GptOssMixture
    attention_sinks = True


FAMILIES: dict[str, type[Decoder]] = {
    "gpt_oss": GptOss,
    "llama": Llama,
    "mistral": Llama,
    "mixtral": Mixtral,
    "qwen2": Qwen2,
    "qwen3": Qwen3,
}


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
    return {
        "stacked": model.stacked_params_mapping,
        "expert_mapping": get_moe_expert_mapping(model) if config.num_experts else None,
    }
