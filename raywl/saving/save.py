"""Each rank writes what it holds; the last one puts the whole tensors together."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from raywl.errors import CapacityError, CheckpointError
from raywl.loaders.ranks import ambient_context
from raywl.locks import atomic_writer
from raywl.saving.files import Held, Part, read_part, write_part, write_whole
from raywl.saving.pieces import Whole, pieces_of
from raywl.sources.selection import INDEX_NAME
from raywl.types import ParallelContext

__all__ = ["SaveReport", "save_sharded"]

MAX_FILE_BYTES = 5_000_000_000
"""Bytes of tensors in one file; a larger tensor has one of its own."""
_UNFINISHED = "unfinished-save"
"""Folder of the ranks' parts, inside of the one that is saved to."""


@dataclass(slots=True)
class SaveReport:
    """One rank's save."""

    folder: str
    """What was saved to."""
    context: ParallelContext
    """Where the rank stands."""
    nbytes: int = 0
    """Bytes of tensors that this rank holds."""
    waiting_for: list[int] = field(default_factory=list)
    """Ranks that hadn't written their part yet when this one had. Empty for the last one."""
    files: dict[str, int] = field(default_factory=dict)
    """The checkpoint's files, with their sizes in bytes, where this rank put it together."""
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON values."""
        return asdict(self)


def save_sharded(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    parallel: ParallelContext | None = None,
    shards: Mapping[str, Any] | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> SaveReport:
    """Saves the weights of a model that is spread over ranks, as one checkpoint of whole tensors.

    Every rank of the group calls it with the same folder, which all of them see (each replica of a group with
    a folder of its own). Each writes what it holds;
    the one that finds all others' parts there puts them together: a safetensors checkpoint with an index, for
    any number of ranks and any library. It is whole or isn't there. Meanwhile the parts take as much disk
    space again.

    What raywl has loaded goes back the way it came: into the tensors of the checkpoint, under their names,
    with the present values, in the parameters' dtypes; padding is left out. What it hasn't, and everything
    where `shards` is given, is saved under the model's own names; tied weights once, views of one storage
    each in full. What several ranks hold must be equal.

    Args:
        model: The rank's model.
        folder: A folder for this save alone: new, or empty.
        parallel: Where this rank stands; by default as for `load_into`.
        shards: How parameters are cut that raywl hasn't loaded and that aren't DTensors: name patterns to
            `Shard(dim)` or `Replicate()`. All ranks' parts must be equally large.
        max_file_bytes: Bytes of tensors in one file; a larger tensor has one of its own.

    Returns:
        What was written. Once every rank has returned, the checkpoint is there.

    Raises:
        ValueError: The folder holds something else, or a parameter can't be saved: it has no memory, isn't
            what was loaded, or holds what its loader computed.
        CheckpointError: The parts don't make whole tensors, or two ranks hold different values for one place.
            The parts stay where they are.
        CapacityError: There isn't room for it on the disk.
        OSError: The folder can't be written to.
    """
    start = time.perf_counter()
    if max_file_bytes < 1:
        raise ValueError(f"max_file_bytes must be at least 1, got {max_file_bytes}")
    context = parallel or ambient_context()
    # First of all: a rank that finds something wrong below leaves no other one waiting.
    token = _token(context)
    path = os.path.abspath(os.path.expanduser(os.fsdecode(folder)))
    report = SaveReport(path, context)
    with torch.no_grad():
        wholes, pieces = pieces_of(model, context, shards)
        report.nbytes = sum(place.nbytes for place, _ in pieces)
        _check_folder(path, context)
        os.makedirs(path, exist_ok=True)
        _check_room(path, report.nbytes)
        if context.world_size == 1:
            report.files = _write_checkpoint(path, wholes, [Held(pieces)], max_file_bytes)
        else:
            names = [_part_name(rank, context.world_size) for rank in range(context.world_size)]
            unfinished = os.path.join(path, _UNFINISHED)
            os.makedirs(unfinished, exist_ok=True)
            write_part(os.path.join(unfinished, names[context.rank]), context, token, wholes, pieces)
            report.waiting_for, report.files = _finish(path, unfinished, names, max_file_bytes)
    report.seconds = time.perf_counter() - start
    return report


def _part_name(rank: int, size: int) -> str:
    return f"rank-{rank:05}-of-{size:05}.safetensors"


def _check_folder(path: str, context: ParallelContext) -> None:
    """Refuses what isn't for this save alone."""
    try:
        others = [name for name in os.listdir(path) if name != _UNFINISHED]
    except FileNotFoundError:
        return
    except NotADirectoryError:
        raise ValueError(f"{path} is no folder") from None
    if others or (context.world_size == 1 and os.path.lexists(os.path.join(path, _UNFINISHED))):
        found = ", ".join(sorted(others)[:3]) or _UNFINISHED
        raise ValueError(
            f"{path} isn't empty ({found}): save to a folder of its own, nothing is written over"
        )
    own = os.path.join(path, _UNFINISHED, _part_name(context.rank, context.world_size))
    if os.path.lexists(own):
        raise ValueError(f"{own} is there already, of a save that didn't end: save to a new folder")


def _check_room(path: str, nbytes: int) -> None:
    free = shutil.disk_usage(path).free
    if free < nbytes:
        raise CapacityError("disk space", nbytes, free, f"in {path}, for this rank's part", unit="bytes")


def _finish(
    path: str, unfinished: str, names: Sequence[str], max_file_bytes: int
) -> tuple[list[int], dict[str, int]]:
    """Puts the parts together if all are there: one rank does it.

    Returns:
        The ranks whose parts aren't there; and the files that this rank wrote, with their sizes.
    """
    there = set(_list(unfinished))
    waiting_for = [rank for rank, name in enumerate(names) if name not in there] if there else []
    if waiting_for or not there:
        return waiting_for, {}
    # One rank alone succeeds, and no further part can come in between.
    merging = f"{unfinished}-{secrets.token_hex(8)}"
    try:
        os.rename(unfinished, merging)
    except FileNotFoundError:
        return [], {}
    try:
        files = _merge(path, merging, names, max_file_bytes)
    except BaseException:
        with contextlib.suppress(OSError):
            os.rename(merging, unfinished)
        raise
    shutil.rmtree(merging, ignore_errors=True)
    return [], files


def _list(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except FileNotFoundError:  # another rank is at work
        return []


def _token(context: ParallelContext) -> str:
    """The same on all ranks of a process group, and another one for every save; empty without one."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() == context.world_size):
        return ""
    box = [secrets.token_hex(8)]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def _merge(path: str, folder: str, names: Sequence[str], max_file_bytes: int) -> dict[str, int]:
    parts = [read_part(os.path.join(folder, name)) for name in names]
    wholes: dict[str, Whole] = {}
    for part in parts:
        if part.token != parts[0].token:
            raise CheckpointError(path, None, "holds parts of different saves: save to a new folder")
        for name, whole in part.wholes.items():
            other = wholes.setdefault(name, whole)
            if other != whole:
                raise CheckpointError(
                    path,
                    name,
                    f"is {whole.dtype} {list(whole.shape)} by {part.who}, but {other.dtype} "
                    f"{list(other.shape)} by others",
                )
    return _write_checkpoint(path, wholes, parts, max_file_bytes)


def _write_checkpoint(
    path: str, wholes: Mapping[str, Whole], sources: Sequence[Held | Part], max_file_bytes: int
) -> dict[str, int]:
    """Writes all files, and last the index, without which several files don't count."""
    groups: list[dict[str, Whole]] = [{}]
    filled = 0
    for name, whole in sorted(wholes.items()):
        if groups[-1] and filled + whole.nbytes > max_file_bytes:
            groups.append({})
            filled = 0
        groups[-1][name] = whole
        filled += whole.nbytes
    count = len(groups)
    if count == 1:
        names = ["model.safetensors"]
    else:
        names = [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]
    sizes: dict[str, int] = {}
    try:
        for name, group in zip(names, groups, strict=True):
            sizes[name] = write_whole(os.path.join(path, name), group, sources, path)
        if count > 1:
            weight_map = {tensor: name for name, group in zip(names, groups, strict=True) for tensor in group}
            nbytes = sum(whole.nbytes for whole in wholes.values())
            with atomic_writer(os.path.join(path, INDEX_NAME), encoding="utf-8") as file:
                json.dump(
                    {"metadata": {"total_size": nbytes}, "weight_map": weight_map},
                    file,
                    indent=2,
                    ensure_ascii=False,
                )
    except BaseException:
        for name in sizes:
            os.unlink(os.path.join(path, name))
        raise
    return sizes
