"""Constants that loaders put into parameters: padding, and parts that no checkpoint has."""

from __future__ import annotations

from typing import NamedTuple

from raywl.plan.copies import itemsize_of, span_of

__all__ = ["Fill", "Number", "number_from", "number_to"]

Number = bool | int | float


class Fill(NamedTuple):
    """One constant in a strided part of a parameter. Fills come before all copies, in their order."""

    target: str
    """The parameter or buffer, by its name in the model."""
    dst_start: int
    """Byte of the first element, counted from the parameter's first byte."""
    shape: tuple[int, ...]
    """Elements along each dim; no dim is 0."""
    dst_strides: tuple[int, ...]
    """Bytes between neighbours along each dim."""
    dst_dtype: str
    """torch's name of the dtype that the value is written as."""
    value: Number

    @property
    def dst_end(self) -> int:
        """One past the last byte that it writes."""
        return self.dst_start + span_of(self.shape, self.dst_strides, itemsize_of(self.dst_dtype))


def number_to(value: Number) -> list[str]:
    """A number as JSON strings, which keep infinities and every bit."""
    return [type(value).__name__, value.hex() if isinstance(value, float) else str(value)]


def number_from(row: list[str]) -> Number:
    """The number that `number_to` wrote.

    Raises:
        ValueError: It wrote no such thing.
    """
    kind, text = row
    if kind == "float":
        return float.fromhex(text)
    if kind == "int":
        return int(text)
    if kind == "bool" and text in ("True", "False"):
        return text == "True"
    raise ValueError(f"{row!r} is no number")
