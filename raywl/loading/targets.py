"""A model's parameters and buffers as places that weights can go to."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]
from torch.overrides import TorchFunctionMode

from raywl.loading.lazy import LazyWeight, plain, writes, written_to

__all__ = ["Target", "adopt_registered", "collect_targets", "init_buffers", "materialise", "restore"]

_PLAIN = (torch.Tensor, nn.Parameter)
_INITIALISERS = ("reset_buffers", "reset_parameters", "init_weights", "_init_weights")


@dataclass(eq=False, slots=True)
class Target:
    """One parameter or buffer, under every name that the model has for it."""

    tensor: torch.Tensor
    """As it is registered: a meta tensor until it is materialised."""
    names: list[str] = field(default_factory=list)
    """In the model's order; more than one when it is tied."""
    owners: list[tuple[nn.Module, str]] = field(default_factory=list)
    """Modules that it is registered with, and the attribute there."""
    persistent: bool = True
    """Whether checkpoints hold it: `False` for buffers that the model computes."""
    twin: Target | None = None
    """An earlier one with the very same memory, though it is another tensor."""

    @property
    def name(self) -> str:
        """Its first name."""
        return self.names[0]

    @property
    def is_meta(self) -> bool:
        """Whether it has no memory yet."""
        return self.tensor.is_meta

    @property
    def local(self) -> torch.Tensor:
        """The memory of this rank: the tensor, or a DTensor's local part."""
        tensor: Any = self.tensor
        local: torch.Tensor = tensor.to_local() if is_dtensor(tensor) else tensor.detach()
        return local

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of `local`."""
        return tuple((self.local if is_dtensor(self.tensor) else self.tensor).shape)

    @property
    def local_nbytes(self) -> int:
        """Bytes of the elements of `local`."""
        return (self.local if is_dtensor(self.tensor) else self.tensor).nbytes

    @property
    def local_strides(self) -> tuple[int, ...]:
        """The strides of `local`, in elements."""
        return (self.local if is_dtensor(self.tensor) else self.tensor).stride()

    def registered(self) -> torch.Tensor:
        """What the model holds in its place now: loaders may have registered something else."""
        module, attribute = self.owners[0]
        registry = module._parameters if attribute in module._parameters else module._buffers
        tensor = registry[attribute]
        assert tensor is not None
        return tensor

    def put(self, tensor: torch.Tensor) -> None:
        """Registers another tensor in its place, everywhere."""
        for module, attribute in self.owners:
            registry = module._parameters if attribute in module._parameters else module._buffers
            registry[attribute] = tensor  # type: ignore[assignment]
        self.tensor = tensor


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Whether a tensor is distributed, without importing what may not be there."""
    if type(tensor) in _PLAIN:
        # Asking a tensor for an attribute that it hasn't takes long.
        return False
    return hasattr(tensor, "device_mesh") and hasattr(tensor, "placements")


def collect_targets(model: nn.Module) -> list[Target]:
    """All parameters and buffers of a model, in its order; tied ones once.

    Raises:
        ValueError: A parameter whose shape isn't known yet (`UninitializedParameter`).
    """
    found: dict[int, Target] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for registry in (module._parameters, module._buffers):
            for attribute, tensor in registry.items():
                if tensor is None:
                    continue
                name = f"{prefix}.{attribute}" if prefix else attribute
                if isinstance(tensor, UninitializedTensorMixin):
                    raise ValueError(f"{name} has no shape yet: run the lazy module once before loading")
                target = found.setdefault(id(tensor), Target(tensor, persistent=False))
                target.names.append(name)
                if (module, attribute) not in target.owners:
                    target.owners.append((module, attribute))
                computed = registry is module._buffers and attribute in module._non_persistent_buffers_set
                target.persistent = target.persistent or not computed
    targets = list(found.values())
    _find_twins(targets)
    return targets


def _find_twins(targets: list[Target]) -> None:
    at: dict[int, list[Target]] = {}
    for target in targets:
        tensor = target.tensor
        if target.is_meta or is_dtensor(tensor) or tensor.layout is not torch.strided or not tensor.numel():
            continue
        others = at.setdefault(tensor.data_ptr(), [])
        if others:
            same = (tensor.dtype, tensor.shape, tensor.stride())
            target.twin = next(
                (o for o in others if (o.tensor.dtype, o.tensor.shape, o.tensor.stride()) == same), None
            )
        if target.twin is None:
            others.append(target)


def materialise(target: Target, shape: tuple[int, ...], device: torch.device) -> None:
    """Gives a meta target memory, keeping its class, attributes, `requires_grad` and ties."""
    old = target.tensor
    if is_dtensor(old) or shape == tuple(old.shape):
        data = torch.empty_like(old, device=device, requires_grad=False)  # keeps strides
    else:
        data = torch.empty(shape, dtype=old.dtype, device=device)
    new: torch.Tensor
    if isinstance(old, nn.Parameter):
        if type(old) is nn.Parameter or is_dtensor(old):
            new = nn.Parameter(data, requires_grad=old.requires_grad)
        else:
            new = torch.Tensor._make_subclass(type(old), data, old.requires_grad)
    else:
        new = data.requires_grad_(old.requires_grad)
    for key, value in old.__dict__.items():
        if key not in ("_local_tensor", "_spec"):
            setattr(new, key, value)
    target.put(new)


@contextlib.contextmanager
def restore(targets: list[Target]) -> Iterator[None]:
    """Puts every target's tensor back when the block fails: the model is as it was."""
    before = [(target, target.tensor) for target in targets]
    try:
        yield
    except BaseException:
        for target, tensor in before:
            target.put(tensor)
        raise


class _WriteWatch(TorchFunctionMode):
    """Notes which tensors are written to."""

    def __init__(self) -> None:
        super().__init__()
        self.written: set[int] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if writes(getattr(func, "__name__", ""), kwargs):
            written = written_to(args, kwargs)
            if isinstance(written, torch.Tensor):
                self.written.add(written.untyped_storage().data_ptr())
        return func(*args, **kwargs)


def init_buffers(model: nn.Module, targets: list[Target], device: torch.device) -> list[str]:
    """Makes meta buffers that no checkpoint holds, by the model's own initialisers.

    A module's `reset_buffers`, `reset_parameters` or `init_weights` is tried, then `_init_weights(module)`
    of the models around it, as transformers has it, from the innermost to the whole. Parameters are still
    on `meta` then, so that nothing is computed for them. The random state is as before afterwards.

    Returns:
        Names of the buffers that no initialiser made; they stay on `meta`.
    """
    computed = [target for target in targets if not target.persistent and target.is_meta]
    if not computed:
        return []
    by_module: dict[nn.Module, list[Target]] = {}
    for target in computed:
        by_module.setdefault(target.owners[0][0], []).append(target)
    unset: list[str] = []
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        for module, members in by_module.items():
            unset += _init_module(model, module, members, targets, device)
    return unset


def _init_module(
    model: nn.Module,
    module: nn.Module,
    members: list[Target],
    targets: list[Target],
    device: torch.device,
) -> list[str]:
    metas = [target.tensor for target in members]
    inside = set(module.modules())
    kept = [
        (target, target.tensor)
        for target in targets
        if target.persistent and not target.is_meta and any(owner in inside for owner, _ in target.owners)
    ]
    for target, tensor in kept:
        # What has memory is the caller's: initialisers must not draw it anew.
        stand_in = torch.empty_like(tensor.detach(), device="meta")
        target.put(nn.Parameter(stand_in, False) if isinstance(tensor, nn.Parameter) else stand_in)
    for target in members:
        materialise(target, tuple(target.tensor.shape), device)
        # transformers marks what it has initialised, on meta too, and skips it from then on.
        target.tensor.__dict__.pop("_is_hf_initialized", None)
    calls: list[tuple[Any, tuple[Any, ...]]]
    calls = [(getattr(module, name), ()) for name in _INITIALISERS[:3] if hasattr(module, name)]
    calls += [(owner._init_weights, (module,)) for owner in _ancestors(model, members[0])]
    waiting = list(members)
    try:
        for call, args in calls:
            with _WriteWatch() as watch:
                call(*args)
            waiting = [target for target in waiting if not _was_made(target, watch)]
            if not waiting:
                break
    finally:
        for target, tensor in kept:
            target.put(tensor)
    for target, meta in zip(members, metas, strict=True):
        if target in waiting:
            target.put(meta)
    return [target.name for target in waiting]


def _ancestors(model: nn.Module, target: Target) -> list[Any]:
    """Modules around a target that can initialise what is inside of them, from the inside out."""
    path = target.names[0].split(".")[:-1]
    around = [model.get_submodule(".".join(path[:length])) for length in range(len(path), -1, -1)]
    return [module for module in around if hasattr(module, "_init_weights")]


def _was_made(target: Target, watch: _WriteWatch) -> bool:
    """Whether an initialiser wrote to a buffer, or registered a new one in its place."""
    module, attribute = target.owners[0]
    current = module._buffers.get(attribute)
    if current is not None and current is not target.tensor and current.device.type != "meta":
        target.put(current)
        return True
    return not target.tensor.numel() or target.tensor.untyped_storage().data_ptr() in watch.written


def adopt_registered(
    targets: list[Target], values_of: Callable[[torch.Tensor], torch.Tensor | None]
) -> Iterator[tuple[Target, bool]]:
    """Takes over what loaders registered in place of a target; lazy weights among it are read.

    Args:
        targets: All of the model's.
        values_of: What a tensor holds that has no memory of its own, or `None`.

    Yields:
        Each target that holds another tensor now, and whether that was read here.
    """
    for target in targets:
        current = target.registered()
        if isinstance(current, LazyWeight):
            values = plain(current).clone()
            is_param = target.owners[0][1] in target.owners[0][0]._parameters
            target.put(nn.Parameter(values, current.requires_grad) if is_param else values)
            yield target, True
        elif (held := values_of(current)) is not None:
            # Set by a thread that isn't watched.
            current.data = held
            target.put(current)
            yield target, True
        elif current is not target.tensor:
            target.put(current)
            yield target, False
