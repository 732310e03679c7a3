"""The command's frame: arguments in, exit code out, errors said once and in one place."""

from __future__ import annotations

import argparse
import contextlib
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import TextIO

from raywl import __version__
from raywl.cli import bench, convert, demo, inspect, load, plan, stage, status, verify
from raywl.cli.arguments import Parser
from raywl.cli.outcome import BUG, DONE, error_fields, exit_code
from raywl.cli.output import Output, flush_stdout, open_output

__all__ = ["build_parser", "main"]

_EPILOG = """exit codes:
  0    done
  1    a bug
  2    wrong usage; sizes that don't divide; an unknown strategy or style
  3    the checkpoint is damaged, incomplete or absent
  4    its source can't be reached, refused, or hasn't got it
  5    a lock, too few resources, or no cluster there
  130  interrupted
"""


def build_parser() -> Parser:
    """The parser of the whole command line."""
    parser = Parser(
        prog="raywl",
        description="Load model weights across the ranks of a Ray cluster.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"raywl {__version__}")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True, dest="command")
    for command in (demo, inspect, verify, plan, load, stage, status, convert, bench):
        command.add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: Arguments without the program's name; `None` means those of this process.

    Returns:
        The exit code, as `raywl --help` lists them.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        args = build_parser().parse_args(words)
    except SystemExit as done:
        # --help and --version have printed what was asked for.
        flush_stdout()
        return DONE if done.code is None else int(done.code)
    except ValueError as error:
        with open_output(as_json="--json" in words, quiet=True) as out:
            return _fail(error, out, debug="--debug" in words)
    with open_output(as_json=args.json, quiet=args.quiet) as out, warnings.catch_warnings():
        warnings.showwarning = _show_warning
        try:
            code: int = args.run(args, out)
        except (Exception, KeyboardInterrupt) as error:
            return _fail(error, out, debug=args.debug)
        return code


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    # Without the line of code that Python adds: it means nothing to who typed a command.
    print(f"raywl: warning: {message}", file=sys.stderr, flush=True)


def _fail(error: BaseException, out: Output, *, debug: bool) -> int:
    code = exit_code(error)
    # Standard error may be gone as well; the exit code still says what happened.
    with contextlib.suppress(BrokenPipeError):
        if debug or code == BUG:
            traceback.print_exception(error, file=sys.stderr)
        fields = error_fields(error)
        print(f"raywl: {fields['class']}: {fields['message']}", file=sys.stderr, flush=True)
    out.json({"error": error_fields(error)})
    return code
