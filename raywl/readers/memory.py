"""Byte views of tensors: where reads end."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch

from raywl.plan.copies import Copy, span_of
from raywl.plan.pending import merge_runs, runs_of

__all__ = ["ByteView", "bytes_of", "can_convert", "dtype_name", "int_dtype", "strided"]

# Part of Python's stable interface; nothing in its library makes a view of an address as quickly.
_view_memory = ctypes.pythonapi.PyMemoryView_FromMemory
_view_memory.restype = ctypes.py_object
_view_memory.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int]
_WRITABLE = 0x200

_INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


@cache
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

    # Most of a hundred thousand parameters are read into once: what that doesn't need is made when asked for.
    __slots__ = ("_address", "_layout", "_raw", "_storage", "dtype", "first", "in_reach", "nbytes")

    def __init__(self, tensor: torch.Tensor) -> None:
        item = tensor.itemsize
        self.dtype = tensor.dtype
        self.first = int(tensor.storage_offset()) * item
        """Byte of the storage that the first element starts at."""
        self._layout: tuple[tuple[int, ...], tuple[int, ...]] | None = None
        """Shape, and strides in bytes, of what isn't contiguous."""
        self.nbytes = tensor.nbytes
        """Bytes from the first element's first to the last element's last."""
        if not tensor.is_contiguous():
            self._layout = tuple(tensor.shape), tuple([stride * item for stride in tensor.stride()])
            self.nbytes = span_of(*self._layout, item)
        self.in_reach = tensor.is_cpu
        """Whether reads can reach them."""
        # The storage, whatever the tensor may come to stand for later.
        self._storage = tensor.untyped_storage()
        self._address = tensor.data_ptr()
        self._raw: torch.Tensor | None = None

    @property
    def address(self) -> int:
        """Address of the storage that they lie in."""
        # Equal numbers are kept once where they are one object.
        return self._address - self.first if self.first else self._address

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self._storage.device

    @property
    def raw(self) -> torch.Tensor:
        """1-d uint8 over the bytes."""
        if self._raw is None:
            raw = torch.empty(0, dtype=torch.uint8, device=self._storage.device)
            # Kept once it is whole: several threads may ask at a time.
            self._raw = raw.set_(self._storage, self.first, (self.nbytes,), (1,))
        return self._raw

    @property
    def memory(self) -> memoryview:
        """The bytes to read into; valid for as long as this is held, and only where reads can reach."""
        if not self.nbytes:
            return memoryview(b"")
        view: memoryview = _view_memory(self._address, self.nbytes, _WRITABLE)
        return view

    def runs(self) -> list[tuple[int, int]]:
        """The byte ranges of the storage that its elements take."""
        if self._layout is None:
            return [(self.first, self.first + self.nbytes)]
        shape, strides = self._layout
        name = dtype_name(self.dtype)
        whole = Copy("", "", "", 0, self.first, shape, strides, strides, name, name)
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
