"""Tensors dumped once as `.npy` files beside the model, and read from there.

`np/index.json` says which dump counts, which files it was made from, and what each of its files holds. It is
written last, in one step. Names of tensors are in it alone: files have numbers. Dtypes that numpy lacks are
stored as unsigned integers of their width.

    <hf_folder>/np/index.json
    <hf_folder>/np/dump-<host>-<pid>-<token>/0.npy, 1.npy, ...
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from raywl.errors import CheckpointError, CorruptFileError
from raywl.iterators.files import as_paths, find_files
from raywl.iterators.pt import pt_weights_iterator
from raywl.iterators.safetensors import safetensors_weights_iterator
from raywl.iterators.tally import Tally
from raywl.locks import acquire_within, atomic_writer, get_lock
from raywl.readers.memory import bytes_of

__all__ = ["np_cache_weights_iterator"]

_log = logging.getLogger(__name__)

_FORMAT = 1
_LOCK_S = 3600.0
_STALE_S = 24 * 3600.0
_SYNC_THREADS = 8
"""Disks write out many small files together if they are asked for at once."""
_FOLDER = re.compile(r"dump-(?P<host>[0-9a-f]{8})-(?P<pid>\d{1,10})-[0-9a-f]{16}")
_UNSIGNED = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}
_OWN = {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
_OWN |= {torch.uint16, torch.uint32, torch.uint64}
_OWN |= {torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128}
"""Dtypes that numpy has, too."""


class _Row(NamedTuple):
    """One dumped tensor."""

    name: str
    dtype: str
    """torch's name."""
    shape: tuple[int, ...]
    nbytes: int
    file_bytes: int
    """Size of its file."""


@dataclass(frozen=True, slots=True)
class _Dump:
    """A dump that is whole."""

    folder: str
    rows: tuple[_Row, ...]

    def path(self, number: int) -> str:
        return os.path.join(self.folder, f"{number}.npy")


def np_cache_weights_iterator(
    model_name_or_path: str | os.PathLike[str],
    cache_dir: str | os.PathLike[str] | None,
    hf_folder: str | os.PathLike[str],
    hf_weights_files: Iterable[str | os.PathLike[str]],
    use_tqdm_on_load: bool,
) -> Generator[tuple[str, torch.Tensor], None, None]:
    """Dumps each tensor to `<hf_folder>/np/`, once, and reads them from there.

    One process dumps, under the model's lock; others wait for up to an hour. Files that changed since, or
    another list of files, are dumped anew. A dump that was interrupted counts for nothing.

    Args:
        model_name_or_path: What the lock is for, as for `get_lock`.
        cache_dir: Where the lock is, as for `get_lock`.
        hf_folder: The model's folder, which must be writable.
        hf_weights_files: Paths, in any order; all safetensors, or all files of `torch.save`.
        use_tqdm_on_load: Whether the process of local rank 0 shows progress; a callable is called as
            `progress(done_bytes, total_bytes, phase)`.

    Yields:
        `(name, tensor)` in the order of the iterators over such files, onto the CPU.

    Raises:
        ValueError: Files of both kinds.
        TypeError: `hf_weights_files` is no list of paths.
        LockError: Another process held the lock for an hour, or it can't be had.
        CheckpointError: As the iterators over such files; a tensor that isn't plain memory; the folder can't
            be written to; or another process, with other files, has replaced the dump meanwhile.
    """
    paths = as_paths(hf_weights_files)
    kinds = {path.endswith(".safetensors") for path in paths}
    if len(kinds) > 1:
        raise ValueError("hf_weights_files must be all safetensors, or all files of torch.save, not both")
    return _run(
        os.fsdecode(model_name_or_path),
        None if cache_dir is None else os.fsdecode(cache_dir),
        os.path.join(os.fsdecode(hf_folder), "np"),
        paths,
        use_tqdm_on_load,
    )


def _run(
    model: str, cache_dir: str | None, folder: str, paths: list[str], use_tqdm_on_load: bool
) -> Generator[tuple[str, torch.Tensor], None, None]:
    with acquire_within(get_lock(model, cache_dir), _LOCK_S, f"dump of {model}"):
        sources = _sources(paths)
        dump = _current(folder, sources)
        if dump is None:
            dump = _write(folder, paths, sources, use_tqdm_on_load)
    tally = Tally(sum(row.nbytes for row in dump.rows), use_tqdm_on_load)
    for number, row in enumerate(dump.rows):
        tally.starts(dump.path(number))
        tensor = _read(dump.path(number), row)
        tally.add(row.nbytes)
        yield row.name, tensor


def _sources(paths: list[str]) -> list[list[Any]]:
    """What tells whether the files are those that were dumped."""
    rows: list[list[Any]] = []
    for file in find_files(paths):
        info = os.stat(file.name)
        rows.append([os.path.basename(file.name), info.st_size, info.st_mtime_ns, info.st_ino])
    return rows


# Reading.


def _current(folder: str, sources: list[list[Any]]) -> _Dump | None:
    """The dump that is there, if it is whole and of these files."""
    try:
        with open(os.path.join(folder, "index.json"), encoding="utf-8") as file:
            index = json.load(file)
        if index["raywl_np"] != _FORMAT or index["sources"] != sources:
            return None
        if not _FOLDER.fullmatch(index["folder"]):
            return None
        rows = tuple(
            _Row(str(name), str(dtype), tuple(map(int, shape)), int(nbytes), int(file_bytes))
            for name, dtype, shape, nbytes, file_bytes in index["tensors"]
        )
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    dump = _Dump(os.path.join(folder, index["folder"]), rows)
    return dump if all(_is_whole(dump.path(number), row) for number, row in enumerate(rows)) else None


def _is_whole(path: str, row: _Row) -> bool:
    dtype = getattr(torch, row.dtype, None)
    if not isinstance(dtype, torch.dtype) or torch.Size(row.shape).numel() * dtype.itemsize != row.nbytes:
        return False
    try:
        return 0 <= row.nbytes <= row.file_bytes == os.stat(path).st_size
    except OSError:
        return False


def _read(path: str, row: _Row) -> torch.Tensor:
    raw = torch.empty(row.nbytes, dtype=torch.uint8, device="cpu")
    rest, position = bytes_of(raw), row.file_bytes - row.nbytes
    try:
        with open(path, "rb", buffering=0) as file:
            while rest:
                done = os.preadv(file.fileno(), [rest], position)
                if not done:
                    reason = f"{path} ends at byte {position} of {row.file_bytes}: it was cut meanwhile"
                    raise CorruptFileError(path, row.name, reason)
                rest, position = rest[done:], position + done
    except FileNotFoundError:
        reason = "its dump is gone: another process has dumped other files to this folder meanwhile"
        raise CheckpointError(path, row.name, reason) from None
    except OSError as error:
        raise CheckpointError(path, row.name, f"can't be read: {error.strerror}") from error
    return raw.view(getattr(torch, row.dtype)).view(row.shape)


# Writing.


def _write(folder: str, paths: list[str], sources: list[list[Any]], use_tqdm_on_load: bool) -> _Dump:
    try:
        os.makedirs(folder, exist_ok=True)
        previous = _named(folder)
        _remove_interrupted(folder, previous)
        name = f"dump-{_host()}-{os.getpid()}-{secrets.token_hex(8)}"
        dump_folder = os.path.join(folder, name)
        os.mkdir(dump_folder)
    except OSError as error:
        raise CheckpointError(folder, None, f"can't hold a dump of the weights: {error.strerror}") from error
    _log.info("dumping %d weight files to %s", len(paths), dump_folder)
    try:
        dump = _Dump(dump_folder, tuple(_dump_all(dump_folder, paths, use_tqdm_on_load)))
        if _sources(paths) != sources:
            raise CheckpointError(folder, None, "weight files changed while they were dumped")
        index = {"raywl_np": _FORMAT, "folder": name, "sources": sources, "tensors": dump.rows}
        with atomic_writer(os.path.join(folder, "index.json"), encoding="utf-8") as file:
            json.dump(index, file)
    except OSError as error:
        shutil.rmtree(dump_folder, ignore_errors=True)
        raise CheckpointError(folder, None, f"can't hold a dump of the weights: {error.strerror}") from error
    except BaseException:
        shutil.rmtree(dump_folder, ignore_errors=True)
        raise
    if previous is not None:
        shutil.rmtree(os.path.join(folder, previous), ignore_errors=True)
    return dump


def _dump_all(folder: str, paths: list[str], use_tqdm_on_load: bool) -> Iterator[_Row]:
    weights: Iterator[tuple[str, torch.Tensor]]
    if paths and paths[0].endswith(".safetensors"):
        weights = safetensors_weights_iterator(paths, False)
    else:
        weights = pt_weights_iterator(paths, False)
    total = sum(map(os.path.getsize, paths))
    tally = Tally(total, use_tqdm_on_load, "dump")
    for number, (name, tensor) in enumerate(weights):
        yield _dump_one(os.path.join(folder, f"{number}.npy"), name, tensor)
        tally.add(tensor.nbytes)
    # Headers and padding are no tensors.
    tally.add(total - tally.bytes_read)
    with ThreadPoolExecutor(_SYNC_THREADS) as pool:
        list(pool.map(_flush, (entry.path for entry in os.scandir(folder))))


def _flush(path: str) -> None:
    """Sees to it that a file is on the disk before the index says that it is whole."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _dump_one(path: str, name: str, tensor: torch.Tensor) -> _Row:
    dtype, shape = tensor.dtype, tuple(tensor.shape)
    is_plain = type(tensor) is torch.Tensor and tensor.layout == torch.strided and not tensor.is_quantized
    if not is_plain or tensor.is_meta:
        kind = "tensor without data (on meta)" if tensor.is_meta else type(tensor).__name__
        raise CheckpointError(path, name, f"is a {kind} of {dtype}, which no array can hold")
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    if dtype not in _OWN:
        plain = plain.view(-1).view(_UNSIGNED[dtype.itemsize]).view(shape)
    with open(path, "xb") as file:
        np.save(file, plain.numpy(), allow_pickle=False)
        return _Row(name, str(dtype).removeprefix("torch."), shape, tensor.nbytes, file.tell())


def _host() -> str:
    return hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]


def _named(folder: str) -> str | None:
    """The dump that the index names, whether it is whole or not."""
    try:
        with open(os.path.join(folder, "index.json"), encoding="utf-8") as file:
            name = json.load(file)["folder"]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    return name if isinstance(name, str) and _FOLDER.fullmatch(name) else None


def _remove_interrupted(folder: str, named: str | None) -> None:
    """Removes dumps of processes that ended before the index named them."""
    for name in os.listdir(folder):
        found = _FOLDER.fullmatch(name)
        path = os.path.join(folder, name)
        if found is None or name == named:
            continue
        with contextlib.suppress(OSError):
            is_old = time.time() - os.stat(path).st_mtime > _STALE_S
            if is_old or (found["host"] == _host() and not os.path.exists(f"/proc/{found['pid']}")):
                shutil.rmtree(path, ignore_errors=True)
