"""New contents for a parameter, at its old address whenever that can be done."""

from __future__ import annotations

import torch
from torch.nn import Module, Parameter

from raywl.parameters.attributes import carry_attributes
from raywl.parameters.modes import is_direct_reload
from raywl.parameters.storage import (
    Span,
    copy_span,
    copy_weight_,
    overlaps_itself,
    same_storage,
    storage_view,
)

__all__ = ["replace_parameter", "write_values"]


def replace_parameter(layer: Module, name: str, new: torch.Tensor | None) -> None:
    """Gives a layer's parameter new contents.

    The parameter object stays, and with it its loader and every module that shares it. In order:

    - same shape, strides, dtype and device: the values are copied in;
    - `new` fits in the bytes that the old one fills: it is copied there, and the parameter becomes a view
      of its new shape, strides and dtype (within `direct_reload()`: anywhere in the old storage);
    - else, or when `new` lies in the old storage already, the parameter takes `new`'s memory.

    A new parameter object is made only if there was none, if the old one has a true attribute
    `requantization_source`, or if it is on `meta` and `new` isn't; it replaces the old one under all the
    names that it has in this layer, with its loader and other attributes.

    Args:
        layer: The module that owns the parameter.
        name: Its name there.
        new: The contents; attributes set on it go over, but for `weight_loader`, `_weight_loader` and
            `_ckpt`. `None` leaves the name there, set to `None`.

    Raises:
        ValueError: `name` is a buffer or another attribute, or `new` is on `meta` or sparse where the old
            one isn't.
    """
    if new is None:
        if name in layer._parameters or not hasattr(layer, name):
            layer.register_parameter(name, None)
        else:
            setattr(layer, name, None)
        return
    old = layer._parameters.get(name)
    if old is None:
        _register(layer, name, new)
    elif getattr(old, "requantization_source", False) or (old.is_meta and not new.is_meta):
        _renew(layer, old, new)
    else:
        with torch.no_grad():
            _refill(layer, name, old, new)
        if new is not old:
            carry_attributes(new, old)


def _register(layer: Module, name: str, new: torch.Tensor) -> None:
    if name not in layer._parameters and hasattr(layer, name):
        if getattr(layer, name) is not None:
            raise ValueError(f"{type(layer).__name__}.{name} is there and no parameter")
        delattr(layer, name)
    fresh = Parameter(new.detach(), requires_grad=isinstance(new, Parameter) and new.requires_grad)
    carry_attributes(new, fresh)
    layer.register_parameter(name, fresh)


def _renew(layer: Module, old: Parameter, new: torch.Tensor) -> None:
    """A new object in the old one's place, under each of its names, with all that was set on it."""
    trains = old.requires_grad and (new.is_floating_point() or new.is_complex())
    fresh = Parameter(new.detach(), requires_grad=trains)
    for attribute, value in vars(old).items():
        # What it holds now is the result of requantization.
        if attribute != "requantization_source":
            setattr(fresh, attribute, value)
    carry_attributes(new, fresh)
    for name in [name for name, parameter in layer._parameters.items() if parameter is old]:
        layer._parameters[name] = fresh


def _refill(layer: Module, name: str, old: Parameter, new: torch.Tensor) -> None:
    data, new = old.data, new.detach().resolve_conj().resolve_neg()
    if data.layout is not new.layout or data.is_meta is not new.is_meta:
        raise ValueError(
            f"{type(layer).__name__}.{name} is {data.layout} on {data.device}: "
            f"its object can't hold a {new.layout} tensor on {new.device}"
        )
    if _alike(data, new) and data.stride() == new.stride() and not overlaps_itself(data):
        write_values(data, new)
        return
    view = None if data.layout is not torch.strided or same_storage(data, new) else _room_for(new, data)
    if view is not None:
        copy_span(view, new)
    if old.requires_grad and not (new.is_floating_point() or new.is_complex()):
        old.requires_grad_(False)
    old.data = new if view is None else view


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and one.device == other.device


def write_values(dst: torch.Tensor, src: torch.Tensor) -> None:
    """Copies between tensors of one shape and dtype that may lie in one storage, in one place or not."""
    if same_storage(dst, src):
        if dst.data_ptr() == src.data_ptr() and dst.stride() == src.stride():
            return
        src = src.clone()
    copy_weight_(dst, src)


def _room_for(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor | None:
    """A view like `new` in the storage of `old`, or `None` where it doesn't fit."""
    if old.device != new.device or old.is_meta:
        return None
    storage, span, needed = old.untyped_storage(), Span.of(old), Span.of(new).nbytes
    starts = [span.start] if span.is_full and needed <= span.nbytes else []
    if is_direct_reload():
        starts += [start for start in (span.start, 0) if start + needed <= storage.nbytes()]
    for start in starts:
        # Kernels want elements at multiples of their size, in the storage and in memory.
        if start % new.itemsize == 0 and (storage.data_ptr() + start) % new.itemsize == 0:
            return storage_view(storage, start // new.itemsize, new.shape, new.stride(), new.dtype)
    return None
