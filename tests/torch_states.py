"""State dicts of all kinds of views, and the files that `torch.save` makes of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st

INDEX = "pytorch_model.bin.index.json"

KINDS = {
    "zip": {},
    "zip-protocol-4": {"pickle_protocol": 4},
    "zip-protocol-5": {"pickle_protocol": 5},
    "before-1.6": {"_use_new_zipfile_serialization": False},
}
"""Ways to save, as arguments of `torch.save`."""

_UNSAVED = {f"torch.{sign}int{width}" for sign in ("", "u") for width in range(1, 8)}
"""Names without storages: `torch.save` refuses them."""

DTYPES = [
    dtype
    for dtype in sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
    if str(dtype) not in _UNSAVED and not str(dtype).startswith("torch.q")
]
"""Every dtype that a plain tensor may have and that can be saved."""


def bits(tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    """Dtype, shape and every bit of a tensor."""
    dtype, shape = tensor.dtype, tuple(tensor.shape)
    if dtype == torch.complex128:
        tensor = torch.view_as_real(tensor)
    else:
        width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize]
        tensor = tensor.detach().view(width)
    return dtype, shape, tensor.contiguous().numpy().tobytes()


def storage(dtype: torch.dtype, num_elements: int, seed: int = 0) -> torch.Tensor:
    """A flat tensor of any bits; of 0 and 1, for bools."""
    generator = torch.Generator().manual_seed(seed)
    high = 2 if dtype == torch.bool else 256
    raw = torch.randint(0, high, (num_elements * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype)


@st.composite
def views_of(draw: st.DrawFn, base: torch.Tensor) -> torch.Tensor:
    """Any view of a flat tensor: gaps, turned, overlapping, repeating, empty, 0-d, or all of it."""
    size = base.numel()
    offset = draw(st.integers(0, size))
    shape, strides, room = [], [], size - offset - 1
    for _ in range(draw(st.integers(0, 4))):
        stride = draw(st.integers(0, 7))
        most = 4 if not stride or room < 0 else min(4, 1 + room // stride)
        length = draw(st.integers(0, max(most, 1)))
        shape.append(length)
        strides.append(stride)
        room -= max(length - 1, 0) * stride
    if room < 0 and 0 not in shape:
        return base
    return base.as_strided(shape, strides, offset)


@st.composite
def states(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    """State dicts whose tensors share storages in every way."""
    dtypes = st.sampled_from(DTYPES)
    bases = [
        storage(draw(dtypes), draw(st.sampled_from([0, 1, 7, 24, 64])), seed)
        for seed in range(draw(st.integers(1, 3)))
    ]
    names = draw(st.lists(st.text(max_size=8), unique=True, max_size=6).map(_encodable))
    return {name: draw(views_of(draw(st.sampled_from(bases)))) for name in names}


def _encodable(names: list[str]) -> list[str]:
    return [name for name in names if name.isprintable()]


def save_sharded(shards: Mapping[str, Mapping[str, Any]], folder: Path, **how: Any) -> Path:
    """Files and their index, as trainers write them."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, state in shards.items():
        torch.save(dict(state), folder / name, **how)
    weight_map = {tensor: name for name, state in shards.items() for tensor in state}
    total = sum(t.numel() * t.itemsize for state in shards.values() for t in state.values())
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))
    return folder
