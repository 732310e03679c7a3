"""What a rank holds of a checkpoint's tensors: pieces, each with its place in the whole tensor."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from raywl.checkpoint.dtypes import DTYPE_BITS, dtype_of, torch_itemsize, torch_shape
from raywl.errors import CheckpointError
from raywl.loading.history import LastLoad, last_load
from raywl.loading.targets import Target, collect_targets, is_dtensor
from raywl.plan import Copy
from raywl.plan.copies import contiguous_strides, itemsize_of, normalise
from raywl.plan.declare import SpecTable
from raywl.readers.memory import ByteView, dtype_name, int_dtype
from raywl.types import ParallelContext, Shard, as_shard_spec

__all__ = ["Place", "Whole", "pieces_of"]

_REMEDY = "with shards= (which may be empty) all is saved under the model's own names"


class Whole(NamedTuple):
    """A tensor of the checkpoint."""

    dtype: str
    """The format's name."""
    shape: tuple[int, ...]
    """Logical shape, as a header has it."""

    @property
    def nbytes(self) -> int:
        """Bytes of data."""
        return math.prod(torch_shape(self.dtype, self.shape)) * torch_itemsize(self.dtype)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a piece lies in its tensor, as if that were row after row. Equal ones are the same bytes."""

    tensor: str
    start: int
    """Byte of its first element."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """Bytes between neighbours; no dim goes on where the one after it ends."""
    itemsize: int

    @classmethod
    def of(
        cls, tensor: str, start: int, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int
    ) -> Place:
        """The place of elements whose strides go down."""
        dims: list[tuple[int, int]] = []
        for size, stride in zip(shape, strides, strict=True):
            if dims and dims[-1][1] == size * stride:
                dims[-1] = dims[-1][0] * size, stride
            elif size != 1:
                dims.append((size, stride))
        return cls(tensor, start, tuple(d[0] for d in dims), tuple(d[1] for d in dims), itemsize)

    @property
    def nbytes(self) -> int:
        """Bytes of data."""
        return math.prod(self.shape) * self.itemsize

    def as_copy(self) -> Copy:
        """As the place that a copy writes to."""
        name = dtype_name(int_dtype(self.itemsize))
        return Copy(
            self.tensor, "", self.tensor, 0, self.start, self.shape, self.strides, self.strides, name, name
        )

    def view(self, raw: torch.Tensor) -> torch.Tensor:
        """The piece, as integers of its width, in the bytes of its whole tensor (1-d uint8)."""
        typed = raw.view(int_dtype(self.itemsize))
        strides = [stride // self.itemsize for stride in self.strides]
        return typed.as_strided(self.shape, strides, typed.storage_offset() + self.start // self.itemsize)


def pieces_of(
    model: nn.Module, context: ParallelContext, shards: Mapping[str, Any] | None
) -> tuple[dict[str, Whole], list[tuple[Place, torch.Tensor]]]:
    """All that a model holds, as pieces of the tensors that it was loaded from, else of its own.

    Args:
        model: The rank's model.
        context: Where the rank stands.
        shards: How parameters are cut; then the tensors are the model's own. `None`: as they were loaded.

    Returns:
        The tensors, by name; and the pieces, each with a view of its elements, as integers of their width.

    Raises:
        ValueError: A parameter has no memory, isn't what was loaded, or was computed by its loader.
        CheckpointError: It is of a dtype that a checkpoint can't have.
    """
    targets = [target for target in collect_targets(model) if target.persistent and target.twin is None]
    for target in targets:
        if target.is_meta:
            raise ValueError(f"{target.name} is on meta: there is nothing to save")
    loaded = last_load(model) if shards is None else None
    wholes: dict[str, Whole] = {}
    pieces: list[tuple[Place, torch.Tensor]] = []
    specs = SpecTable(shards)
    copies: dict[str, list[Copy]] = {}
    if loaded is not None and loaded.plan is not None:
        wholes = {
            name: Whole(loaded.tensors[name].dtype, loaded.tensors[name].shape) for name in loaded.empty
        }
        copies = {name: [] for name in (*loaded.computed, *loaded.plan.targets)}
        for copy in loaded.plan.copies:
            copies[copy.target].append(copy)
    for target in targets:
        found: Iterator[tuple[str, Whole, Place, torch.Tensor]]
        if loaded is not None and target.name in copies:
            found = _as_loaded(target, copies[target.name], loaded)
        else:
            found = iter([_own(target, specs, context)])
        for name, whole, place, values in found:
            if wholes.setdefault(name, whole) != whole:
                raise ValueError(
                    f"{name} is held in two ways, as {wholes[name].dtype} {list(wholes[name].shape)} and, "
                    f"in {target.name}, as {whole.dtype} {list(whole.shape)}"
                )
            if place.nbytes:
                pieces.append((place, values))
    return wholes, pieces


def _as_loaded(
    target: Target, copies: list[Copy], loaded: LastLoad
) -> Iterator[tuple[str, Whole, Place, torch.Tensor]]:
    """Back along the copies that brought a parameter's values."""
    if target.name in loaded.computed:
        raise ValueError(
            f"{target.name} holds what its loader computed, which isn't what the checkpoint had: {_REMEDY}"
        )
    local = target.local
    assert loaded.plan is not None
    if not copies and local.numel():
        raise ValueError(f"{target.name} was loaded by no copy of a tensor: {_REMEDY}")
    info = loaded.plan.targets[target.name]
    now = dtype_name(local.dtype), tuple(local.shape), tuple(local.stride())
    if now != info:
        raise ValueError(
            f"{target.name} is {now[0]} {list(now[1])} with strides {list(now[2])}, but was loaded as "
            f"{info.dtype} {list(info.shape)} with {list(info.strides)}: {_REMEDY}"
        )
    view = ByteView(local.detach())
    for copy in map(normalise, copies):
        entry = loaded.tensors[copy.tensor]
        if entry.strides is not None:
            raise ValueError(f"{copy.tensor} lies turned in {entry.file}: convert that checkpoint first")
        same = copy.src_dtype == copy.dst_dtype
        dtype = entry.dtype if same else dtype_of(copy.dst_dtype)
        if dtype is None or dtype not in DTYPE_BITS:
            raise CheckpointError(None, target.name, f"is {copy.dst_dtype}, which safetensors can't hold")
        # What was converted keeps its place, in elements of another width.
        old, new = itemsize_of(copy.src_dtype), itemsize_of(copy.dst_dtype)
        strides = tuple(stride // old * new for stride in copy.src_strides)
        start = (copy.src_start - entry.start) // old * new
        values = view.view_for(copy._replace(src_dtype=copy.dst_dtype))
        for dim, stride in enumerate(strides):
            if stride == 0:
                values = _without_repeats(values, dim, target.name, copy.tensor)
        place = Place.of(copy.tensor, start, tuple(values.shape), strides, new)
        yield copy.tensor, Whole(dtype, entry.shape), place, values


def _without_repeats(values: torch.Tensor, dim: int, name: str, tensor: str) -> torch.Tensor:
    """What one element of a tensor went to, which must still be equal, as that element."""
    first = values.narrow(dim, 0, 1)
    if not torch.equal(values, first.expand_as(values)):
        raise ValueError(f"{name} holds different values for what was one element of {tensor}")
    return first


def _own(
    target: Target, specs: SpecTable, context: ParallelContext
) -> tuple[str, Whole, Place, torch.Tensor]:
    """A parameter under its own name: a part by its placements or its spec, else whole."""
    local = target.local.detach()
    shape, first = tuple(local.shape), [0] * local.dim()
    spec = next((spec for name in target.names if (spec := specs.find(name)) is not None), None)
    if is_dtensor(target.tensor):
        shape, first = _placed(target.tensor)
    elif isinstance(spec, Shard) and context.tp_size > 1:
        if not -local.dim() <= spec.dim < local.dim():
            raise ValueError(f"{target.name} has {local.dim()} dims, none of them {spec.dim}")
        dim = spec.dim % local.dim()
        first[dim] = context.tp_rank * shape[dim]
        shape = (*shape[:dim], shape[dim] * context.tp_size, *shape[dim + 1 :])
    dtype = dtype_of(dtype_name(local.dtype))
    if dtype is None or dtype not in DTYPE_BITS or (dtype == "F4" and not shape):
        raise CheckpointError(
            None, target.name, f"is {dtype_name(local.dtype)}, which safetensors can't hold"
        )
    size = local.itemsize
    strides = contiguous_strides(shape, size)
    start = sum(offset * stride for offset, stride in zip(first, strides, strict=True))
    name = target.name
    own = tuple(stride * size for stride in local.stride())
    kind = dtype_name(local.dtype)
    copy = normalise(Copy(name, "", name, start, 0, tuple(local.shape), strides, own, kind, kind))
    place = Place.of(name, start, copy.shape, copy.src_strides, size)
    values = ByteView(local).view_for(copy) if local.numel() else local
    logical = (*shape[:-1], shape[-1] * 2) if dtype == "F4" else shape
    return name, Whole(dtype, logical), place, values


def _placed(tensor: Any) -> tuple[tuple[int, ...], list[int]]:
    """Shape of the whole of a DTensor, and where this rank's part starts in it."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    for placement in tensor.placements:
        as_shard_spec(placement)
    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(tensor.shape), list(offset)
