"""Loading a checkpoint into the parameters of one rank's model."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from raywl.checkpoint.manifest import root
from raywl.errors import MissingWeightsError, RaywlError, some_of
from raywl.loaders.ranks import ambient_context
from raywl.loading.binding import Binding
from raywl.loading.fetching import make_local
from raywl.loading.history import note_loaded
from raywl.loading.record import Recorder
from raywl.loading.releasing import released_after
from raywl.loading.scales import unused_scales
from raywl.loading.targets import adopt_registered, init_buffers, restore
from raywl.node.page_cache import record_checkpoint_files
from raywl.opening import Checkpoint, open_checkpoint
from raywl.plan import LoadPlan
from raywl.plan.plan import TargetInfo
from raywl.plan.reads import schedule
from raywl.progress import Progress, make_progress
from raywl.readers import Reader, open_reader
from raywl.readers.memory import dtype_name
from raywl.readers.streamed import is_streamed
from raywl.remap.kv_scales import kv_scale_kind, unused_kv_scales
from raywl.report import LoadReport
from raywl.strategies import check_strategy
from raywl.timeline import Timeline
from raywl.types import ParallelContext

__all__ = ["check_report", "fill_report", "load_into"]


def load_into(
    model: nn.Module,
    ref: Checkpoint | str | os.PathLike[str],
    *,
    parallel: ParallelContext | None = None,
    shards: Mapping[str, Any] | None = None,
    tp_plan: Mapping[str, str] | None = None,
    mapper: Any = None,
    stacked: Sequence[tuple[str, str, Any]] | None = None,
    expert_mapping: Sequence[tuple[str, str, int | None, Any]] | None = None,
    strategy: str | None = None,
    plan: LoadPlan | None = None,
    strict: bool | str = True,
    device: torch.device | str | None = None,
    optional: Sequence[str] | None = None,
    release_page_cache: bool = False,
    progress: bool | Progress | None = None,
    **source: Any,
) -> LoadReport:
    """Loads a checkpoint into a model: only the bytes that this rank keeps, straight into its parameters.

    How a parameter is cut comes from its own `weight_loader`; else from its placements, if it is a
    `DTensor`; else from `shards`; else from `tp_plan`; else it is replicated. A model with a
    `load_weights(iterator)` of its own, and no mapping given, has that called. All of them get lazy
    weights, of which only what is copied is read.

    Names that the model doesn't have are looked for by the rules for scales of the KV cache and for experts
    (`raywl.remap`): `kv_scale` fills `k_scale` and `v_scale`, and `experts.w13_weight` is found under
    `experts.routed_experts.`. Scales that stay unused are summed up in one warning.

    Everything that can be checked before the first byte is written is checked then: the model is
    untouched by an error, unless the error's `partly_loaded` is true.

    Args:
        model: On any device; what is on `meta` is materialised on `device`.
        ref: What `open_checkpoint` takes, or an open checkpoint.
        parallel: Where this rank stands; by default the ambient context, else the default process
            group of `torch.distributed`, else a lone rank.
        shards: Name patterns (`*`, `?`) to `Shard(dim)` or `Replicate()`, cut as DTensor cuts.
        tp_plan: Name patterns to styles, as Hugging Face configs carry them; parts must be equal.
        mapper: An object with `map_name(name) -> str | None`, for example a `WeightsMapper`.
        stacked: `(param_name, weight_name, shard_id)` rows: `weight_name` in a name is replaced by
            `param_name`, and that parameter's `weight_loader(param, weight, shard_id)` is called.
            A `shard_id` of `None` means all of the parameter. Several rows may take one tensor (keys that are
            values too).
        expert_mapping: `(param_name, weight_name, expert_id, shard_id)` rows, likewise, with
            `weight_loader(param, weight, name, shard_id=..., expert_id=...)`.
        strategy: How files are read: `"auto"` (as `None`), `"buffered"`, `"direct"`, `"mmap"` or
            `"prefetch"`; `raywl.strategies` says what they do.
        plan: A recorded or saved plan of the same checkpoint, rank and model, to use instead of names
            and loaders.
        strict: `True`: a parameter or persistent buffer that stays unset is an error. `"exact"`: so is
            a tensor that has no place. `False`: both are only reported.
        device: Where `meta` tensors are made; by default where the model's other tensors are, else the CPU.
        optional: Names of modules (a tower for images) that the checkpoint may have nothing of; their weights
            then stay as they are, `meta` ones on `meta`, which the report's notes say. Of a module that is
            there in part the rest is missing, as ever.
        release_page_cache: Drop the checkpoint's files from the page cache once they are read. Of several
            processes of this node that load it at the same time, all asked so, the last one does.
        progress: `True` for a bar on standard error, or a callable.
        **source: Keyword arguments of `open_checkpoint`.

    Returns:
        What was loaded, skipped, missing, unexpected, and how long it took.

    Raises:
        ValueError: An unknown strategy, a style or cut that isn't possible, or a plan of something else.
        MissingWeightsError: Under `strict`, parameters that nothing sets.
        ShapeMismatchError: A tensor doesn't fit its parameter.
        CheckpointError: The checkpoint is damaged, or changed while it was read.
    """
    check_strategy(strategy)
    if strict not in (True, False, "exact"):
        raise ValueError(f"strict must be True, False or 'exact', not {strict!r}")
    if not isinstance(plan, LoadPlan | None):
        raise TypeError(
            f"plan must be a LoadPlan, not {type(plan).__name__}; LoadPlan.load(path) reads a saved one"
        )
    _check_arguments(model, parallel, mapper, stacked, expert_mapping, device)
    timeline = Timeline()
    if isinstance(ref, Checkpoint):
        if source:
            raise ValueError(f"{sorted(source)} are for opening a checkpoint, and this one is open")
        checkpoint = ref
    else:
        checkpoint = open_checkpoint(ref, **source)
    context = parallel or ambient_context()
    report = LoadReport(checkpoint.source.ref, checkpoint.identity, context, timeline=timeline)
    report.phases["open"] = timeline.note_phase("open")
    binding = Binding(
        model, checkpoint, context, shards=shards, tp_plan=tp_plan, mapper=mapper, stacked=stacked,
        expert_mapping=expert_mapping, device=device, optional=optional,
    )  # fmt: skip
    opening = open_reader(checkpoint, strategy, num_local_ranks=context.local_size, timeline=timeline)
    released: AbstractContextManager[None] = contextlib.nullcontext()
    if release_page_cache and not is_streamed(checkpoint):
        released = released_after(checkpoint, report)
    with released, context, torch.no_grad(), _one_torch_thread(), _gc_paused(), opening as reader:
        _load(model, binding, reader, report, plan, strict, make_progress(progress))
    note_loaded(model, checkpoint, report, binding.computed)
    report.phases["post"] = timeline.note_phase("post")
    report.seconds = time.perf_counter() - timeline.origin_s
    return report


def _check_arguments(
    model: Any, parallel: Any, mapper: Any, stacked: Any, expert_mapping: Any, device: Any
) -> None:
    """Names what is of a wrong kind, where it would fail later in words of something else."""
    for name, value, kind in (("model", model, nn.Module), ("parallel", parallel, ParallelContext)):
        if not isinstance(value, kind) and not (name == "parallel" and value is None):
            raise TypeError(f"{name} must be a {kind.__name__}, not {type(value).__name__}")
    if mapper is not None and not callable(getattr(mapper, "map_name", None)):
        raise TypeError(
            f"mapper must have map_name(name), as a WeightsMapper has; {type(mapper).__name__} hasn't"
        )
    for name, rows, length in (("stacked", stacked, 3), ("expert_mapping", expert_mapping, 4)):
        for row in rows or ():
            if not isinstance(row, tuple | list) or len(row) != length:
                raise ValueError(f"{name} has rows of {length} values, not {row!r}")
    if device is not None and torch.device(device).type == "meta":
        raise ValueError("device is where weights go, which can't be meta")


def _load(
    model: nn.Module,
    binding: Binding,
    reader: Reader,
    report: LoadReport,
    plan: LoadPlan | None,
    strict: bool | str,
    progress: Progress | None,
) -> None:
    timeline = report.timeline
    recorder: Recorder | None = None
    try:
        with restore(binding.targets):
            unmade = init_buffers(model, binding.targets, binding.device)
            recorder = binding.prepare(reader, plan)
            make_local(binding.checkpoint, binding.files_of_loaders(plan), report, progress)
            binding.record(recorder, plan)
            for target, was_lazy in adopt_registered(binding.targets, recorder.mappings.values_of):
                recorder.note_registered(target.name)
                if was_lazy:
                    report.notes.append(f"{target.name}: a loader left its weight in the model; it was read")
            fill_report(report, binding, recorder, unmade)
            rest = recorder.finish()
            check_report(report, binding, strict)
            assert report.plan is not None
            whole = len(rest) == len(recorder.copies)
            reads = report.plan.reads if whole else schedule(rest, binding.file_order)
            files = list(dict.fromkeys(read.file for read in reads))
            make_local(binding.checkpoint, files, report, progress)
            reader.files.open_all(files)
        if not reader.is_streamed:
            record_checkpoint_files(map(binding.checkpoint.path, {*files, *recorder.nbytes_early}))
        count = _Count(sum(read.end - read.start for read in reads), progress)
        with reader.reading(reads):
            planned_s = timeline.note_phase("plan")
            report.phases["plan"] = report.phases.get("plan", 0.0) + planned_s
            recorder.started = bool(reads) or recorder.started
            recorder.make_fills()
            before = timeline.parts
            reader.execute(reads, recorder.views, count)
            wall_s = timeline.note_phase("read")
            report.phases |= timeline.parts_of(wall_s, min(reader.num_threads, len(reads)), before)
        reader.files.check_unchanged()
    except Exception as error:
        started = recorder is not None and recorder.started
        if isinstance(error, RaywlError):
            error.partly_loaded = started
        elif started:
            error.add_note("raywl: the model is partly loaded")
        raise
    report.notes += reader.notes
    report.limit_bytes_per_s = reader.limit_bytes_per_s
    report.bytes_by_file = dict(recorder.nbytes_early)
    for read in reads:
        report.bytes_by_file[read.file] = report.bytes_by_file.get(read.file, 0) + read.end - read.start
    report.bytes_read = sum(report.bytes_by_file.values())
    report.bytes_by_source[reader.word] = report.bytes_read


def fill_report(report: LoadReport, binding: Binding, recorder: Recorder, unmade: list[str]) -> None:
    """What is known before the reads: it decides whether they are made at all."""
    planned = binding.routed | {fill.target for fill in recorder.fills}
    report.plan = LoadPlan(
        identity=binding.checkpoint.identity,
        context=report.context,
        files=tuple(binding.file_order),
        copies=tuple(recorder.copies),
        fills=tuple(recorder.fills),
        targets={
            target.name: TargetInfo(dtype_name(target.tensor.dtype), target.local_shape, target.local_strides)
            for target in binding.targets
            if not target.is_meta and (target.name in planned or recorder.written[target.name].nbytes)
        },
        unplanned=tuple(recorder.surprises),
    )
    binding.computed = recorder.computed
    report.bytes_loaded = report.plan.nbytes_kept
    report.loaded = [name for name in binding.checkpoint.tensors if name in binding.used]
    report.unexpected = binding.unexpected
    report.skipped = dict(binding.skipped)
    report.unused_shards = binding.unused_shards
    report.notes += [*binding.checkpoint.notes, *binding.notes]
    report.missing = [name for name in unmade if name not in binding.may_miss]
    for target in binding.targets:
        if not target.persistent or target.name in binding.may_miss:
            continue
        written = recorder.written.get(target.name)
        nbytes = target.local_nbytes
        set_nbytes = 0 if written is None else recorder.set_nbytes(target.name)
        empty = binding.has_own_loader and not nbytes  # whose loader has nothing to copy
        if written is None or not (set_nbytes or written.otherwise or target.name in binding.routed or empty):
            report.missing.append(target.name)
        elif written.otherwise or not nbytes:
            continue
        elif not set_nbytes:
            report.missing.append(target.name)
        elif lacking := binding.lacking_parts(target):
            report.partial[target.name] = f"the checkpoint has no {some_of(lacking)}"
        elif set_nbytes < nbytes:
            report.partial[target.name] = f"{set_nbytes} of {nbytes} bytes are set"


def check_report(report: LoadReport, binding: Binding, strict: bool | str) -> None:
    where = root(binding.checkpoint.source)
    if report.unexpected:
        hint = _near(binding)
        if strict == "exact":
            reason = f"tensors that have no place in the model{hint}"
            raise MissingWeightsError(where, report.unexpected, reason)
        if others := [name for name in report.unexpected if kv_scale_kind(name) is None]:
            text = f"{len(others)} tensors of {report.ref} have no place in the model"
            warnings.warn(f"{text}{hint}: {some_of(others)}", stacklevel=4)
    if scales := unused_scales(report):
        warnings.warn(f"{report.ref}: {unused_kv_scales(scales)}", stacklevel=4)
    if report.unused_shards and report.context.pp_size == 1:
        unused = some_of(report.unused_shards)
        warnings.warn(f"shards match no parameter that they could cut: {unused}", stacklevel=4)
    if not strict:
        return
    if report.missing:
        reason = f"{len(report.missing)} parameters or buffers would stay unset"
        raise MissingWeightsError(where, report.missing, reason + _near(binding, report.missing))
    # What had memory before keeps there what its owner put: padding, on purpose or not.
    holes = {
        name: f"{name} ({why})"
        for name, why in report.partial.items()
        if strict == "exact" or name in binding.was_meta or not why.endswith("are set")
    }
    if holes:
        reason = f"{len(holes)} parameters would be set only in part"
        raise MissingWeightsError(where, list(holes.values()), reason + _near(binding, holes))
    if report.partial:
        rows = [f"{name} ({why})" for name, why in report.partial.items()]
        warnings.warn(f"{len(rows)} parameters are set only in part: {some_of(rows)}", stacklevel=4)


def _near(binding: Binding, params: Collection[str] | None = None) -> str:
    """Which tensors without a place are called almost as parameters are: as these, if they are given."""
    near = [
        f"{name} is near to {' and '.join(close)}"
        for name, close in binding.nearest.items()
        if params is None or any(param in params for param in close)
    ]
    return f" ({'; '.join(near)})" if near else ""


class _Count:
    """Sums the bytes of all reader threads for the progress display."""

    def __init__(self, total_bytes: int, progress: Progress | None) -> None:
        self._total_bytes, self._progress = total_bytes, progress
        self._done_bytes = 0
        self._lock = threading.Lock()
        if progress is not None:
            progress(0, total_bytes, "read")

    def __call__(self, nbytes: int) -> None:
        # One after the other, so that what is shown never goes back.
        with self._lock:
            self._done_bytes += nbytes
            if self._progress is not None:
                self._progress(self._done_bytes, self._total_bytes, "read")


@contextlib.contextmanager
def _gc_paused() -> Iterator[None]:
    """No collections in between: a plan is a great many small values, none of them garbage."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


@contextlib.contextmanager
def _one_torch_thread() -> Iterator[None]:
    """Copies run on one thread each: the reader threads are the parallelism."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
