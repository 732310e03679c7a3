"""`raywl verify`: whether a checkpoint is whole."""

from __future__ import annotations

import argparse

from raywl.cli.arguments import Subparsers, add_command, add_source_arguments, source_arguments
from raywl.cli.outcome import CHECKPOINT, DONE
from raywl.cli.output import Output
from raywl.errors import CheckpointError
from raywl.sources import resolve, shown_url
from raywl.text import format_bytes
from raywl.verifying import VerifyReport, problems_of, verify_source

__all__ = ["add_parser"]


def add_parser(subparsers: Subparsers) -> None:
    parser = add_command(
        subparsers,
        "verify",
        run,
        help="check that a checkpoint is whole",
        description="Checks index, headers and file sizes, and lists all that is wrong; with --deep reads "
        "every byte as well. Exits with 3 where there are problems.",
    )
    add_source_arguments(parser)
    parser.add_argument("--deep", action="store_true", help="read all tensor data too")


def _check(args: argparse.Namespace) -> VerifyReport:
    try:
        source = resolve(args.ref, **source_arguments(args))
    except CheckpointError as error:
        # A repository that hasn't got what its index names.
        return VerifyReport(problems_of(error), deep=args.deep)
    return verify_source(source, args.allow_patterns, deep=args.deep)


def run(args: argparse.Namespace, out: Output) -> int:
    report = _check(args)
    out.json(report.to_dict())
    depth = f", {format_bytes(report.bytes_checked)} read" if report.deep else ""
    out.text(f"{shown_url(args.ref)}: {report.files_checked} files checked{depth}")
    for problem in report.problems:
        out.text(f"problem: {problem}")
    for note in report.notes:
        out.text(f"note: {note}")
    out.text("ok" if report.ok else f"{len(report.problems)} problems")
    return DONE if report.ok else CHECKPOINT
