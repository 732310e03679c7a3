"""What the decoder needs to know of a checkpoint's `config.json`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from .rope import Rope


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes of the whole model, before any cut, under the names of Hugging Face configs.

    Kernels that want a multiple of some number of heads, or of an expert's width, get padded parameters;
    `dataclasses.replace(config, pad_heads_to=..., pad_experts_to=...)` asks for them.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: Rope
    tie_word_embeddings: bool
    dtype: str
    attention_bias: bool = False
    mlp_bias: bool = False
    windows: tuple[int | None, ...] = ()
    """For each layer, tokens that a query sees, itself included; `None` for all before it."""
    num_experts: int = 0
    num_experts_per_tok: int = 0
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0
    pad_heads_to: int | None = None
    """Heads that each rank computes, its own and padding; `None` for no padding."""
    pad_experts_to: int | None = None
    """Likewise, width of each rank's part of an expert."""

    @classmethod
    def from_folder(cls, folder: str | Path) -> Self:
        """Reads `config.json` of a local checkpoint."""
        return cls.from_dict(json.loads((Path(folder) / "config.json").read_text(encoding="utf-8")))

    @classmethod
    def from_dict(cls, hf: dict[str, Any]) -> Self:
        """The config in a Hugging Face config's dict.

        Raises:
            ValueError: An activation, rotary embedding or attention that this decoder doesn't compute.
        """
        if hf.get("hidden_act", "silu") != "silu":
            raise ValueError(f"activation {hf['hidden_act']!r}: only 'silu' is computed here")
        heads = hf["num_attention_heads"]
        return cls(
            model_type=hf["model_type"],
            vocab_size=hf["vocab_size"],
            hidden_size=hf["hidden_size"],
            intermediate_size=hf["intermediate_size"],
            num_hidden_layers=hf["num_hidden_layers"],
            num_attention_heads=heads,
            num_key_value_heads=hf.get("num_key_value_heads") or heads,
            head_dim=hf.get("head_dim") or hf["hidden_size"] // heads,
            rms_norm_eps=hf["rms_norm_eps"],
            rope=Rope.from_dict(hf),
            tie_word_embeddings=hf.get("tie_word_embeddings", False),
            dtype=hf.get("dtype") or hf.get("torch_dtype") or "float32",
            attention_bias=hf.get("attention_bias", False),
            mlp_bias=hf.get("mlp_bias", False),
            windows=_windows(hf),
            num_experts=hf.get("num_local_experts", 0),
            num_experts_per_tok=hf.get("num_experts_per_tok", 0),
            swiglu_alpha=hf.get("swiglu_alpha", 1.702),
            swiglu_limit=hf.get("swiglu_limit", 7.0),
        )


def _windows(hf: dict[str, Any]) -> tuple[int | None, ...]:
    """What each layer sees; configs without `layer_types` mean all layers, or those from some layer on."""
    window = hf.get("sliding_window") if hf.get("use_sliding_window", True) else None
    num_layers = hf["num_hidden_layers"]
    types = hf.get("layer_types")
    if types is None:
        first = hf.get("max_window_layers", 0)
        types = ["sliding_attention" if layer >= first else "full_attention" for layer in range(num_layers)]
    if unknown := set(types) - {"sliding_attention", "full_attention"}:
        raise ValueError(f"layers of {', '.join(sorted(unknown))} are not computed here")
    return tuple(window if kind == "sliding_attention" else None for kind in types)
