"""Reports as pages: one file, no scripts, nothing fetched, readable in light and dark.

Every name from a checkpoint or a model is escaped here, since a checkpoint may come from anybody.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, cast

from raywl.text import format_bytes, format_rate, format_seconds

if TYPE_CHECKING:
    from raywl.report import GroupReport, LoadReport
    from raywl.timeline import Span

__all__ = [
    "bars",
    "fragment",
    "names",
    "page",
    "rank_title",
    "report_sections",
    "section",
    "table",
    "write_page",
]

_STYLE = """
:root { color-scheme: light dark; --fg: #1c2024; --dim: #60646c; --bg: #fff; --line: #dfe2e6; --tint: #f4f5f7;
  --c0: #3e63dd; --c1: #e5892b; --c2: #30a46c; --c3: #ab4aba; --c4: #e5484d; --c5: #8d8d8d; }
@media (prefers-color-scheme: dark) { :root { --fg: #edeef0; --dim: #a0a4ab; --bg: #111113; --line: #363a3f;
  --tint: #1b1d20; --c0: #849dff; --c1: #ffb366; --c2: #4cc38a; --c3: #d19dff; --c4: #ff9592; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--fg); background: var(--bg); max-width: 70rem;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: .2rem; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin-top: 2rem; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; }
th, td { padding: .3rem .9rem .3rem 0; border-bottom: 1px solid var(--line); text-align: left;
  vertical-align: top; }
td.num, th.num { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
th { color: var(--dim); font-weight: 500; } .dim { color: var(--dim); } .good { color: var(--c2); }
.bad { color: var(--c4); }
code { font: 13px ui-monospace, monospace; overflow-wrap: anywhere; }
details { margin: .3rem 0; }
details ul { max-height: 24rem; overflow-y: auto; background: var(--tint); padding: .6rem 2rem; }
.bar { display: flex; height: 1.1rem; background: var(--tint); border-radius: 3px; overflow: hidden;
  min-width: 18rem; }
.bar span { display: block; height: 100%; } .key i { display: inline-block; width: .8rem; height: .8rem;
  border-radius: 2px; margin: 0 .3rem 0 .9rem; vertical-align: -1px; }
"""
_NUM_COLOURS = 6
_MAX_BARS = 12_000
"""Bars in all timelines of a page: what is too short to be seen is drawn as one."""


def page(title: str, sections: Sequence[str]) -> str:
    """A whole page of `sections`, which are HTML already; `title` is text."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n"
        f"<body><h1>{escape(title)}</h1>\n" + "\n".join(sections) + "\n</body></html>\n"
    )


def section(heading: str, body: str) -> str:
    """HTML `body` under a heading, which is text."""
    return f"<section><h2>{escape(heading)}</h2>\n{body}</section>"


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], *, numbers_from: int = 1) -> str:
    """A table of text cells.

    Args:
        headers: One title for each column.
        rows: Cells as text; they are escaped.
        numbers_from: The first column that is aligned to the right, as are all after it.
    """

    def cells(row: Sequence[str], tag: str) -> str:
        return "".join(
            f'<{tag} class="num">{escape(str(cell))}</{tag}>'
            if column >= numbers_from
            else f"<{tag}>{escape(str(cell))}</{tag}>"
            for column, cell in enumerate(row)
        )

    body = "\n".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
    return (
        f'<div class="scroll"><table><thead><tr>{cells(headers, "th")}</tr></thead>'
        f"<tbody>\n{body}\n</tbody></table></div>"
    )


def bars(rows: Mapping[str, Mapping[str, float]]) -> str:
    """One stacked bar of seconds for each row, all to one scale, with a key of the parts.

    Args:
        rows: Row title to part to seconds.
    """
    parts = list(dict.fromkeys(part for row in rows.values() for part in row))
    colour = {part: f"var(--c{index % _NUM_COLOURS})" for index, part in enumerate(parts)}
    longest_s = max((sum(row.values()) for row in rows.values()), default=0.0)
    if longest_s <= 0:
        return '<p class="dim">No time was recorded.</p>'
    key = "".join(f'<i style="background:{colour[part]}"></i>{escape(part)}' for part in parts)
    lines = []
    for title, row in rows.items():
        spans = "".join(
            f'<span style="width:{100 * seconds / longest_s:.2f}%;background:{colour[part]}" '
            f'title="{escape(part)}: {format_seconds(seconds)}"></span>'
            for part, seconds in row.items()
        )
        total = format_seconds(sum(row.values()))
        lines.append(
            f'<tr><td>{escape(title)}</td><td style="width:100%"><div class="bar">{spans}</div></td>'
            f'<td class="num">{total}</td></tr>'
        )
    return f'<p class="key dim">{key}</p><table style="width:100%">' + "\n".join(lines) + "</table>"


def names(title: str, values: Sequence[str] | Mapping[str, str]) -> str:
    """A list of names to unfold, each with its reason where `values` maps to one."""
    if isinstance(values, Mapping):
        items = [
            f"<li><code>{escape(name)}</code> <span class='dim'>{escape(why)}</span></li>"
            for name, why in values.items()
        ]
    else:
        items = [f"<li><code>{escape(name)}</code></li>" for name in values]
    return f"<details><summary>{escape(title)}: {len(items)}</summary><ul>{''.join(items)}</ul></details>"


def report_sections(report: LoadReport | GroupReport) -> list[str]:
    """The sections of a report's page: summary, ranks, phases, files, names, notes."""
    ranks = _ranks(report)
    sections = [_summary(report), section("Ranks", _rank_table(ranks))]
    phases = {rank_title(rank): rank.phases for rank in ranks}
    body = bars(phases)
    if _is_group(report):
        body = bars({"launch": report.phases}) + body
    sections.append(section("Phases", body))
    by_file: dict[str, int] = {}
    for rank in ranks:
        for file, num_bytes in rank.bytes_by_file.items():
            by_file[file] = by_file.get(file, 0) + num_bytes
    sources = [[source, format_bytes(num_bytes)] for source, num_bytes in report.bytes_by_source.items()]
    sections.append(section("Sources", table(["source", "bytes"], sources)))
    rows = [[file, format_bytes(num_bytes)] for file, num_bytes in by_file.items()]
    sections.append(section("Files", table(["file", "read by all ranks"], rows)))
    sections += _timelines(ranks)
    sections.append(section("Names", _name_lists(report, ranks)))
    notes = list(dict.fromkeys([*report.notes, *(note for rank in ranks for note in rank.notes)]))
    if notes:
        sections.append(section("Notes", f"<ul>{''.join(f'<li>{escape(note)}</li>' for note in notes)}</ul>"))
    return sections


def fragment(report: LoadReport | GroupReport) -> str:
    """A small piece of HTML for a notebook's cell."""
    return f"<div><p>{_headline(report)}</p>{_rank_table(_ranks(report))}</div>"


def write_page(path: str | os.PathLike[str], text: str) -> None:
    """Writes a page so that `path` is the old file or the whole new one, never a part.

    Raises:
        OSError: The folder doesn't exist or can't be written to.
    """
    path = os.fspath(path)
    temporary = f"{path}.{secrets.token_hex(4)}.tmp"
    # Not mkstemp, whose file only its owner may read: a report is made to be shown.
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _is_group(report: LoadReport | GroupReport) -> bool:
    # Told by its field: raywl.report imports this module, not the other way round.
    return hasattr(report, "ranks")


def _ranks(report: LoadReport | GroupReport) -> list[LoadReport]:
    if _is_group(report):
        return cast("GroupReport", report).ranks
    return [cast("LoadReport", report)]


def rank_title(rank: LoadReport) -> str:
    """What a rank is called in a report."""
    where = f" on {rank.node}" if rank.node else ""
    return f"rank {rank.context.rank}{where}"


def _headline(report: LoadReport | GroupReport) -> str:
    num_ranks = len(_ranks(report))
    # A group's seconds hold the start of its processes too, so a rate of all of them would mislead.
    rate = "" if _is_group(report) else f" ({format_rate(report.bytes_read, report.seconds)})"
    return (
        f"<code>{escape(report.ref)}</code>: {num_ranks} rank{'s' if num_ranks != 1 else ''}, "
        f"{format_bytes(report.bytes_read)} read, {format_bytes(report.bytes_loaded)} kept, "
        f"{format_seconds(report.seconds)}{rate}"
    )


def _summary(report: LoadReport | GroupReport) -> str:
    identity = f'<span class="dim">identity <code>{escape(report.identity)}</code></span>'
    return f"<p>{_headline(report)}<br>{identity}</p>"


def _rank_table(ranks: Sequence[LoadReport]) -> str:
    headers = ["rank", "node", "read", "kept", "tensors", "seconds", "rate", "while reading", "of the limit"]
    rows = [
        [
            str(rank.context.rank),
            rank.node or "-",
            format_bytes(rank.bytes_read),
            format_bytes(rank.bytes_loaded),
            str(len(rank.loaded)),
            f"{rank.seconds:.3f}",
            format_rate(rank.bytes_read, rank.seconds),
            "-" if rank.read_bytes_per_s is None else format_rate(rank.read_bytes_per_s, 1),
            "-" if rank.limit_ratio is None else f"{rank.limit_ratio:.2f} x",
        ]
        for rank in ranks
    ]
    return table(headers, rows, numbers_from=2)


def _timelines(ranks: Sequence[LoadReport]) -> list[str]:
    """The sections of what was slow and of what happened when; none where nothing was read."""
    ranks = [rank for rank in ranks if rank.timeline.spans]
    if not ranks:
        return []
    slow = [
        [
            file,
            rank_title(rank),
            format_bytes(times.nbytes),
            format_seconds(times.seconds),
            format_rate(times.nbytes, times.seconds),
        ]
        for rank in ranks
        for file, times in rank.timeline.slowest_files(3)
    ]
    headers = ["file", "rank", "bytes", "thread time", "rate of a thread"]
    first = min(rank.timeline.started_at for rank in ranks)
    end_s = max(rank.timeline.started_at - first + rank.seconds for rank in ranks)
    parts = ("read", "copy", "wait")
    key = "".join(f'<i style="background:var(--c{i})"></i>{part}' for i, part in enumerate(parts))
    key += '<i style="background:var(--line)"></i>phases of the load'
    charts = [
        _chart(rank, rank.timeline.started_at - first, end_s, _MAX_BARS // len(ranks)) for rank in ranks
    ]
    body = f'<p class="key dim">{key}; a row for each thread, {format_seconds(end_s)} in all</p>'
    return [
        section("Slowest files", table(headers, slow, numbers_from=2)),
        section("Timeline", body + "".join(charts)),
    ]


def _chart(rank: LoadReport, late_s: float, end_s: float, max_bars: int) -> str:
    """One rank's timeline as a drawing.

    Args:
        rank: Its load.
        late_s: How much later than the first rank it began.
        end_s: The end of the time axis.
        max_bars: Most bars to draw, about.
    """
    timeline = rank.timeline
    threads = sorted({span.thread for span in timeline.spans})
    scale = 1000 / max(end_s, 1e-9)
    bars = [
        _bar(
            0, (phase.at_s + late_s) * scale, phase.seconds * scale, "var(--line)", phase.name, phase.seconds
        )
        for phase in timeline.phases
    ]
    # Three parts of a span, and spans nearer than this are one.
    nearest_s = 3 * len(threads) * end_s / max(max_bars, 1)
    for row, thread in enumerate(threads, 1):
        spans = sorted((span for span in timeline.spans if span.thread == thread), key=lambda span: span.at_s)
        for at_s, parts, title in _merged(spans, nearest_s):
            x = (at_s + late_s) * scale
            for colour, seconds in enumerate(parts):
                if seconds:
                    bars.append(_bar(row, x, seconds * scale, f"var(--c{colour})", title, sum(parts)))
                    x += seconds * scale
    height = 14 * (len(threads) + 1)
    title = escape(rank_title(rank))
    return (
        f'<p>{title}</p><svg viewBox="0 0 1000 {height}" width="100%" height="{height}" '
        f'preserveAspectRatio="none" role="img" aria-label="timeline of {title}">{"".join(bars)}</svg>'
    )


def _merged(spans: Sequence[Span], nearest_s: float) -> Iterator[tuple[float, list[float], str]]:
    """Reads of one thread, those that follow each other closely as one: begin, parts, title."""
    at = 0
    while at < len(spans):
        first, last = spans[at], at + 1
        while last < len(spans) and spans[last].at_s - first.at_s < nearest_s:
            last += 1
        group = spans[at:last]
        parts = [sum(times) for times in zip(*((s.read_s, s.copy_s, s.wait_s) for s in group), strict=True)]
        title = first.file if len(group) == 1 else f"{len(group)} reads from {first.file} on"
        yield first.at_s, parts, f"{title}, {format_bytes(sum(span.nbytes for span in group))}"
        at = last


def _bar(row: int, x: float, width: float, colour: str, title: str, seconds: float) -> str:
    return (
        f'<rect x="{x:.2f}" y="{14 * row + 1}" width="{max(width, 0.2):.2f}" height="12" fill="{colour}">'
        f"<title>{escape(title)}: {format_seconds(seconds)}</title></rect>"
    )


def _name_lists(report: LoadReport | GroupReport, ranks: Sequence[LoadReport]) -> str:
    lists = [
        names("loaded", report.loaded),
        names("missing from the checkpoint", report.missing),
        names("without a place in the model", report.unexpected),
    ]
    for rank in ranks:
        title = "" if len(ranks) == 1 else f", rank {rank.context.rank}"
        if rank.skipped:
            lists.append(names(f"left out on purpose{title}", rank.skipped))
        if rank.partial:
            lists.append(names(f"set only in part{title}", rank.partial))
    return "\n".join(lists)
