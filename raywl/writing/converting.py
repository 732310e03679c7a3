"""A checkpoint of files of `torch.save` as a folder of safetensors files, with their index."""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from raywl.checkpoint import Manifest
from raywl.disk import sync_folder
from raywl.errors import CapacityError
from raywl.opening import Checkpoint, open_checkpoint
from raywl.progress import Progress, make_progress
from raywl.sources.local import LocalSource
from raywl.sources.selection import INDEX_NAME, INDEX_NAMES, SAFETENSORS, TORCH, companions, is_leftover
from raywl.text import parse_bytes
from raywl.writing.files import (
    TensorReader,
    check_dtypes,
    check_file,
    check_records,
    distinct_views,
    read_headers,
    reading,
    write_file,
)
from raywl.writing.single import replacing

__all__ = ["MAX_SHARD_SIZE", "ConvertReport", "convert"]

MAX_SHARD_SIZE = "5GB"
"""Bytes of tensors in one file, unless the caller says another number."""


@dataclass(slots=True)
class ConvertReport:
    """What was converted."""

    ref: str
    """The checkpoint as the user named it."""
    path: str
    """Where the new one is."""
    files: dict[str, int] = field(default_factory=dict)
    """Its weight files, with their sizes in bytes."""
    num_tensors: int = 0
    nbytes: int = 0
    """Bytes of tensors."""
    tied: dict[str, str] = field(default_factory=dict)
    """Tensors that aren't written, each with the one that is the same view of the same bytes."""
    companions: list[str] = field(default_factory=list)
    """Configs, tokenizers and other small files that were copied."""
    notes: list[str] = field(default_factory=list)
    """What else was left out."""
    identity: str = ""
    """Of the new checkpoint."""
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON values."""
        return asdict(self)


def convert(
    ref: Checkpoint | str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    max_shard_size: int | str = MAX_SHARD_SIZE,
    progress: bool | Progress | None = None,
    **source: Any,
) -> ConvertReport:
    """Writes a checkpoint of `.bin`, `.pt` or `.pth` files as safetensors, and compares them bit by bit.

    Of tensors that are the same view of a storage the first name is kept, as models tie them again; every
    other view is written in full. Everything is written to a folder beside `out`, checked there, and renamed
    when all is well: `out` is whole or isn't there. One tensor is in memory at a time.

    Args:
        ref: What `open_checkpoint` takes, or an open checkpoint.
        out: A folder that isn't there, or is empty; or, to have one file and nothing else, a path that ends
            in `.safetensors`.
        max_shard_size: Bytes of tensors in one file, as a number or as text (`"500MB"`, `"4GiB"`). A larger
            tensor has a file of its own.
        progress: `True` for a bar on standard error, or a callable.
        **source: Keyword arguments of `open_checkpoint`.

    Returns:
        What was written, and what wasn't.

    Raises:
        ValueError: The checkpoint is of safetensors files already, or `out` isn't empty.
        CheckpointError: The checkpoint is damaged, or has a tensor that safetensors can't hold.
        CapacityError: There isn't room for it on the disk.
        SourceError: It comes from elsewhere, and can't be fetched.
        RuntimeError: What was written isn't what was read.
        OSError: The output can't be written.
    """
    start = time.perf_counter()
    limit = parse_bytes(max_shard_size)
    target = os.path.abspath(os.path.expanduser(os.fsdecode(out)))
    _check_target(target)
    if isinstance(ref, Checkpoint):
        if source:
            raise ValueError(f"{sorted(source)} are for opening a checkpoint, and this one is open")
        checkpoint = ref
    else:
        checkpoint = open_checkpoint(ref, **source)
    if checkpoint.format != TORCH.name:
        raise ValueError(f"{checkpoint.source.ref} is a checkpoint of {checkpoint.format} files already")
    check_dtypes(checkpoint)
    headers = read_headers(checkpoint)
    names, tied = distinct_views(checkpoint, headers)
    report = ConvertReport(
        checkpoint.source.ref, target, {}, len(names), tied=tied, notes=list(checkpoint.notes)
    )
    report.nbytes = sum(checkpoint.tensors[name].nbytes for name in names)
    _check_room(target, report.nbytes)
    show = make_progress(progress)
    checkpoint.fetch(progress=show)
    check_records(checkpoint, headers)
    count = _Count(report.nbytes, show)
    if target.endswith(SAFETENSORS.suffixes):
        with replacing(target) as temporary, reading(checkpoint) as reader:
            _write(reader, {temporary: names}, count)
            report.identity = _checked(temporary, checkpoint, names).identity
        report.files = {os.path.basename(target): os.path.getsize(target)}
    else:
        _convert_folder(checkpoint, names, target, limit, report, count)
    report.seconds = time.perf_counter() - start
    return report


def _check_target(target: str) -> None:
    if target.endswith(SAFETENSORS.suffixes):
        if os.path.isdir(target):
            raise ValueError(f"{target} is a folder; a path that ends in .safetensors stands for one file")
    elif os.path.lexists(target) and not (os.path.isdir(target) and not os.listdir(target)):
        raise ValueError(f"{target} is there already, and not empty: nothing is written over")


def _check_room(target: str, nbytes: int) -> None:
    folder = os.path.dirname(target)
    os.makedirs(folder, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < nbytes:
        raise CapacityError("disk space", nbytes, free, f"in {folder}, for the tensors alone", unit="bytes")


def _convert_folder(
    checkpoint: Checkpoint,
    names: Sequence[str],
    target: str,
    limit: int,
    report: ConvertReport,
    count: _Count,
) -> None:
    """Writes the files into a folder of their own, and renames it."""
    parent, name = os.path.split(target)
    temporary = os.path.join(parent, f".{name[:40]}.{secrets.token_hex(8)}.tmp")
    os.mkdir(temporary)
    try:
        shards = _shards(checkpoint, names, limit)
        files = dict(zip(_file_names(len(shards)), shards, strict=True))
        with reading(checkpoint) as reader:
            _write(reader, {os.path.join(temporary, file): shard for file, shard in files.items()}, count)
        if len(files) > 1:
            _write_index(os.path.join(temporary, INDEX_NAME), files, report.nbytes)
        report.companions = _copy_companions(checkpoint, temporary)
        written = _checked(temporary, checkpoint, names)
        report.identity = written.identity
        report.files = {file.name: file.size for file in written.files}
        sync_folder(temporary)
        try:
            os.rename(temporary, target)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
            raise ValueError(
                f"{target} was made by somebody else meanwhile: nothing is written over"
            ) from error
        sync_folder(parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _shards(checkpoint: Checkpoint, names: Sequence[str], limit: int) -> list[list[str]]:
    """The names in runs whose tensors take at most `limit` bytes; one by itself may take more."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name in names:
        nbytes = checkpoint.tensors[name].nbytes
        if shards[-1] and filled + nbytes > limit:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += nbytes
    return shards


def _file_names(count: int) -> list[str]:
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]


def _write(reader: TensorReader, files: Mapping[str, Sequence[str]], count: _Count) -> None:
    for phase, step in (("write", write_file), ("check", check_file)):
        count.start(phase)
        for path, names in files.items():
            try:
                step(reader, names, path, count)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                free = shutil.disk_usage(os.path.dirname(path)).free
                reason = f"while {path} was written: {error.strerror}"
                raise CapacityError("disk space", count.total_bytes, free, reason, unit="bytes") from error


def _write_index(path: str, files: Mapping[str, Sequence[str]], nbytes: int) -> None:
    weight_map = {name: file for file, names in files.items() for name in names}
    index = {"metadata": {"total_size": nbytes}, "weight_map": dict(sorted(weight_map.items()))}
    with open(path, "x", encoding="utf-8") as file:
        json.dump(index, file, indent=2, ensure_ascii=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())


def _copy_companions(checkpoint: Checkpoint, folder: str) -> list[str]:
    """Copies configs and tokenizers; what is about the old files, or a trainer's, stays behind."""
    if checkpoint.source.only is not None:
        return []
    found = [name for name in companions(checkpoint.source.list()) if not is_leftover(name)]
    found = [name for name in found if name not in INDEX_NAMES and not name.endswith(".index.json")]
    for name in found:
        # The content of a link, as a hub's cache has them.
        shutil.copyfile(checkpoint.source.path(name), os.path.join(folder, name))
    return found


def _checked(path: str, checkpoint: Checkpoint, names: Sequence[str]) -> Manifest:
    """What was written, opened as anybody would, so that the index is checked as well."""
    folder = path if os.path.isdir(path) else os.path.dirname(path)
    written = Manifest.read(LocalSource(path, folder, None if folder == path else os.path.basename(path)))
    if written.tensors.keys() != set(names):
        raise RuntimeError(f"{path}: holds {len(written.tensors)} tensors, expected {len(names)}")
    return written


class _Count:
    """Bytes of tensors that are done, for the display of progress."""

    def __init__(self, total_bytes: int, progress: Progress | None) -> None:
        self.total_bytes, self._progress = total_bytes, progress
        self._done_bytes, self._phase = 0, ""

    def start(self, phase: str) -> None:
        self._done_bytes, self._phase = 0, phase
        self(0)

    def __call__(self, nbytes: int) -> None:
        self._done_bytes += nbytes
        if self._progress is not None:
            self._progress(self._done_bytes, self.total_bytes, self._phase)
