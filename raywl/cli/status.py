"""`raywl status` and `raywl prune`: what is where, and what may go."""

from __future__ import annotations

import argparse
import os
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from raywl.caches import PruneReport, list_cache, prune_cache
from raywl.cli.arguments import Subparsers, add_command
from raywl.cli.outcome import DONE, UsageError
from raywl.cli.output import Output
from raywl.sources.cache import cache_root
from raywl.text import format_bytes, format_rate, parse_bytes

__all__ = ["add_parser"]

_UNITS_S = {"m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_AGE = re.compile(r"(\d+(?:\.\d+)?)\s*([mhdw])", re.IGNORECASE)


def add_parser(subparsers: Subparsers) -> None:
    status = add_command(
        subparsers,
        "status",
        run_status,
        help="what the cluster and the caches hold",
        description="Nodes, groups, leases, stagings, pins and caches of a cluster; without one, this "
        "machine's cache.",
    )
    _add_places(status)
    prune = add_command(
        subparsers,
        "prune",
        run_prune,
        help="delete from the caches what nobody uses",
        description="Deletes from raywl's cache of this machine, or of all nodes of a cluster, what wasn't "
        "used for long, or the longest unused until the rest is small enough. What a process has open, what "
        "is being fetched or pinned, and what was used within the hour stays.",
    )
    _add_places(prune)
    prune.add_argument(
        "--older-than", metavar="AGE", type=_age, help="what wasn't used for so long: 12h, 30d, 8w"
    )
    prune.add_argument(
        "--max-size", metavar="SIZE", type=_size, help="as much as must go for this to be left: 500GB, 2TiB"
    )
    prune.add_argument("--dry-run", action="store_true", help="only say what would go")


def _add_places(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--address", help="a Ray cluster, HOST:PORT or auto; default: RAY_ADDRESS, if set")
    parser.add_argument(
        "--cache-dir", metavar="FOLDER", help="of this machine; default: RAYWL_CACHE, or in the user's cache"
    )


def _age(text: str) -> float:
    found = _AGE.fullmatch(text.strip())
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no age such as 12h, 30d or 8w")
    return float(found[1]) * _UNITS_S[found[2].lower()]


def _size(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _address(args: argparse.Namespace) -> str | None:
    address: str | None = args.address or os.environ.get("RAY_ADDRESS")
    if address and args.cache_dir:
        raise UsageError("--cache-dir is for this machine, and --address for a cluster's nodes")
    return None if address == "local" else address


def run_status(args: argparse.Namespace, out: Output) -> int:
    address = _address(args)
    if address is None:
        found = [one.to_dict() for one in list_cache(args.cache_dir)]
        out.json({"address": None, "nodes": [], "coordinator": None, "cache": found})
        out.text(f"cache {cache_root(args.cache_dir)}")
        _show_cache(found, out)
        return DONE
    from raywl.actors.overview import cluster_status

    status = cluster_status(address)
    out.json(status)
    _show_nodes(status, out)
    _show_stages(status, out)
    for node in status["nodes"]:
        if node.get("cache"):
            out.text(f"\ncache of {node['node']}")
            _show_cache(node["cache"], out)
    return DONE


def _show_nodes(status: Mapping[str, Any], out: Output) -> None:
    coordinator = status["coordinator"] or {}
    out.text(f"cluster {status['address']}: {len(status['nodes'])} nodes")
    rows = [
        [
            node["node"],
            node["agent"],
            str(len(node.get("staging", ()))),
            format_bytes(sum(pin["nbytes"] for pin in node.get("pins", ()))),
            str(len(node.get("tables", ()))),
            format_bytes(sum(one["nbytes"] for one in node.get("cache", ()))),
        ]
        for node in status["nodes"]
    ]
    out.table(["node", "agent", "stagings", "pinned", "tables", "cached"], rows)
    for name, group in coordinator.get("groups", {}).items():
        out.text(f"group {name}: {group['num_ranks']} ranks of {group['ref']}, driver {group['driver']}")
    for lease in coordinator.get("leases", ()):
        out.text(f"lease {lease['resource']}: {lease['holder']} since {lease['held_for_s']:.0f} s")


def _show_stages(status: Mapping[str, Any], out: Output) -> None:
    for stage in (status["coordinator"] or {}).get("stages", ()):
        done, total = format_bytes(stage["done_bytes"]), format_bytes(stage["total_bytes"])
        out.text(f"\nstaging {stage['label']}: {stage['state']}, {done} of {total}")
        rows = [
            [
                node["label"],
                node["state"] + (" (slow)" if node["slow"] else ""),
                format_bytes(node["has_bytes"]),
                format_rate(node["fetch_bytes_per_s"], 1.0),
                format_rate(node["send_bytes_per_s"], 1.0),
                format_bytes(node["peak_store_bytes"]),
            ]
            for node in stage["nodes"]
        ]
        out.table(["node", "state", "has", "fetches", "sends", "peak in the store"], rows)
        if stage["waiting"]:
            out.text(stage["waiting"])


def _show_cache(found: Sequence[Mapping[str, Any]], out: Output) -> None:
    if not found:
        out.text("nothing in the cache")
        return
    rows = [
        [one["url"], one["version"][:12], format_bytes(one["nbytes"]), _ago(time.time() - one["used_s"])]
        for one in found
    ]
    out.table(["checkpoint", "version", "bytes", "unused for"], rows)


def _ago(seconds: float) -> str:
    for unit, name in ((86400.0, "d"), (3600.0, "h"), (60.0, "m")):
        if seconds >= unit:
            return f"{seconds / unit:.0f} {name}"
    return f"{max(0.0, seconds):.0f} s"


def run_prune(args: argparse.Namespace, out: Output) -> int:
    if args.older_than is None and args.max_size is None:
        raise UsageError("say what is to go: --older-than AGE, --max-size SIZE, or both")
    address = _address(args)
    if address is None:
        report = prune_cache(
            args.cache_dir, max_age_s=args.older_than, max_bytes=args.max_size, dry_run=args.dry_run
        )
        reports = {"this machine": report}
    else:
        from raywl.actors.overview import prune_nodes

        reports = prune_nodes(
            address, max_age_s=args.older_than, max_bytes=args.max_size, dry_run=args.dry_run
        )
    out.json({"nodes": {name: report.to_dict() for name, report in reports.items()}})
    for name, report in reports.items():
        _show_pruned(name, report, out)
    return DONE


def _show_pruned(name: str, report: PruneReport, out: Output) -> None:
    would = "would be " if report.dry_run else ""
    leftovers = f", and {report.leftovers} leftovers" if report.leftovers else ""
    out.text(f"{name}: {format_bytes(report.freed_bytes)} {would}freed")
    for one in report.removed:
        out.text(f"{would}deleted: {one.url} ({one.version}), {format_bytes(one.nbytes)}{leftovers}")
    for what, why in report.kept.items():
        out.text(f"kept: {what}: {why}")
