"""Where in a file the elements of a view lie, when the view is of a tensor that was laid out anew.

`weight.t().contiguous().view(-1)[3:]` isn't a view of the file's bytes any more, but each of its elements is
still one element of the file. A layout knows for every element of the new tensor where it comes from; a view
of the new tensor then is a strided part of the file again, with some dims split in two or more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Dim", "Layout", "Located"]

Dim = tuple[int, int]
"""`(size, stride in bytes of the file)`."""


class Located(NamedTuple):
    """A view as a strided part of a file."""

    start: int
    """Byte of its first element."""
    dims: tuple[tuple[Dim, ...], ...]
    """For each dim of the view the dims that it is made of, the outermost first; their sizes multiply up."""


class _Digit(NamedTuple):
    """One of the dims, as the digit of an element's position: `position // step % size`."""

    size: int
    step: int
    """In elements of the new tensor."""
    stride: int
    """In bytes of the file."""


class Layout:
    """How the elements of a dense tensor lie in a file.

    Args:
        origin: Its elements in the file, by dims.
        strides: The tensor's strides in elements, one for each dim of `origin`; together they leave no gap.
    """

    def __init__(self, origin: Located, strides: Sequence[int]) -> None:
        digits = []
        for dims, stride in zip(origin.dims, strides, strict=True):
            step = stride
            for size, file_stride in reversed(dims):
                if size > 1:
                    digits.append(_Digit(size, step, file_stride))
                step *= size
        self._start = origin.start
        self._digits: list[_Digit] = []
        for digit in sorted(digits, key=lambda digit: -digit.step):
            outer = self._digits[-1] if self._digits else None
            if outer is not None and outer.stride == digit.size * digit.stride:
                # One run of the file, one digit.
                self._digits[-1] = _Digit(outer.size * digit.size, digit.step, digit.stride)
            else:
                self._digits.append(digit)

    def locate(self, offset: int, shape: Sequence[int], strides: Sequence[int]) -> Located | None:
        """Where a view lies.

        Args:
            offset: Its first element's position in the tensor's memory; as are `strides`, in elements.
            shape: Its sizes, none of them 0.
            strides: Between neighbours along each dim.

        Returns:
            `None` where its elements don't lie in the file at regular distances.
        """
        start, last = self._start, []
        for digit in self._digits:
            index = offset // digit.step % digit.size
            start += index * digit.stride
            last.append(index)
        first = list(last)
        found = []
        for size, stride in zip(shape, strides, strict=True):
            dims = self._walk(size, stride, first, last)
            if dims is None:
                return None
            found.append(tuple(dims))
        # Several dims may count up one digit, which must not overflow into the next.
        if any(index >= digit.size for index, digit in zip(last, self._digits, strict=True)):
            return None
        return Located(start, tuple(found))

    def _walk(self, size: int, stride: int, first: list[int], last: list[int]) -> list[Dim] | None:
        """The dims that `size` steps of `stride` make, adding to `last` what each digit counts up to."""
        if size == 1 or stride == 0:
            return [(size, 0)]
        at = next((i for i, digit in enumerate(self._digits) if digit.step <= stride), None)
        if at is None:
            return None
        digit = self._digits[at]
        count, left = divmod(stride, digit.step)
        if left:
            return None
        if first[at] + (size - 1) * count < digit.size:
            last[at] += (size - 1) * count
            return [(size, count * digit.stride)]
        # It runs through this digit, and on into the next one.
        num_steps, left = divmod(digit.size, count)
        if left or first[at] >= count or size % num_steps or not at:
            return None
        outer = self._walk(size // num_steps, digit.step * digit.size, first, last)
        if outer is None:
            return None
        last[at] += (num_steps - 1) * count
        return [*outer, (num_steps, count * digit.stride)]
