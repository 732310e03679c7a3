"""Companions of quantised matrices: tensors whose elements each stand for several rows or columns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

UNSET = -1


@dataclass(frozen=True)
class Kind:
    """How a companion lies beside a matrix `(outputs, inputs)`."""

    name: str
    outputs: int | None = 1
    """Rows for each element; `None` where no dim runs along the outputs."""
    inputs: int | None = 1
    turned: bool = False
    """Whether its first dim runs along the inputs."""
    marks: dict[str, Any] = field(default_factory=dict)
    first_dim: int = 0

    def shape(self, rows: int, columns: int) -> tuple[int, ...]:
        """Shape for a matrix of so many rows and columns."""
        sizes = [
            -(-size // unit)
            for size, unit in ((rows, self.outputs), (columns, self.inputs))
            if unit is not None
        ]
        return tuple(reversed(sizes) if self.turned else sizes)

    @property
    def output_dim(self) -> int:
        return self.first_dim + self.turned

    @property
    def input_dim(self) -> int:
        return self.first_dim + (not self.turned)

    def parameter(self, *shape: int) -> torch.nn.Parameter:
        param = torch.nn.Parameter(torch.full(shape, UNSET, dtype=torch.int32), requires_grad=False)
        for name, value in self.marks.items():
            setattr(param, name, value)
        return param

    def expanded(self, tensor: torch.Tensor, dim: int, unit: int, rows: int) -> torch.Tensor:
        """One element for each row: what a kernel takes it for."""
        return tensor.repeat_interleave(unit, dim).narrow(dim, 0, rows)


def kinds(unit: int, first_dim: int = 0) -> list[Kind]:
    """The companions that quantised checkpoints have, and packed weights, with blocks of `unit`."""
    out, inp = first_dim, first_dim + 1
    turned = {"output_dim": inp, "input_dim": out}
    rows = [
        ("weight", 1, 1, False, {}),
        ("turned weight", 1, 1, True, turned),
        ("block scale", unit, unit, False, {"block_shape": (unit, unit)}),
        ("turned block scale", unit, unit, True, {"weight_block_size": [unit, unit], **turned}),
        ("group scale", 1, unit, False, {"group_size": unit}),
        ("turned group scale", 1, unit, True, {"group_size": unit, **turned}),
        ("packed along outputs", unit, 1, False, {"packed_dim": out, "packed_factor": unit}),
        ("awq weight", unit, 1, True, {"packed_dim": inp, "pack_factor": unit, **turned}),
        ("packed along inputs", 1, unit, False, {"packed_dim": inp, "packed_factor": unit}),
        ("gptq weight", 1, unit, True, {"packed_dim": out, "packed_factor": unit, **turned}),
        ("gptq zeros", unit, 4, True, {"packed_dim": -1, "packed_factor": unit, "group_size": 4, **turned}),
    ]
    return [Kind(*row, first_dim=first_dim) for row in rows]


KIND_NAMES = [kind.name for kind in kinds(1)]


def numbered(*shape: int) -> torch.Tensor:
    """Every element another number."""
    return torch.arange(torch.Size(shape).numel(), dtype=torch.int32).view(shape)
