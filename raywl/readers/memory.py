"""Byte views of tensors: where reads end."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from raywl.plan.copies import Copy, span_of
from raywl.plan.pending import merge_runs, runs_of

__all__ = ["ByteView", "bytes_of", "can_convert", "dtype_name", "int_dtype", "strided"]

_INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def dtype_name(dtype: torch.dtype) -> str:
    """torch's name of a dtype, without the module: `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def bytes_of(raw: torch.Tensor) -> memoryview:
    """The memory of a 1-d uint8 tensor on the CPU."""
    array: Any = raw.numpy()
    return memoryview(array)


def int_dtype(itemsize: int) -> torch.dtype:
    """A dtype of a width, to move elements whose own dtype has no copy kernel; bits stay as they are."""
    return _INTS[itemsize]


@cache
def can_convert(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether torch can copy elements of one dtype into another; tried, since it has no list of it."""
    if source == target:
        return True
    one = torch.zeros(16, dtype=torch.uint8, device="cpu")
    try:
        torch.empty(16, dtype=torch.uint8, device="cpu").view(target)[:1].copy_(one.view(source)[:1])
    except (RuntimeError, NotImplementedError):
        return False
    return True


def strided(
    raw: torch.Tensor, start: int, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]
) -> torch.Tensor:
    """A tensor over the bytes of `raw`, a 1-d uint8 tensor.

    Args:
        raw: The bytes.
        start: Byte of the first element.
        dtype: Dtype of the view.
        shape: Its shape.
        strides: Its strides in bytes.
    """
    size = dtype.itemsize
    span = span_of(shape, strides, size)
    flat = raw[start : start + span + -span % size]
    if (flat.storage_offset() | flat.data_ptr() | start) % size:
        # Files may put tensors at any byte; elements must be aligned to be viewed.
        flat = flat.clone()
    return flat.view(dtype).as_strided(
        shape, [stride // size for stride in strides], flat.storage_offset() // size
    )


class ByteView:
    """All bytes that a parameter spans, as uint8."""

    def __init__(self, tensor: torch.Tensor) -> None:
        strides = tuple(stride * tensor.itemsize for stride in tensor.stride())
        self.nbytes = span_of(tuple(tensor.shape), strides, tensor.itemsize)
        """Bytes from the first element's first to the last element's last."""
        self.dtype = tensor.dtype
        self._shape, self._strides = tuple(tensor.shape), strides
        storage = tensor.untyped_storage()
        self.first = int(tensor.storage_offset()) * tensor.itemsize
        """Byte of the storage that the first element starts at."""
        self.raw = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        """1-d uint8 over those bytes."""
        self.raw.set_(storage, self.first, (self.nbytes,), (1,))
        self.memory = bytes_of(self.raw) if tensor.device.type == "cpu" else None
        """The bytes to read into; `None` where no read can reach."""

    def runs(self) -> list[tuple[int, int]]:
        """The byte ranges of the storage that its elements take."""
        name = dtype_name(self.dtype)
        whole = Copy("", "", "", 0, self.first, self._shape, self._strides, self._strides, name, name)
        return merge_runs(runs_of(whole))

    def view_for(self, copy: Copy) -> torch.Tensor:
        """The destination of a copy."""
        dtype = self.dtype if copy.converts else int_dtype(copy.itemsize)
        size = dtype.itemsize
        if self.first % size:
            raise ValueError(f"{copy.target}: its storage starts at byte {self.first}, not on {size}")
        flat = self.raw[copy.dst_start : copy.dst_end]
        typed = flat.view(dtype)
        return typed.as_strided(
            copy.shape, [stride // size for stride in copy.dst_strides], typed.storage_offset()
        )
