"""Rows of a checkpoint's tensor into rows of a parameter, whatever of them one element stands for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from raywl.errors import ShapeMismatchError
from raywl.loaders.copying import check_shape, copy_checked, zero
from raywl.loaders.layout import Along, Layout

__all__ = ["Piece", "copy_pieces", "load_uncut"]


class Piece(NamedTuple):
    """Rows that lie together in the checkpoint and in the parameter; rows are the matrix's own."""

    place: int
    """First row in the parameter."""
    room: int
    """Rows that it has there."""
    first: int
    """First row in the checkpoint's tensor."""
    num_rows: int
    """Rows of it that go there; what is left of the room becomes zero."""


def copy_pieces(
    param: torch.Tensor,
    weight: torch.Tensor,
    along: Along,
    pieces: Sequence[Piece],
    *,
    num_local: int,
    num_rows: int,
    name: str | None,
    who: str,
    holds: str,
) -> None:
    """Copies rows of a weight, or of a companion of it, along one dim.

    Args:
        param: The parameter.
        weight: The checkpoint's tensor, in the parameter's orientation.
        along: How the parameter's dim lies along the rows.
        pieces: What goes where.
        num_local: Rows of the parameter.
        num_rows: Rows of the checkpoint's tensor.
        name: For messages.
        who: The rank, likewise.
        holds: What the parameter should hold, likewise.

    Raises:
        ValueError: A piece begins or ends inside a block, a group or a packed word. Nothing was copied.
        ShapeMismatchError: The parameter or the weight has another shape. Nothing was copied.
    """
    dim = along.dim
    if dim < weight.dim() == param.dim():
        found = along.inferred(num_rows, weight.shape[dim])
        along = found if param.shape[dim] == found.num_stored(num_local) else along
    check_shape(name, _with(param, dim, along.num_stored(num_local)), param, holds)
    check_shape(name, _with(param, dim, along.num_stored(num_rows)), weight, f"shape differs ({who})")
    where = "" if name is None else f"{name}: "
    copies, padding = [], []
    for place, room, first, count in _joined(pieces):
        text = f"{where}{who} keeps rows {first} to {first + count} of {num_rows}, which"
        start, end = along.span(first, first + count, num_rows, text)
        to = along.starts_at(place, f"{where}what {who} has from row {place} of its parameter on")
        copies.append((param.data.narrow(dim, to, end - start), weight.narrow(dim, start, end - start)))
        stop = along.num_stored(place + room)
        if count < room and to + end - start < stop:
            padding.append(param.data.narrow(dim, to + end - start, stop - to - end + start))
    # Pad rows first: a lazy weight's copy is then the last thing that touches the parameter.
    for rest in padding:
        zero(rest)
    for target, source in copies:
        # Also where there are no rows: by that a rank of pad rows alone says that it has seen the weight.
        copy_checked(target, source, name)


def _with(param: torch.Tensor, dim: int, size: int) -> tuple[int, ...]:
    return (*param.shape[:dim], size, *param.shape[dim + 1 :])


def _joined(pieces: Sequence[Piece]) -> list[Piece]:
    """Pieces that go on where the one before ends, in both, made one: no cut is made between them."""
    joined: list[Piece] = []
    for piece in pieces:
        if joined:
            last = joined[-1]
            full = last.room == last.num_rows
            if full and piece.place == last.place + last.room and piece.first == last.first + last.num_rows:
                joined[-1] = last._replace(
                    room=last.room + piece.room, num_rows=last.num_rows + piece.num_rows
                )
                continue
        joined.append(piece)
    return joined


def load_uncut(
    param: torch.Tensor,
    weight: torch.Tensor,
    layout: Layout,
    *,
    index: int | None,
    count: int,
    name: str | None,
) -> bool:
    """Loads a companion that isn't cut: one element for each tensor, or one that has no dim of outputs.

    Args:
        param: Of elements, one for each of the tensors that its matrix is made of, or one for all; of any
            other shape, the weight's own, with a dim of `count` before it where each has its own.
        weight: The checkpoint's tensor.
        layout: The parameter's.
        index: Which of the tensors, `None` for all in one.
        count: How many there are.
        name: For messages.

    Returns:
        Whether it is such a companion; if not, nothing was done.

    Raises:
        ShapeMismatchError: It is one, and has another shape.
    """
    data = param.data
    unmarked = layout.output is not None and layout.output.unit == 1 and param.dim() == 1
    elements = unmarked and weight.numel() == 1 and param.numel() == (1 if index is None else count)
    if layout.per_tensor or param.dim() == 0 or elements:
        _load_elements(data, weight, index, count, name)
        return True
    if layout.output is not None:
        return False
    if index is not None and count > 1 and tuple(param.shape) == (count, *weight.shape):
        data, index = data[index], 0
    check_shape(name, data.shape, weight)
    if not index:
        # Of several that are the same by their meaning (group indices of q, k and v), the first counts.
        copy_checked(data, weight, name)
    return True


def _load_elements(
    data: torch.Tensor, weight: torch.Tensor, index: int | None, count: int, name: str | None
) -> None:
    """One element for each tensor."""
    flat, values = data.view(-1), weight.reshape(-1)
    if index is not None:
        if len(flat) != count or len(values) != 1:
            raise ShapeMismatchError(
                name, (count,), tuple(data.shape), f"one element for each of {count} tensors; shape differs"
            )
        flat = flat.narrow(0, index, 1)
    elif len(values) == 1:
        values = values.expand(len(flat))
    copy_checked(flat, values, name)
