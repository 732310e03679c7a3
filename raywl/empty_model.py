"""A model that holds one parameter for each tensor of a checkpoint, where no real model is given."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from raywl.checkpoint import Manifest
from raywl.checkpoint.dtypes import torch_dtype, torch_shape
from raywl.plan import local_box
from raywl.types import ParallelContext, Replicate, ShardSpec

__all__ = ["EmptyModel", "build_empty_model", "describe_parameters"]


class EmptyModel(nn.Module):
    """Parameters under the tensors' own names; it has no `forward` that computes anything."""

    def add(self, name: str, parameter: nn.Parameter) -> None:
        """Takes a parameter of any name."""
        # register_parameter refuses dots, and modules for the parts of a name would refuse some parts
        # (`type`, `half`: methods of every module) and tensors whose name is a prefix of another's.
        self._parameters[name] = parameter


def describe_parameters(manifest: Manifest) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Dtype, by the format's name, and torch's full shape of each tensor; small enough to send to ranks."""
    return {
        name: (entry.dtype, torch_shape(entry.dtype, entry.shape)) for name, entry in manifest.tensors.items()
    }


def build_empty_model(
    parameters: Mapping[str, tuple[str, tuple[int, ...]]],
    shards: Mapping[str, ShardSpec],
    context: ParallelContext,
) -> EmptyModel:
    """One rank's parameters, on `meta`.

    Args:
        parameters: As `describe_parameters` gives them.
        shards: How parameters are cut, by their whole names; others are replicated.
        context: The rank.

    Raises:
        ShapeMismatchError: A tensor hasn't the dim that it is to be cut along.
    """
    model = EmptyModel()
    for name, (dtype, shape) in parameters.items():
        box = local_box(name, shape, shards.get(name, Replicate()), context.tp_rank, context.tp_size)
        local = torch.empty([end - start for start, end in box], dtype=torch_dtype(dtype), device="meta")
        model.add(name, nn.Parameter(local, requires_grad=False))
    return model
