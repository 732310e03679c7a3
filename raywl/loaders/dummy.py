"""Dummy weights: repeatable values for models that run without a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from raywl.loaders.sinks import is_attention_sink

__all__ = ["initialize_dummy_weights", "initialize_single_dummy_weight"]

_CHUNK_ELEMENTS = 1 << 22
"""What is drawn at a time; bounds the scratch memory to some tens of MiB."""
_ONE_E8M0 = 127
"""The exponent byte of 1.0."""
_BYTES = frozenset({torch.int8, torch.uint8, torch.float4_e2m1fn_x2})

Draw = Callable[[int], torch.Tensor]
"""The next so many values, 1-d, on the CPU."""


def initialize_dummy_weights(
    model: torch.nn.Module,
    model_config: Any = None,
    low: float | None = None,
    high: float | None = None,
    seed: int = 1234,
) -> None:
    """Fills all parameters and persistent buffers of a model with dummy values.

    Args:
        model: The model; filled in place. Tied weights are filled once.
        model_config: Not looked at; callers of older utilities pass it.
        low: Least value of floats, `None` for each dtype's default.
        high: Greatest value, likewise.
        seed: Of the random numbers, for each weight anew.

    Raises:
        ValueError: As `initialize_single_dummy_weight`.
    """
    seen = set()
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, torch.Tensor) and id(value) not in seen:
            seen.add(id(value))
            initialize_single_dummy_weight(value, low, high, seed, name)


def initialize_single_dummy_weight(
    param: torch.Tensor,
    low: float | None = None,
    high: float | None = None,
    seed: int = 1234,
    name: str = "",
) -> None:
    """Fills one weight with dummy values.

    They depend on the seed, the dtype, low and high, and the number of elements alone (and on whether a
    `uint8` is a scale by its name), and are the same on every device. In this order: `meta` tensors are left
    alone; an attribute `dummy_weight_value` is the value; `float8_e8m0fnu`, and `uint8` with `scale` in the
    name, become 1.0 as an exponent byte; `int8`, `uint8` and packed fp4 get random bytes; other integers
    and booleans are left alone; floats are uniform. In an attention sink what is `-inf` stays so: padding,
    and all of a sink that was never loaded.

    Args:
        param: The weight; filled in place.
        low: Least value of floats; by default -1e-3, or -1 for 8-bit floats.
        high: Greatest value; by default 1e-3, or 1 for 8-bit floats.
        seed: Of the random numbers.
        name: Its name in the model.

    Raises:
        ValueError: `low` is above `high`, or the dtype can't hold one of them.
    """
    data = param.detach()
    # A DTensor's own part: that is what this rank holds.
    data = data.to_local() if hasattr(data, "to_local") else data
    if data.is_meta:
        return
    value = getattr(param, "dummy_weight_value", None)
    if value is not None:
        (data.view(torch.uint8) if data.dtype == torch.float4_e2m1fn_x2 else data).fill_(value)
    elif data.dtype == torch.float8_e8m0fnu or (data.dtype == torch.uint8 and "scale" in name):
        data.view(torch.uint8).fill_(_ONE_E8M0)
    elif data.dtype in _BYTES:
        _fill(data.view(torch.uint8), _random_bytes(seed))
    elif data.is_complex():
        _fill(torch.view_as_real(data), _uniform(data.dtype.to_real(), low, high, seed))
    elif data.is_floating_point():
        _fill(data, _uniform(data.dtype, low, high, seed), keep_minus_inf=is_attention_sink(param))


def _random_bytes(seed: int) -> Draw:
    generator = torch.Generator("cpu").manual_seed(seed)
    return lambda num: torch.randint(256, (num,), dtype=torch.uint8, generator=generator, device="cpu")


def _uniform(dtype: torch.dtype, low: float | None, high: float | None, seed: int) -> Draw:
    is_8_bit = dtype.itemsize == 1
    default = 1.0 if is_8_bit else 1e-3
    low, high = -default if low is None else low, default if high is None else high
    limits = torch.finfo(dtype)
    if not limits.min <= low <= high <= limits.max:
        raise ValueError(f"can't draw {dtype} from {low} to {high}: it holds {limits.min} to {limits.max}")
    generator = torch.Generator("cpu").manual_seed(seed)

    def draw(num: int) -> torch.Tensor:
        # 8-bit floats have no `uniform_` of their own.
        drawn = torch.empty(num, dtype=torch.float16 if is_8_bit else dtype, device="cpu")
        return drawn.uniform_(low, high, generator=generator).to(dtype)

    return draw


def _fill(data: torch.Tensor, draw: Draw, *, keep_minus_inf: bool = False) -> None:
    """Draws the elements in the order of their indices, whatever the strides."""
    for block in _blocks(data):
        values = draw(block.numel()).view(block.shape).to(block.device)
        if keep_minus_inf:
            values = torch.where(torch.isneginf(block), block, values)
        block.copy_(values)


def _blocks(data: torch.Tensor) -> Iterator[torch.Tensor]:
    """Views that have all elements in order, each of at most `_CHUNK_ELEMENTS`."""
    if data.numel() <= _CHUNK_ELEMENTS:
        if data.numel():
            yield data
    elif data.is_contiguous():
        yield from torch.split(data.view(-1), _CHUNK_ELEMENTS)
    else:
        rows = max(1, _CHUNK_ELEMENTS // (data.numel() // data.shape[0]))
        for block in torch.split(data, rows):
            yield from _blocks(block.squeeze(0) if rows == 1 else block)
