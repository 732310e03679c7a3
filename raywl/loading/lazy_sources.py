"""What stands behind lazy weights: a tensor of the checkpoint, or one that is made of one by a conversion.

Each has a tensor for its shape, strides and dtype, whose views are views of the source. Where its bytes can't
be had by touching memory (a conversion, or a file of another machine), that tensor has no memory at all:
its elements can't be looked at by mistake, and nothing can fault.
"""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING, Protocol

import torch

from raywl.checkpoint.dtypes import torch_dtype, torch_shape
from raywl.checkpoint.header import TensorEntry
from raywl.plan.copies import span_of
from raywl.plan.layout import Layout, Located
from raywl.readers.memory import bytes_of, dtype_name

if TYPE_CHECKING:
    from raywl.loading.lazy import LazyWeight

__all__ = [
    "ConvertedSource",
    "FileSource",
    "LazySource",
    "ReadsNow",
    "is_dense",
    "memory_of_file",
    "put_behind",
    "source_behind",
    "without_detours",
    "without_memory",
]

_NOWHERE = 4096
"""An address that no process has memory at."""

_EXACT = {
    "bfloat16": {"float32", "float64"},
    "float16": {"float32", "float64"},
    "float32": {"float64"},
    "float8_e4m3fn": {"float16", "float32", "float64"},
    "float8_e5m2": {"float16", "float32", "float64"},
}
"""Dtypes, and those that hold all of their values: from there on conversions are as if made at once."""


class ReadsNow(Protocol):
    """Reads bytes at once, for uses that can't wait, and takes copies."""

    def note_use(self, source: LazySource) -> None:
        """Notes that an element of a weight was copied or looked at."""

    def read_now(self, source: LazySource, start: int, buffer: memoryview) -> None:
        """Fills `buffer` from byte `start` of the source's file."""

    def copy(self, dst: torch.Tensor, src: LazyWeight) -> None:
        """Copies a lazy weight into memory, now or later, as `dst.copy_` would."""


class LazySource:
    """One tensor behind all lazy views of it. It holds no tensor of them, which hold it."""

    def __init__(
        self, name: str, entry: TensorEntry, reader: ReadsNow, like: torch.Tensor, has_memory: bool
    ) -> None:
        self.name, self.entry, self.reader = name, entry, reader
        """The checkpoint's tensor, and who reads it."""
        self.has_memory = has_memory
        """Whether touching the memory of its views would bring its bytes."""
        self.loaded: torch.Tensor | None = None
        """The whole of it in memory, once something may have written to it or kept its address."""
        self.dtype = like.dtype
        self._shape, self._strides = tuple(like.shape), like.stride()

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The dtypes that a value goes through, from the file's on, without those that make no difference."""
        raise NotImplementedError

    def locate(self, view: torch.Tensor) -> Located | None:
        """Where in the file a view lies; `None` where it lies in none, or irregularly."""
        raise NotImplementedError

    def read(self, view: torch.Tensor) -> torch.Tensor:
        """The values of a view as a plain tensor of the same shape and strides."""
        self.reader.note_use(self)
        if self.loaded is None:
            return self._read(view)
        return _as_lazily(view, _same_view(self.loaded, view))

    def load(self) -> torch.Tensor:
        """The whole tensor in memory, from now on the one truth for all views of it."""
        if self.loaded is None:
            self.loaded = self.read(self._whole())
        return self.loaded

    def _whole(self) -> torch.Tensor:
        """The view that is all of it."""
        return torch.empty_strided(self._shape, self._strides, dtype=self.dtype, device="meta")

    def _read(self, view: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class FileSource(LazySource):
    """A tensor of the checkpoint."""

    @property
    def dtypes(self) -> tuple[str, ...]:
        """As `LazySource.dtypes`."""
        return (dtype_name(self.dtype),)

    def locate(self, view: torch.Tensor) -> Located:
        """As `LazySource.locate`; a view of another dtype has that one's bytes."""
        with torch._C.DisableTorchFunctionSubclass():
            item = view.itemsize
            start = self.entry.start + int(view.storage_offset()) * item
            dims = [((size, step * item),) for size, step in zip(view.shape, view.stride(), strict=True)]
            return Located(start, tuple(dims))

    def _read(self, view: torch.Tensor) -> torch.Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            item = view.itemsize
            span = span_of(tuple(view.shape), tuple([stride * item for stride in view.stride()]), item)
            raw = torch.empty(span, dtype=torch.uint8, device="cpu")
            if span:
                start = self.entry.start + int(view.storage_offset()) * item
                self.reader.read_now(self, start, bytes_of(raw))
            return _as_lazily(view, raw.view(view.dtype).as_strided(view.shape, view.stride(), 0))


class ConvertedSource(LazySource):
    """What another lazy weight becomes in another dtype or layout: new memory, as far as anyone can tell.

    Args:
        origin: The weight, of which nothing is in memory.
        located: Where in its file it lies.
        like: A tensor of the result's dtype and strides, which leave no gap; its shape is the origin's.
    """

    def __init__(self, origin: LazyWeight, located: Located, like: torch.Tensor) -> None:
        parent = origin.source
        super().__init__(parent.name, parent.entry, parent.reader, like, False)
        # A file's bytes viewed as another dtype are taken for that one's.
        before = parent.dtypes if isinstance(parent, ConvertedSource) else (dtype_name(origin.dtype),)
        self._dtypes = without_detours((*before, dtype_name(like.dtype)))
        self._layout = Layout(located, like.stride())

    @property
    def dtypes(self) -> tuple[str, ...]:
        """As `LazySource.dtypes`."""
        return self._dtypes

    def locate(self, view: torch.Tensor) -> Located | None:
        """As `LazySource.locate`."""
        with torch._C.DisableTorchFunctionSubclass():
            if view.dtype != self.dtype:
                return None
            return self._layout.locate(int(view.storage_offset()), tuple(view.shape), view.stride())

    def _read(self, view: torch.Tensor) -> torch.Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            located = self.locate(view) if view.numel() and is_dense(view) else None
            if located is None:
                whole = self._whole()
                found = self.locate(whole)
                assert found is not None
                return _as_lazily(view, _same_view(self._values_at(found, whole), view))
            return _as_lazily(view, self._values_at(located, view))

    def _values_at(self, located: Located, view: torch.Tensor) -> torch.Tensor:
        """A part of the file in this source's dtype, with a view's shape and strides."""
        dtype: torch.dtype = getattr(torch, self._dtypes[0])
        dims = [dim for dims in located.dims for dim in dims]
        shape, strides = tuple(size for size, _ in dims), tuple(stride for _, stride in dims)
        raw = torch.empty(span_of(shape, strides, dtype.itemsize), dtype=torch.uint8, device="cpu")
        self.reader.read_now(self, located.start, bytes_of(raw))
        values = raw.view(dtype).as_strided(shape, [stride // dtype.itemsize for stride in strides], 0)
        for step in self._dtypes[1:]:
            values = values.to(getattr(torch, step))
        values = values.contiguous().view(view.shape)
        if view.is_contiguous():
            return values
        empty = torch.empty_strided(view.shape, view.stride(), dtype=view.dtype, device="cpu")
        return empty.copy_(values)


def memory_of_file(entry: TensorEntry, mapping: mmap.mmap | None) -> torch.Tensor:
    """The tensor whose views are those of a checkpoint's tensor.

    Args:
        entry: Where it lies.
        mapping: A private mapping of its file; `None` leaves it without memory.
    """
    dtype, shape = torch_dtype(entry.dtype), torch_shape(entry.dtype, entry.shape)
    if not entry.nbytes:
        return torch.empty(shape, dtype=dtype, device="cpu")
    nbytes = entry.end - entry.start
    if mapping is None:
        flat = without_memory(nbytes).view(dtype)
    else:
        flat = torch.frombuffer(mapping, dtype=dtype, count=nbytes // dtype.itemsize, offset=entry.start)
    if entry.strides is None:
        return flat if len(shape) == 1 else flat.view(shape)
    return flat.as_strided(shape, [stride // flat.itemsize for stride in entry.strides])


def without_memory(nbytes: int) -> torch.Tensor:
    """Bytes that have a place in a storage, and no memory: who asks for their address gets an error."""
    storage = torch._C._construct_storage_from_data_pointer(_NOWHERE, torch.device("cpu"), nbytes)
    tensor = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage, 0, (nbytes,), (1,))
    torch._C._set_throw_on_mutable_data_ptr(tensor)
    return tensor


def put_behind(base: torch.Tensor, source: LazySource) -> None:
    """Lets a tensor without memory lead to what it stands for, for as long as anybody holds its storage."""
    base.untyped_storage().raywl_source = source  # type: ignore[attr-defined]


def source_behind(tensor: torch.Tensor) -> LazySource | None:
    """The source whose bytes a plain tensor without memory stands for; `None` for any other tensor.

    A parameter can come to be one by `param.data = weight`, which asks nobody.
    """
    if tensor.layout is not torch.strided or tensor.device.type != "cpu":
        return None
    return getattr(tensor.untyped_storage(), "raywl_source", None)


def without_detours(dtypes: tuple[str, ...]) -> tuple[str, ...]:
    """The same conversions without steps that lose nothing on the way to a third dtype.

    There and back again stays, and so does what ends in bfloat16: what isn't a number may come out as
    another such.
    """
    kept = [dtypes[0]]
    for index, dtype in enumerate(dtypes[1:], 1):
        after = dtypes[index + 1] if index + 1 < len(dtypes) else None
        lossless = dtype in _EXACT.get(kept[-1], ())
        if dtype != kept[-1] and not (lossless and after not in (None, kept[-1], "bfloat16")):
            kept.append(dtype)
    return tuple(kept)


def _same_view(whole: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
    """The view of `whole` that `view` is of another tensor of the same layout."""
    with torch._C.DisableTorchFunctionSubclass():
        raw = torch.empty(0, dtype=torch.uint8, device="cpu").set_(whole.untyped_storage())
        return raw.view(view.dtype).as_strided(view.shape, view.stride(), view.storage_offset())


def _as_lazily(view: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor over a view's bytes, read as the view reads them."""
    with torch._C.DisableTorchFunctionSubclass():
        if view.is_conj():
            tensor = tensor.conj()
        return torch._neg_view(tensor) if view.is_neg() else tensor


def is_dense(view: torch.Tensor) -> bool:
    """Whether a view's elements lie in memory of their own, without overlap."""
    reach = 1
    for stride, size in sorted(zip(view.stride(), view.shape, strict=True)):
        if size > 1:
            if stride < reach:
                return False
            reach = stride * (size - 1) + reach
    return True
