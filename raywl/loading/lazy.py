"""Lazy weights: checkpoint tensors that are read only where, and when, their bytes are used.

A lazy weight is a real tensor over a private mapping of the file, so that everything about it (shape,
strides, views) is torch's own. Views of it stay lazy; their address, shape and strides say which bytes
of the file they are. So do conversions to another dtype or layout (`to`, `contiguous`), which are made
while copying. A `copy_` from it into memory becomes a recorded copy; any other use reads what it
needs by `preadv` into memory of its own and goes on as a plain tensor. The mapping itself is touched
only by code that torch can't show us (a C++ extension), and then holds the right bytes. Where files can't
be mapped, and for conversions, there is no memory behind the tensor, and torch asks us for every use.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable
from typing import Any

import torch

from raywl.checkpoint.header import TensorEntry
from raywl.loading.lazy_sources import (
    ConvertedSource,
    FileSource,
    LazySource,
    ReadsNow,
    is_dense,
    memory_of_file,
    put_behind,
    without_memory,
)
from raywl.readers.memory import can_convert

__all__ = [
    "LazySource",
    "LazyWeight",
    "UnmappedWeight",
    "is_basic",
    "lazy_copies",
    "lazy_weight",
    "plain",
    "writes",
    "written_to",
]

VIEWS = frozenset(
    """__getitem__ alias adjoint as_strided chunk detach diagonal dsplit expand expand_as flatten hsplit
    movedim moveaxis narrow permute ravel requires_grad_ reshape select split split_with_sizes squeeze
    swapaxes swapdims t tensor_split transpose unbind unflatten unfold unsafe_chunk unsafe_split unsqueeze
    view view_as vsplit""".split()
)
"""Functions whose result shares its argument's memory, or (`reshape`) can."""

FACTS = frozenset(
    """__dlpack_device__ __hash__ __len__ can_cast dim element_size get_device is_complex is_conj
    is_contiguous is_floating_point is_inference is_neg is_same_size is_shared is_signed is_tensor ndimension
    nelement numel result_type size storage_offset stride""".split()
)
"""Functions that look at no element."""

ALIASES = frozenset(
    """numpy data_ptr untyped_storage storage _typed_storage __array__ __dlpack__ __cuda_array_interface__
    const_data_ptr swap_tensors share_memory_ __array_interface__ _make_subclass from_dlpack""".split()
)
"""Functions that hand out, or take over, the memory itself."""

_CONVERSIONS = frozenset(
    """bfloat16 bool byte cfloat char contiguous cpu double float half int long short to type
    type_as""".split()
)
"""Functions that give back their argument where there is nothing to convert."""


class LazyWeight(torch.Tensor):
    """A checkpoint tensor, or a view of one, that hasn't been read."""

    source: LazySource

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__":
            return _get(func, args)
        if name in FACTS:
            return _run(func, args, kwargs)
        if name == "__iter__":
            return iter(args[0].unbind(0))
        if name in VIEWS:
            return _view(func, name, args, kwargs)
        pairs = lazy_copies(name, args, kwargs)
        if pairs is not None:
            for dst, src in pairs:
                src.source.reader.copy(dst, src)
            return None if name != "copy_" else pairs[0][0]
        if args and isinstance(args[0], LazyWeight) and name in _CONVERSIONS:
            converted = _convert(func, name, args, kwargs)
            if converted is not None:
                return converted
        if name in ALIASES:
            _load_all((*args, *kwargs.values()))
        elif writes(name, kwargs):
            _load_all((written_to(args, kwargs),))
        return _compute(func, args, kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"LazyWeight({self.source.name!r}, shape={list(self.shape)}, dtype={self.dtype})"

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        values: torch.Tensor = plain(self)
        return values.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return plain(self).clone().__reduce_ex__(protocol)


class UnmappedWeight(LazyWeight):
    """A lazy weight without memory: torch asks for its values also when called by code that isn't Python."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        # It may be written to, or kept: from now on memory is the truth.
        kwargs = kwargs or {}
        _load_all((*args, *kwargs.values()))
        read: dict[int, torch.Tensor] = {}
        return func(*_values_of(args, read), **{k: _values_of(v, read) for k, v in kwargs.items()})


def lazy_weight(name: str, entry: TensorEntry, mapping: mmap.mmap | None, reader: ReadsNow) -> LazyWeight:
    """The lazy weight of a checkpoint tensor.

    Args:
        name: Its name.
        entry: Where it lies.
        mapping: A private mapping of its file; `None` where it can't be mapped.
        reader: Takes its copies and reads.
    """
    # Nobody needs to watch this.
    with torch._C.DisableTorchFunction():
        base = memory_of_file(entry, mapping)
        has_memory = mapping is not None or not entry.nbytes
        source = FileSource(name, entry, reader, base, has_memory)
        if not has_memory:
            put_behind(base, source)
        return _wrap(base, source)


def plain(value: Any) -> Any:
    """A lazy weight read in full as a plain tensor; anything else as it is."""
    return value.source.read(value) if isinstance(value, LazyWeight) else value


def _wrap(tensor: torch.Tensor, source: LazySource) -> LazyWeight:
    lazy = tensor.as_subclass(LazyWeight if source.has_memory else UnmappedWeight)
    lazy.source = source
    return lazy


def _run(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if args and isinstance(args[0], UnmappedWeight):
        with torch._C.DisableTorchFunctionSubclass(), torch._C._DisableTorchDispatch():
            return func(*args, **kwargs)
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def lazy_copies(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[tuple[torch.Tensor, LazyWeight]] | None:
    """The copies that a torch function makes out of lazy weights, if it does nothing else."""
    pairs: list[tuple[Any, Any]]
    if name == "copy_":
        source = args[1] if len(args) > 1 else kwargs.get("other")
        if not args or not isinstance(source, LazyWeight) or isinstance(args[0], LazyWeight):
            return None
        return [(args[0], source)]
    if name == "_foreach_copy_" and len(args) > 1 and len(args[0]) == len(args[1]):
        pairs = list(zip(args[0], args[1], strict=True))
    elif name == "__setitem__" and isinstance(args[2], LazyWeight) and is_basic(args[1]):
        if isinstance(args[0], LazyWeight):
            return None
        value: Any = args[2]
        dst = args[0][args[1]]
        while value.dim() > dst.dim() and value.shape[0] == 1:
            value = value[0]  # torch ignores them too
        pairs = [(dst, value)]
    else:
        return None
    good = all(isinstance(src, LazyWeight) and not isinstance(dst, LazyWeight) for dst, src in pairs)
    return pairs if pairs and good else None


def _convert(func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The lazy weight that a conversion makes of another; `None` where it has to be made at once."""
    lazy = args[0]
    if name == "contiguous" and lazy.is_contiguous(**kwargs):
        return lazy
    probe = torch.empty(0, dtype=lazy.dtype, device="cpu")
    try:
        result = _run(func, (probe, *args[1:]), {k: v for k, v in kwargs.items() if k != "memory_format"})
        if result is probe and name != "contiguous" and "memory_format" not in kwargs:
            return lazy
        like = _like(lazy, name, result, kwargs)
    except (AttributeError, RuntimeError, TypeError, ValueError):
        # No conversion after all (`type()`), or wrong arguments, which torch says when called in earnest.
        return None
    source = lazy.source
    if like is None or source.loaded is not None or not lazy.numel() or lazy.is_conj() or lazy.is_neg():
        return None
    # What is lost with an imaginary part is a warning of torch's, to whom it may concern.
    if like.dtype != lazy.dtype and (lazy.is_complex() or not can_convert(lazy.dtype, like.dtype)):
        return None
    located = source.locate(lazy)
    if located is None or not (is_dense(like) and like.untyped_storage().nbytes() == like.nbytes):
        return None
    base = without_memory(like.nbytes).view(like.dtype).as_strided(like.shape, like.stride())
    converted = ConvertedSource(lazy, located, like)
    put_behind(base, converted)
    return _wrap(base, converted)


def _like(lazy: LazyWeight, name: str, result: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor | None:
    """A meta tensor of the dtype, shape and strides that a conversion gives; `None` for other devices.

    Args:
        lazy: The weight.
        name: Of the function.
        result: What it gave for a tensor without elements.
        kwargs: What it was called with.
    """
    if result.device.type != "cpu":
        return None
    layout = {"memory_format": kwargs["memory_format"]} if "memory_format" in kwargs else {}
    with torch._C.DisableTorchFunctionSubclass():
        meta = torch.empty_strided(lazy.shape, lazy.stride(), dtype=lazy.dtype, device="meta")
        if name == "contiguous":
            return meta.contiguous(**layout)
        return meta.to(result.dtype, copy=True, **layout)


def _rewrap(result: Any, lazy: LazyWeight) -> Any:
    """Views of a lazy weight are lazy: the results that share its memory."""
    if isinstance(result, tuple | list) and not isinstance(result, torch.Size):
        return type(result)(_rewrap(item, lazy) for item in result)
    if isinstance(result, torch.Tensor) and not isinstance(result, LazyWeight):
        return _wrap(result, lazy.source)
    return result


def _get(func: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    attribute = getattr(getattr(func, "__self__", None), "__name__", "")
    if attribute in ("H", "real", "imag", "__cuda_array_interface__", "__array_interface__"):
        return _compute(func, args, {})
    return _rewrap(_run(func, args, {}), args[0])


def is_basic(index: Any) -> bool:
    """Whether an index makes a view: integers, slices, `None` and `...` only."""
    items = index if isinstance(index, tuple) else (index,)
    return all(
        item is None or item is ... or isinstance(item, slice) or (type(item) is int) for item in items
    )


def _view(func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    lazy = args[0] if args else None
    if not isinstance(lazy, LazyWeight) or (name == "__getitem__" and not is_basic(args[1])):
        return _compute(func, args, kwargs)
    if name in ("reshape", "flatten", "ravel") and not lazy.is_contiguous():
        # On other strides these may copy, which would read through the mapping.
        shape = _run(
            func, (torch.empty_strided(lazy.shape, lazy.stride(), device="meta"), *args[1:]), kwargs
        ).shape
        try:
            return _rewrap(_run(torch.Tensor.view, (lazy, shape), {}), lazy)
        except RuntimeError:
            new = _convert(torch.Tensor.contiguous, "contiguous", (lazy,), {})
            return _compute(func, args, kwargs) if new is None else new.view(shape)
    return _rewrap(_run(func, args, kwargs), lazy)


def writes(name: str, kwargs: dict[str, Any]) -> bool:
    """Whether a torch function, by its name, writes to an argument."""
    if name.startswith("__"):
        augmented = name.startswith("__i") and name not in ("__index__", "__int__", "__invert__", "__iter__")
        return augmented or name in ("__setitem__", "__set__")
    return name.endswith("_") or kwargs.get("out") is not None


def written_to(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The argument that such a function writes to: `out`, else the first one, however it is passed."""
    if kwargs.get("out") is not None:
        return kwargs["out"]
    return args[0] if args else next(iter(kwargs.values()), None)


def _lazies(values: Iterable[Any]) -> Iterable[LazyWeight]:
    for value in values:
        if isinstance(value, LazyWeight):
            yield value
        elif isinstance(value, tuple | list):
            yield from _lazies(value)


def _load_all(values: Iterable[Any]) -> None:
    for lazy in _lazies(values):
        lazy.source.load()


def _values_of(value: Any, read: dict[int, torch.Tensor]) -> Any:
    """A function's argument, or several, with what lazy weights hold, which `read` takes by their ids.

    No inner function of those that call it: one that calls itself is garbage that only a collection frees,
    with all that was read, and none runs during a load.
    """
    if isinstance(value, LazyWeight):
        if id(value) not in read:
            read[id(value)] = value.source.read(value)
        return read[id(value)]
    if isinstance(value, tuple | list):
        return type(value)(_values_of(item, read) for item in value)
    return value


def _compute(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs a function on what the lazy weights hold."""
    read: dict[int, torch.Tensor] = {}
    result = func(*_values_of(args, read), **{k: _values_of(v, read) for k, v in kwargs.items()})
    fresh = [lazy for lazy in _lazies((*args, *kwargs.values())) if lazy.source.loaded is None]
    if fresh and _shares_memory(result, [read[id(lazy)] for lazy in fresh]):
        # The result is a view after all (`to` without a change): writes through it must reach the weight.
        for lazy in fresh:
            lazy.source.load()
        return _compute(func, args, kwargs)
    return result


def _shares_memory(result: Any, tensors: list[torch.Tensor]) -> bool:
    if isinstance(result, tuple | list):
        return any(_shares_memory(item, tensors) for item in result)
    if not isinstance(result, torch.Tensor) or result.layout is not torch.strided:
        return False
    address = result.untyped_storage().data_ptr()
    return address != 0 and any(address == tensor.untyped_storage().data_ptr() for tensor in tensors)
