"""Files of `torch.save`, read by `torch.load` with `weights_only=True`, always.

What a file holds is first read from its pickle and directory by raywl's own reader, which runs nothing and
finds damage. Tensors that only torch can put together (sparse ones, classes that the user has allowed by
`torch.serialization.add_safe_globals`) are found by `torch.load` itself, with the data left out.
"""

from __future__ import annotations

import mmap
import os
import pickle
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.serialization import get_default_mmap_options, skip_data

from raywl.checkpoint import FileEntry
from raywl.checkpoint.dtypes import torch_itemsize
from raywl.checkpoint.manifest import read_one
from raywl.errors import CheckpointError, CorruptFileError, some_of
from raywl.iterators.files import PATHS, find_files, names_once
from raywl.iterators.watched import Watched
from raywl.node.mounts import fs_type, is_local
from raywl.sources.local import stamp_of
from raywl.sources.selection import TORCH

__all__ = ["TorchFile", "check_unchanged", "load_torch_file", "plan_torch_files"]

_HEADER_THREADS = 8
_GLOBAL = re.compile(r"GLOBAL (\S+) was not an allowed global|unsupported GLOBAL (\S+) whose module")
_CHANGED = "changed while it was read; what was read may be mixed"


@dataclass(frozen=True, slots=True)
class TorchFile:
    """One file, and which of its tensors are given out."""

    path: str
    names: tuple[str, ...]
    """In this order."""
    sizes: Mapping[str, int]
    """Bytes of each tensor."""
    file: FileEntry
    may_be_mapped: bool
    """Whether every tensor lies in the file as it does in memory."""
    left_out: str = ""
    """What in it is no weight, in a sentence."""

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors to give out."""
        return sum(self.sizes[name] for name in self.names)


def plan_torch_files(paths: Iterable[str]) -> list[TorchFile]:
    """What each of the files holds, and which of it is given out; reads no data.

    Raises:
        MissingFileError: Files are absent.
        CorruptFileError: A file is damaged.
        CheckpointError: A file needs code to be run, or has no dict of tensors; tensors of one name differ.
        SourceError: A file can't be read.
    """
    files = find_files(paths)
    with ThreadPoolExecutor(_HEADER_THREADS if len(files) > 1 else 1) as pool:
        works = list(pool.map(_plan, files))
    if left_out := [work.left_out for work in works if work.left_out]:
        warnings.warn(f"not all entries are weights: {some_of(left_out, 4)}", stacklevel=3)
    names = names_once(works, lambda name, one, other: _check_same(name, works[one], works[other]))
    return [replace(work, names=kept) for work, kept in zip(works, names, strict=True)]


def _plan(file: FileEntry) -> TorchFile:
    try:
        header = read_one(PATHS, file, TORCH)
    except CorruptFileError:
        raise
    except CheckpointError as error:
        if "TorchScript" in error.reason:
            raise
        # Something that isn't a plain range of bytes; torch may know how to read it.
        return _plan_by_torch(file, error)
    return TorchFile(
        path=file.name,
        names=tuple(sorted(header.tensors)),
        sizes={name: entry.nbytes for name, entry in header.tensors.items()},
        file=file,
        may_be_mapped=bool(header.records)
        and all(entry.start % torch_itemsize(entry.dtype) == 0 for entry in header.tensors.values()),
        left_out="; ".join(header.notes),
    )


def _plan_by_torch(file: FileEntry, error: CheckpointError) -> TorchFile:
    with skip_data(), Watched(file) as opened:
        try:
            state = torch.load(opened, map_location="meta", weights_only=True)
        except Exception as refusal:
            opened.raise_error()
            if (found := _global_of(refusal)) is not None:
                raise _needs_code(file.name, found) from None
            raise error from refusal
    tensors, others = _tensors_of(state, file.name)
    return TorchFile(
        path=file.name,
        names=tuple(sorted(tensors)),
        sizes={name: tensor.numel() * tensor.itemsize for name, tensor in tensors.items()},
        file=file,
        may_be_mapped=False,
        left_out=f"{file.name}: {some_of(others)}" if others else "",
    )


def _tensors_of(state: Any, path: str) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The tensors of what a file holds, and what isn't one, with its kind."""
    if not isinstance(state, dict):
        raise CheckpointError(path, None, f"holds a {type(state).__name__}, expected a dict of tensors")
    others = []
    if isinstance(state.get("state_dict"), dict):
        others += [f"{key} beside the state_dict" for key in state if key != "state_dict"]
        state = state["state_dict"]
    tensors = {
        key: value for key, value in state.items() if isinstance(key, str) and isinstance(value, torch.Tensor)
    }
    others += [f"{key} ({type(value).__name__})" for key, value in state.items() if key not in tensors]
    return tensors, others


def load_torch_file(
    work: TorchFile,
    map_location: Any = "cpu",
    *,
    can_map: bool = False,
    check_stop: Callable[[], None] | None = None,
) -> dict[str, torch.Tensor]:
    """The tensors of a planned file, by name.

    Args:
        work: The file.
        map_location: As for `torch.load`.
        can_map: Whether the file may be mapped, if it can be.
        check_stop: Called between reads; what it raises ends the reading.

    Raises:
        CorruptFileError: The file was cut.
        CheckpointError: It isn't the one that was planned with any more, or torch can't load it.
    """
    check_unchanged(work)
    state: Any
    if can_map and _can_be_mapped(work):
        try:
            state = torch.load(work.path, map_location=map_location, weights_only=True, mmap=True)
        except Exception as error:
            raise _not_loaded(work.path, error) from error
    else:
        with Watched(work.file, check_stop) as opened:
            try:
                state = torch.load(opened, map_location=map_location, weights_only=True)
            except Exception as error:
                opened.raise_error()
                raise _not_loaded(work.path, error) from error
            opened.raise_error()
        check_unchanged(work)
    tensors, _ = _tensors_of(state, work.path)
    return {name: tensors[name].detach() for name in work.names}


def _can_be_mapped(work: TorchFile) -> bool:
    # On other file systems a page that can't be read ends the process.
    is_private = get_default_mmap_options() == mmap.MAP_PRIVATE
    return work.may_be_mapped and is_private and is_local(fs_type([work.path]))


def check_unchanged(work: TorchFile) -> None:
    """Raises `CheckpointError` where a file isn't the one that was planned with any more."""
    try:
        same = work.file.stamp == stamp_of(os.stat(work.path))
    except OSError:
        same = False
    if not same:
        raise CheckpointError(work.path, None, _CHANGED)


def _check_same(name: str, one: TorchFile, other: TorchFile) -> None:
    """Raises `CheckpointError`, naming both files, where they differ in what they hold by a name."""
    ours, theirs = (
        load_torch_file(replace(work, names=(name,)), can_map=True)[name] for work in (one, other)
    )
    reason = f"is also in {other.path}, with other"
    for what, a, b in (
        ("dtype", ours.dtype, theirs.dtype),
        ("layout", ours.layout, theirs.layout),
        ("shape", list(ours.shape), list(theirs.shape)),
    ):
        if a != b:
            raise CheckpointError(one.path, name, f"{reason} {what}: {a} here, {b} there")
    if not _equal_bits(ours, theirs):
        raise CheckpointError(one.path, name, f"{reason} values, and no index says which one counts")


def _equal_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if type(one) is not torch.Tensor or one.layout != torch.strided or one.is_quantized:
        # Of what isn't plain memory, only torch knows when it is equal, and not of all of it.
        try:
            return bool(torch.equal(one, other))
        except (NotImplementedError, RuntimeError):
            return False
    return torch.equal(*(t.contiguous().view(-1).view(torch.uint8) for t in (one, other)))


def _global_of(error: BaseException) -> str | None:
    found = _GLOBAL.search(str(error))
    return None if found is None else found[1] or found[2]


def _needs_code(path: str, name: str) -> CheckpointError:
    return CheckpointError(
        path,
        None,
        f"needs the global {name!r}, which isn't one that weights are made of: files are read with "
        "weights_only=True, and code from them is never run (torch.serialization.add_safe_globals allows it)",
    )


def _not_loaded(path: str, error: Exception) -> CheckpointError:
    if (found := _global_of(error)) is not None:
        return _needs_code(path, found)
    # What was found stands behind advice to run what the file holds.
    found_out = [
        line for line in str(error).rpartition("WeightsUnpickler error:")[2].splitlines() if line.strip()
    ]
    reason = f"torch can't load it: {found_out[0].strip() if found_out else type(error).__name__:.300}"
    if "Unsupported operand" in reason:
        # Of a pickle protocol that torch.load doesn't read with weights_only=True.
        return CheckpointError(path, None, f"{reason} (`raywl convert` may read it)")
    kind = CorruptFileError if isinstance(error, pickle.UnpicklingError | EOFError) else CheckpointError
    return kind(path, None, reason)
