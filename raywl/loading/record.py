"""Records the copies that loaders make, and keeps what they then read in order.

While loaders run, their copies out of lazy weights are only noted. A loader may read what it has just
written (`param.copy_(w); param.mul_(scale)`), so every torch function that touches memory with noted
copies makes them first. What can't be seen from here (an alias of the memory that torch no longer
knows about) makes that memory's copies immediate from then on.
"""

from __future__ import annotations

import math
import mmap
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from raywl.checkpoint import Manifest, TensorEntry
from raywl.errors import ShapeMismatchError
from raywl.loading.lazy import (
    ALIASES,
    FACTS,
    VIEWS,
    LazySource,
    LazyWeight,
    lazy_weight,
    plain,
    writes,
    written_to,
)
from raywl.plan.copies import Copy, itemsize_of, may_overlap, normalise, span_of
from raywl.plan.reads import schedule
from raywl.readers import ByteView, OpenFiles, execute
from raywl.readers.memory import dtype_name

__all__ = ["Recorder", "Written"]


@dataclass(slots=True)
class Written:
    """What is known about one target's memory."""

    nbytes: int = 0
    """Bytes written by copies out of the checkpoint, in the parameter's dtype."""
    otherwise: bool = False
    """Whether anything else wrote to it: a fill, arithmetic, a copy from other memory."""


@dataclass(slots=True)
class _Memory:
    """One storage that targets lie in."""

    targets: list[tuple[int, int, str]] = field(default_factory=list)
    """`(first byte, end byte, name)` in the storage."""
    pending: list[Copy] = field(default_factory=list)
    """Noted copies that haven't been made; their `dst_start` counts from the storage's first byte."""
    immediate: bool = False
    """Whether something holds an alias that torch functions don't show."""


class Recorder(TorchFunctionMode):
    """Notes copies from lazy weights into the targets, in the thread that entered it.

    In other threads, and into memory that is no target's, copies are made at once.

    Args:
        manifest: The checkpoint.
        files: Its open files.
        targets: Every parameter and buffer, by name; one name for each memory.
        num_threads: Threads for reads.
    """

    def __init__(
        self,
        manifest: Manifest,
        files: OpenFiles,
        targets: Mapping[str, torch.Tensor],
        *,
        num_threads: int,
        on_bytes: Callable[[int], None] | None = None,
    ) -> None:
        super().__init__()
        self._manifest, self._files, self._targets = manifest, files, targets
        self._num_threads, self._on_bytes = num_threads, on_bytes
        self._file_order = {file.name: index for index, file in enumerate(manifest.files)}
        self._mappings: dict[str, mmap.mmap] = {}
        self._views: dict[str, ByteView] = {}
        self._memories: dict[int, _Memory] = {}
        self._memory_by_name: dict[str, _Memory] = {}
        self._thread: int | None = None
        self._lock = threading.RLock()
        self.copies: list[Copy] = []
        """All copies into targets, in the order they were made."""
        self.written: dict[str, Written] = {name: Written() for name in targets}
        self.nbytes_early: dict[str, int] = {}
        """Bytes that were read before the end, by file, because something wanted the values."""
        self.started = False
        """Whether any target was written to."""
        self.surprises: dict[str, None] = {}
        """What happened that the copies alone don't reproduce."""
        for name, tensor in targets.items():
            self._add_target(name, tensor)

    def _add_target(self, name: str, tensor: torch.Tensor) -> None:
        if tensor.device.type == "meta" or not tensor.numel():
            return
        storage = tensor.untyped_storage()
        view = self._views[name] = ByteView(tensor)
        memory = self._memories.setdefault(storage.data_ptr(), _Memory())
        self._memory_by_name[name] = memory
        memory.targets.append((view.first, view.first + view.nbytes, name))

    def weight(self, name: str) -> LazyWeight:
        """The lazy weight of a checkpoint tensor."""
        entry = self._manifest.entry(name)
        return lazy_weight(name, entry, self._mapping(entry), self)

    def _mapping(self, entry: TensorEntry) -> mmap.mmap | None:
        if not entry.nbytes:
            return None
        if entry.file not in self._mappings:
            size = next(file.size for file in self._manifest.files if file.name == entry.file)
            flags, access = mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE
            self._mappings[entry.file] = mmap.mmap(self._files.fd(entry.file), size, flags, access)
        return self._mappings[entry.file]

    # What the lazy weights ask for.

    def read_now(self, source: LazySource, start: int, buffer: memoryview) -> None:
        """Fills `buffer` from byte `start` of the source's file."""
        self._files.read_into(source.entry.file, start, [buffer])
        self._count_early(source.entry.file, buffer.nbytes)

    def _count_early(self, file: str, nbytes: int) -> None:
        with self._lock:
            self.nbytes_early[file] = self.nbytes_early.get(file, 0) + nbytes

    def copy(self, dst: torch.Tensor, src: LazyWeight) -> None:
        """Notes `dst.copy_(src)`, or makes it at once where that isn't safe."""
        if dst.shape != src.shape:
            try:
                expanded: Any = src.expand(dst.shape)
            except RuntimeError:
                raise ShapeMismatchError(
                    src.source.name, dst.shape, src.shape, "can't be copied by its loader"
                ) from None
            src = expanded
        src.source.used = True
        if not src.numel() or dst.device.type == "meta":
            return
        memory = self._memory_of(dst)
        if memory is None or threading.get_ident() != self._thread or src.source.loaded is not None:
            self._copy_now(dst, src, memory)
            return
        noted = self._copy_of(dst, src, memory)
        if noted is None or memory.immediate:
            self._copy_now(dst, src, memory)
            return
        if any(may_overlap(noted, other) for other in memory.pending):
            self.drain()
        memory.pending.append(noted)
        self.copies.append(self._in_target(noted, memory))
        self._count(noted, dst)

    def declare(self, copy: Copy) -> None:
        """Notes a copy that was planned without a loader."""
        self.copies.append(copy)
        first = self._views[copy.target].first
        self._memory_by_name[copy.target].pending.append(copy._replace(dst_start=copy.dst_start + first))
        self.written[copy.target].nbytes += math.prod(copy.shape) * itemsize_of(copy.dst_dtype)

    def _copy_now(self, dst: torch.Tensor, src: LazyWeight, memory: _Memory | None) -> None:
        if memory is not None and memory.pending:
            self.drain()
        self.started = self.started or memory is not None
        values = src.source.read(src)
        with torch._C.DisableTorchFunctionSubclass():
            dst.copy_(values)
        if memory is not None:
            noted = self._copy_of(dst, src, memory)
            if noted is None:
                self._note_write(memory, dst, src.source.name)
            else:
                self._count(noted, dst)
                self.surprises[f"{src.source.name} was copied into {noted.target} while loaders ran"] = None

    def _count(self, copy: Copy, dst: torch.Tensor) -> None:
        self.written[copy.target].nbytes += dst.numel() * dst.itemsize

    def _memory_of(self, tensor: torch.Tensor) -> _Memory | None:
        if tensor.layout is not torch.strided:
            return None
        return self._memories.get(tensor.untyped_storage().data_ptr())

    def _copy_of(self, dst: torch.Tensor, src: LazyWeight, memory: _Memory) -> Copy | None:
        """The copy as data, counted from the storage's first byte; `None` where no target holds it all."""
        item = dst.itemsize
        copy = normalise(
            Copy(
                tensor=src.source.name,
                file=src.source.entry.file,
                target="",
                src_start=src.source.start_of(src),
                dst_start=int(dst.storage_offset()) * item,
                shape=tuple(dst.shape),
                src_strides=tuple(stride * src.itemsize for stride in src.stride()),
                dst_strides=tuple(stride * item for stride in dst.stride()),
                src_dtype=dtype_name(src.dtype),
                dst_dtype=dtype_name(dst.dtype),
            )
        )
        if dst.is_conj() or dst.is_neg() or src.is_conj():
            return None
        for first, end, name in memory.targets:
            if first <= copy.dst_start and copy.dst_end <= end:
                same = copy.src_dtype == copy.dst_dtype
                if same or self._views[name].dtype == dst.dtype:
                    return copy._replace(target=name)
        return None

    def _in_target(self, copy: Copy, memory: _Memory) -> Copy:
        first = next(first for first, _, name in memory.targets if name == copy.target)
        return copy._replace(dst_start=copy.dst_start - first)

    # What happens to the memory of targets.

    def drain(self) -> None:
        """Makes all noted copies now."""
        copies = [
            self._in_target(copy, memory) for memory in self._memories.values() for copy in memory.pending
        ]
        for memory in self._memories.values():
            memory.pending.clear()
        if copies:
            self.started = True
            reads = schedule(copies, self._file_order)
            for read in reads:
                self._count_early(read.file, read.end - read.start)
            self.surprises["values were read while loaders ran"] = None
            execute(reads, self._files, self._views, num_threads=self._num_threads, on_bytes=self._on_bytes)

    def finish(self) -> list[Copy]:
        """The copies that are still to be made; forgets them."""
        rest = []
        for memory in self._memories.values():
            rest += [self._in_target(copy, memory) for copy in memory.pending]
            memory.pending.clear()
        return rest

    @property
    def views(self) -> Mapping[str, ByteView]:
        """The bytes of every target."""
        return self._views

    def __enter__(self) -> Recorder:
        self._thread = threading.get_ident()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)  # type: ignore[no-untyped-call]
        self._thread = None

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__set__" and isinstance(args[-1], LazyWeight):
            # `param.data = weight` never asks the weight: it would leave the mapping in the model.
            args = (*args[:-1], plain(args[-1]))
        if name in FACTS or name in VIEWS or (name == "__get__" and not _is_raw(func)):
            return func(*args, **kwargs)
        lazy_copy = name in ("copy_", "__setitem__", "_foreach_copy_") and _is_lazy_copy(args)
        if not lazy_copy:
            self._before(name, args, kwargs)
        return func(*args, **kwargs)

    def _before(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Makes what is pending where a function is about to look at, or write to, a target's memory."""
        for tensor in _tensors((*args, *kwargs.values())):
            memory = self._memory_of(tensor)
            if memory is None:
                continue
            if memory.pending:
                self.drain()
            if name in ALIASES:
                memory.immediate = True
                self._note_write(memory, tensor, name)
        if writes(name, kwargs):
            for tensor in _tensors((written_to(args, kwargs),)):
                memory = self._memory_of(tensor)
                if memory is not None:
                    self._note_write(memory, tensor, name)

    def _note_write(self, memory: _Memory, tensor: torch.Tensor, what: str) -> None:
        start = int(tensor.storage_offset()) * tensor.itemsize
        strides = tuple(stride * tensor.itemsize for stride in tensor.stride())
        end = start + span_of(tuple(tensor.shape), strides, tensor.itemsize)
        self.started = True
        for first, last, name in memory.targets:
            if first < end and start < last:
                self.written[name].otherwise = True
                self.surprises[f"{name} was also written by {what}"] = None

    def close(self) -> None:
        """Lets go of the mappings that no tensor uses any more."""
        self._mappings.clear()


def _is_lazy_copy(args: tuple[Any, ...]) -> bool:
    last = args[-1] if args else None
    if isinstance(last, tuple | list):
        return all(isinstance(item, LazyWeight) for item in last)
    return isinstance(last, LazyWeight)


def _is_raw(func: Callable[..., Any]) -> bool:
    return getattr(getattr(func, "__self__", None), "__name__", "") in (
        "__cuda_array_interface__",
        "__array_interface__",
    )


def _tensors(values: Iterable[Any]) -> Iterable[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            if not isinstance(value, LazyWeight):
                yield value
        elif isinstance(value, tuple | list):
            yield from _tensors(value)
