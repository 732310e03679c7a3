"""`raywl bench`: measurements that others can repeat."""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

from raywl.bench.words import LAYOUTS, PEERS
from raywl.cli import bench_cluster
from raywl.cli.arguments import (
    Parser,
    Subparsers,
    add_command,
    add_source_arguments,
    byte_size,
    positive,
    source_arguments,
)
from raywl.cli.outcome import BUG, DONE, UsageError
from raywl.cli.output import Output
from raywl.cli.weights import choose_cuts
from raywl.opening import Checkpoint, open_checkpoint
from raywl.sources import shown_url
from raywl.sources.selection import SAFETENSORS
from raywl.strategies import check_strategy
from raywl.text import format_bytes
from raywl.types import Shard

__all__ = ["add_parser"]


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("bench", help="measure loading beside the raw limit", allow_abbrev=False)
    commands = parser.add_subparsers(metavar="WHAT", required=True, dest="what", parser_class=Parser)
    load = add_command(
        commands,
        "load",
        run_load,
        help="load_into beside raw reads, a safe_open loop and other libraries",
        description="Brings REF into memory that was touched before, in turn by parallel preadv and nothing "
        "else (the raw limit), by load_into, by a safe_open loop, and by other libraries, each in a fresh "
        "process, and compares what arrived bit by bit.",
    )
    add_source_arguments(load)
    _add_runs(load)
    _add_ranks(load)
    load.add_argument(
        "--peers",
        metavar="WORDS",
        default="",
        help=f"other libraries, with commas between, or all that are installed: {', '.join(PEERS)}",
    )
    load.add_argument(
        "--strategy",
        metavar="WORDS",
        default="",
        help="load_into by each of these as well, with commas between; it goes by auto",
    )
    reload = add_command(
        commands,
        "reload",
        run_reload,
        help="reload_into beside copying from memory to memory",
        description="Brings REF into the parameters of a live model, in turn by reload_into and by "
        "load_file and a copy of each tensor, each in a fresh process, beside copying as many bytes from "
        "memory to memory and nothing else (the limit); compares what arrived bit by bit, and that no "
        "parameter has moved.",
    )
    add_source_arguments(reload)
    _add_runs(reload)
    _add_ranks(reload)
    make = add_command(
        commands,
        "make",
        run_make,
        help="a checkpoint to measure with",
        description="Writes a checkpoint of random bits: "
        + "; ".join(f"{layout}, {what}" for layout, what in LAYOUTS.items())
        + ".",
    )
    make.add_argument("folder", metavar="FOLDER", help="made if it isn't there")
    make.add_argument(
        "--layout", choices=list(LAYOUTS), default="model", help="what of it is large (default model)"
    )
    make.add_argument(
        "--size", type=byte_size, default="2GiB", metavar="SIZE", help="bytes of tensors (default 2GiB)"
    )
    bench_cluster.add_parsers(commands)
    iterate = add_command(
        commands,
        "iterate",
        run_iterate,
        help="iterators over weight files, their time and peak memory",
        description="Reads the files of REF tensor by tensor, in turn by each strategy of raywl's iterator, "
        "by several threads, and by a safe_open loop, each in a fresh process whose peak of memory is "
        "counted by the kernel.",
    )
    add_source_arguments(iterate)
    _add_runs(iterate)
    iterate.add_argument(
        "--max-workers", type=positive, default=4, metavar="N", help="threads that read (default 4)"
    )
    iterate.add_argument(
        "--pause-ms",
        type=positive,
        metavar="MS",
        help="how long the consumer is at each tensor beside copying it (default 0)",
    )


def _add_runs(parser: argparse.ArgumentParser) -> None:
    """How often, and with what in the page cache."""
    parser.add_argument("--repeat", type=positive, default=5, metavar="N", help="repetitions (default 5)")
    cache = parser.add_mutually_exclusive_group()
    cache.add_argument(
        "--cold", action="store_true", help="drop the files from the page cache before each run"
    )
    cache.add_argument("--warm", action="store_true", help="fill the page cache before each run (default)")


def _add_ranks(parser: argparse.ArgumentParser) -> None:
    """How many, and how tensors are cut for them."""
    parser.add_argument(
        "--tp",
        type=positive,
        default=1,
        metavar="N",
        help="tensor-parallel ranks, one process each (default 1)",
    )
    parser.add_argument("--tp-plan", metavar="FILE", help="JSON object of name pattern to style")


def run_load(args: argparse.Namespace, out: Output) -> int:
    from raywl.bench.load import CONTESTANTS

    manifest = _fetched(args, out)
    peers, left_out = _peers(args.peers, manifest, args.tp)
    return _compare(args, out, manifest, (*CONTESTANTS, *_strategies(args.strategy), *peers), left_out)


def run_reload(args: argparse.Namespace, out: Output) -> int:
    from raywl.bench.load import RELOADS

    return _compare(args, out, _fetched(args, out), RELOADS, {})


def _compare(
    args: argparse.Namespace,
    out: Output,
    manifest: Checkpoint,
    contestants: Sequence[str],
    left_out: dict[str, str],
) -> int:
    from raywl.bench.load import LoadBenchmark

    cuts = choose_cuts(manifest, args.tp, args.tp_plan)
    with _scratch_beside(manifest) as folder:
        benchmark = LoadBenchmark(
            manifest,
            args.ref,
            source_arguments(args),
            cold=args.cold,
            tp_size=args.tp,
            shards={name: spec.dim for name, spec in cuts.shards.items() if isinstance(spec, Shard)},
            contestants=contestants,
            folder=folder,
            notes=[] if args.tp == 1 else [f"tensors are {cuts.source}"],
            left_out=left_out,
        )
        benchmark.run(args.repeat, out.say)
    found = benchmark.to_dict()
    out.json(found)
    _show(found, out)
    return DONE if found["identical"] else BUG


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _strategies(text: str) -> list[str]:
    words = _words(text)
    for word in words:
        check_strategy(word)
    return [f"load_into-{word}" for word in words]


def _peers(text: str, manifest: Checkpoint, tp_size: int) -> tuple[list[str], dict[str, str]]:
    """The peers that take part, and why others that were asked for don't."""
    from raywl.bench.peers import why_not

    words = list(PEERS) if text == "all" else _words(text)
    if unknown := [word for word in words if word not in PEERS]:
        raise UsageError(f"--peers {unknown[0]}: expected all, or some of {', '.join(PEERS)}")
    reasons = {word: why_not(word, manifest, tp_size) for word in words}
    left_out = {word: reason for word, reason in reasons.items() if reason is not None}
    return [word for word in words if word not in left_out], left_out


@contextlib.contextmanager
def _scratch_beside(manifest: Checkpoint) -> Iterator[str]:
    """A folder on the checkpoint's own disk where that may be written to, else in the system's place."""
    around = os.path.dirname(os.path.dirname(os.path.realpath(manifest.path(manifest.files[0].name))))
    where = around if os.access(around, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="raywl-bench-", dir=where) as folder:
        yield folder


def run_make(args: argparse.Namespace, out: Output) -> int:
    from raywl.bench.synthetic import make_layout

    if os.path.isdir(args.folder) and os.listdir(args.folder):
        raise UsageError(f"{args.folder} isn't empty")
    nbytes = make_layout(args.folder, args.layout, args.size)
    out.json({"folder": args.folder, "layout": args.layout, "nbytes": nbytes})
    out.text(f"{args.folder}: {LAYOUTS[args.layout]}, {format_bytes(nbytes)}")
    return DONE


def run_iterate(args: argparse.Namespace, out: Output) -> int:
    from raywl.bench.iterate import IterateBenchmark

    manifest = _fetched(args, out)
    benchmark = IterateBenchmark(
        [manifest.path(file.name) for file in manifest.files],
        cold=args.cold,
        max_workers=args.max_workers,
        pause_s=(args.pause_ms or 0) / 1000,
    )
    benchmark.run(args.repeat, out.say)
    found = benchmark.to_dict()
    out.json(found)
    out.text(
        f"{args.ref}: {found['num_files']} files of at most {format_bytes(found['largest_file_bytes'])}, "
        f"{found['cache']}"
    )
    rows = [
        [
            name,
            f"{of['median_s']:.3f}",
            f"{format_bytes(of['bytes_per_s'])}/s",
            format_bytes(of["peak_bytes"]),
        ]
        for name, of in found["iterators"].items()
    ]
    out.table(["iterator", "median s", "rate", "peak memory"], rows)
    return DONE


def _fetched(args: argparse.Namespace, out: Output) -> Checkpoint:
    """The checkpoint, all of it on this machine: what is compared is reading."""
    manifest = open_checkpoint(args.ref, **source_arguments(args))
    manifest.fetch(progress=out.progress())
    if manifest.format != SAFETENSORS.name:
        raise UsageError(
            f"{shown_url(args.ref)} has {manifest.format} files; what is measured beside raywl reads "
            "safetensors files alone (`raywl convert` makes them)"
        )
    return manifest


def _show(found: dict[str, Any], out: Output) -> None:
    out.text(
        f"{found['ref']}: {format_bytes(found['nbytes'])}, {found['cache']}, {found['tp_size']} ranks, "
        f"{found['num_repetitions']} repetitions; the limit is {found['raw']}"
    )
    rows = [
        [
            name,
            f"{of['median_s']:.3f}",
            f"{of['min_s']:.3f}",
            f"{of['max_s']:.3f}",
            f"{format_bytes(of['bytes_per_s'])}/s",
            f"{of['ratio_to_raw']:.2f}",
            "-" if of["disk_bytes"] is None else format_bytes(of["disk_bytes"]),
            "-" if of["peak_bytes"] is None else format_bytes(of["peak_bytes"]),
        ]
        for name, of in found["contestants"].items()
    ]
    limit = found["raw"].partition("-")[0]
    headers = ["contestant", "median s", "min", "max", "rate", f"x {limit}", "from disk", "peak memory"]
    out.table(headers, rows)
    for name, why in found["left_out"].items():
        out.text(f"left out: {name}: {why}")
    for note in found["notes"]:
        out.text(f"note: {note}")
    out.text(
        "all brought the same bytes" if found["identical"] else "the contestants brought DIFFERENT bytes"
    )
