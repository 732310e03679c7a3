"""`raywl plan`: how many bytes each rank would read, of which files. Reads no tensor data."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from raywl.cli.arguments import (
    Subparsers,
    add_command,
    add_parallel_arguments,
    add_source_arguments,
    add_weights_arguments,
    sizes,
    source_arguments,
)
from raywl.cli.outcome import DONE, UsageError
from raywl.cli.output import Output
from raywl.cli.weights import choose_cuts, import_factory, read_tp_plan
from raywl.errors import some_of
from raywl.opening import Checkpoint, open_checkpoint
from raywl.sources import shown_url
from raywl.text import format_bytes
from raywl.types import ParallelContext

if TYPE_CHECKING:
    from raywl.plan import LoadPlan

__all__ = ["add_parser"]


def add_parser(subparsers: Subparsers) -> None:
    parser = add_command(
        subparsers,
        "plan",
        run,
        help="bytes per rank and per file, before loading",
        description="Shows what each rank would read, and how much of it it would keep; or a saved plan.",
    )
    add_source_arguments(parser, needs_ref=False)
    add_parallel_arguments(parser)
    add_weights_arguments(parser)
    saved = parser.add_argument_group("saved plans")
    saved.add_argument(
        "--save",
        metavar="FOLDER",
        help="write each rank's plan to rank-N.json there, for load_into(plan=...)",
    )
    saved.add_argument("--show", metavar="FILE", help="show every copy of a saved plan; takes no REF")


def run(args: argparse.Namespace, out: Output) -> int:
    if args.show is not None:
        if args.ref is not None or args.save is not None:
            raise UsageError("--show FILE shows what the file holds: it takes neither REF nor --save")
        return _show_saved(args.show, out)
    if args.ref is None:
        raise UsageError("give REF, or a saved plan by --show FILE")
    if args.save is not None:
        _check_folder(args.save)
    group = sizes(args)
    num_ranks = args.pp * args.dp * args.tp
    contexts = [ParallelContext.of_rank(rank, **group) for rank in range(num_ranks)]
    checkpoint = open_checkpoint(args.ref, **source_arguments(args))
    if args.model:
        plans, notes = _plans_of_model(args, checkpoint, contexts)
    else:
        cuts = choose_cuts(checkpoint, args.tp, args.tp_plan)
        plans = [checkpoint.plan(parallel=context, shards=cuts.shards) for context in contexts]
        notes = [cuts.note(others=args.pp * args.dp * args.ep > 1)]
    paths = [] if args.save is None else _save(plans, args.save, notes)
    nbytes, kept = sum(plan.nbytes for plan in plans), sum(plan.nbytes_kept for plan in plans)
    out.json(
        {
            "ref": shown_url(args.ref),
            "identity": checkpoint.identity,
            "checkpoint_nbytes": checkpoint.nbytes,
            "nbytes": nbytes,
            "nbytes_kept": kept,
            "ranks": [{"rank": plan.context.rank, **plan.summary()} for plan in plans],
            "saved": paths,
            "notes": notes,
        }
    )
    out.text(
        f"{shown_url(args.ref)}: {format_bytes(checkpoint.nbytes)} of tensors; {num_ranks} ranks ask for "
        f"{format_bytes(nbytes)} and keep {format_bytes(kept)}"
    )
    _show(plans, out)
    for note in notes:
        out.text(f"note: {note}")
    for path in paths:
        out.text(f"saved: {path}")
    return DONE


def _show_saved(path: str, out: Output) -> int:
    from raywl.plan import LoadPlan

    plan = LoadPlan.load(path)
    targets = {name: info._asdict() for name, info in plan.targets.items()}
    out.json({"path": path, "rank": plan.context.rank, **plan.summary(), "targets": targets})
    out.text(f"identity {plan.identity}")
    out.text(plan.explain())
    return DONE


def _check_folder(path: str) -> None:
    """Makes the folder before the work, so that one that can't be written to is known by then."""
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--save {path}: {error.strerror}") from None
    if not os.access(path, os.W_OK):
        raise UsageError(f"--save {path}: can't be written to")


def _save(plans: list[LoadPlan], folder: str, notes: list[str]) -> list[str]:
    paths = []
    for plan in plans:
        path = os.path.join(folder, f"rank-{plan.context.rank}.json")
        plan.save(path)
        paths.append(path)
        if plan.unplanned:
            notes.append(f"rank {plan.context.rank}: load_into won't take this plan: {plan.unplanned[0]}")
    return paths


def _plans_of_model(
    args: argparse.Namespace, checkpoint: Checkpoint, contexts: list[ParallelContext]
) -> tuple[list[LoadPlan], list[str]]:
    """The plans of the ranks' models, made one after the other in this process."""
    from raywl.loading.planning import plan_model

    factory = import_factory(args.model)
    tp_plan = None if args.tp_plan is None else read_tp_plan(args.tp_plan)
    plans, notes = [], [f"the model that {args.model} makes for each rank"]
    for context in contexts:
        report = plan_model(factory(context), checkpoint, context, tp_plan=tp_plan)
        assert report.plan is not None
        plans.append(report.plan)
        rank = f"rank {context.rank}"
        if report.missing:
            notes.append(f"{rank}: not in the checkpoint: {some_of(report.missing)}")
        if report.unexpected:
            notes.append(f"{rank}: without a place in the model: {some_of(report.unexpected)}")
        notes += [f"{rank}: {note}" for note in report.notes]
    return plans, notes


def _show(plans: list[LoadPlan], out: Output) -> None:
    rows = [
        [
            str(plan.context.rank),
            format_bytes(plan.nbytes),
            format_bytes(plan.nbytes_kept),
            str(len(plan.reads)),
            str(len(plan.targets)),
        ]
        for plan in plans
    ]
    out.table(["rank", "asked", "kept", "reads", "parameters"], rows, title="Ranks")
    files = dict.fromkeys(file for plan in plans for file in plan.files)
    per_file = [[file, *(format_bytes(plan.nbytes_by_file.get(file, 0)) for plan in plans)] for file in files]
    headers = ["file", *(f"rank {plan.context.rank}" for plan in plans)]
    out.table(headers, per_file, title="Asked of each file")
