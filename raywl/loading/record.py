"""Records the copies that loaders make, and keeps what they then read in order.

While loaders run, their copies out of lazy weights are only noted. A loader may read what it has just
written (`param.copy_(w); param.mul_(scale)`), so every torch function that touches memory with noted
copies makes them first. What can't be seen from here (an alias of the memory that torch no longer
knows about) makes that memory's copies immediate from then on.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from raywl.checkpoint import Manifest
from raywl.errors import CheckpointError, RaywlError, ShapeMismatchError
from raywl.loading.constants import fill_of, make_fill
from raywl.loading.destinations import Destination
from raywl.loading.lazy import (
    ALIASES,
    FACTS,
    VIEWS,
    LazySource,
    LazyWeight,
    lazy_copies,
    lazy_weight,
    plain,
    writes,
    written_to,
)
from raywl.loading.lazy_sources import FileSource, without_detours
from raywl.loading.mappings import Mappings
from raywl.plan.copies import Copy, itemsize_of, may_overlap, normalise, span_of, straight
from raywl.plan.fills import Fill, Number
from raywl.plan.layout import Dim
from raywl.plan.pending import covered_bytes, merge_runs, runs_of, writes_once
from raywl.plan.places import Places
from raywl.plan.reads import schedule
from raywl.readers import READER_THREADS, ByteView, Reader
from raywl.readers.memory import can_convert, dtype_name

__all__ = ["Recorder", "Written"]


@dataclass(slots=True)
class Written:
    """What is known about one target's memory."""

    nbytes: int = 0
    """Bytes written by copies out of the checkpoint, in the parameter's dtype."""
    otherwise: bool = False
    """Whether anything else wrote to it: a fill, arithmetic, a copy from other memory."""


class Recorder(TorchFunctionMode):
    """Notes copies from lazy weights into the targets, in the thread that entered it.

    In other threads, and into memory that is no target's, copies are made at once.

    Args:
        manifest: The checkpoint.
        reader: Reads its files.
        targets: Every parameter and buffer, by name; one name for each memory.
    """

    def __init__(
        self,
        manifest: Manifest,
        reader: Reader,
        targets: Mapping[str, torch.Tensor],
    ) -> None:
        super().__init__()
        self._manifest, self._reader = manifest, reader
        self._files = reader.files
        self._file_order = {file.name: index for index, file in enumerate(manifest.files)}
        self.mappings = Mappings(manifest, reader.files)
        self._views: dict[str, ByteView] = {}
        self._memories: dict[int, Destination] = {}
        self._waiting: list[Destination] = []
        """Those in which anything is noted."""
        self._thread: int | None = None
        self._lock = threading.RLock()
        self._watching, self._profile_before = False, threading.getprofile()
        self._shared = False
        """Whether other threads may look at the targets, which can't be seen from here."""
        self._failed: RaywlError | None = None
        """What failed in another thread."""
        self.used: set[str] = set()
        """Tensors of which some element was copied or looked at."""
        self.copies: list[Copy] = []
        """All copies into targets, in the order they were made."""
        self.fills: list[Fill] = []
        """All constants that loaders put into targets, in order."""
        self.written: dict[str, Written] = {name: Written() for name in targets}
        self.nbytes_early: dict[str, int] = {}
        """Bytes that were read before the end, by file, because something wanted the values."""
        self.started = False
        """Whether any target was written to."""
        self.surprises: dict[str, None] = {}
        """What happened that the copies alone don't reproduce."""
        self._copies_by_target: dict[str, list[Copy]] = {}
        self._num_sorted = 0
        self._overwritten: set[str] = set()
        self._add_targets(targets)

    def _add_targets(self, targets: Mapping[str, torch.Tensor]) -> None:
        shared: dict[int, list[str]] = {}
        for name, tensor in targets.items():
            if tensor.is_meta or not tensor.numel():
                continue
            view = self._views[name] = ByteView(tensor)
            address = view.address
            if address in self._memories:
                shared.setdefault(address, [self._memories[address].name]).append(name)
            else:
                self._memories[address] = Destination(name)
        for address, names in shared.items():
            rows = [
                (view.first, view.first + view.nbytes, name)
                for name in names
                for view in (self._views[name],)
            ]
            self._memories[address].places = Places(rows)

    def weight(self, name: str) -> LazyWeight:
        """The lazy weight of a checkpoint tensor."""
        self._watch_threads()
        entry = self._manifest.entry(name)
        return lazy_weight(name, entry, self.mappings.of(entry), self)

    # What the lazy weights ask for.

    def note_use(self, source: LazySource) -> None:
        """Notes that an element of a weight was copied or looked at."""
        self.used.add(source.name)

    def read_now(self, source: LazySource, start: int, buffer: memoryview) -> None:
        """Fills `buffer` from byte `start` of the source's file."""
        self._files.read_into(source.entry.file, start, [buffer])
        self._count_early(source.entry.file, buffer.nbytes)

    def _count_early(self, file: str, nbytes: int) -> None:
        with self._lock:
            self.nbytes_early[file] = self.nbytes_early.get(file, 0) + nbytes

    def copy(self, dst: torch.Tensor, src: LazyWeight) -> None:
        """Notes `dst.copy_(src)`, or makes it at once where that isn't safe."""
        source = src.source
        # Here and below: what only looks at a weight needn't ask it.
        with torch._C.DisableTorchFunctionSubclass():
            same_shape, is_empty = dst.shape == src.shape, not src.numel()
            wanted, has = dst.dtype, src.dtype
        if not same_shape:
            try:
                expanded: Any = src.expand(dst.shape)
            except RuntimeError:
                raise ShapeMismatchError(
                    source.name, dst.shape, src.shape, "can't be copied by its loader"
                ) from None
            src = expanded
        self.note_use(source)
        if (is_empty and same_shape) or (dst.is_meta and self._memory_of(dst) is None) or not dst.numel():
            return
        if wanted != has and not can_convert(has, wanted):
            path = self._manifest.source.label(source.entry.file)
            raise CheckpointError(path, source.name, f"{has} can't be copied into {wanted}")
        with self._lock:
            if self._thread is not None and threading.get_ident() != self._thread:
                self._share()
            memory = self._memory_of(dst)
            noted = None
            if memory is not None:
                with torch._C.DisableTorchFunctionSubclass():
                    noted = self._run_of(dst, src, memory) or self._copy_of(dst, src, memory)
            if memory is None or noted is None or source.loaded is not None:
                self._copy_now(dst, src, memory, noted)
                return
            self._note(noted, memory)
            self.copies.append(self._in_target(noted))
            if self._shared or memory.immediate or self._thread is None:
                self.drain(memory)

    @property
    def _copies_of(self) -> dict[str, list[Copy]]:
        """All copies so far by target; sorted when it is asked for, which few loads do."""
        for copy in self.copies[self._num_sorted :]:
            self._copies_by_target.setdefault(copy.target, []).append(copy)
        self._num_sorted = len(self.copies)
        return self._copies_by_target

    @property
    def computed(self) -> frozenset[str]:
        """Targets that hold, wholly or in part, something else than copies have set: loaders computed it."""
        instead = {name for name, written in self.written.items() if written.otherwise}
        if instead:
            instead.difference_update(copy.target for copy in self.copies)
        return frozenset(self._overwritten | instead)

    def _note(self, copy: Copy, memory: Destination) -> None:
        """Takes a copy, after those that it may overlap."""
        if memory.may_overlap(copy):
            memory.repeated = True
            self.drain(memory)
        if not memory.is_waiting:
            self._waiting.append(memory)
        memory.add(copy)
        nbytes = math.prod(copy.shape) * itemsize_of(copy.dst_dtype)
        self.written[copy.target].nbytes += nbytes

    def note_registered(self, name: str) -> None:
        """Notes that a loader registered a tensor of its own in a target's place."""
        self.started = True
        self.written.setdefault(name, Written()).otherwise = True
        self.surprises[f"{name} was registered anew by a loader"] = None

    def fill(self, dst: torch.Tensor, value: Number) -> bool:
        """Notes `dst.fill_(value)`; `False` where it has to be made at once."""
        with self._lock:
            memory = self._memory_of(dst)
            if memory is None or memory.immediate or self._shared or dst.is_conj() or dst.is_neg():
                return False
            # What torch refuses it refuses here.
            torch.empty(1, dtype=dst.dtype, device="cpu").fill_(value)
            if not dst.numel():
                return True
            copy = self._place_of(dst)
            name = self._holder_of(copy.dst_start, copy.dst_end, memory)
            if name is None:
                return False
            if memory.may_overlap(copy):
                self.drain(memory)
            self._note_overwritten(name, copy)
            noted = Fill(name, copy.dst_start, copy.shape, copy.dst_strides, copy.dst_dtype, value)
            self._note_fill(noted, memory)
            self.fills.append(noted._replace(dst_start=noted.dst_start - self._views[name].first))
            return True

    def _note_fill(self, fill: Fill, memory: Destination) -> None:
        if not memory.is_waiting:
            self._waiting.append(memory)
        if memory.fills is None:
            memory.fills = []
        memory.fills.append(fill)
        for name in self._meeting(fill.dst_start, fill.dst_end, memory):
            self.written[name].otherwise = True

    def declare_fill(self, fill: Fill) -> None:
        """Notes a constant that was planned without a loader."""
        self.fills.append(fill)
        first = self._views[fill.target].first
        self._note_fill(fill._replace(dst_start=fill.dst_start + first), self._memory_named(fill.target))

    def declare(self, copy: Copy) -> None:
        """Notes a copy that was planned without a loader."""
        self.copies.append(copy)
        first = self._views[copy.target].first
        noted = copy._replace(dst_start=copy.dst_start + first) if first else copy
        self._note(noted, self._memory_named(copy.target))

    def _copy_now(
        self, dst: torch.Tensor, src: LazyWeight, memory: Destination | None, noted: Copy | None
    ) -> None:
        if memory is not None and memory.is_waiting:
            self.drain(memory)
        self.started = self.started or memory is not None
        values = src.source.read(src)
        with torch._C.DisableTorchFunctionSubclass():
            dst.copy_(values)
        if memory is not None:
            self._note_write(memory, dst, f"a copy of {src.source.name}")

    def _memory_named(self, name: str) -> Destination:
        """The memory of a target that has a view."""
        return self._memories[self._views[name].address]

    def _memory_of(self, tensor: torch.Tensor) -> Destination | None:
        if tensor.layout is not torch.strided:
            return None
        try:
            start = int(tensor.storage_offset()) * tensor.itemsize
            return self._memories.get(tensor.data_ptr() - start)
        except RuntimeError:
            # It has none: a parameter that another thread let stand for a weight.
            return None

    def _run_of(self, dst: torch.Tensor, src: LazyWeight, memory: Destination) -> Copy | None:
        """The copy as data if it is one run of bytes on both sides, as most are; see `_copy_of`."""
        source, dtype = src.source, dst.dtype
        if type(source) is not FileSource or dtype != src.dtype or dtype.is_complex:
            return None
        if not (dst.is_contiguous() and src.is_contiguous()) or dst.is_neg() or src.is_neg():
            return None
        item, count = dtype.itemsize, dst.numel()
        start = int(dst.storage_offset()) * item
        target = self._holder_of(start, start + count * item, memory)
        if target is None:
            return None
        entry, name = source.entry, dtype_name(dtype)
        first = entry.start + int(src.storage_offset()) * item
        return straight(source.name, entry.file, target, first, start, count, name)

    def _copy_of(self, dst: torch.Tensor, src: LazyWeight, memory: Destination) -> Copy | None:
        """The copy as data, counted from the storage's first byte; `None` where no target holds it all."""
        if dst.is_conj() or dst.is_neg() or src.is_conj() or src.is_neg():
            return None
        source = src.source
        located = source.locate(src)
        seen = source.dtypes if source.dtype == src.dtype else (dtype_name(src.dtype),)
        dtypes = without_detours((*seen, dtype_name(dst.dtype)))
        if located is None or len(dtypes) > 3:
            return None
        item = dst.itemsize
        dims = [
            (size, stride, step * item)
            for parts, dst_stride in zip(located.dims, dst.stride(), strict=True)
            for size, stride, step in _steps(parts, dst_stride)
        ]
        copy = normalise(
            Copy(
                tensor=source.name,
                file=source.entry.file,
                target="",
                src_start=located.start,
                dst_start=int(dst.storage_offset()) * item,
                shape=tuple([size for size, _, _ in dims]),
                src_strides=tuple([stride for _, stride, _ in dims]),
                dst_strides=tuple([stride for _, _, stride in dims]),
                src_dtype=dtypes[0],
                dst_dtype=dtypes[-1],
                via=dtypes[1] if len(dtypes) == 3 else "",
            )
        )
        if not writes_once(copy):
            return None
        name = self._holder_of(copy.dst_start, copy.dst_end, memory, dst.dtype if copy.converts else None)
        return None if name is None else copy._replace(target=name)

    def _place_of(self, dst: torch.Tensor) -> Copy:
        """A tensor's place in its storage, as that of a copy from nowhere."""
        item, dtype = dst.itemsize, dtype_name(dst.dtype)
        strides = tuple([stride * item for stride in dst.stride()])
        start = int(dst.storage_offset()) * item
        return normalise(Copy("", "", "", 0, start, tuple(dst.shape), strides, strides, dtype, dtype))

    def _holder_of(
        self, start: int, end: int, memory: Destination, dtype: torch.dtype | None = None
    ) -> str | None:
        """The target that some bytes of its storage lie in; of a dtype, if that is given."""
        names: Iterable[str] = (memory.name,)
        if memory.places is not None:
            names = memory.places.holding(start, end)
        elif not ((view := self._views[memory.name]).first <= start and end <= view.first + view.nbytes):
            return None
        return next((name for name in names if dtype is None or self._views[name].dtype == dtype), None)

    def _meeting(self, start: int, end: int, memory: Destination) -> Iterable[str]:
        """The targets that have any of some bytes of their storage."""
        if memory.places is not None:
            return memory.places.meeting(start, end)
        view = self._views[memory.name]
        return (memory.name,) if view.first < end and start < view.first + view.nbytes else ()

    def _in_target(self, copy: Copy) -> Copy:
        first = self._views[copy.target].first
        return copy._replace(dst_start=copy.dst_start - first) if first else copy

    # What happens to the memory of targets.

    def drain(self, memory: Destination | None = None) -> None:
        """Makes noted copies now: all, or where reading early costs more, those into one memory."""
        with self._lock:
            wanted = [memory] if memory is not None and self._reader.is_streamed else self._waiting
            copies = self._take_copies(wanted)
            self.make_fills(wanted)
            if not copies:
                return
            for copy in copies:
                # What comes later may write there again.
                self._memory_named(copy.target).repeated = True
            reads = schedule(copies, self._file_order)
            self._files.open_all({read.file: None for read in reads})
            self.started = True
            for read in reads:
                self._count_early(read.file, read.end - read.start)
            self.surprises["values were read while loaders ran"] = None
            self._reader.execute(reads, self._views)

    def make_fills(self, memories: Sequence[Destination] | None = None) -> None:
        """Makes noted constants now, all or those of some memories; what is copied there comes later."""
        with self._lock:
            for fill in self._take_fills(self._waiting if memories is None else memories):
                self.started = True
                view = self._views[fill.target]
                make_fill(fill._replace(dst_start=fill.dst_start - view.first), view)

    def _take_fills(self, memories: Sequence[Destination]) -> list[Fill]:
        """Noted constants of some memories, in order within each; none are left there."""
        fills: list[Fill] = []
        for memory in memories:
            fills += memory.fills or ()
            memory.fills = None
        self._waiting = [memory for memory in self._waiting if memory.is_waiting]
        return fills

    def finish(self) -> list[Copy]:
        """The copies that are still to be made; forgets them.

        Raises:
            RaywlError: Copies that another thread waited for couldn't be made.
        """
        return self._take_copies(self._waiting)

    def _take_copies(self, memories: Sequence[Destination]) -> list[Copy]:
        with self._lock:
            if self._failed is not None:
                raise self._failed
            copies = [self._in_target(copy) for memory in memories for copy in memory.take()]
            self._waiting = [memory for memory in self._waiting if memory.is_waiting]
            return copies

    def _share(self) -> None:
        """Makes what is noted, and from now on every copy at once: another thread may be looking."""
        with self._lock:
            if not self._shared:
                self._shared = True
                self.drain()

    def _watch_threads(self) -> None:
        """From the first lazy weight on: a thread that starts may read what was written before."""
        if self._watching or self._thread is None:
            return
        self._watching, self._profile_before = True, threading.getprofile()

        def hook(*event: Any) -> Any:
            # Runs in the new thread, before anything of its own.
            sys.setprofile(self._profile_before)
            if not threading.current_thread().name.startswith(READER_THREADS):
                try:
                    self._share()
                except RaywlError as error:
                    self._failed = error
                    raise
            return None if self._profile_before is None else self._profile_before(*event)

        threading.setprofile(hook)

    def set_nbytes(self, name: str) -> int:
        """Bytes of a target that copies have set, each counted once, through whichever target."""
        memory = self._memory_named(name) if name in self._views else None
        if memory is None or (memory.places is None and not memory.repeated):
            return self.written[name].nbytes
        if memory.merged is None:
            copies = self._copies_of
            memory.merged = merge_runs(
                run
                for target in memory.names
                for copy in copies.get(target, ())
                for run in runs_of(copy._replace(dst_start=copy.dst_start + self._views[target].first))
            )
        return covered_bytes(self._views[name].runs(), memory.merged)

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
        if self._watching:
            threading.setprofile(self._profile_before)
            self._watching = False

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
        if name == "_foreach_copy_":
            # One by one: some may be lazy, and each may read what the ones before it wrote.
            for dst, src in zip(args[0], args[1], strict=True):
                self.__torch_function__(torch.Tensor.copy_, types, (dst, src))
            return None
        filled = fill_of(func, name, args, kwargs)
        if filled is not None and self.fill(*filled):
            return None if name == "__setitem__" else filled[0]
        pairs = lazy_copies(name, args, kwargs)
        if pairs is None:
            self._before(name, args, kwargs)
            return func(*args, **kwargs)
        for dst, src in pairs:
            src.source.reader.copy(dst, src)
        return pairs[0][0] if name == "copy_" else None

    def _before(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Makes what is pending where a function is about to look at, or write to, a target's memory."""
        for tensor in _tensors((*args, *kwargs.values())):
            memory = self._memory_of(tensor)
            if memory is None:
                continue
            if memory.is_waiting:
                self.drain(memory)
            if name in ALIASES:
                memory.immediate = True
                self._note_write(memory, tensor, name)
        if writes(name, kwargs):
            for tensor in _tensors((written_to(args, kwargs),)):
                memory = self._memory_of(tensor)
                if memory is not None:
                    self._note_write(memory, tensor, name)

    def _note_write(self, memory: Destination, tensor: torch.Tensor, what: str) -> None:
        start = int(tensor.storage_offset()) * tensor.itemsize
        strides = tuple(stride * tensor.itemsize for stride in tensor.stride())
        end = start + span_of(tuple(tensor.shape), strides, tensor.itemsize)
        self.started = True
        for name in self._meeting(start, end, memory):
            self.written[name].otherwise = True
            self.surprises[f"{name} was also written by {what}"] = None
            # Who asks for an address hasn't written yet.
            if tensor.numel() and what not in ALIASES:
                self._note_overwritten(name, self._place_of(tensor))

    def _note_overwritten(self, name: str, place: Copy) -> None:
        """Notes that a place in a target's storage was written to, if a copy was there before."""
        write = place._replace(dst_start=place.dst_start - self._views[name].first)
        if name not in self._overwritten and any(
            may_overlap(write, copy) for copy in self._copies_of.get(name, ())
        ):
            self._overwritten.add(name)


def _steps(parts: tuple[Dim, ...], dst_stride: int) -> Iterable[tuple[int, int, int]]:
    """The parts of a dim: how many, apart how far in the file, and in the destination."""
    if len(parts) == 1:
        return ((*parts[0], dst_stride),)
    rows, step = [], dst_stride
    for size, stride in reversed(parts):
        rows.append((size, stride, step))
        step *= size
    return reversed(rows)


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
