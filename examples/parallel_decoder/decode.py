"""What ranks are asked to do; all run it together, and give the same answer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn


@torch.inference_mode()
def logits_of(model: nn.Module, tokens: Sequence[Sequence[int]]) -> torch.Tensor:
    """Logits `(batch, tokens, vocabulary)` in fp32, on the CPU."""
    device = next(model.parameters()).device
    return model(torch.tensor(tokens, device=device)).float().cpu()


@torch.inference_mode()
def greedy(model: nn.Module, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """The prompt and `num_tokens` more, each the likeliest. Everything is computed again for each."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(int(logits_of(model, [tokens])[0, -1].argmax()))
    return tokens
