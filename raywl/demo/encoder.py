"""A BERT sentence encoder whose layers are split over tensor-parallel ranks.

Parameters carry the names that the checkpoint gives them, in the shape of this rank's part; `SHARDS`
says how each is cut. That is all that `raywl.load_into` needs.

    column-parallel   query, key, value, intermediate: each rank has some heads, some hidden units
    row-parallel      the layer after each of these: each rank has the matching input columns, and the
                      ranks' partial sums are added by an all-reduce
    replicated        everything else
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from raywl.types import ParallelContext, Shard

__all__ = ["SHARDS", "Encoder", "build"]

SHARDS = {
    "encoder.layer.*.attention.self.*": Shard(0),
    "encoder.layer.*.intermediate.dense.*": Shard(0),
    # Both the attention's output and the feed-forward's; their biases are added once, after the sum.
    "encoder.layer.*.output.dense.weight": Shard(1),
}


class RowParallelLinear(nn.Module):
    """A linear layer that has some of the input columns; the ranks' results are summed."""

    def __init__(self, in_features: int, out_features: int, tp_size: int) -> None:
        super().__init__()
        self.tp_size = tp_size
        self.weight = nn.Parameter(torch.empty(out_features, in_features // tp_size))
        self.bias = nn.Parameter(torch.empty(out_features))

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight)
        if self.tp_size > 1:
            dist.all_reduce(y)
        return y + self.bias


class Embeddings(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        width, positions = config["hidden_size"], config["max_position_embeddings"]
        self.word_embeddings = nn.Embedding(config["vocab_size"], width)
        self.position_embeddings = nn.Embedding(positions, width)
        self.token_type_embeddings = nn.Embedding(config["type_vocab_size"], width)
        self.LayerNorm = nn.LayerNorm(width, config["layer_norm_eps"])
        self.register_buffer("position_ids", torch.empty(1, positions, dtype=torch.int64))

    def forward(self, token_ids: Tensor) -> Tensor:
        x = self.word_embeddings(token_ids) + self.token_type_embeddings.weight[0]
        x = x + self.position_embeddings(self.get_buffer("position_ids")[:, : token_ids.shape[1]])
        normed: Tensor = self.LayerNorm(x)
        return normed


class SelfAttention(nn.Module):
    """This rank's heads."""

    def __init__(self, config: dict[str, Any], tp_size: int) -> None:
        super().__init__()
        width = config["hidden_size"]
        self.num_heads = config["num_attention_heads"] // tp_size
        self.query = nn.Linear(width, width // tp_size)
        self.key = nn.Linear(width, width // tp_size)
        self.value = nn.Linear(width, width // tp_size)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None, :].bool())
        return mixed.transpose(1, 2).flatten(2)


class AddAndNorm(nn.Module):
    """Row-parallel layer, residual, norm: the second half of attention and of the feed-forward."""

    def __init__(self, config: dict[str, Any], in_features: int, tp_size: int) -> None:
        super().__init__()
        self.dense = RowParallelLinear(in_features, config["hidden_size"], tp_size)
        self.LayerNorm = nn.LayerNorm(config["hidden_size"], config["layer_norm_eps"])

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        normed: Tensor = self.LayerNorm(self.dense(x) + residual)
        return normed


class Layer(nn.Module):
    def __init__(self, config: dict[str, Any], tp_size: int) -> None:
        super().__init__()
        width, inner = config["hidden_size"], config["intermediate_size"]
        self.attention = nn.ModuleDict(
            {"self": SelfAttention(config, tp_size), "output": AddAndNorm(config, width, tp_size)}
        )
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(width, inner // tp_size)})
        self.output = AddAndNorm(config, inner, tp_size)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.attention["output"](self.attention["self"](x, mask), x)
        y: Tensor = self.output(F.gelu(self.intermediate["dense"](x)), x)
        return y


class Encoder(nn.Module):
    """The whole encoder, or one tensor-parallel rank's part of it."""

    def __init__(self, config: dict[str, Any], tp_size: int) -> None:
        super().__init__()
        self.embeddings = Embeddings(config)
        self.encoder = nn.ModuleDict(
            {"layer": nn.ModuleList(Layer(config, tp_size) for _ in range(config["num_hidden_layers"]))}
        )
        # In the checkpoint, but sentence embeddings don't use it.
        self.pooler = nn.ModuleDict({"dense": nn.Linear(config["hidden_size"], config["hidden_size"])})

    def forward(self, token_ids: Tensor, mask: Tensor) -> Tensor:
        """Sentence embeddings.

        Args:
            token_ids: `(sentences, tokens)`.
            mask: 1 for tokens, 0 for padding; `(sentences, tokens)`.

        Returns:
            The mean of each sentence's token states, of length 1; `(sentences, width)`.
        """
        x = self.embeddings(token_ids)
        for layer in self.encoder["layer"].children():
            x = layer(x, mask)
        weights = mask[:, :, None].to(x.dtype)
        return F.normalize((x * weights).sum(1) / weights.sum(1), dim=-1)


def build(config: dict[str, Any], context: ParallelContext) -> Encoder:
    """One rank's model on `meta`: it takes no memory until the weights are loaded.

    Raises:
        ValueError: The heads don't divide by `context.tp_size`.
    """
    if config["num_attention_heads"] % context.tp_size:
        raise ValueError(f"{config['num_attention_heads']} heads don't divide by {context.tp_size} ranks")
    with torch.device("meta"):
        return Encoder(config, context.tp_size).eval()
