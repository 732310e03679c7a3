"""`raywl stage`: a checkpoint onto the nodes of a cluster."""

from __future__ import annotations

import argparse
import os

from raywl.cli.arguments import Subparsers, add_command, add_source_arguments, source_arguments
from raywl.cli.load import add_report_argument, check_report_path
from raywl.cli.outcome import DONE
from raywl.cli.output import Output

__all__ = ["add_parser"]


def add_parser(subparsers: Subparsers) -> None:
    parser = add_command(
        subparsers,
        "stage",
        run,
        help="bring a checkpoint to the nodes of a cluster",
        description="Every node fetches a part of the checkpoint and gets the rest from the others, so that "
        "each byte leaves the source once. What came of an interrupted staging is used.",
    )
    add_source_arguments(parser)
    parser.add_argument(
        "--address",
        help="the Ray cluster, HOST:PORT or auto; default: RAY_ADDRESS, else one that is started for this",
    )
    parser.add_argument(
        "--node",
        metavar="ID",
        action="append",
        dest="nodes",
        help="only this node, by id or address; may be given again",
    )
    parser.add_argument(
        "--no-prefetch",
        action="store_false",
        dest="prefetch",
        help="don't read the files into the nodes' page caches",
    )
    parser.add_argument(
        "--mode",
        metavar="WORD",
        default="cache",
        help="cache: into the nodes' cache folders (default); stream: past them, to see what it takes",
    )
    parser.add_argument("--timeout", type=float, default=3600.0, metavar="SECONDS", help="bounds it all")
    add_report_argument(parser)


def run(args: argparse.Namespace, out: Output) -> int:
    check_report_path(args.report)
    import raywl

    report = raywl.stage(
        args.ref,
        nodes=args.nodes,
        mode=args.mode,
        prefetch=args.prefetch,
        address=args.address,
        timeout_s=args.timeout,
        progress=out.progress(),
        **source_arguments(args),
    )
    if args.report:
        report.to_html(args.report)
    out.json({**report.to_dict(), "report_path": args.report})
    out.text(report.headline)
    out.table(report.headers, report.rows())
    for note in report.notes:
        out.text(f"note: {note}")
    for node in report.nodes:
        for note in node.notes:
            out.text(f"note: {node.node}: {note}")
    if args.report:
        out.text(f"report: {os.path.abspath(args.report)}")
    return DONE
