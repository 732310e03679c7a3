"""What the decoder needs to know of a checkpoint's `config.json`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes of the whole model, before any cut, under the names of Hugging Face configs."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool
    dtype: str
    attention_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | None = None
    """Tokens that a query sees, itself included; `None` for all before it."""
    num_experts: int = 0
    num_experts_per_tok: int = 0

    @classmethod
    def from_folder(cls, folder: str | Path) -> Self:
        """Reads `config.json` of a local checkpoint."""
        return cls.from_dict(json.loads((Path(folder) / "config.json").read_text(encoding="utf-8")))

    @classmethod
    def from_dict(cls, hf: dict[str, Any]) -> Self:
        """The config in a Hugging Face config's dict.

        Raises:
            ValueError: An activation or rotary embedding that this decoder doesn't compute.
        """
        rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
        if rope.get("rope_type", "default") != "default":
            raise ValueError(f"rotary embedding {rope['rope_type']!r}: only 'default' is computed here")
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
            rope_theta=rope.get("rope_theta") or hf.get("rope_theta") or 10000.0,
            tie_word_embeddings=hf.get("tie_word_embeddings", False),
            dtype=hf.get("dtype") or hf.get("torch_dtype") or "float32",
            attention_bias=hf.get("attention_bias", False),
            mlp_bias=hf.get("mlp_bias", False),
            sliding_window=hf.get("sliding_window"),
            num_experts=hf.get("num_local_experts", 0),
            num_experts_per_tok=hf.get("num_experts_per_tok", 0),
        )
