"""Files with tensors of every dtype that safetensors and torch share, as libraries find them hard to read."""

from __future__ import annotations

import math
import random
from pathlib import Path

from raywl.checkpoint.dtypes import DTYPE_BITS, TORCH_NAMES
from tests.hostile.files import build

SHAPES = ((3, 4), (), (0, 4), (1,), (2, 0), (64,))
"""Of one dtype; those that F4 can't have are left out for it. A byte in front leaves them unaligned."""


def write_dtype(folder: Path, dtype: str, *, file: str | None = None, prefix: str = "") -> str:
    """A file with tensors of one dtype and of all shapes, whose names and bytes are in different orders."""
    shapes = [shape for shape in SHAPES if dtype != "F4" or (shape and shape[-1] % 2 == 0)]
    rows = {f"{prefix}{chr(ord('y') - at)}.{dtype}": (dtype, shape) for at, shape in enumerate(shapes)}
    rows = {f"{prefix}z.first": ("U8", (1,)), **rows}
    header, data = {}, b""
    source = random.Random(dtype)
    for name, (kind, shape) in rows.items():
        nbytes = DTYPE_BITS[kind] * math.prod(shape) // 8
        raw = source.randbytes(nbytes)
        raw = bytes(byte & 1 for byte in raw) if kind == "BOOL" else raw
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": (len(data), len(data) + nbytes)}
        data += raw
    path = folder / (file or f"model-{list(TORCH_NAMES).index(dtype):05}.safetensors")
    path.write_bytes(build(header, data))
    return str(path)


def write_all(folder: Path) -> list[str]:
    """One file for each dtype."""
    return [write_dtype(folder, dtype, prefix=f"{dtype}.") for dtype in TORCH_NAMES]
