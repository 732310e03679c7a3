"""How a parameter lies beside the matrix that it belongs to, as its attributes say.

A quantised weight comes with companions: scales of blocks or groups, zero points, group indices; and its
own values may be packed, several to a word. Which rows of a companion a rank keeps follows from which rows
of the matrix it keeps. So a parameter says how its dims run along the matrix, `(outputs, inputs)`:

    output_dim      dim that runs along the outputs; None: none does
    input_dim       dim that runs along the inputs; None: none does
    packed_dim      dim along which one element holds several values
    packed_factor   how many, a `Fraction` where values cross words (32 of 3 bits in three int32: 32/3)
    block_shape     (outputs, inputs) that one element stands for, as the scale of a block does
    group_size      inputs that one element stands for, as the scale of a group does; -1: all of them
    per_tensor      True: one element for a whole tensor

Dims are the parameter's own, those of experts counted from their first one, the expert; negative ones count
from the last. Without attributes a parameter is `(outputs, inputs)`, after the expert. On a dim that is
packed, a block or group says only where it may be cut. What other libraries call some of these is
understood too: `pack_factor`, `weight_block_size`, `is_transposed` (inputs first), `quant_method`
(`"tensor"`, `"channel"`, `"group"` or `"block"`), `needs_scalar_to_array` (per tensor), `load_full_w2` (no
input dim).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import torch

from raywl.types import whole_number

__all__ = ["Along", "Layout", "layout_of"]

_UNSET = object()


@dataclass(frozen=True, slots=True)
class Along:
    """How one dim of a parameter runs along the rows, or the columns, of its matrix."""

    dim: int
    unit: Fraction | int = 1
    """Rows that one element stands for."""
    border: int = 1
    """Only at multiples of so many rows may the matrix be cut."""
    what: str = "row"
    """What would be cut otherwise."""

    def num_stored(self, num_rows: int) -> int:
        """Elements that stand for the first `num_rows`; the last may stand for fewer than others."""
        return int(-(-num_rows // self.unit))

    def starts_at(self, row: int, text: str) -> int:
        """The element that starts with a row.

        Raises:
            ValueError: None does; the message begins with `text`.
        """
        if row % self.border:
            raise ValueError(f"{text} cuts a {self.what} of {self.border} (at {row})")
        return self.num_stored(row)

    def span(self, start: int, end: int, whole: int, text: str) -> tuple[int, int]:
        """The elements, `[first, end)`, that stand for the rows `[start, end)` of `whole`, and for no other.

        Raises:
            ValueError: There are none such; the message begins with `text`.
        """
        if start == end:
            return (self.num_stored(start),) * 2
        last = self.num_stored(end) if end == whole else self.starts_at(end, text)
        return self.starts_at(start, text), last

    def inferred(self, num_rows: int, num_stored: int) -> Along:
        """This, with the block size that `num_stored` elements for `num_rows` rows leave no doubt about.

        Only where the parameter says nothing of blocks, groups or packing. Of several sizes that it could
        be, the power of two is taken, if there is one: `ceil(100 / 64)` is 2, and so is `ceil(100 / 50)`.
        """
        if self.unit != 1 or not 0 < num_stored < num_rows:
            return self
        least = -(-num_rows // num_stored)
        most = num_rows if num_stored == 1 else -(-num_rows // (num_stored - 1)) - 1
        found = [size for size in (1 << n for n in range(num_rows.bit_length())) if least <= size <= most]
        size = least if least == most else found[0] if len(found) == 1 else None
        return self if size is None else replace(self, unit=size, border=size, what="block")


@dataclass(frozen=True, slots=True)
class Layout:
    """What a parameter's attributes say."""

    output: Along | None
    """Along the outputs; `None` where no dim runs so."""
    input: Along | None
    """Along the inputs, likewise."""
    per_tensor: bool = False
    """Whether it holds one element for each whole tensor."""
    per_channel: bool = False
    """Whether it says that there is one element for all inputs."""

    @property
    def inputs_first(self) -> bool:
        """Whether the parameter's matrices are `(inputs, outputs)`."""
        return self.output is not None and self.input is not None and self.input.dim < self.output.dim


def layout_of(param: torch.Tensor, first_dim: int = 0) -> Layout:
    """How a parameter lies.

    Args:
        param: The parameter.
        first_dim: Dims before those of the matrix: 1 for the expert's.

    Raises:
        ValueError: Attributes that contradict each other, or of a kind that they can't be.
    """
    kind = _kind_of(param)
    num_dims = param.dim()
    output_dim, input_dim = _dims_of(param, num_dims, first_dim)
    packed_dim, factor = _packing_of(param, num_dims)
    blocks = _block_shape_of(param)
    group_size = getattr(param, "group_size", None)
    groups = None if group_size is None else whole_number("group_size", group_size)
    if groups == 0 or (groups is not None and groups < -1):
        raise ValueError(f"group_size must be at least 1, or -1 for all inputs, got {groups}")
    alongs: list[Along | None] = []
    for which, dim in enumerate((output_dim, input_dim)):
        size, what = (blocks[which], "block") if blocks else (1, "row")
        if which == 1 and groups is not None and groups > 0:
            size, what = groups, "group"
        if dim is None:
            alongs.append(None)
        elif dim == packed_dim:
            what = "packed word" if size % factor.numerator else what
            alongs.append(Along(dim, factor, math.lcm(size, factor.numerator), what))
        else:
            alongs.append(Along(dim, size, size, what))
    return Layout(
        output=alongs[0],
        input=alongs[1],
        per_tensor=kind == "tensor",
        per_channel=kind == "channel" or groups == -1,
    )


def _kind_of(param: Any) -> str | None:
    method = getattr(param, "quant_method", None)
    method = getattr(method, "value", method)
    if getattr(param, "per_tensor", False) or getattr(param, "needs_scalar_to_array", False):
        return "tensor"
    return method if method in ("tensor", "channel", "group", "block") else None


def _dims_of(param: Any, num_dims: int, first_dim: int) -> tuple[int | None, int | None]:
    """Which dim runs along the outputs and which along the inputs."""
    turned = bool(getattr(param, "is_transposed", False)) and num_dims >= first_dim + 2
    there = [dim if dim < num_dims else None for dim in (first_dim, first_dim + 1)]
    output_dim, input_dim = reversed(there) if turned else there
    told_output, told_input = (getattr(param, f"{which}_dim", _UNSET) for which in ("output", "input"))
    if told_output is not _UNSET:
        output_dim = _checked_dim("output_dim", told_output, num_dims)
        # Whatever is left runs along the inputs.
        left = [dim for dim in there if dim is not None and dim != output_dim]
        input_dim = left[0] if left and output_dim is not None else None
    if told_input is not _UNSET:
        input_dim = _checked_dim("input_dim", told_input, num_dims)
        if told_output is _UNSET:
            left = [dim for dim in there if dim is not None and dim != input_dim]
            output_dim = left[0] if left else None
    if getattr(param, "load_full_w2", False):
        input_dim = None
    if output_dim is not None and output_dim == input_dim:
        raise ValueError(f"output_dim and input_dim are both {output_dim}")
    return output_dim, input_dim


def _checked_dim(what: str, value: Any, num_dims: int) -> int | None:
    if value is None:
        return None
    dim = whole_number(what, value)
    if not -num_dims <= dim < num_dims:
        raise ValueError(f"{what} {dim} is no dim of a parameter that has {num_dims}")
    return dim % num_dims


def _packing_of(param: Any, num_dims: int) -> tuple[int | None, Fraction | int]:
    dim = _checked_dim("packed_dim", getattr(param, "packed_dim", None), num_dims)
    if dim is None:
        # A factor alone is a note for kernels.
        return None, 1
    factor = getattr(param, "packed_factor", getattr(param, "pack_factor", None))
    if factor is None or isinstance(factor, bool) or not isinstance(factor, int | Fraction) or factor < 1:
        raise ValueError(f"packed_dim {dim} needs a packed_factor of at least 1, got {factor!r}")
    return dim, factor


def _block_shape_of(param: Any) -> tuple[int, int] | None:
    shape = getattr(param, "block_shape", getattr(param, "weight_block_size", None))
    if shape is None:
        return None
    if not isinstance(shape, Sequence) or len(shape) != 2:
        raise ValueError(f"block_shape must be (outputs, inputs), got {shape!r}")
    rows, columns = (whole_number("block_shape", size) for size in shape)
    if rows < 1 or columns < 1:
        raise ValueError(f"block_shape must be at least 1, got {list(shape)}")
    return rows, columns
