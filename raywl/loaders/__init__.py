"""Weight loaders: how a checkpoint tensor goes into a parameter, or into this rank's part of one.

A parameter carries its loader as `param.weight_loader`; it is called `loader(param, loaded_weight)`,
those of fused parameters with a shard id (and expert id) more. Loaders touch the loaded weight through
views and `copy_` alone, so that a lazy one is read only where it is kept.
"""

from __future__ import annotations

from raywl.loaders.basic import (
    composed_weight_loader,
    default_weight_loader,
    row_parallel_weight_loader,
    sharded_weight_loader,
)
from raywl.loaders.experts import ExpertLoader
from raywl.loaders.fused import MergedColumnLoader, QKVLoader, VocabLoader
from raywl.loaders.ranks import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

__all__ = [
    "ExpertLoader",
    "MergedColumnLoader",
    "QKVLoader",
    "VocabLoader",
    "composed_weight_loader",
    "default_weight_loader",
    "get_tensor_model_parallel_rank",
    "get_tensor_model_parallel_world_size",
    "row_parallel_weight_loader",
    "sharded_weight_loader",
]
