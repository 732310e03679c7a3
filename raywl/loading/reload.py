"""Loading other weights into a live model: checked in full first, then written in place."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from raywl.errors import MissingWeightsError, ShapeMismatchError
from raywl.loaders.ranks import ambient_context
from raywl.loading.binding import Binding
from raywl.loading.load import load_into
from raywl.loading.record import Recorder
from raywl.loading.targets import Target, collect_targets
from raywl.opening import Checkpoint, open_checkpoint
from raywl.plan import Copy
from raywl.progress import Progress
from raywl.readers import OpenFiles
from raywl.report import LoadReport
from raywl.types import ParallelContext

__all__ = ["ReloadReport", "check_reload", "reload_into"]

_BINDING_ARGUMENTS = ("shards", "tp_plan", "mapper", "stacked", "expert_mapping")


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
    **source: Any,
) -> ReloadReport:
    """Loads another checkpoint into a live model, in place: every parameter keeps its address.

    Names, shapes, dtypes and cuts are checked before the first write: a checkpoint that doesn't fit
    leaves the old weights as they are, bit for bit. There is no second copy of the model, so a file
    that turns out damaged while it is read leaves the model partly loaded, and the error says so.

    Args:
        model: A model without `meta` tensors.
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
    }
    checkpoint = check_reload(model, ref, parallel=parallel, strict=strict, **binding, **source)
    checked = time.perf_counter()
    before = {id(target.tensor): target for target in collect_targets(model)}
    memory = {key: (target, target.local.detach()) for key, target in before.items()}
    loaded = load_into(
        model,
        checkpoint,
        parallel=parallel,
        progress=progress,
        strict=strict,
        strategy=strategy,
        **binding,
    )
    report = ReloadReport(**{name: getattr(loaded, name) for name in LoadReport.__dataclass_fields__})
    report.restored = _move_back(list(memory.values()))
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
    **source: Any,
) -> Checkpoint:
    """Checks that a checkpoint can be loaded into a live model, without writing to it.

    Loaders are run on stand-ins on `meta` that have their parameters' shapes and attributes.

    Returns:
        The open checkpoint.

    Raises:
        As `reload_into`.
    """
    if isinstance(ref, Checkpoint) and not source:
        checkpoint = ref
    else:
        checkpoint = open_checkpoint(ref, **source)  # type: ignore[arg-type]
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
    )
    unmade = [target.name for target in binding.targets if target.is_meta]
    if unmade:
        raise ValueError(f"can't reload a model that was never loaded: {unmade[0]} is on meta")
    with context, torch.no_grad(), OpenFiles(checkpoint) as files:
        binding.prepare(files, None, 1)
        with _stand_ins(binding.targets):
            binding.record(_DryRecorder(checkpoint, files, {}, num_threads=1), None)
    unset = [
        target.name
        for target in binding.targets
        if target.persistent and target.name not in binding.routed | binding.may_miss
    ]
    root = checkpoint.path("").rstrip("/")
    if strict and unset and not (binding.has_own_loader and not binding.routed):
        raise MissingWeightsError(
            root, unset, f"{len(unset)} parameters or buffers would keep their old values"
        )
    if strict == "exact" and binding.unexpected:
        raise MissingWeightsError(root, binding.unexpected, "tensors that have no place in the model")
    return checkpoint


class _DryRecorder(Recorder):
    """Lets loaders run without noting or making any copy."""

    def declare(self, copy: Copy) -> None:
        """Nothing: its shapes were checked when it was planned."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if getattr(func, "__name__", "") == "__set__" and isinstance(args[-1], torch.Tensor):
            # `param.data = value` on a stand-in takes only what is on meta as well.
            args = (*args[:-1], torch.empty_like(args[-1], device="meta"))
        return super().__torch_function__(func, types, args, kwargs)


@contextmanager
def _stand_ins(targets: list[Target]) -> Iterator[None]:
    """Registers meta tensors with the parameters' shapes, strides and attributes in their place."""
    real = [(target, target.tensor) for target in targets]
    try:
        for target, tensor in real:
            stand_in: Any = torch.empty_like(tensor.detach(), device="meta")
            if isinstance(tensor, nn.Parameter):
                stand_in = nn.Parameter(stand_in, requires_grad=tensor.requires_grad)
            stand_in.__dict__.update(tensor.__dict__)
            target.put(stand_in)
        yield
        for target, tensor in real:
            got = target.registered()
            if got.shape != tensor.shape:
                raise ShapeMismatchError(target.name, tensor.shape, got.shape, "its loader changes its shape")
    finally:
        for target, tensor in real:
            target.put(tensor)


def _move_back(memory: list[tuple[Target, torch.Tensor]]) -> list[str]:
    """Puts values that a loader left in other memory where the parameter was before."""
    moved = []
    for target, old in memory:
        now: Any = target.registered()
        local = now.to_local() if hasattr(now, "to_local") else now
        if local.data_ptr() == old.data_ptr() and local.stride() == old.stride():
            continue
        with torch.no_grad():
            old.copy_(local)
            if now is target.tensor:
                now.data = old
            else:
                target.tensor.data = old
                target.put(target.tensor)
        moved.append(target.name)
    return moved
