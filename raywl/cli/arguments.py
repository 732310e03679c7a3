"""Arguments that several subcommands take, and the parser that reports misuse as an error."""

from __future__ import annotations

import argparse
import json
from typing import Any, NoReturn, Protocol

from raywl.cli.outcome import UsageError
from raywl.cli.output import Output
from raywl.text import parse_bytes

__all__ = [
    "Parser",
    "Run",
    "Subparsers",
    "add_command",
    "add_parallel_arguments",
    "add_source_arguments",
    "add_weights_arguments",
    "byte_size",
    "positive",
    "sizes",
    "source_arguments",
    "storage_option",
]

Subparsers = Any
"""argparse's own class for it has no public name."""


class Run(Protocol):
    """What a subcommand does; returns the exit code."""

    def __call__(self, args: argparse.Namespace, out: Output) -> int: ...


class Parser(argparse.ArgumentParser):
    """Raises `UsageError` where argparse would print and exit, so that `--json` covers misuse too."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}\n{self.format_usage().rstrip()}")


def add_command(subparsers: Subparsers, name: str, run: Run, help: str, description: str) -> Parser:
    """A subcommand's parser, with the options that every subcommand has."""
    parser: Parser = subparsers.add_parser(name, help=help, description=description, allow_abbrev=False)
    parser.set_defaults(run=run)
    parser.add_argument("--json", action="store_true", help="print one JSON object on standard output")
    parser.add_argument("--quiet", action="store_true", help="no progress on standard error")
    parser.add_argument("--debug", action="store_true", help="show the traceback of every error")
    return parser


def positive(text: str) -> int:
    """An argument that is a whole number of at least 1."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return value


def storage_option(text: str) -> tuple[str, Any]:
    """An argument that is `NAME=VALUE`."""
    name, equals, value = text.partition("=")
    if not (name and equals):
        # What was given may be a secret.
        raise argparse.ArgumentTypeError("not of the form NAME=VALUE")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def byte_size(text: str) -> int:
    """An argument that is a number of bytes, such as `500MB` or `4GiB`."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def add_source_arguments(parser: argparse.ArgumentParser, *, needs_ref: bool = True) -> None:
    """REF, which may be left out where it isn't needed, and how it is opened."""
    parser.add_argument(
        "ref",
        metavar="REF",
        nargs=None if needs_ref else "?",
        help="folder with weight files (safetensors, .bin, .pt), one such file, org/name[@revision], or a "
        "URL of fsspec's (s3://, https://, ...)",
    )
    parser.add_argument("--revision", metavar="NAME", help="branch, tag or commit of a repository")
    parser.add_argument(
        "--cache-dir",
        metavar="FOLDER",
        help="where fetched files are kept; by default the hub client's cache, and RAYWL_CACHE for stores",
    )
    parser.add_argument(
        "--offline", action="store_true", default=None, help="use what the cache holds, and ask nobody"
    )
    parser.add_argument(
        "--storage-option",
        metavar="NAME=VALUE",
        action="append",
        type=storage_option,
        dest="storage_options",
        help="of fsspec's file system for a URL; VALUE as JSON or as it is; may be given again",
    )
    parser.add_argument("--subfolder", metavar="NAME", help="folder inside REF that holds the weights")
    parser.add_argument(
        "--allow-pattern",
        metavar="GLOB",
        action="append",
        dest="allow_patterns",
        help="take only weight files whose name matches; may be given again",
    )


def source_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """The keyword arguments of `open_checkpoint` that the command line gave."""
    given = {
        "revision": args.revision,
        "subfolder": args.subfolder,
        "cache_dir": args.cache_dir,
        "allow_patterns": args.allow_patterns,
        "offline": args.offline,
        "storage_options": None if args.storage_options is None else dict(args.storage_options),
    }
    return {name: value for name, value in given.items() if value is not None}


def add_parallel_arguments(parser: argparse.ArgumentParser) -> None:
    """The sizes of the group of ranks."""
    group = parser.add_argument_group("group of ranks")
    for kind, meaning in (
        ("tp", "tensor-parallel"),
        ("pp", "pipeline-parallel"),
        ("dp", "data-parallel"),
        ("ep", "expert-parallel"),
    ):
        group.add_argument(
            f"--{kind}", type=positive, default=1, metavar="N", help=f"{meaning} size (default 1)"
        )


def sizes(args: argparse.Namespace) -> dict[str, int]:
    """The sizes as `launch` and `ParallelContext.of_rank` take them."""
    return {"tp_size": args.tp, "pp_size": args.pp, "dp_size": args.dp, "ep_size": args.ep}


def add_weights_arguments(parser: argparse.ArgumentParser) -> None:
    """Which parameters the weights go to."""
    group = parser.add_argument_group(
        "parameters",
        "Without --model: one empty parameter for each tensor, cut by --tp-plan, else by the plan of the "
        "checkpoint's transformers config class where that is installed, else replicated.",
    )
    group.add_argument(
        "--model",
        metavar="MODULE:FACTORY",
        help="called with each rank's ParallelContext, returns the torch module to load",
    )
    group.add_argument(
        "--tp-plan",
        metavar="FILE",
        help="JSON object of name pattern to style, as in Hugging Face configs",
    )
