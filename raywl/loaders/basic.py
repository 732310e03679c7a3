"""Loaders of parameters that hold one checkpoint tensor, or this rank's part of one."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import torch

from raywl.errors import ShapeMismatchError
from raywl.loaders.copying import check_shape, copy_checked, weight_name
from raywl.loaders.layout import layout_of
from raywl.loaders.ranks import ambient_context

__all__ = [
    "composed_weight_loader",
    "default_weight_loader",
    "row_parallel_weight_loader",
    "sharded_weight_loader",
]

WeightLoader = Callable[..., Any]
"""`loader(param, loaded_weight, *more)`."""


def default_weight_loader(param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
    """Copies a weight into a parameter of the same shape.

    One element goes into one element whatever their shapes. `uint8` into `float8_e8m0fnu` or
    `float4_e2m1fn_x2`, and back, is copied as bits.

    Raises:
        ShapeMismatchError: The shapes differ; nothing is broadcast.
    """
    copy_checked(param.data, loaded_weight, weight_name(loaded_weight))


def row_parallel_weight_loader(param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
    """Copies this rank's part of dim 0; a 1-D parameter gets the whole weight.

    Raises:
        ShapeMismatchError: The weight isn't `tp_size` times the parameter along dim 0.
    """
    if param.dim() == 1:
        default_weight_loader(param, loaded_weight)
    else:
        _load_part(param, loaded_weight, 0)


def sharded_weight_loader(axis: int) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """A loader that copies this rank's part of dim `axis` (negative counts from the last).

    The loader raises `ShapeMismatchError`, with name, sizes and rank, when the weight isn't `tp_size`
    times the parameter along `axis`: neither a rank's part that lies outside nor elements that no rank
    keeps pass in silence. Parameters of quantised weights that say what their elements stand for
    (`raywl.loaders.layout`) are cut on whole blocks, groups and packed words, else it's a `ValueError`.
    """

    def load_part(param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
        _load_part(param, loaded_weight, axis)

    return load_part


def _load_part(param: torch.Tensor, loaded_weight: torch.Tensor, axis: int) -> None:
    name = weight_name(loaded_weight)
    context = ambient_context()
    rank, size = context.tp_rank, context.tp_size
    if size == 1:
        copy_checked(param.data, loaded_weight, name)
        return
    if not -param.dim() <= axis < param.dim():
        raise ShapeMismatchError(
            name, tuple(param.shape), tuple(loaded_weight.shape), f"the parameter has no dim {axis} to cut"
        )
    axis %= param.dim()
    length = param.shape[axis]
    if axis < loaded_weight.dim():
        _check_borders(param, loaded_weight.shape[axis], axis, name)
    whole = list(param.shape)
    whole[axis] = length * size
    check_shape(
        name,
        whole,
        loaded_weight,
        f"rank {rank} of {size} keeps {length} of dim {axis}, from {rank * length}; shape differs",
    )
    copy_checked(param.data, loaded_weight.narrow(axis, rank * length, length), name)


def _check_borders(param: torch.Tensor, num_stored: int, axis: int, name: str | None) -> None:
    """Refuses parts that would begin or end inside a block, a group or a packed word."""
    context = ambient_context()
    rank, size = context.tp_rank, context.tp_size
    layout = layout_of(param)
    for along in (layout.output, layout.input):
        if along is None or along.dim != axis or along.border == 1:
            continue
        rows = Fraction(num_stored * along.unit) / size
        if rows.denominator != 1 or rows.numerator % along.border:
            where = "" if name is None else f"{name}: "
            raise ValueError(
                f"{where}{num_stored} elements of dim {axis}, for {num_stored * along.unit} rows in "
                f"{along.what}s of {along.border}, can't be cut into {size} equal parts of whole "
                f"{along.what}s (rank {rank} of {size})"
            )


def composed_weight_loader(
    loader: WeightLoader, fn: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[..., None]:
    """A loader that runs `loader` and then sets the parameter to `fn(param)`.

    The composed loader passes what else it is called with to `loader`, and raises `ShapeMismatchError`
    when `fn` gives another shape, and `TypeError` when it gives no tensor. What it gives may be a view of the
    parameter, such as its transpose.
    """

    def load_then_apply(param: torch.Tensor, loaded_weight: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        loader(param, loaded_weight, *args, **kwargs)
        with torch.no_grad():
            result: Any = fn(param)
        name = weight_name(loaded_weight)
        if not isinstance(result, torch.Tensor):
            where = "" if name is None else f"{name}: "
            raise TypeError(f"{where}the function gave {result!r}, not the parameter's new values")
        check_shape(name, param.shape, result, "the function gave another shape")
        if result.untyped_storage()._cdata == param.untyped_storage()._cdata:
            # The parameter's own memory, perhaps in another order.
            result = result.clone()
        copy_checked(param.data, result, name)

    return load_then_apply
