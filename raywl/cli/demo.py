"""`raywl demo`: a small real model across a local two-rank cluster, checked."""

from __future__ import annotations

import argparse
import os

from raywl.cli.arguments import Subparsers, add_command
from raywl.cli.load import add_report_argument, check_report_path, show_group
from raywl.cli.outcome import BUG, DONE, UsageError
from raywl.cli.output import Output

__all__ = ["add_parser"]

_REPORT = "raywl-demo.report.html"


def add_parser(subparsers: Subparsers) -> None:
    parser = add_command(
        subparsers,
        "demo",
        run,
        help="a small real model across a local two-rank cluster, checked",
        description="Shards a trained sentence encoder over two ranks of a local Ray cluster, encodes a few "
        "sentences with them, and compares with the unsharded model. Downloads nothing.",
    )
    add_report_argument(parser, default=_REPORT)


def run(args: argparse.Namespace, out: Output) -> int:
    check_report_path(args.report)
    # Not at the top: every command's parser is built at each start.
    from raywl.demo.run import MAX_DIFFERENCE, run_demo

    out.say("all-MiniLM-L6-v2 over two ranks of a local Ray cluster; this takes some seconds")
    try:
        result = run_demo(out.progress())
    except ModuleNotFoundError as error:
        raise UsageError(f"{error} (raywl[demo] brings all that the demo needs)") from error
    result.to_html(args.report)
    path = os.path.abspath(args.report)
    out.json({**result.to_dict(), "report_path": path})
    show_group(result.report, out)
    rows = [
        [f"{number + 1}. {sentence}", *(f"{value:.3f}" for value in row)]
        for number, (sentence, row) in enumerate(zip(result.sentences, result.similarities, strict=True))
    ]
    headers = ["sentence", *(str(number + 1) for number in range(len(rows)))]
    out.table(headers, rows, title="Cosine similarities, computed by the sharded ranks")
    verdict = "the same as" if result.ok else "NOT the same as"
    out.text(
        f"\nembeddings are {verdict} the unsharded model's: largest difference {result.max_difference:.2e} "
        f"(limit {MAX_DIFFERENCE:.0e})"
    )
    out.text(f"report: {path}")
    return DONE if result.ok else BUG
