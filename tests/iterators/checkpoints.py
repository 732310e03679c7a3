"""Checkpoints that every iterator must read alike, in each of the formats."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from raywl.checkpoint.dtypes import DTYPE_BITS, TORCH_NAMES, torch_dtype, torch_shape
from raywl.checkpoint.index import natural_sort_key
from tests.hostile.files import build


class Made(NamedTuple):
    """One tensor of a checkpoint."""

    dtype: str
    """The safetensors format's name."""
    shape: tuple[int, ...]
    """Logical, as in a header."""
    raw: bytes

    def tensor(self) -> torch.Tensor:
        """As torch has it."""
        flat = (
            torch.frombuffer(bytearray(self.raw), dtype=torch.uint8)
            if self.raw
            else torch.empty(0, dtype=torch.uint8)
        )
        return flat.view(torch_dtype(self.dtype)).reshape(torch_shape(self.dtype, self.shape)).clone()


Files = Mapping[str, Mapping[str, Made]]
"""Tensors by name, by file's stem."""


class Row(NamedTuple):
    """What an iterator gave."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    raw: bytes


@cache
def make(dtype: str, *shape: int, seed: object = 0) -> Made:
    """A tensor of random bytes, which are what its dtype allows."""
    raw = random.Random(f"{dtype} {shape} {seed}").randbytes(DTYPE_BITS[dtype] * math.prod(shape) // 8)
    return Made(dtype, shape, bytes(byte & 1 for byte in raw) if dtype == "BOOL" else raw)


def write(files: Files, folder: Path, kind: str) -> list[str]:
    """Writes a checkpoint; returns its paths in another order than that of reading."""
    paths = []
    for stem, tensors in files.items():
        path = folder / f"{stem}{'.safetensors' if kind == 'safetensors' else '.bin'}"
        if kind == "safetensors":
            path.write_bytes(in_one_file(tensors))
        else:
            state = {name: made.tensor() for name, made in tensors.items()}
            torch.save(state, path, _use_new_zipfile_serialization=kind == "torch")
        paths.append(str(path))
    return sorted(paths, reverse=True)


def in_one_file(tensors: Mapping[str, Made]) -> bytes:
    """A safetensors file with the tensors' bytes in the order given: unaligned, where it so happens."""
    header, data = {}, []
    start = 0
    for name, made in tensors.items():
        end = start + len(made.raw)
        header[name] = {"dtype": made.dtype, "shape": made.shape, "data_offsets": (start, end)}
        data.append(made.raw)
        start = end
    return build(header, b"".join(data))


def rows_of(files: Files) -> list[Row]:
    """What an iterator must give: by file in natural order, then by name."""
    return [
        row(name, files[stem][name].tensor())
        for stem in sorted(files, key=lambda stem: natural_sort_key(f"{stem}."))
        for name in sorted(files[stem])
    ]


def row(name: str, tensor: torch.Tensor) -> Row:
    flat = tensor.detach().contiguous().view(-1)
    raw = bytes(flat.view(torch.uint8).numpy()) if tensor.numel() else b""
    return Row(name, tensor.dtype, tuple(tensor.shape), raw)


def collect(weights: Iterable[tuple[str, torch.Tensor]]) -> list[Row]:
    """All that an iterator gives, looked at only once it has ended: no memory may have been used twice."""
    held = list(weights)
    return [row(name, tensor) for name, tensor in held]


def every_dtype() -> Files:
    """Each dtype in a file of its own, with odd shapes, and a byte in front that leaves them unaligned."""
    shapes = [(3, 4), (), (0, 4), (1,), (2, 0), (64,), (2, 3, 2)]
    files: dict[str, dict[str, Made]] = {}
    for number, dtype in enumerate(TORCH_NAMES):
        fitting = [shape for shape in shapes if dtype != "F4" or (shape and shape[-1] % 2 == 0)]
        tensors = {f"{dtype}.z": make("U8", 1)}
        tensors |= {f"{dtype}.{len(fitting) - i}": make(dtype, *shape) for i, shape in enumerate(fitting)}
        files[f"model-{number}"] = tensors
    return files


def many_small() -> Files:
    """Thousands of tensors of a few bytes, in names and bytes in different orders."""
    names = [f"layers.{i}.norm.weight" for i in range(700)]
    random.Random(0).shuffle(names)
    kinds = ["F32", "BF16", "U8"]
    return {
        "model": {name: make(kinds[i % 3], i % 7, seed=i) for i, name in enumerate(names)},
        "model-2": {f"{name}.scale": make("F32", seed=i) for i, name in enumerate(names[:200])},
    }


def large() -> Files:
    """Tensors larger than what is read at once, between small ones; one file has nothing in it."""
    return {
        "part-1": {
            "b": make("U8", (16 << 20) + 3),
            "a": make("F32", 5),
            "c": make("BF16", 1 << 20),
            "d": make("F16", 1),
        },
        "part-2": {},
        "part-3": {f"e{i}": make("F32", 3 << 18, seed=i) for i in range(6)},
    }


def many_files(num_files: int = 12, num_elements: int = 40) -> Files:
    """Files whose natural order isn't that of their letters."""
    return {
        f"model-{i}-of-{num_files}": {f"m{i}.{part}": make("F32", num_elements, seed=i) for part in "cab"}
        for i in range(1, num_files + 1)
    }


def experts() -> Files:
    """Heavy tensors and others of four experts, in two files."""
    kinds = {"weight": "BF16", "weight_packed": "U8", "qweight": "I32", "weight_scale": "F32", "bias": "F32"}
    return {
        f"model-{part}": {
            f"layers.{part}.mlp.experts.{expert}.w1.{kind}": make(dtype, 30, seed=expert)
            for expert in range(4)
            for kind, dtype in kinds.items()
        }
        | {
            f"layers.{part}.mlp.shared_experts.w1.weight": make("F32", 6),
            f"layers.{part}.mlp.experts.w13_weight": make("F32", 4),
        }
        for part in range(2)
    }


def written_before_1_6(files: Files) -> Files:
    """Without the dtypes that are newer than the format: torch can't read its own such files."""
    old = {"BOOL", "U8", "I8", "I16", "I32", "I64", "F16", "BF16", "F32", "F64", "C64"}
    return {
        stem: {name: made for name, made in tensors.items() if made.dtype in old}
        for stem, tensors in files.items()
    }


CHECKPOINTS = {
    "every-dtype": every_dtype,
    "many-small": many_small,
    "large": large,
    "many-files": many_files,
    "experts": experts,
    "one-tensor": lambda: {"model": {"a": make("F32")}},
    "nothing": lambda: {"model": {}},
}
