"""`raywl load`: weights onto the ranks of a cluster, and what that cost."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, Any

from raywl.cli.arguments import (
    Subparsers,
    add_command,
    add_parallel_arguments,
    add_source_arguments,
    add_weights_arguments,
    sizes,
    source_arguments,
)
from raywl.cli.outcome import DONE, UsageError
from raywl.cli.output import Output
from raywl.cli.weights import choose_cuts, empty_factory, import_factory, read_tp_plan
from raywl.opening import open_checkpoint
from raywl.text import format_bytes, format_rate, format_seconds

if TYPE_CHECKING:
    from raywl.report import GroupReport

__all__ = ["add_parser", "add_report_argument", "check_report_path", "rank_rows", "show_group"]

RANK_HEADERS = ("rank", "node", "read", "kept", "tensors", "seconds", "rate")


def add_parser(subparsers: Subparsers) -> None:
    parser = add_command(
        subparsers,
        "load",
        run,
        help="load across ranks, and report",
        description="Starts ranks on a Ray cluster, loads each one's part, reports, and ends them.",
    )
    add_source_arguments(parser)
    add_parallel_arguments(parser)
    add_weights_arguments(parser)
    parser.add_argument(
        "--stage-mode",
        metavar="WORD",
        default="cache",
        help="how a remote checkpoint comes to the nodes; cache: to their disks (default); stream: straight "
        "to the ranks",
    )
    parser.add_argument("--strategy", metavar="WORD", help="how files are read (default auto)")
    parser.add_argument(
        "--address",
        help="the Ray cluster, HOST:PORT or auto; default: RAY_ADDRESS, else one that is started for this",
    )
    parser.add_argument(
        "--release-page-cache",
        action="store_true",
        help="drop the checkpoint from each node's page cache once all ranks have loaded",
    )
    add_report_argument(parser)
    parser.add_argument(
        "--trace", metavar="PATH", help="write what each thread did when, in the Chrome trace format"
    )


def add_report_argument(parser: argparse.ArgumentParser, default: str | None = None) -> None:
    """`--report PATH`."""
    shown = "" if default is None else f" (default {default})"
    parser.add_argument(
        "--report", metavar="PATH", default=default, help=f"write a self-contained HTML page{shown}"
    )


def check_report_path(path: str | None, option: str = "--report") -> None:
    """Finds out before the work, rather than after it, that its report can't be written.

    Args:
        path: Where to; `None` for nowhere.
        option: What it was given by.

    Raises:
        UsageError: There is no such folder, or it can't be written to.
    """
    if path is None:
        return
    folder = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(folder):
        raise UsageError(f"{option} {path}: there is no folder {folder}")
    if os.path.isdir(path) or not os.access(folder, os.W_OK):
        raise UsageError(f"{option} {path}: can't be written")


def run(args: argparse.Namespace, out: Output) -> int:
    check_report_path(args.report)
    check_report_path(args.trace, "--trace")
    # Here and below, what takes a second or more to import, after what needs no import.
    from raywl.strategies import check_strategy

    check_strategy(args.strategy)
    arguments, notes = _load_arguments(args)
    import raywl

    with raywl.launch(
        args.ref,
        address=args.address,
        strategy=args.strategy,
        release_page_cache=args.release_page_cache,
        stage_mode=args.stage_mode,
        progress=out.progress(),
        **{**arguments, **sizes(args), **source_arguments(args)},
    ) as group:
        report = group.report
    report.notes[:0] = notes
    if args.report:
        report.to_html(args.report)
    if args.trace:
        report.to_trace(args.trace)
    out.json({**report.to_dict(), "report_path": args.report, "trace_path": args.trace})
    show_group(report, out)
    if args.report:
        out.text(f"report: {os.path.abspath(args.report)}")
    if args.trace:
        out.text(f"trace: {os.path.abspath(args.trace)}")
    return DONE


def _load_arguments(args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """The arguments of `launch` that say which parameters are loaded, and how that was chosen."""
    if args.model:
        plan = None if args.tp_plan is None else read_tp_plan(args.tp_plan)
        return {"model_factory": import_factory(args.model), "tp_plan": plan}, []
    manifest = open_checkpoint(args.ref, **source_arguments(args))
    cuts = choose_cuts(manifest, args.tp, args.tp_plan)
    arguments = {"model_factory": empty_factory(manifest, cuts), "shards": cuts.shards}
    return arguments, [cuts.note(others=args.pp * args.dp * args.ep > 1)]


def rank_rows(report: GroupReport) -> list[list[str]]:
    """Rows under `RANK_HEADERS`."""
    return [
        [
            str(rank.context.rank),
            rank.node or "-",
            format_bytes(rank.bytes_read),
            format_bytes(rank.bytes_loaded),
            str(len(rank.loaded)),
            f"{rank.seconds:.3f}",
            format_rate(rank.bytes_read, rank.seconds),
        ]
        for rank in report.ranks
    ]


def show_group(report: GroupReport, out: Output) -> None:
    """A group's load as text."""
    out.text(
        f"{report.ref}: {len(report.ranks)} ranks, {format_bytes(report.bytes_read)} read, "
        f"{format_bytes(report.bytes_loaded)} kept, "
        f"{format_seconds(report.seconds)} with the start of the ranks"
    )
    out.table(RANK_HEADERS, rank_rows(report))
    for title, names in (("missing", report.missing), ("without a place", report.unexpected)):
        for name in names:
            out.text(f"{title}: {name}")
    for note in dict.fromkeys([*report.notes, *(note for rank in report.ranks for note in rank.notes)]):
        out.text(f"note: {note}")
