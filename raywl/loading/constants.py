"""Constants that loaders put into parameters: told from other writes, and made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from raywl.loading.lazy import LazyWeight, is_basic
from raywl.plan.fills import Fill, Number
from raywl.readers.memory import ByteView

__all__ = ["fill_of", "make_fill"]

_NAMED = {"zero_": 0, "zeros_": 0, "ones_": 1}


def fill_of(
    func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[torch.Tensor, Number] | None:
    """What a torch function fills, and with which number; `None` if it does anything else.

    Args:
        func: The function.
        name: Its name.
        args: Its arguments.
        kwargs: Likewise.
    """
    values = (*args, *kwargs.values())
    value: Any
    if name == "zero_" or (name in _NAMED and getattr(func, "__module__", "") == "torch.nn.init"):
        if len(values) != 1:
            return None
        value = _NAMED[name]
    elif name in ("fill_", "constant_"):
        if len(values) != 2:
            return None
        value = values[1]
    elif name == "__setitem__" and is_basic(args[1]):
        value = args[2]
    else:
        return None
    # A tensor's value may change before it is used.
    of_target = isinstance(values[0], torch.Tensor) and not isinstance(values[0], LazyWeight)
    if type(value) not in (bool, int, float) or not of_target:
        return None
    dst = values[0][args[1]] if name == "__setitem__" else values[0]
    return dst, value


def make_fill(fill: Fill, view: ByteView) -> None:
    """Writes a constant into a parameter's memory."""
    dtype: torch.dtype = getattr(torch, fill.dst_dtype)
    typed = view.raw[fill.dst_start : fill.dst_end].view(dtype)
    strides = [stride // dtype.itemsize for stride in fill.dst_strides]
    typed.as_strided(fill.shape, strides, typed.storage_offset()).fill_(fill.value)
