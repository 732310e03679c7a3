"""Tensors as bytes of a storage: where they lie, what they span, and views of other shape and dtype."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

__all__ = ["Span", "copy_span", "copy_weight_", "same_storage", "storage_view"]

_PAGE_BYTES = 4096


def _num_spanned(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Elements from a tensor's first to its last, both included."""
    if 0 in shape:
        return 0
    return 1 + sum((length - 1) * step for length, step in zip(shape, stride, strict=True))


def storage_view(
    storage: torch.UntypedStorage,
    offset: int,
    shape: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
) -> torch.Tensor:
    """A tensor over a storage. The storage never grows for it.

    Args:
        storage: The bytes.
        offset: Place of the first element, in elements of `dtype`.
        shape: Shape of the view.
        stride: Its strides in elements, none negative.
        dtype: Its dtype.

    Raises:
        ValueError: A negative number, strides that don't fit the shape, or an element that lies outside
            the storage; the message has the bytes.
    """
    shape, stride = tuple(shape), tuple(stride)
    if len(shape) != len(stride):
        raise ValueError(f"shape {list(shape)} has {len(shape)} dims, stride {list(stride)} {len(stride)}")
    if offset < 0 or min(shape, default=0) < 0 or min(stride, default=0) < 0:
        raise ValueError(f"offset {offset}, shape {list(shape)} and stride {list(stride)} can't be negative")
    end_bytes = (offset + _num_spanned(shape, stride)) * dtype.itemsize
    if end_bytes > storage.nbytes():
        raise ValueError(
            f"shape {list(shape)}, stride {list(stride)} and {dtype} from element {offset} need "
            f"{end_bytes} bytes, the storage has {storage.nbytes()}"
        )
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, shape, stride)


def copy_weight_(dst: torch.Tensor, src: torch.Tensor) -> None:
    """`dst.copy_(src)`.

    On an integrated GPU, which reads the host's memory itself, the pages of a contiguous source on the CPU
    of the same dtype are touched first: faults are much slower when they come from the GPU.

    Args:
        dst: Where the values go.
        src: Where they come from; one element needs no touching.
    """
    plain = src.device.type == "cpu" and src.is_contiguous() and src.dtype == dst.dtype and src.numel() > 1
    if plain and dst.device.type == "cuda" and torch.cuda.get_device_properties(dst.device).is_integrated:
        touch_pages(src)
    dst.copy_(src)


def touch_pages(tensor: torch.Tensor) -> None:
    """Reads a byte of each page of a contiguous tensor on the CPU."""
    Span.of(tensor).bytes_over(tensor)[::_PAGE_BYTES].sum()


@dataclass(frozen=True, slots=True)
class Span:
    """The bytes of a storage from a tensor's first element to the end of its last."""

    start: int
    """First byte, from the storage's start."""
    nbytes: int
    """Bytes up to the last element's last."""
    is_full: bool
    """Whether the tensor's elements fill it, each byte belonging to exactly one."""

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Span:
        """What a strided tensor spans."""
        num_spanned = _num_spanned(tensor.shape, tensor.stride())
        return cls(
            start=int(tensor.storage_offset()) * tensor.itemsize,
            nbytes=num_spanned * tensor.itemsize,
            is_full=num_spanned == tensor.numel() and not overlaps_itself(tensor),
        )

    def bytes_over(self, tensor: torch.Tensor) -> torch.Tensor:
        """These bytes of a tensor's storage, 1-d uint8."""
        raw = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        return raw.set_(tensor.untyped_storage(), self.start, (self.nbytes,), (1,))


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether two of a tensor's elements may be the same memory, as in one that was expanded."""
    end = 0
    dims = [(step, length) for step, length in zip(tensor.stride(), tensor.shape, strict=True) if length > 1]
    for step, length in sorted(dims):
        if step <= end:
            return True
        end += step * (length - 1)
    return False


def same_storage(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors lie in one storage; of empty and `meta` ones nobody can tell, and it's `False`."""
    address = one.untyped_storage().data_ptr()
    return address != 0 and one.device == other.device and address == other.untyped_storage().data_ptr()


def copy_span(dst: torch.Tensor, src: torch.Tensor) -> None:
    """Copies all bytes that `src` spans over those of `dst`, which has its dtype, shape and strides.

    As bytes, since some dtypes have no copy of their own, and repeated elements can't be written to.
    """
    Span.of(dst).bytes_over(dst).copy_(Span.of(src).bytes_over(src))
