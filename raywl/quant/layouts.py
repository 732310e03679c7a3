"""How the tensors of a quantised layer lie: what is needed to cut them, and nothing about kernels."""

from __future__ import annotations

from dataclasses import dataclass, fields
from fractions import Fraction
from typing import Any

__all__ = ["TensorLayout", "blocks", "channels", "groups", "packed", "per_tensor"]


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """One tensor of a quantised layer, beside the matrix `(outputs, inputs)` that it stands for.

    A dim that is `None` runs along nothing that is cut: every rank keeps all of it.
    """

    dtype: str | None = None
    """torch's name of the dtype; `None`: the model's own, or whatever the checkpoint has."""
    output_dim: int | None = 0
    """Dim that runs along the outputs."""
    input_dim: int | None = 1
    """Dim that runs along the inputs."""
    packed_dim: int | None = None
    """Dim along which one element holds several values."""
    packed_factor: Fraction | int = 1
    """How many; no whole number where values cross words (32 of 3 bits in three int32: 32/3)."""
    block_shape: tuple[int, int] | None = None
    """`(outputs, inputs)` that one element stands for."""
    group_size: int | None = None
    """Inputs that one element stands for; on a packed dim, at whose multiples it may be cut."""
    per_tensor: bool = False
    """Whether there is one element for the whole matrix."""

    def attributes(self, num_leading_dims: int = 0) -> dict[str, Any]:
        """What to set on a parameter so that raywl's loaders cut it (`raywl.parameters.set_weight_attrs`).

        Args:
            num_leading_dims: Dims of the parameter before those of the matrix: 1 for experts in one.
        """
        found: dict[str, Any] = {"output_dim": self.output_dim, "input_dim": self.input_dim}
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name not in ("dtype", *found) and value != field.default:
                found[field.name] = value
        for name, dim in found.items():
            if name.endswith("_dim") and dim is not None:
                found[name] = dim + num_leading_dims
        return found


def per_tensor(dtype: str | None = "float32") -> TensorLayout:
    """One element for the whole matrix, as a scale often is."""
    return TensorLayout(dtype, None, None, per_tensor=True)


def channels(dtype: str | None) -> TensorLayout:
    """`(outputs,)` or `(outputs, 1)`: one element for all inputs of an output."""
    return TensorLayout(dtype, 0, None)


def groups(dtype: str | None, size: int) -> TensorLayout:
    """`(outputs, inputs / size)`."""
    return TensorLayout(dtype, 0, 1, group_size=size)


def blocks(dtype: str | None, shape: tuple[int, int]) -> TensorLayout:
    """`(outputs / shape[0], inputs / shape[1])`, the last ones for less than a whole block."""
    return TensorLayout(dtype, 0, 1, block_shape=shape)


def packed(dtype: str, factor: int, group_size: int | None = None) -> TensorLayout:
    """`(outputs, inputs / factor)`."""
    return TensorLayout(dtype, 0, 1, packed_dim=1, packed_factor=factor, group_size=group_size)
