"""Attention sinks: one logit for each head, cut by heads and padded with `-inf`.

Padding must be `-inf`: it stands for a head without a sink, and 0 would take part in the softmax.
"""

from __future__ import annotations

import torch
from torch.nn import Parameter

from raywl.errors import ShapeMismatchError
from raywl.loaders.basic import default_weight_loader
from raywl.loaders.copying import copy_checked, weight_name
from raywl.loaders.ranks import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from raywl.parameters import set_weight_attrs
from raywl.types import ParallelContext

__all__ = ["is_attention_sink", "load_attention_sink", "load_padded_attn_sink", "make_attention_sink"]

_NO_SINK = float("-inf")
_WITH_INFINITY = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2})


def make_attention_sink(num_heads: int, dtype: torch.dtype | None = None) -> Parameter:
    """A parameter for the sinks of this rank's heads, without gradient.

    Args:
        num_heads: Heads of this rank, padding included.
        dtype: Its dtype, torch's default if `None`.

    Returns:
        `num_heads` values `-inf`, with the loader `load_attention_sink`.

    Raises:
        ValueError: The dtype has no infinity.
    """
    values = torch.empty(num_heads, dtype=dtype)
    _pad(values)
    sink = Parameter(values, requires_grad=False)
    set_weight_attrs(sink, {"weight_loader": load_attention_sink})
    return sink


def is_attention_sink(param: torch.Tensor) -> bool:
    """Whether a parameter is loaded by `load_attention_sink`."""
    return getattr(param, "weight_loader", None) is load_attention_sink


def load_attention_sink(param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
    """Copies this rank's heads to the front of a sink; the rest, padding, becomes `-inf`.

    Rank and size are those of `raywl.loaders.ranks`.

    Args:
        param: `(local heads and padding,)`.
        loaded_weight: `(heads,)`, of all ranks.

    Raises:
        ValueError: The heads can't be spread evenly over the ranks.
        ShapeMismatchError: A rank has more heads than the parameter has places, or one of both isn't 1-d.
    """
    rank, size = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
    _check_dims(param, loaded_weight)
    heads = loaded_weight.shape[0]
    if heads % size:
        name = weight_name(loaded_weight)
        where = "" if name is None else f"{name}: "
        raise ValueError(
            f"{where}sinks of {heads} heads can't be cut into {size} equal parts (rank {rank} of {size})"
        )
    each = heads // size
    _load(param, loaded_weight, rank * each, each)


def load_padded_attn_sink(
    param: torch.Tensor, loaded_weight: torch.Tensor, head_start: int, head_end: int
) -> None:
    """Loads a given range of heads into a sink, through the loader that the parameter has now.

    A loader other than `load_attention_sink` is given the parameter's whole new contents, padding
    included, and has nothing left to cut: it runs as a lone rank.

    Args:
        param: `(local heads and padding,)`.
        loaded_weight: `(heads,)`, of all ranks.
        head_start: First head of this rank.
        head_end: One past its last.

    Raises:
        ValueError: The range lies outside the checkpoint's heads.
        ShapeMismatchError: It has more heads than the parameter has places, or one of both isn't 1-d.
    """
    _check_dims(param, loaded_weight)
    heads = loaded_weight.shape[0]
    if not 0 <= head_start <= head_end <= heads:
        raise ValueError(f"heads {head_start} to {head_end} are not in a checkpoint of {heads} heads")
    num_local = head_end - head_start
    loader = getattr(param, "weight_loader", default_weight_loader)
    if loader is load_attention_sink or loader is default_weight_loader:
        _load(param, loaded_weight, head_start, num_local)
        return
    contents = torch.empty(param.shape, dtype=param.dtype, device=loaded_weight.device)
    _load(contents, loaded_weight, head_start, num_local)
    with ParallelContext():
        loader(param, contents)


def _check_dims(param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
    if param.dim() != 1 or loaded_weight.dim() != 1:
        raise ShapeMismatchError(
            weight_name(loaded_weight),
            tuple(param.shape),
            tuple(loaded_weight.shape),
            "a sink has one dim, of heads",
        )


def _load(param: torch.Tensor, loaded_weight: torch.Tensor, start: int, num_heads: int) -> None:
    name = weight_name(loaded_weight)
    if num_heads > param.shape[0]:
        raise ShapeMismatchError(
            name, tuple(param.shape), (num_heads,), f"heads {start} to {start + num_heads} don't fit"
        )
    # The padding first: a lazy copy that is only noted isn't made early then by a write beside it.
    _pad(param.data[num_heads:])
    copy_checked(param.data[:num_heads], loaded_weight.narrow(0, start, num_heads), name)


def _pad(values: torch.Tensor) -> None:
    if values.dtype not in _WITH_INFINITY:
        raise ValueError(f"{values.dtype} has no infinity, which the padding of a sink needs")
    values.fill_(_NO_SINK)
