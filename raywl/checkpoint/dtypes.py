"""The dtypes of the safetensors format, by their names in a file's header, and those only torch's files have.

Source: the `Dtype` list of the safetensors format, version 0.8. Widths are in bits, since F4 and F6
elements are narrower than a byte.
"""

from __future__ import annotations

import math
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = [
    "DTYPE_BITS",
    "TORCH_NAMES",
    "TORCH_ONLY",
    "dtype_of",
    "nbytes_of",
    "torch_dtype",
    "torch_itemsize",
    "torch_name",
    "torch_shape",
]

DTYPE_BITS: dict[str, int] = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}
"""Every dtype that the format knows, with its width in bits."""

TORCH_NAMES: dict[str, str] = {
    "BOOL": "bool",
    "F4": "float4_e2m1fn_x2",
    "U8": "uint8",
    "I8": "int8",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "C64": "complex64",
    "F64": "float64",
    "I64": "int64",
    "U64": "uint64",
}
"""The dtypes of the format that torch has a type for, with that type's name."""

TORCH_ONLY: dict[str, tuple[str, int]] = {
    "BITS8": ("bits8", 8),
    "BITS16": ("bits16", 16),
    "BITS1X8": ("bits1x8", 8),
    "BITS2X4": ("bits2x4", 8),
    "BITS4X2": ("bits4x2", 8),
    "C32": ("complex32", 32),
    "C128": ("complex128", 128),
}
"""What `torch.save` writes and safetensors has no name for: torch's name, and the width in bits."""

_BITS = {**DTYPE_BITS, **{name: bits for name, (_, bits) in TORCH_ONLY.items()}}
_NAMES = {**TORCH_NAMES, **{name: of_torch for name, (of_torch, _) in TORCH_ONLY.items()}}
_OF_TORCH = {of_torch: name for name, of_torch in _NAMES.items()}


def nbytes_of(dtype: str, shape: tuple[int, ...]) -> int | None:
    """Bytes that a tensor takes, or `None` where its bits don't fill whole bytes."""
    bits = _BITS[dtype] * math.prod(shape)
    return None if bits % 8 else bits // 8


def torch_name(dtype: str) -> str:
    """torch's name for the dtype of an entry."""
    return _NAMES[dtype]


def dtype_of(torch_name: str) -> str | None:
    """An entry's name for a dtype of torch; `None` where no entry can have it."""
    return _OF_TORCH.get(torch_name)


@cache
def torch_dtype(dtype: str) -> torch.dtype:
    """torch's dtype for the dtype of an entry."""
    import torch

    found: torch.dtype = getattr(torch, torch_name(dtype))
    return found


def torch_itemsize(dtype: str) -> int:
    """Bytes of one element as torch counts them, for the dtype of an entry; F4 elements go in pairs."""
    return max(_BITS[dtype] // 8, 1)


def torch_shape(dtype: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape that torch gives such a tensor: F4 packs two elements of the last dim into one."""
    return (*shape[:-1], shape[-1] // 2) if dtype == "F4" and shape else shape
