"""`raywl bench cluster`, `coordinator` and `table`: what takes a cluster, or stands for one."""

from __future__ import annotations

import argparse
from typing import Any

from raywl.cli.arguments import Subparsers, add_command, byte_size, positive
from raywl.cli.outcome import BUG, DONE, UsageError
from raywl.cli.output import Output
from raywl.text import format_bytes

__all__ = ["add_parsers"]

_SITUATIONS = ("a", "b", "c")


def add_parsers(commands: Subparsers) -> None:
    """The three commands."""
    cluster = add_command(
        commands,
        "cluster",
        run_cluster,
        help="staging over hosts that are network namespaces of this machine",
        description="Stages a checkpoint onto 1, 2 and 4 hosts (as root, with ip and tc; each host is a "
        "network namespace with a link of 1 Gbit/s) from a web server that (a) sends 200 Mbit/s in all, "
        "(b) sends 100 Mbit/s to each host, (c) isn't asked, as one host has everything; and downloads it on "
        "each host alone, all at once.",
    )
    cluster.add_argument(
        "--size", type=byte_size, default="256MiB", metavar="SIZE", help="bytes of tensors (default 256MiB)"
    )
    cluster.add_argument(
        "--hosts", type=_sizes, default=(1, 2, 4), metavar="N,N", help="how many (default 1,2,4)"
    )
    cluster.add_argument(
        "--situation",
        choices=_SITUATIONS,
        action="append",
        dest="situations",
        help="only this one; may be given again",
    )
    cluster.add_argument(
        "--rate", default="1gbit", metavar="RATE", help="of a host's link, as tc writes it (default 1gbit)"
    )
    cluster.add_argument("--repeat", type=positive, default=3, metavar="N", help="repetitions (default 3)")
    cluster.add_argument("--plot", metavar="PATH", help="write the times as an SVG file")
    coordinator = add_command(
        commands,
        "coordinator",
        run_coordinator,
        help="the coordinator's own time with a thousand simulated nodes",
        description="Runs the state machine that hands out chunks with simulated nodes, some of which die, "
        "and counts the processor time that it takes itself.",
    )
    for name, default, help in (
        ("nodes", 1000, "nodes"),
        ("files", 1000, "files of 64 MiB"),
        ("deaths", 100, "nodes that die; every second one comes back"),
    ):
        coordinator.add_argument(
            f"--{name}", type=positive, default=default, metavar="N", help=f"{help} (default {default})"
        )
    table = add_command(
        commands,
        "table",
        run_table,
        help="rows of a shared table beside those of a private tensor",
        description="Shares a table with two processes of a local Ray. Each gathers random rows, in turn "
        "from the shared table and by torch.embedding from a tensor of its own, on one thread; and the "
        "memory that all processes together have of the table is counted by the kernel.",
    )
    table.add_argument(
        "--size", type=byte_size, default="1GiB", metavar="SIZE", help="bytes of the table (default 1GiB)"
    )
    table.add_argument(
        "--row-bytes", type=positive, default=1024, metavar="N", help="bytes of a row, in bf16 (default 1024)"
    )
    table.add_argument(
        "--batch", type=positive, default=8192, metavar="N", help="rows at a time (default 8192)"
    )
    table.add_argument("--repeat", type=positive, default=5, metavar="N", help="repetitions (default 5)")


def _sizes(text: str) -> tuple[int, ...]:
    try:
        sizes = tuple(int(word) for word in text.split(","))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1 or max(sizes) > 16:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers from 1 to 16, such as 1,2,4")
    return sizes


def run_cluster(args: argparse.Namespace, out: Output) -> int:
    from raywl.bench.cluster import ClusterBenchmark

    benchmark = ClusterBenchmark(args.size, args.hosts, tuple(args.situations or _SITUATIONS), args.rate)
    benchmark.run(args.repeat, out.say)
    found = benchmark.to_dict()
    if args.plot:
        from raywl.bench.plots import write_times

        write_times(args.plot, found)
    out.json(found)
    _show(found, out)
    return DONE


def _show(found: dict[str, Any], out: Output) -> None:
    out.text(
        f"{format_bytes(found['num_bytes'])}, links of {found['rate']}, {found['cores']} cores for all hosts"
    )
    rows = [
        [
            f"({row['situation']}) {row['what']}",
            str(row["hosts"]),
            f"{row['median_s']:.2f}",
            f"{row['min_s']:.2f}",
            f"{row['max_s']:.2f}",
            "-" if row["ratio_to_one"] is None else f"{row['ratio_to_one']:.2f}",
            f"{row['source_ratio']:.3f}",
            f"{row['most_sent_ratio']:.2f}",
            f"{row['most_wire_ratio']:.2f}",
            format_bytes(row["peak_store_bytes"]),
        ]
        for row in found["rows"]
    ]
    headers = ["situation", "N", "median s", "min", "max", "x one host", "x source", "x sent", "x link"]
    out.table([*headers, "peak store"], rows)
    out.text(
        "x source: what the source sent, x sent: chunks that the busiest host sent, x link: all that its"
    )
    out.text("link carried; each as multiples of the checkpoint, the most of all repetitions")


def run_coordinator(args: argparse.Namespace, out: Output) -> int:
    from raywl.bench.coordinator import Simulation

    if args.deaths >= args.nodes:
        raise UsageError(f"--deaths {args.deaths}: some of {args.nodes} nodes must live")
    found = Simulation(args.nodes, args.files, num_deaths=args.deaths).run()
    out.json(found)
    out.text(
        f"{found['nodes']} nodes, {found['files']} files, {found['chunks']} chunks, {found['deaths']} "
        f"deaths: {found['own_s']:.2f} s of the coordinator's own time for {found['messages']} messages"
    )
    out.text(
        f"the source sent {found['source_ratio']:.3f} x the checkpoint; {found['finished']} nodes have it"
    )
    out.text(
        "nothing was fetched twice but what only the dead had" if found["all_excused"] else "FETCHED TWICE"
    )
    return DONE if found["all_excused"] else BUG


def run_table(args: argparse.Namespace, out: Output) -> int:
    from raywl.bench.table import TableBenchmark

    if args.row_bytes % 2 or args.row_bytes > args.size:
        raise UsageError(
            f"--row-bytes {args.row_bytes}: expected an even number, at most the table's {args.size}"
        )
    benchmark = TableBenchmark(args.size, args.row_bytes, args.batch)
    benchmark.run(args.repeat, out.say)
    found = benchmark.to_dict()
    out.json(found)
    out.text(
        f"{format_bytes(found['table_bytes'])} in rows of {args.row_bytes} bytes, {args.batch} at a time, "
        f"{found['num_processes']} processes"
    )
    rows = [
        [name, f"{rate:,.0f}", *(f"{bound:,.0f}" for bound in found["spread"][name])]
        for name, rate in found["rows_per_s"].items()
    ]
    out.table(["way", "median rows/s", "min", "max"], rows)
    out.text(f"gather is {found['ratio_to_embedding']:.2f} x embedding")
    out.text(
        f"all processes together hold {found['copies']:.3f} x the table ({format_bytes(found['pss_bytes'])})"
    )
    return DONE
