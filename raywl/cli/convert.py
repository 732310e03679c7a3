"""`raywl convert`: files of `torch.save` as safetensors files."""

from __future__ import annotations

import argparse

from raywl.cli.arguments import (
    Subparsers,
    add_command,
    add_source_arguments,
    byte_size,
    source_arguments,
)
from raywl.cli.outcome import DONE
from raywl.cli.output import Output
from raywl.text import format_bytes, format_seconds

__all__ = ["add_parser"]


def add_parser(subparsers: Subparsers) -> None:
    parser = add_command(
        subparsers,
        "convert",
        run,
        help="write .bin and .pt files as safetensors files",
        description="Writes a checkpoint of .bin, .pt or .pth files as safetensors files with an index, and "
        "compares them bit by bit. No code of the files is run. OUT is whole or isn't there.",
    )
    add_source_arguments(parser)
    parser.add_argument(
        "out",
        metavar="OUT",
        help="folder to make; or a path that ends in .safetensors, to have that one file alone",
    )
    parser.add_argument(
        "--max-shard-size",
        metavar="SIZE",
        type=byte_size,
        default="5GB",
        help="bytes of tensors in one file, such as 500MB or 4GiB (default 5GB)",
    )


def run(args: argparse.Namespace, out: Output) -> int:
    # Here, since it imports torch.
    from raywl.writing import convert

    report = convert(
        args.ref,
        args.out,
        max_shard_size=args.max_shard_size,
        progress=out.progress(),
        **source_arguments(args),
    )
    out.json(report.to_dict())
    out.text(
        f"{report.path}: {report.num_tensors} tensors, {format_bytes(report.nbytes)}, compared bit by bit "
        f"with {report.ref}, in {format_seconds(report.seconds)}"
    )
    out.table(["file", "size"], [[name, format_bytes(size)] for name, size in report.files.items()])
    for name in report.companions:
        out.text(f"copied: {name}")
    for name, kept in report.tied.items():
        out.text(f"left out: {name}, the same view of the same bytes as {kept}")
    for note in report.notes:
        out.text(f"note: {note}")
    return DONE
