"""Measurements as pictures: SVG, without anything else."""

from __future__ import annotations

import os
from collections.abc import Mapping
from html import escape
from typing import Any

__all__ = ["write_times"]

_TITLES = {
    "a": "(a) the source sends 200 Mbit/s in all",
    "b": "(b) 100 Mbit/s to each host",
    "c": "(c) one host has it all",
}
_ROW, _BAR, _LEFT, _WIDTH = 26, 16, 210, 640


def write_times(path: str | os.PathLike[str], found: Mapping[str, Any]) -> None:
    """Draws the times of `ClusterBenchmark.to_dict` as bars, to one scale.

    Raises:
        OSError: The file can't be written.
    """
    rows = found["rows"]
    longest_s = max((row["median_s"] for row in rows), default=1.0)
    lines, top, situation = [], 10, None
    for row in rows:
        if row["situation"] != situation:
            situation = row["situation"]
            top += 20
            lines.append(f'<text x="0" y="{top}" class="t">{escape(_TITLES[situation])}</text>')
            top += 8
        what = f"{row['hosts']} host{'s' if row['hosts'] > 1 else ''}"
        label = f"{what}, each alone" if row["what"] == "alone" else f"{what}, staged"
        width = (_WIDTH - _LEFT - 70) * row["median_s"] / longest_s
        kind = "alone" if row["what"] == "alone" else "staged"
        lines.append(
            f'<text x="{_LEFT - 8}" y="{top + 13}" text-anchor="end">{escape(label)}</text>'
            f'<rect x="{_LEFT}" y="{top}" width="{width:.1f}" height="{_BAR}" class="{kind}"/>'
            f'<text x="{_LEFT + width + 6:.1f}" y="{top + 13}">{row["median_s"]:.1f} s</text>'
        )
        top += _ROW
    style = (
        "text{font:13px system-ui,sans-serif;fill:#333}.t{font-weight:600}"
        ".staged{fill:#3e63dd}.alone{fill:#b0b4ba}"
        "@media(prefers-color-scheme:dark){text{fill:#ddd}}"
    )
    body = "\n".join(lines)
    with open(path, "w", encoding="utf-8") as file:
        file.write(
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {top + 6}" '
            f'width="{_WIDTH}" height="{top + 6}"><style>{style}</style>\n{body}\n</svg>\n'
        )
