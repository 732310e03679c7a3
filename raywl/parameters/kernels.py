"""Which of a layer's parameters its kernels read, and under which names."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import Module, Parameter

from raywl.parameters.attributes import RETIRED
from raywl.parameters.replace import replace_parameter

__all__ = [
    "get_live_param",
    "kernel_parameters",
    "move_parameter",
    "retire_parameter",
    "set_kernel_parameter",
]


def move_parameter(layer: Module, src: str, dst: str) -> None:
    """Registers a parameter under a second name, the one that kernels know it by.

    One object has both names, so that reloads under the checkpoint's name reach the kernels. `dst` becomes
    its attribute `runtime_name`.

    Args:
        layer: The module that owns the parameter.
        src: The name that it has.
        dst: The name that it gets.

    Raises:
        ValueError: There is no parameter `src`, or something else is called `dst`.
    """
    parameter = layer._parameters.get(src)
    if parameter is None:
        raise ValueError(f"{type(layer).__name__} has no parameter {src!r} to call {dst!r}")
    there = getattr(layer, dst, None)
    if there is not None and there is not parameter:
        kind = "parameter" if isinstance(there, Parameter) else "attribute"
        raise ValueError(f"{type(layer).__name__} has another {kind} {dst!r}: {src!r} can't get that name")
    if there is None and dst not in layer._parameters and hasattr(layer, dst):
        delattr(layer, dst)
    layer.register_parameter(dst, parameter)
    parameter.runtime_name = dst  # type: ignore[attr-defined]


def retire_parameter(layer: Module, name: str) -> None:
    """Marks a parameter as read by no kernel. It stays registered, and loaders still reach it.

    The mark is the object's, whatever names it has; a name that holds `None` is left as it is.

    Raises:
        ValueError: There is no parameter of that name.
    """
    if name not in layer._parameters and getattr(layer, name, name) is not None:
        raise ValueError(f"{type(layer).__name__} has no parameter {name!r} to retire")
    parameter = layer._parameters.get(name)
    if parameter is not None:
        setattr(parameter, RETIRED, True)


def _is_live(parameter: Parameter) -> bool:
    return parameter.numel() > 0 and not getattr(parameter, RETIRED, False)


def get_live_param(layer: Module, name: str) -> Any:
    """The attribute `name`, for a kernel to read.

    Returns:
        The attribute; `None` when it is missing, retired, or a parameter with no elements.
    """
    value = getattr(layer, name, None)
    return None if isinstance(value, Parameter) and not _is_live(value) else value


def kernel_parameters(layer: Module) -> dict[str, Parameter]:
    """A layer's own live parameters, without those of its children.

    Returns:
        Each object once, under its runtime name (else its first name), in the order of registration.
    """
    found: dict[int, tuple[str, Parameter]] = {}
    for name, parameter in layer._parameters.items():
        if parameter is not None and _is_live(parameter) and id(parameter) not in found:
            # A parameter that is shared between layers may have its runtime name in another one.
            runtime_name = getattr(parameter, "runtime_name", name)
            known_here = layer._parameters.get(runtime_name) is parameter
            found[id(parameter)] = (runtime_name if known_here else name, parameter)
    return dict(found.values())


def set_kernel_parameter(layer: Module, name: str, tensor: torch.Tensor | None) -> None:
    """`replace_parameter`, after which kernels read the parameter, under `name` if it has a runtime name.

    Raises:
        ValueError: As `replace_parameter`.
    """
    replace_parameter(layer, name, tensor)
    parameter = layer._parameters.get(name)
    if parameter is None:
        return
    if hasattr(parameter, RETIRED):
        delattr(parameter, RETIRED)
    if hasattr(parameter, "runtime_name"):
        parameter.runtime_name = name
