"""Tensors that layers make out of their parameters and keep as plain attributes."""

from __future__ import annotations

from typing import Any

import torch

from raywl.parameters.modes import is_trial
from raywl.parameters.replace import write_values
from raywl.parameters.storage import overlaps_itself

__all__ = ["refill_derived"]


def refill_derived(obj: Any, name: str, new: torch.Tensor | None) -> torch.Tensor | None:
    """Sets an attribute that is made out of weights, keeping its address where that can be done.

    While a reload is only tried, what is held stays as it is.

    Args:
        obj: What has the attribute, or gets it.
        name: Its name.
        new: Its values. Those of the same shape, dtype and device as what is held go into its memory,
            others take its place.

    Returns:
        The tensor that is held now.
    """
    held = getattr(obj, name, None)
    if isinstance(held, torch.Tensor) and is_trial():
        return held
    if (
        isinstance(held, torch.Tensor)
        and isinstance(new, torch.Tensor)
        and held.layout is new.layout is torch.strided
        and (held.shape, held.dtype, held.device) == (new.shape, new.dtype, new.device)
        and not overlaps_itself(held)
    ):
        with torch.no_grad():
            write_values(held.detach(), new.detach())
        return held
    setattr(obj, name, new)
    return new
