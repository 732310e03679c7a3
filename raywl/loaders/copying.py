"""The one way that weights get into parameters here: shapes checked, then a plain `copy_`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from raywl.errors import ShapeMismatchError

__all__ = ["Sized", "as_bytes", "check_shape", "copy_checked", "part_of", "weight_name", "zero"]

# Their numbers mean nothing to arithmetic: `copy_` between them and uint8 would convert 1.0 to 1.
_BYTE_CODED = frozenset({torch.float8_e8m0fnu, torch.float4_e2m1fn_x2})


class Sized(NamedTuple):
    """A tensor and its shape. While a load is recorded, each question to a tensor takes a while."""

    tensor: torch.Tensor
    shape: tuple[int, ...]

    def narrow(self, dim: int, start: int, length: int) -> Sized:
        """The part of it, which is itself where nothing is cut off."""
        if length == self.shape[dim]:
            return self
        shape = (*self.shape[:dim], length, *self.shape[dim + 1 :])
        return Sized(self.tensor.narrow(dim, start, length), shape)


def weight_name(loaded_weight: torch.Tensor) -> str | None:
    """The name of a lazy weight in its checkpoint; plain tensors have none."""
    name = getattr(getattr(loaded_weight, "source", None), "name", None)
    return name if isinstance(name, str) else None


def check_shape(
    name: str | None, expected: Sequence[int], got: torch.Tensor | Sized, reason: str = "shape differs"
) -> None:
    """Raises `ShapeMismatchError` unless `got` has the shape `expected`."""
    if tuple(got.shape) != tuple(expected):
        raise ShapeMismatchError(name, expected, tuple(got.shape), reason)


def part_of(total: int, rank: int, num_parts: int, what: str, name: str | None) -> int:
    """Length of one of `num_parts` equal parts of `total`.

    Raises:
        ValueError: They wouldn't be equal; the message has the sizes, the rank and the name.
    """
    if total % num_parts:
        where = "" if name is None else f"{name}: "
        raise ValueError(
            f"{where}{what} {total} can't be cut into {num_parts} equal parts (rank {rank} of {num_parts})"
        )
    return total // num_parts


def copy_checked(target: torch.Tensor, loaded_weight: torch.Tensor, name: str | None = None) -> None:
    """Copies a weight into `target`, a parameter's data or a view of it.

    Args:
        target: Where it goes; must not require grad.
        loaded_weight: Equal shape, or one element where `target` has one.
        name: For messages.

    Raises:
        ShapeMismatchError: Any other pair of shapes. Nothing was copied.
    """
    if target.shape != loaded_weight.shape:
        if target.numel() != 1 or loaded_weight.numel() != 1:
            raise ShapeMismatchError(name, tuple(target.shape), tuple(loaded_weight.shape))
        loaded_weight = loaded_weight.view(target.shape)
    target, loaded_weight = as_bytes(target, loaded_weight)
    target.copy_(loaded_weight)


def as_bytes(target: torch.Tensor, loaded_weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both as `uint8` where one of them is, and the other is byte-coded: they are copied as bits."""
    dtypes = {target.dtype, loaded_weight.dtype}
    if len(dtypes) == 2 and torch.uint8 in dtypes and dtypes & _BYTE_CODED:
        return target.view(torch.uint8), loaded_weight.view(torch.uint8)
    return target, loaded_weight


def zero(target: torch.Tensor) -> None:
    """Sets a parameter's data, or a view of it, to zero bytes: in a dtype without 0, its smallest scale."""
    (target.view(torch.uint8) if target.dtype in _BYTE_CODED else target).zero_()
