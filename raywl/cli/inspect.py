"""`raywl inspect`: what a checkpoint holds, from its index and headers alone."""

from __future__ import annotations

import argparse
from typing import Any

from raywl.checkpoint import FileEntry, Manifest, TensorEntry
from raywl.cli.arguments import Subparsers, add_command, add_source_arguments, source_arguments
from raywl.cli.outcome import DONE
from raywl.cli.output import Output
from raywl.opening import open_checkpoint
from raywl.sources import shown_url
from raywl.text import format_bytes
from raywl.verifying import notes_on

__all__ = ["add_parser", "describe"]


def add_parser(subparsers: Subparsers) -> None:
    parser = add_command(
        subparsers,
        "inspect",
        run,
        help="files, dtypes, sizes, problems and notes of a checkpoint",
        description="Shows what a checkpoint holds. Reads its index and headers, and no tensor data.",
    )
    add_source_arguments(parser)
    parser.add_argument("--tensors", action="store_true", help="list every tensor too")


def run(args: argparse.Namespace, out: Output) -> int:
    manifest = open_checkpoint(args.ref, **source_arguments(args))
    found = describe(manifest)
    out.json(found)
    out.text(
        f"{shown_url(args.ref)}: {found['format']}, {len(manifest.tensors)} tensors, "
        f"{format_bytes(found['nbytes'])}"
    )
    out.text(f"identity {found['identity']}")
    out.table(
        ["file", "size", "tensors"],
        [[f["name"], format_bytes(f["size"]), str(f["num_tensors"])] for f in found["files"]],
        title="Files",
    )
    out.table(
        ["dtype", "tensors", "bytes"],
        [[d, str(of["num_tensors"]), format_bytes(of["nbytes"])] for d, of in found["dtypes"].items()],
        title="Dtypes",
    )
    if found["metadata"]:
        out.table(["key", "value"], [[k, v] for k, v in found["metadata"].items()], title="Metadata")
    if args.tensors:
        rows = [
            [name, e.dtype, "x".join(map(str, e.shape)) or "scalar", format_bytes(e.nbytes), e.file]
            for name, e in manifest.tensors.items()
        ]
        out.table(["tensor", "dtype", "shape", "bytes", "file"], rows, title="Tensors")
    out.text()
    for problem in found["problems"]:
        out.text(f"problem: {problem}")
    for note in found["notes"]:
        out.text(f"note: {note}")
    if not found["problems"]:
        out.text("no problems found in index and headers")
    return DONE


def describe(manifest: Manifest) -> dict[str, Any]:
    """A checkpoint's files, tensors, problems and notes, as JSON values under the names of the Python API."""
    dtypes: dict[str, dict[str, int]] = {}
    per_file = dict.fromkeys((file.name for file in manifest.files), 0)
    for entry in manifest.tensors.values():
        of_dtype = dtypes.setdefault(entry.dtype, {"num_tensors": 0, "nbytes": 0})
        of_dtype["num_tensors"] += 1
        of_dtype["nbytes"] += entry.nbytes
        per_file[entry.file] += 1
    return {
        "ref": manifest.source.ref,
        "identity": manifest.identity,
        "format": manifest.format,
        "nbytes": manifest.nbytes,
        "num_tensors": len(manifest.tensors),
        "files": [{**_shown(file), "num_tensors": per_file[file.name]} for file in manifest.files],
        "dtypes": dict(sorted(dtypes.items())),
        "metadata": dict(manifest.metadata),
        "problems": [] if manifest.tensors else ["there are no tensors"],
        "notes": notes_on(manifest),
        "tensors": {name: _entry(entry) for name, entry in manifest.tensors.items()},
    }


def _shown(file: FileEntry) -> dict[str, Any]:
    # The stamp means something on this node alone, and the spans nothing outside.
    return {name: value for name, value in file._asdict().items() if name not in ("stamp", "header_spans")}


def _entry(entry: TensorEntry) -> dict[str, Any]:
    # Few have strides.
    return {name: value for name, value in entry._asdict().items() if name != "strides" or value is not None}
