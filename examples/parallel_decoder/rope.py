"""Rotary embeddings: the plain ones, and those that YaRN stretches to longer contexts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Self

import torch

_PLAIN = {"rope_type", "rope_theta"}
_YARN = {
    *_PLAIN,
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "factor",
    "original_max_position_embeddings",
    "truncate",
}


@dataclass(frozen=True)
class Rope:
    """How a token's position turns its queries and keys."""

    theta: float
    factor: float = 1.0
    """How many times longer than in training a context may get; 1 for plain embeddings."""
    attention_factor: float = 1.0
    """What queries and keys grow by."""
    trained_tokens: int = 0
    """Length of the contexts of training."""
    beta_fast: float = 32.0
    """Frequencies that turn more often than this in a context of training stay as they are."""
    beta_slow: float = 1.0
    """Those that turn less often are divided by `factor`; in between it is a mixture."""
    whole_dims: bool = True
    """Whether the limits of the mixture are rounded outwards to whole dims."""

    @classmethod
    def from_dict(cls, hf: dict[str, Any]) -> Self:
        """The rotary embedding that a Hugging Face config's dict asks for.

        Raises:
            ValueError: One that isn't computed here.
        """
        given = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
        kind = given.get("rope_type", "default")
        if kind not in ("default", "yarn"):
            raise ValueError(f"rotary embedding {kind!r}: only 'default' and 'yarn' are computed here")
        unknown = sorted(set(given) - (_YARN if kind == "yarn" else _PLAIN))
        if unknown:
            raise ValueError(f"rotary embedding {kind!r} with {', '.join(unknown)} is not computed here")
        theta = given.get("rope_theta") or hf.get("rope_theta") or 10000.0
        if kind == "default":
            return cls(theta)
        trained = given.get("original_max_position_embeddings") or hf["max_position_embeddings"]
        factor = given.get("factor") or hf["max_position_embeddings"] / trained
        attention_factor = given.get("attention_factor")
        if attention_factor is None:
            attention_factor = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
        return cls(
            theta,
            factor,
            attention_factor,
            trained,
            given.get("beta_fast") or 32.0,
            given.get("beta_slow") or 1.0,
            given.get("truncate", True),
        )

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        """Turns `(..., tokens, head_dim)`, the first token at position 0."""
        num_tokens, head_dim = x.shape[-2:]
        positions = torch.arange(num_tokens, dtype=torch.float32, device=x.device)
        angles = (positions[:, None] * self.frequencies(head_dim, x.device)).repeat(1, 2)
        cos = (angles.cos() * self.attention_factor).to(x.dtype)
        sin = (angles.sin() * self.attention_factor).to(x.dtype)
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-second, first), dim=-1) * sin

    def frequencies(self, head_dim: int, device: torch.device | str = "cpu") -> torch.Tensor:
        """Radians per token, `(head_dim / 2,)`."""
        steps = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
        plain = 1.0 / self.theta**steps
        if self.factor == 1:
            return plain
        low = self._dim_that_turns(self.beta_fast, head_dim)
        high = self._dim_that_turns(self.beta_slow, head_dim)
        if self.whole_dims:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        dims = torch.arange(head_dim // 2, dtype=torch.float32, device=device)
        stretched = ((dims - low) / max(high - low, 0.001)).clamp(0, 1)
        return plain / self.factor * stretched + plain * (1 - stretched)

    def _dim_that_turns(self, times: float, head_dim: int) -> float:
        """Which dim, not a whole one, turns so many times in a context of training."""
        turns = math.log(self.trained_tokens / (times * 2 * math.pi))
        return head_dim * turns / (2 * math.log(self.theta))
