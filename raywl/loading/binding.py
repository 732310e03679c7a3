"""Binds a checkpoint's tensors to a model's parameters: by name, by loader, or by shape."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from raywl.checkpoint import TensorEntry
from raywl.checkpoint.dtypes import torch_dtype, torch_name, torch_shape
from raywl.checkpoint.manifest import sorted_for_iteration
from raywl.errors import CheckpointError, RaywlError, ShapeMismatchError, some_of
from raywl.loading.hf import ConversionRules, FusedPart, offsets_of_parts
from raywl.loading.lazy import LazyWeight
from raywl.loading.names import NameTable, Route
from raywl.loading.record import Recorder
from raywl.loading.scales import IGNORED, LEFT
from raywl.loading.targets import Target, collect_targets, is_dtensor, materialise
from raywl.loading.tp_plan import shards_from_tp_plan, unused_entries
from raywl.opening import Checkpoint
from raywl.plan import Copy, LoadPlan, copy_of_box, local_box
from raywl.plan.copies import straight
from raywl.plan.declare import SpecTable
from raywl.plan.fills import Fill
from raywl.readers import Reader
from raywl.readers.memory import can_convert, dtype_name
from raywl.remap.experts import parse_expert_id
from raywl.types import ParallelContext, Replicate, ShardSpec, as_shard_spec, check_patterns

__all__ = ["Binding"]

Box = tuple[tuple[int, int], ...]


class _Place(NamedTuple):
    """One place that only one tensor can take."""

    target: str
    shard_id: Any
    expert_id: int | None
    is_expert: bool
    fused: FusedPart | None


_NUM_HINTS = 3
"""Tensors without a place that near names are looked for."""
_BYTE_CODED = ("uint8", "float8_e8m0fnu", "float4_e2m1fn_x2")


class Binding:
    """Which tensors go where on this rank, and what remains.

    The life of one: made from names alone; `prepare` checks shapes and gives meta parameters memory;
    `record` runs the loaders. After that the public attributes are complete.
    """

    def __init__(
        self,
        model: nn.Module,
        checkpoint: Checkpoint,
        context: ParallelContext,
        *,
        shards: Mapping[str, Any] | None,
        tp_plan: Mapping[str, str] | None,
        mapper: Any,
        stacked: Sequence[tuple[str, str, Any]] | None,
        expert_mapping: Sequence[tuple[str, str, int | None, Any]] | None,
        device: torch.device | str | None,
        optional: Sequence[str] | None = None,
    ) -> None:
        check_patterns("tp_plan", tp_plan)
        self.model, self.checkpoint, self.context = model, checkpoint, context
        self.targets = collect_targets(model)
        self.by_name = {name: target for target in self.targets for name in target.names}
        self.device = _device_for(self.targets, device)
        self.file_order = {file.name: index for index, file in enumerate(checkpoint.files)}
        self.unexpected: list[str] = []
        """Tensors that have no place in the model."""
        self.nearest: dict[str, list[str]] = {}
        """Parameters that are called almost like one of the first of these."""
        self.skipped: dict[str, str] = {}
        """Tensors that are left out, and why."""
        self.used: set[str] = set()
        """Tensors of which something was copied."""
        self.routed: set[str] = set()
        """First names of targets that a tensor is bound to."""
        self.computed: frozenset[str] = frozenset()
        """First names of targets that hold something else than copies; known after `record`."""
        self.notes: list[str] = []
        self.was_meta = {name for target in self.targets if target.is_meta for name in target.names}
        """Names of targets that had no memory before."""
        self.may_miss = _ignored_missing(model, self.by_name)
        self._shards, self._tp_plan, self._mapper = SpecTable(shards), tp_plan, mapper
        self._cuts = bool(shards)
        self._stacked, self._expert_mapping = list(stacked or ()), list(expert_mapping or ())
        self._names = NameTable(self.by_name, stacked, expert_mapping, _prefixes(model))
        self._rules = ConversionRules(model)
        self._fused_starts: dict[str, tuple[int, ...]] = {}
        self.has_own_loader = (
            callable(getattr(model, "load_weights", None))
            and mapper is None
            and not (self._stacked or self._expert_mapping or shards or tp_plan)
        )
        self.absent: set[str] = set()
        """First names of targets of modules that the checkpoint has nothing of; known after `route`."""
        self._optional = _optional_targets(self.targets, model, optional, context)
        self._is_routed = False
        self._routes: list[tuple[str, Route]] = []
        self._parts: dict[str, set[tuple[Any, int | None]]] = {}

    # Names.

    def route(self) -> None:
        """Finds the place of every tensor, if that hasn't been done, and what optional modules are absent."""
        if self._is_routed:
            return
        self._is_routed = True
        if not self.has_own_loader:
            self._route_all()
        bound = {self.by_name[route.param].name for _, route in self._routes}
        for module, members in self._optional.items():
            names = [name for name in self.checkpoint.tensors if name not in self.skipped]
            there = sorted(bound.intersection(members)) or [n for n in names if is_below(n, module)]
            if there:
                continue
            self.absent.update(members)
            self.notes.append(
                f"{module}: the checkpoint has nothing of it, {len(members)} weights stay as they are"
            )
        self.may_miss |= self.absent

    def _route_all(self) -> None:
        """Finds the place of every tensor; the first of several tied names gets the memory."""
        ignored = _ignored_unexpected(self.model)
        taken: dict[_Place, tuple[str, str]] = {}
        for name in sorted_for_iteration(list(self.checkpoint.tensors), self.checkpoint.tensors):
            mapped = name if self._mapper is None else self._mapper.map_name(name)
            if mapped is None:
                self.skipped[name] = "dropped by the mapper"
                continue
            routes = self._names.find(mapped) or self._find_converted(mapped)
            if not routes:
                self._no_place(name, mapped, ignored)
            for route in routes:
                target = self.by_name[route.param]
                if not target.persistent:
                    self.skipped[name] = f"{route.param} is a buffer that the model computes itself"
                    continue
                first = target.twin or target
                key = _Place(first.name, *route[1:])
                if key in taken and route.expert_id is None:
                    self._second(name, route, first, taken, key)
                    continue
                taken[key] = name, route.param
                self._routes.append((name, route))
        self._routes = [(name, route) for name, route in self._routes if name not in self.skipped]

    def _find_converted(self, name: str) -> list[Route]:
        """The place under transformers' own rules for the model, when it is one of its models."""
        converted, part = self._rules.map_name(name)
        routes = self._names.find(converted) if converted != name else []
        return [route._replace(fused=part) for route in routes]

    def _second(
        self,
        name: str,
        route: Route,
        first: Target,
        taken: dict[_Place, tuple[str, str]],
        key: _Place,
    ) -> None:
        """A further tensor for a place that has one: fine where the place has two names, else an error."""
        other, its_param = taken[key]
        if its_param == route.param:
            raise CheckpointError(
                self.checkpoint.source.label(self.checkpoint.tensors[name].file),
                name,
                f"goes to {route.param}, and so does {other}: which one counts isn't known",
            )
        if route.param == first.name:
            # The model's first name for tied weights decides, whatever the order of files.
            self.skipped[other] = f"tied to {route.param}, which is loaded"
            taken[key] = name, route.param
            self._routes.append((name, route))
        else:
            self.skipped[name] = f"tied to {first.name}, which is loaded"

    def _no_place(self, name: str, mapped: str, ignored: list[re.Pattern[str]]) -> None:
        if any(pattern.search(mapped) for pattern in ignored):
            self.skipped[name] = IGNORED
        elif self.context.pp_size > 1:
            self.skipped[name] = f"no place on stage {self.context.pp_rank} of {self.context.pp_size}"
        else:
            self.unexpected.append(name)
            if len(self.unexpected) <= _NUM_HINTS and (close := self._names.nearest(mapped)):
                self.nearest[name] = close

    # Shapes and memory.

    def prepare(self, reader: Reader, plan: LoadPlan | None) -> Recorder:
        """Checks shapes and dtypes, gives meta targets memory, and makes the recorder.

        Raises:
            ShapeMismatchError: A tensor doesn't fit.
            ValueError: A cut, a style or a plan that isn't possible.
        """
        boxes: dict[int, Box | None] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        if plan is None:
            self.route()
        if plan is not None:
            self._check_plan(plan)
            shapes = {name: info.shape for name, info in plan.targets.items()}
        elif not self.has_own_loader:
            specs = self._specs()
            self._fused_starts = self._place_fused()
            for index, (name, route) in enumerate(self._routes):
                target = self.by_name[route.param]
                self._check_loader(name, route, target)
                if not _has_loader(target):
                    box = boxes[index] = self._box(name, route, target, specs)
                    if box is not None and not is_dtensor(target.tensor) and route.fused is None:
                        shapes[target.name] = tuple(end - start for start, end in box)
        for target in self.targets:
            if target.is_meta and target.persistent and target.name not in self.absent:
                one = target.tensor.numel() == 1
                shape = (
                    tuple(target.tensor.shape) if one else shapes.get(target.name, tuple(target.tensor.shape))
                )
                materialise(target, shape, self.device)
        if plan is not None:
            self._check_strides(plan)
        memory = {
            target.name: target.local if is_dtensor(target.tensor) else target.tensor
            for target in self.targets
            if not target.is_meta
        }
        # Before loaders run, since every torch call is watched then, which costs more than the call.
        self._declared = {
            index: self._copy_of(
                *self._routes[index], box, memory[self.by_name[self._routes[index][1].param].name]
            )
            for index, box in boxes.items()
        }
        return Recorder(self.checkpoint, reader, memory)

    def _specs(self) -> dict[str, ShardSpec]:
        """Specs by `tp_plan` for the parameters that tensors are bound to."""
        if not self._tp_plan:
            return {}
        full: dict[str, tuple[int, ...]] = {}
        for name, route in self._routes:
            target = self.by_name[route.param]
            if not _has_loader(target) and not is_dtensor(target.tensor):
                entry = self.checkpoint.tensors[name]
                full |= dict.fromkeys(target.names, torch_shape(entry.dtype, entry.shape))
        if unused := unused_entries(self._tp_plan, full):
            self.notes.append(f"tp_plan entries that match no parameter: {some_of(unused)}")
        return shards_from_tp_plan(self._tp_plan, full, self.context.tp_size)

    def _place_fused(self) -> dict[str, tuple[int, ...]]:
        """Where each tensor of a fused parameter starts in it, by the tensor's name."""
        parts: dict[str, dict[FusedPart, tuple[int, ...]]] = {}
        for name, route in self._routes:
            if route.fused is not None:
                entry = self.checkpoint.tensors[name]
                shape = torch_shape(entry.dtype, entry.shape)
                parts.setdefault(route.param, {})[route.fused] = shape
        starts = {
            param: offsets_of_parts(param, tuple(self.by_name[param].tensor.shape), shapes)
            for param, shapes in parts.items()
        }
        return {
            name: starts[route.param][route.fused] for name, route in self._routes if route.fused is not None
        }

    def _check_loader(self, name: str, route: Route, target: Target) -> None:
        if (route.shard_id is not None or route.is_expert) and not _has_loader(target):
            raise ValueError(
                f"{route.param} takes {name} as one of several parts (shard {route.shard_id!r}, expert "
                f"{route.expert_id}), but has no weight_loader to place it"
            )

    def _box(self, name: str, route: Route, target: Target, specs: Mapping[str, ShardSpec]) -> Box | None:
        """The part of a tensor that a parameter without a loader keeps; `None` for all of it."""
        entry = self.checkpoint.tensors[name]
        full = torch_shape(entry.dtype, entry.shape)
        has = tuple(target.tensor.shape)
        _check_dtype(self.checkpoint, name, entry, route.param, target.tensor.dtype)
        if has == full and not (self._cuts or specs or route.fused or is_dtensor(target.tensor)):
            return None
        if is_dtensor(target.tensor):
            if has != full:
                raise ShapeMismatchError(name, has, full, f"does not fit {route.param}, a DTensor")
            return _dtensor_box(target)
        if route.fused is not None:
            if self._shards_of(target) or any(specs.get(other) for other in target.names):
                raise ValueError(f"{route.param} is fused out of several tensors and can't be cut as well")
            return tuple((0, size) for size in full)
        spec = self._shards_of(target) or _first(specs.get(n) for n in target.names) or Replicate()
        box = local_box(name, full, spec, self.context.tp_rank, self.context.tp_size)
        local = tuple(end - start for start, end in box)
        fits = has == local or (target.is_meta and has == full)
        if not fits and not (target.tensor.numel() == 1 and local == full and _numel(full) == 1):
            what = f"does not fit {route.param}"
            if local != full:
                rank = f"rank {self.context.tp_rank} of {self.context.tp_size}"
                what += f" ({rank} keeps {list(local)} of {list(full)})"
            raise ShapeMismatchError(name, has, local, what)
        return box

    def _shards_of(self, target: Target) -> ShardSpec | None:
        found = {spec for name in target.names if (spec := self._shards.find(name)) is not None}
        if len(found) > 1:
            raise ValueError(f"{', '.join(target.names)} are tied, but have different shard specs: {found}")
        return found.pop() if found else None

    # Loaders.

    def files_of_loaders(self, plan: LoadPlan | None) -> list[str]:
        """Files that loaders may look into while they run, in order; known after `prepare`."""
        if plan is not None:
            return []
        names: Iterable[str] = self.checkpoint.tensors
        if not self.has_own_loader:
            names = [name for index, (name, _) in enumerate(self._routes) if index not in self._declared]
        return sorted({self.checkpoint.tensors[name].file for name in names}, key=self.file_order.__getitem__)

    def record(self, recorder: Recorder, plan: LoadPlan | None) -> None:
        """Runs all loaders, which note their copies in the recorder."""
        with recorder:
            if plan is not None:
                for copy in plan.copies:
                    self._check_copy(copy, recorder)
                for fill in plan.fills:
                    self._check_fill(fill, recorder)
                for fill in plan.fills:
                    recorder.declare_fill(fill)
                for copy in plan.copies:
                    recorder.declare(copy)
                self.used = {copy.tensor for copy in plan.copies}
                self.routed = {self.by_name[name].name for name in plan.targets}
            elif self.has_own_loader:
                self._run_own(recorder)
            else:
                for index, (name, route) in enumerate(self._routes):
                    self._place(recorder, name, route, self._declared.get(index))

    def _place(self, recorder: Recorder, name: str, route: Route, copy: Copy | None) -> None:
        target = self.by_name[route.param]
        self.routed.add(target.name)
        if self._stacked or self._expert_mapping:
            self._parts.setdefault(target.name, set()).add((route.shard_id, route.expert_id))
        if copy is not None:
            self.used.add(name)
            if 0 not in copy.shape:
                recorder.declare(copy)
            return
        weight = recorder.weight(name)
        try:
            _call_loader(target.tensor, weight, route)
        except RaywlError as error:
            error.add_note(f"while {route.param} took {name}")
            raise
        except Exception as error:
            error.add_note(
                f"raywl: the weight_loader of {route.param} failed on tensor {name!r} {list(weight.shape)}"
            )
            raise
        if name in recorder.used or not weight.numel():
            self.used.add(name)
        elif route.expert_id is not None or parse_expert_id(name) is not None:
            self.skipped[name] = "another rank's expert"
        else:
            self.skipped[name] = f"the weight_loader of {route.param} {LEFT}"

    def _copy_of(self, name: str, route: Route, box: Box | None, local: torch.Tensor) -> Copy:
        """The copy that brings the part of a tensor that a parameter without a loader keeps."""
        entry = self.checkpoint.tensors[name]
        dtype, wanted = torch_name(entry.dtype), dtype_name(local.dtype)
        if dtype != wanted and dtype in _BYTE_CODED and wanted in _BYTE_CODED:
            wanted = dtype  # the same bits under another name
        if box is None and dtype == wanted and entry.strides is None and local.is_contiguous():
            # One run of bytes, as most are.
            target = self.by_name[route.param].name
            return straight(name, entry.file, target, entry.start, 0, local.numel(), dtype)
        full = torch_shape(entry.dtype, entry.shape)
        if box is None:
            box = tuple((0, size) for size in full)
        strides = tuple([stride * local.itemsize for stride in local.stride()])
        if _numel(full) == 1:
            strides = (0,) * len(box)
        start = self._fused_starts.get(name, ())
        first = sum(offset * stride for offset, stride in zip(start, strides, strict=False))
        target = self.by_name[route.param].name
        copy = copy_of_box(name, entry, box, target, strides[len(strides) - len(box) :], wanted)
        return copy._replace(dst_start=first) if first else copy

    def _run_own(self, recorder: Recorder) -> None:
        """Calls the model's `load_weights`, which names what it loaded or is judged by what it wrote."""

        def stream() -> Iterator[tuple[str, torch.Tensor]]:
            for name in sorted_for_iteration(list(self.checkpoint.tensors), self.checkpoint.tensors):
                # Not held here: a hundred thousand lazy weights at once take hundreds of MiB.
                yield name, recorder.weight(name)
                if not self.checkpoint.tensors[name].nbytes:
                    self.used.add(name)

        loaded = self.model.load_weights(stream())  # type: ignore[operator]
        if isinstance(loaded, set | frozenset | list | tuple):
            self.routed |= {self.by_name[name].name for name in loaded if name in self.by_name}
        for name in self.checkpoint.tensors:
            if name in self.used or name in recorder.used:
                self.used.add(name)
            elif parse_expert_id(name) is not None and self.context.ep_size > 1:
                self.skipped[name] = "another rank's expert"
            elif self.context.pp_size > 1:
                self.skipped[name] = f"no place on stage {self.context.pp_rank} of {self.context.pp_size}"
            else:
                self.unexpected.append(name)

    @property
    def unused_shards(self) -> list[str]:
        """Names and patterns of `shards` that nothing was cut by: a typo leaves a parameter whole."""
        return self._shards.unused if self._routes else []

    def lacking_parts(self, target: Target) -> list[str]:
        """Parts of a stacked or expert parameter that no tensor of the checkpoint was bound to."""
        if not (self._stacked or self._expert_mapping):
            return []
        have = self._parts.get(target.name, set())
        rows: list[tuple[str, str, Any, int | None]]
        rows = [(p, w, shard, None) for p, w, shard in self._stacked]
        rows += [(p, w, shard, expert) for p, w, expert, shard in self._expert_mapping]
        lacking = []
        for param_name, weight_name, shard_id, expert_id in rows:
            used = any(param_name in name for name in target.names)
            same_kind = any((expert is None) == (expert_id is None) for _, expert in have)
            whole = (None, None) in have
            if used and same_kind and not whole and (shard_id, expert_id) not in have:
                name = next(name for name in target.names if param_name in name)
                lacking.append(name.replace(param_name, weight_name, 1))
        return lacking

    def _check_copy(self, copy: Copy, recorder: Recorder) -> None:
        """A plan's file may have been damaged: no copy may leave its tensor or its parameter."""
        entry, view = self.checkpoint.tensors.get(copy.tensor), recorder.views.get(copy.target)
        if (
            entry is None
            or view is None
            or entry.file != copy.file
            or not entry.start <= copy.src_start <= copy.src_end <= entry.end
            or not 0 <= copy.dst_start <= copy.dst_end <= view.nbytes
        ):
            raise ValueError(f"the plan is damaged: its copy of {copy.tensor} to {copy.target} doesn't fit")

    def _check_fill(self, fill: Fill, recorder: Recorder) -> None:
        """As `_check_copy`."""
        view, dtype = recorder.views.get(fill.target), getattr(torch, fill.dst_dtype, None)
        fits = view is not None and 0 <= fill.dst_start <= fill.dst_end <= view.nbytes
        if not fits or not isinstance(dtype, torch.dtype):
            raise ValueError(f"the plan is damaged: its constant for {fill.target} doesn't fit")

    def _check_plan(self, plan: LoadPlan) -> None:
        """A plan is used for what it was made for, or not at all."""
        if plan.identity != self.checkpoint.identity:
            raise ValueError(
                f"the plan is of checkpoint {plan.identity}, this one is {self.checkpoint.identity}"
            )
        local = {"local_rank", "local_size"}
        theirs, ours = plan.context.to_dict(), self.context.to_dict()
        different = [key for key in ours if key not in local and ours[key] != theirs[key]]
        if different:
            rows = ", ".join(f"{key} {theirs[key]} (here {ours[key]})" for key in different)
            raise ValueError(f"the plan is of another rank: {rows}")
        if plan.unplanned:
            raise ValueError(f"the plan can't be used again: {plan.unplanned[0]}")
        for name, info in plan.targets.items():
            target = self.by_name.get(name)
            if target is None:
                raise ValueError(f"the plan is of another model: it writes {name}, which isn't here")
            dtype = dtype_name(target.tensor.dtype)
            shape = target.local_shape
            fits = shape == info.shape or (target.is_meta and shape in self._full_shapes(name, plan))
            if dtype != info.dtype or not fits:
                raise ValueError(
                    f"the plan is of another model: {name} is {dtype} {list(shape)}, "
                    f"the plan expects {info.dtype} {list(info.shape)}"
                )

    def _full_shapes(self, target: str, plan: LoadPlan) -> set[tuple[int, ...]]:
        """Shapes of the tensors that a plan copies to a target, of which it may be a part."""
        entries = [self.checkpoint.tensors.get(c.tensor) for c in plan.copies if c.target == target]
        return {torch_shape(entry.dtype, entry.shape) for entry in entries if entry is not None}

    def _check_strides(self, plan: LoadPlan) -> None:
        """Once all targets have memory: a plan's copies go to bytes, whatever elements are there."""
        for name, info in plan.targets.items():
            target = self.by_name[name]
            ours = target.local_strides
            rows = zip(info.shape, ours, info.strides, strict=False)
            same = len(ours) == len(info.strides) and all(
                size < 2 or here == there for size, here, there in rows
            )
            if target.local_nbytes and not same:
                raise ValueError(
                    f"the plan is of another model: {name} has strides {list(ours)}, "
                    f"the plan expects {list(info.strides)}"
                )


def is_below(name: str, module: str) -> bool:
    """Whether a name is that of a module, or of something in it."""
    return name == module or name.startswith(f"{module}.")


def _optional_targets(
    targets: Sequence[Target],
    model: nn.Module,
    optional: Sequence[str] | None,
    context: ParallelContext,
) -> dict[str, list[str]]:
    """First names of the targets that are wholly in a module that a checkpoint may lack, by module.

    Raises:
        ValueError: The model has no such module. (A stage of several may be without it.)
    """
    found = {}
    for module in (optional,) if isinstance(optional, str) else optional or ():
        module = module.removesuffix(".")
        found[module] = [t.name for t in targets if all(is_below(name, module) for name in t.names)]
        if not found[module] and context.pp_size == 1:
            raise ValueError(f"optional: {type(model).__name__} has no weights in a module {module!r}")
    return found


def _first(values: Iterator[ShardSpec | None]) -> ShardSpec | None:
    return next((value for value in values if value is not None), None)


def _numel(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _has_loader(target: Target) -> bool:
    return callable(getattr(target.tensor, "weight_loader", None))


def _call_loader(param: torch.Tensor, weight: LazyWeight, route: Route) -> None:
    loader = param.weight_loader  # type: ignore[attr-defined]
    if route.is_expert:
        loader(param, weight, route.param, shard_id=route.shard_id, expert_id=route.expert_id)
    elif route.shard_id is not None:
        loader(param, weight, route.shard_id)
    else:
        loader(param, weight)


def _device_for(targets: list[Target], device: torch.device | str | None) -> torch.device:
    if device is not None:
        chosen = torch.device(device)
    else:
        chosen = next((t.tensor.device for t in targets if not t.is_meta), torch.get_default_device())
    return torch.device("cpu") if chosen.type == "meta" else chosen


def _prefixes(model: nn.Module) -> list[str]:
    """The prefix that a Hugging Face model has around its base model, and its checkpoints may lack."""
    prefix = getattr(model, "base_model_prefix", "")
    return [prefix] if isinstance(prefix, str) and prefix else []


def _patterns_of(model: nn.Module, attribute: str) -> list[re.Pattern[str]]:
    patterns = getattr(model, attribute, None)
    return [re.compile(pattern) for pattern in patterns] if isinstance(patterns, list | tuple | set) else []


def _ignored_unexpected(model: nn.Module) -> list[re.Pattern[str]]:
    return _patterns_of(model, "_keys_to_ignore_on_load_unexpected")


def _ignored_missing(model: nn.Module, names: Mapping[str, Target]) -> set[str]:
    patterns = _patterns_of(model, "_keys_to_ignore_on_load_missing")
    return {
        target.name for name, target in names.items() if any(pattern.search(name) for pattern in patterns)
    }


def _dtensor_box(target: Target) -> Box:
    """The part of a DTensor that this rank holds, cut as DTensor itself cuts."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    tensor: Any = target.tensor
    for placement in tensor.placements:
        as_shard_spec(placement)
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple((start, start + size) for start, size in zip(offset, shape, strict=True))


def _check_dtype(
    checkpoint: Checkpoint, name: str, entry: TensorEntry, param: str, wanted: torch.dtype
) -> None:
    """Refuses conversions that lose the meaning of a value: floats into integers, complex into real."""
    has = torch_dtype(entry.dtype)
    if has == wanted:
        return
    both_bytes = torch_name(entry.dtype) in _BYTE_CODED and dtype_name(wanted) in _BYTE_CODED
    if both_bytes:
        return
    if not torch.can_cast(has, wanted) or not can_convert(has, wanted):
        raise CheckpointError(
            checkpoint.source.label(entry.file), name, f"is {has}, which {param} ({wanted}) can't hold"
        )
