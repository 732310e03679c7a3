"""Rows out of chunks."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from raywl.errors import CheckpointError, ShapeMismatchError
from raywl.tables.layout import TableLayout

__all__ = ["RowReader"]

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


class RowReader:
    """Gathers rows of a table whose chunks lie anywhere in this process's memory.

    All chunks are seen as one run of words, from the lowest address to the highest, and a row as the
    words from its own first one on: whatever the number of chunks, one `index_select` finds all rows.
    What lies between chunks is never touched.

    Args:
        layout: The table's.
        chunks: 1-d uint8 arrays, in order; kept alive by the reader. Read-only memory is fine.
    """

    def __init__(self, layout: TableLayout, chunks: Sequence[np.ndarray[Any, Any]]) -> None:
        self.layout = layout
        self._chunks = list(chunks)
        starts = [chunk.ctypes.data for chunk in chunks]
        # Words are as wide as rows and addresses allow.
        size = math.gcd(8, layout.row_bytes, *(start - starts[0] for start in starts)) if starts else 1
        self._word = _WORDS[size]
        self._row_words = layout.row_bytes // size
        if not layout.nbytes:
            return
        low = min(starts)
        high = max(start + chunk.nbytes for start, chunk in zip(starts, chunks, strict=True))
        # Through the address, since torch takes read-only arrays only with a warning.
        span = (ctypes.c_char * (high - low)).from_address(low)
        words = torch.frombuffer(span, dtype=torch.uint8)[: (high - low) // size * size].view(self._word)
        self._rows = words.as_strided((words.numel() - self._row_words + 1, self._row_words), (1, 1))
        self._starts = torch.tensor([(start - low) // size for start in starts])

    def gather(self, row_ids: Any, out: torch.Tensor | None = None) -> torch.Tensor:
        """Copies rows, in the order of `row_ids`.

        Args:
            row_ids: Integers of any shape: a tensor, an array, or a list.
            out: Where to put them: contiguous, on the CPU, of the table's dtype, of the ids' shape and
                then a row's; made when left out.

        Returns:
            `out`, of shape `(*row_ids.shape, *table.shape[1:])`.

        Raises:
            CheckpointError: A row id is outside the table.
            ShapeMismatchError: `out` has another shape.
            ValueError: `out` has another dtype, device or layout, or the ids aren't integers.
        """
        layout = self.layout
        ids = _as_ids(layout, row_ids)
        flat = ids.reshape(-1)
        _check_range(layout, flat)
        result = _checked_out(layout, (*ids.shape, *layout.shape[1:]), out)
        if not result.numel():
            return result
        with torch.no_grad():
            target = result.view(-1).view(torch.uint8)
            aligned = target.storage_offset() % self._word.itemsize == 0
            words = (target if aligned else torch.empty_like(target)).view(self._word)
            chunk = torch.div(flat, layout.rows_per_chunk, rounding_mode="floor")
            first_words = self._starts[chunk] + (flat - chunk * layout.rows_per_chunk) * self._row_words
            torch.index_select(self._rows, 0, first_words, out=words.view(flat.numel(), self._row_words))
            if not aligned:
                target.copy_(words.view(torch.uint8))
        return result


def _as_ids(layout: TableLayout, row_ids: Any) -> torch.Tensor:
    """Ids of any kind as int64 on the CPU."""
    ids = row_ids
    if not isinstance(ids, torch.Tensor):
        # Through numpy: torch takes no reversed or foreign arrays, and read-only ones only with a warning.
        array = np.asarray(row_ids)
        if array.dtype.kind not in "iu" and array.size:
            raise ValueError(f"{layout.name}: row ids must be integers, not {array.dtype}")
        if array.dtype == np.uint64 and array.size and array.max() > np.iinfo(np.int64).max:
            raise _outside(layout, int(array.max()))
        ids = torch.from_numpy(array.astype(np.int64))
    elif not ids.numel():
        ids = ids.to(torch.int64)
    if ids.dtype.is_floating_point or ids.dtype.is_complex or ids.dtype is torch.bool:
        raise ValueError(f"{layout.name}: row ids must be integers, not {ids.dtype}")
    return ids.to("cpu", torch.int64)


def _outside(layout: TableLayout, row_id: int) -> CheckpointError:
    rows = layout.shape[0]
    there = f"0..{rows - 1}" if rows else "the table, which has no rows"
    return CheckpointError(None, layout.name, f"row id {row_id} is outside {there}")


def _check_range(layout: TableLayout, ids: torch.Tensor) -> None:
    if not ids.numel():
        return
    low, high = (int(value) for value in torch.aminmax(ids))
    if low < 0 or high >= layout.shape[0]:
        raise _outside(layout, low if low < 0 else high)


def _checked_out(layout: TableLayout, shape: tuple[int, ...], out: torch.Tensor | None) -> torch.Tensor:
    dtype: torch.dtype = getattr(torch, layout.dtype)
    if out is None:
        return torch.empty(shape, dtype=dtype)
    if not isinstance(out, torch.Tensor):
        raise TypeError(f"{layout.name}: out must be a tensor, not {type(out).__name__}")
    if tuple(out.shape) != shape:
        raise ShapeMismatchError(layout.name, shape, tuple(out.shape), "gather's out has another shape")
    strided = out.layout is torch.strided
    if out.dtype != dtype or out.device.type != "cpu" or not strided or not out.is_contiguous():
        raise ValueError(
            f"{layout.name}: out must be a contiguous {dtype} tensor on the CPU, "
            f"not {out.dtype} on {out.device}"
        )
    return out
