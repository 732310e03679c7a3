"""The attributes that a parameter carries: its loader, and what its layer notes about it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["RETIRED", "carry_attributes", "set_weight_attrs"]

RETIRED = "_retired"
"""The attribute of parameters that no kernel reads."""
_KEPT = frozenset({"weight_loader", "_weight_loader", "_ckpt", RETIRED})
"""How checkpoint tensors come in, and whether anybody reads them, doesn't change with the contents."""


class _AttributeSetError(ValueError, AssertionError):
    """An attribute is there already; an `AssertionError` too, for callers of older utilities."""


def set_weight_attrs(weight: torch.Tensor, attrs: Mapping[str, Any] | None) -> None:
    """Sets attributes of a parameter.

    Args:
        weight: The parameter.
        attrs: Names and values; `None` sets nothing.

    Raises:
        ValueError: One of them exists already (an `AssertionError` as well). None was set.
    """
    if attrs is None:
        return
    taken = [name for name in attrs if hasattr(weight, name)]
    if taken:
        raise _AttributeSetError(f"the tensor has these attributes already: {', '.join(taken)}")
    for name, value in attrs.items():
        setattr(weight, name, value)


def carry_attributes(source: torch.Tensor, target: torch.Tensor) -> None:
    """Gives `target` the attributes that were set on `source`, except for those that stay its own."""
    for name, value in vars(source).items():
        if name not in _KEPT:
            setattr(target, name, value)
