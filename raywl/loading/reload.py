"""Loading other weights into a live model: checked in full first, then written in place."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from raywl.errors import CheckpointError, ShapeMismatchError
from raywl.loaders.ranks import ambient_context
from raywl.loading.binding import Binding
from raywl.loading.history import check_same_architecture
from raywl.loading.lazy import FACTS, VIEWS, LazyWeight, lazy_copies, writes, written_to
from raywl.loading.load import check_report, fill_report, load_into
from raywl.loading.record import Recorder
from raywl.loading.targets import Target, collect_targets, is_dtensor
from raywl.opening import Checkpoint, open_checkpoint
from raywl.parameters.modes import trial
from raywl.plan import Copy
from raywl.progress import Progress
from raywl.readers import open_reader
from raywl.readers.memory import can_convert
from raywl.report import LoadReport
from raywl.types import ParallelContext

__all__ = ["ReloadReport", "check_reload", "reload_into"]


@dataclass(slots=True)
class ReloadReport(LoadReport):
    """One rank's reload."""

    restored: list[str] = field(default_factory=list)
    """Parameters that a loader had given other memory, and whose values were moved back to their own."""


def reload_into(
    model: nn.Module,
    ref: Checkpoint | str | os.PathLike[str],
    *,
    parallel: ParallelContext | None = None,
    progress: bool | Progress | None = None,
    strict: bool | str = True,
    strategy: str | None = None,
    shards: Mapping[str, Any] | None = None,
    tp_plan: Mapping[str, str] | None = None,
    mapper: Any = None,
    stacked: Any = None,
    expert_mapping: Any = None,
    optional: Any = None,
    release_page_cache: bool = False,
    **source: Any,
) -> ReloadReport:
    """Loads another checkpoint into a live model, in place: every parameter keeps its address.

    Names, shapes, dtypes and cuts are checked before the first write: a checkpoint that doesn't fit
    leaves the old weights as they are, bit for bit. There is no second copy of the model, so a file
    that turns out damaged while it is read leaves the model partly loaded, and the error says so.

    Args:
        model: A model without `meta` tensors, but in optional modules that the checkpoint hasn't got.
        ref: What `open_checkpoint` takes, or an open checkpoint.
        parallel: As for `load_into`.
        progress: As for `load_into`.
        strict: As for `load_into`.
        strategy: As for `load_into`.
        shards: As for `load_into`.
        tp_plan: As for `load_into`.
        mapper: As for `load_into`.
        stacked: As for `load_into`.
        expert_mapping: As for `load_into`.
        optional: As for `load_into`.
        release_page_cache: As for `load_into`.
        **source: Keyword arguments of `open_checkpoint`.

    Raises:
        ValueError: The model has `meta` tensors: it was never loaded.
        MissingWeightsError: The checkpoint lacks weights that the model has.
        ShapeMismatchError: A tensor doesn't fit its parameter.
        CheckpointError: The checkpoint is damaged.
    """
    start = time.perf_counter()
    binding = {
        "shards": shards,
        "tp_plan": tp_plan,
        "mapper": mapper,
        "stacked": stacked,
        "expert_mapping": expert_mapping,
        "optional": optional,
    }
    checkpoint = check_reload(model, ref, parallel=parallel, strict=strict, **binding, **source)
    checked = time.perf_counter()
    memory = [(target, target.tensor, target.local.detach()) for target in collect_targets(model)]
    try:
        loaded = load_into(
            model,
            checkpoint,
            parallel=parallel,
            progress=progress,
            strict=strict,
            strategy=strategy,
            release_page_cache=release_page_cache,
            **binding,
        )
    except BaseException:
        _move_back(memory, keep=False)
        raise
    report = ReloadReport(**{name: getattr(loaded, name) for name in LoadReport.__dataclass_fields__})
    report.restored = _move_back(memory)
    report.phases = {"check": checked - start, **report.phases}
    report.seconds = time.perf_counter() - start
    return report


def check_reload(
    model: nn.Module,
    ref: Checkpoint | str | os.PathLike[str],
    *,
    parallel: ParallelContext | None = None,
    strict: bool | str = True,
    shards: Mapping[str, Any] | None = None,
    tp_plan: Mapping[str, str] | None = None,
    mapper: Any = None,
    stacked: Any = None,
    expert_mapping: Any = None,
    optional: Any = None,
    **source: Any,
) -> Checkpoint:
    """Checks that a checkpoint can be loaded into a live model, without writing to it.

    Loaders are run on stand-ins on `meta` that have their parameters' shapes and attributes; so a loader
    that looks at its parameter's old values can't be checked, and its error is raised. Meanwhile the model
    holds the stand-ins: it can't be used.

    Returns:
        The open checkpoint.

    Raises:
        As `reload_into`.
    """
    if isinstance(ref, Checkpoint):
        if source:
            raise ValueError(f"{sorted(source)} are for opening a checkpoint, and this one is open")
        checkpoint = ref
    else:
        checkpoint = open_checkpoint(ref, **source)
    context = parallel or ambient_context()
    binding = Binding(
        model,
        checkpoint,
        context,
        shards=shards,
        tp_plan=tp_plan,
        mapper=mapper,
        stacked=stacked,
        expert_mapping=expert_mapping,
        device=None,
        optional=optional,
    )
    binding.route()
    unmade = [
        target.name for target in binding.targets if target.is_meta and target.name not in binding.absent
    ]
    if unmade:
        raise ValueError(f"can't reload a model that was never loaded: {unmade[0]} is on meta")
    report = LoadReport(checkpoint.source.ref, checkpoint.identity, context)
    with context, torch.no_grad(), open_reader(checkpoint, "buffered") as reader:
        binding.prepare(reader, None)
        checkpoint.fetch(binding.files_of_loaders(None))
        recorder = _DryRecorder(checkpoint, reader, {target.name: target.local for target in binding.targets})
        with trial(), _attributes_kept(model), _stand_ins(binding.targets, recorder):
            binding.record(recorder, None)
        fill_report(report, binding, recorder, [])
        with warnings.catch_warnings():
            # The load says it.
            warnings.simplefilter("ignore")
            check_report(report, binding, strict)
        if strict:
            check_same_architecture(model, checkpoint, report)
    return checkpoint


_TAKES_ALL = FACTS | VIEWS | {"__get__", "__set__", "copy_", "_foreach_copy_"}
"""Functions that take a stand-in beside tensors of another device, or look at no element of it."""


def _is_meta(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return any(map(_is_meta, value))
    return isinstance(value, torch.Tensor) and value.device.type == "meta"


class _DryRecorder(Recorder):
    """Notes what loaders copy, as for a load, and makes no copy: neither to stand-ins nor to live memory."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._mirrors: dict[int, torch.Tensor] = {}
        self._mirrored: dict[int, Any] = {}

    def mirror(self, tensor: torch.Tensor) -> torch.Tensor:
        """A meta tensor that lies in its storage as `tensor` does; what shares memory shares the mirror's."""
        storage = tensor.untyped_storage()
        memory = self._memories.get(storage.data_ptr())
        if memory is None:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        base = self._mirrors.get(storage.data_ptr())
        if base is None:
            base = torch.empty(storage.nbytes(), dtype=torch.uint8, device="meta")
            self._mirrors[storage.data_ptr()] = base
            self.adopt(base, memory)
        empty = torch.empty(0, dtype=tensor.dtype, device="meta")
        return empty.set_(base.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())

    def memory_of(self, tensor: torch.Tensor) -> Any:
        """What is known of a tensor's memory, or `None`."""
        return self._memory_of(tensor)

    def adopt(self, stand_in: torch.Tensor, memory: Any) -> None:
        """Lets a meta tensor's storage stand for a live one, from its first byte on."""
        self._mirrored[stand_in.untyped_storage()._cdata] = memory

    def make_fills(self, memories: Any = None) -> None:
        """Nothing is made, and live memory stays as it is."""
        self._take_fills(self._waiting)

    def drain(self, memory: Any = None) -> None:
        """Nothing is made; only noted as made."""
        self.make_fills()
        for copy in self.finish():
            self._memory_named(copy.target).repeated = True

    def _memory_of(self, tensor: torch.Tensor) -> Any:
        if tensor.device.type == "meta" and tensor.layout is torch.strided:
            return self._mirrored.get(tensor.untyped_storage()._cdata)
        return super()._memory_of(tensor)

    def _copy_now(self, dst: torch.Tensor, src: Any, memory: Any, noted: Copy | None) -> None:
        live = memory is not None and dst.device.type != "meta"
        super()._copy_now(self.mirror(dst) if live else dst, src, memory, noted)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if writes(name, kwargs):
            written = written_to(args, kwargs)
            if kwargs.get("out") is not None:
                kwargs = {**kwargs, "out": self._unreal(written)}
            elif args:
                args = (self._unreal(written), *args[1:])
        if name == "__set__" and isinstance(args[-1], torch.Tensor) and args[0].device.type == "meta":
            # `param.data = value` on a stand-in takes only what is on meta as well.
            args = (*args[:-1], torch.empty_like(args[-1], device="meta"))
        elif name == "copy_" and len(args) > 1 and _is_meta(args[1]):
            # Out of a stand-in into what is no parameter's memory.
            args = (self._on_meta(args[0]), *args[1:])
        elif (
            name not in _TAKES_ALL
            and lazy_copies(name, args, kwargs) is None
            and any(map(_is_meta, (*args, *kwargs.values())))
        ):
            args, kwargs = self._on_meta(args), {key: self._on_meta(kwargs[key]) for key in kwargs}
        return super().__torch_function__(func, types, args, kwargs)

    def _on_meta(self, value: Any) -> Any:
        """Arguments of a function that takes a stand-in: torch takes no other devices beside it."""
        if isinstance(value, tuple | list):
            return type(value)(map(self._on_meta, value))
        if not isinstance(value, torch.Tensor) or value.device.type == "meta" or is_dtensor(value):
            return value
        if isinstance(value, LazyWeight):
            self.note_use(value.source)
        with torch._C.DisableTorchFunctionSubclass():
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")

    def _unreal(self, value: Any) -> Any:
        """What is written to, with mirrors for live memory."""
        if isinstance(value, tuple | list):
            return type(value)(map(self._unreal, value))
        if not isinstance(value, torch.Tensor) or isinstance(value, LazyWeight) or is_dtensor(value):
            return value
        if value.device.type == "meta" or self._memory_of(value) is None:
            return value
        return self.mirror(value)


@contextmanager
def _attributes_kept(model: nn.Module) -> Iterator[None]:
    """Puts back whatever loaders set on modules: what they make out of stand-ins has no values."""
    registries = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
    before = [
        (module, dict(vars(module)), [getattr(module, name).copy() for name in registries])
        for module in model.modules()
    ]
    try:
        yield
    finally:
        for module, attributes, registered in before:
            vars(module).clear()
            vars(module).update(attributes)
            for name, entries in zip(registries, registered, strict=True):
                getattr(module, name).clear()
                getattr(module, name).update(entries)


@contextmanager
def _stand_ins(targets: list[Target], recorder: _DryRecorder) -> Iterator[None]:
    """Registers meta tensors with the parameters' classes, shapes, strides and attributes in their place."""
    real = [(target, target.tensor) for target in targets]
    try:
        for target in targets:
            target.put(_stand_in(target, recorder))
        yield
        for target, tensor in real:
            got = target.registered()
            if got.shape != tensor.shape:
                raise ShapeMismatchError(target.name, tensor.shape, got.shape, "its loader changes its shape")
            if not can_convert(got.dtype, tensor.dtype):
                raise CheckpointError(
                    None, target.name, f"its loader makes it {got.dtype}, which {tensor.dtype} can't hold"
                )
            if got is not target.tensor:
                recorder.note_registered(target.name)
    finally:
        for target, tensor in real:
            target.put(tensor)


def _stand_in(target: Target, recorder: _DryRecorder) -> Any:
    tensor: Any = target.tensor
    new: Any
    if is_dtensor(tensor):
        new = torch.empty_like(tensor.detach(), device="meta")
        memory = recorder.memory_of(target.local)
        if memory is not None and target.local.storage_offset() == 0:
            recorder.adopt(new.to_local(), memory)
    else:
        new = recorder.mirror(tensor.detach())
    if isinstance(tensor, nn.Parameter):
        if type(tensor) is nn.Parameter or is_dtensor(tensor):
            new = nn.Parameter(new, requires_grad=tensor.requires_grad)
        else:
            new = torch.Tensor._make_subclass(type(tensor), new, tensor.requires_grad)
    for key, value in tensor.__dict__.items():
        if key not in ("_local_tensor", "_spec"):
            setattr(new, key, value)
    return new


def _move_back(memory: list[tuple[Target, torch.Tensor, torch.Tensor]], keep: bool = True) -> list[str]:
    """Puts tensors that a loader left in other memory back where the parameter was before.

    Args:
        memory: Each target, what was registered for it, and its memory.
        keep: Takes the new values along.

    Returns:
        Their names.
    """
    moved = []
    for target, before, old in memory:
        now: Any = target.registered()
        local = now.to_local() if hasattr(now, "to_local") else now
        if now is before and local.data_ptr() == old.data_ptr() and local.stride() == old.stride():
            continue
        with torch.no_grad():
            if keep and local.data_ptr() != old.data_ptr():
                old.copy_(local)
            if local.data_ptr() != old.data_ptr() or local.stride() != old.stride():
                before.data = old
            target.put(before)
        moved.append(target.name)
    return moved
