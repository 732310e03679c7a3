"""Numbers and tables as people read them; used by progress, reports and the command line."""

from __future__ import annotations

import re
from collections.abc import Sequence

__all__ = ["format_bytes", "format_rate", "format_seconds", "parse_bytes", "plain_table"]

_NUMBER = re.compile(r"-?[\d.]+( ?[A-Za-z/%]+)?|-")
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_SIZE = re.compile(r"(?P<number>\d+(\.\d+)?) ?(?P<prefix>[KMGTP]?)(?P<binary>I?)B?", re.IGNORECASE)


def format_bytes(num_bytes: float) -> str:
    """`num_bytes` in the largest binary unit that leaves at least 1: `86.6 MiB`."""
    value = float(num_bytes)
    for unit in _UNITS[:-1]:
        if abs(value) < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} {_UNITS[-1]}"


def parse_bytes(size: int | str) -> int:
    """A number of bytes: `1000`, `"500MB"` (millions), `"4GiB"` (powers of 1,024).

    Raises:
        ValueError: It is none of these, or less than 1.
    """
    found = None if isinstance(size, bool) else _SIZE.fullmatch(str(size).strip())
    nbytes = 0
    if found is not None and not (found["binary"] and not found["prefix"]):
        power = "KMGTP".find(found["prefix"].upper()) + 1 if found["prefix"] else 0
        nbytes = round(float(found["number"]) * (1024 if found["binary"] else 1000) ** power)
    if nbytes < 1:
        raise ValueError(f"{size!r} is no size of at least one byte, such as 500MB or 4GiB")
    return nbytes


def format_rate(num_bytes: float, seconds: float) -> str:
    """Bytes per second, or a dash where no time passed."""
    return f"{format_bytes(num_bytes / seconds)}/s" if seconds > 0 else "-"


def format_seconds(seconds: float) -> str:
    """Milliseconds below one second, else seconds."""
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def plain_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns of text; columns of numbers are aligned to the right.

    Args:
        headers: One title for each column.
        rows: Cells as text, as many in each row as there are headers.
    """
    table = [list(map(str, headers)), *(list(map(str, row)) for row in rows)]
    widths = [max(len(row[i]) for row in table) for i in range(len(headers))]
    right = [bool(rows) and all(_is_number(row[i]) for row in table[1:]) for i in range(len(headers))]
    lines = [
        "  ".join(
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(row, widths, right, strict=True)
        ).rstrip()
        for row in table
    ]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def _is_number(cell: str) -> bool:
    return _NUMBER.fullmatch(cell) is not None
