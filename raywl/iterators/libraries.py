"""What iterators have in common that read with another library: one file at a time, its tensors in order."""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from raywl.checkpoint.dtypes import torch_dtype, torch_shape
from raywl.errors import CheckpointError, ClusterError, RaywlError, some_of
from raywl.iterators.files import FileWork, open_files
from raywl.iterators.tally import Tally

__all__ = ["check_same_files", "give_out", "load_library", "read_with", "shown_files", "unreadable"]


def load_library(module: str, package: str, extra: str) -> Any:
    """An optional library.

    Raises:
        ImportError: It isn't installed, or can't be imported; the message names the extra that has it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"{package} can't be imported ({error}): install it with `pip install 'raywl[{extra}]'`",
            name=error.name,
        ) from error


def unreadable(
    package: str,
    works: Sequence[FileWork],
    readable: Collection[str],
    takes: Callable[[FileWork], bool] = lambda work: True,
) -> frozenset[str]:
    """Paths of the files that a library can't read, and that raywl's own reader reads; one warning for all.

    Args:
        package: The library's name, for the warning.
        works: All files.
        readable: The dtypes that it can read, by the format's names.
        takes: Whether it takes a file, whose dtypes it can read.
    """
    dtypes = {work.path: work.dtypes - set(readable) for work in works}
    found = [work.path for work in works if work.names and (dtypes[work.path] or not takes(work))]
    if found:
        kinds = sorted(frozenset[str]().union(*dtypes.values())) or ["their format"]
        warnings.warn(
            f"{package} can't read {', '.join(kinds)}: raywl reads these files itself: {some_of(found)}",
            stacklevel=4,
        )
    return frozenset(found)


def read_with(
    package: str, work: FileWork, read: Callable[[], Mapping[str, torch.Tensor]]
) -> dict[str, torch.Tensor]:
    """What a library reads from one file, checked against the header that was planned with.

    Args:
        package: The library's name, for messages.
        work: The file.
        read: Gives its tensors; more than are to be given out are left out.

    Raises:
        CheckpointError: The library can't read it, gives something else than the header says, or the file
            isn't the one that was planned with any more.
    """
    with open_files([work]) as files:
        files.open_all([work.path])
        try:
            found = read()
        except (RaywlError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            # A file that was cut or replaced meanwhile has a better message.
            files.check_unchanged()
            reason = f"{package} can't read it: {type(error).__name__}: {error}"
            raise CheckpointError(work.path, None, reason) from error
        files.check_unchanged()
    for name in work.names:
        _check(package, work, name, found.get(name))
    return {name: found[name] for name in work.names}


def _check(package: str, work: FileWork, name: str, tensor: torch.Tensor | None) -> None:
    entry = work.entries[name]
    wanted = torch_dtype(entry.dtype), list(torch_shape(entry.dtype, entry.shape))
    got = None if tensor is None else (tensor.dtype, list(tensor.shape))
    if got != wanted:
        has = "nothing" if got is None else f"{got[0]} {got[1]}"
        raise CheckpointError(
            work.path, name, f"{package} gave {has}, the header says {wanted[0]} {wanted[1]}"
        )


def give_out(
    work: FileWork, tensors: dict[str, torch.Tensor], tally: Tally, *, buffer_bytes: int = 0
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of one file in their order; each is let go of before the next.

    Args:
        work: The file.
        tensors: All of them; emptied.
        tally: Counts them.
        buffer_bytes: How much of the library's memory a tensor may keep, as several lie in one buffer. One
            that is smaller than half of that gets memory of its own; so does one that isn't aligned.
    """
    for name in work.names:
        tally.add(work.entries[name].nbytes)
        tensor = tensors.pop(name)
        if 2 * tensor.nbytes < buffer_bytes or tensor.data_ptr() % tensor.element_size():
            tensor = tensor.clone()
        yield name, tensor
        del tensor


def shown_files(works: Sequence[FileWork]) -> list[list[Any]]:
    """Names, sizes and headers of files, by which ranks find out whether they have the same."""
    return [[os.path.basename(work.path), work.file.size, work.file.header_sha256] for work in works]


def check_same_files(rows: Sequence[list[list[Any]]]) -> None:
    """Raises `ClusterError`, with what differs, where the ranks' `shown_files` aren't the same."""
    for rank, files in enumerate(rows):
        if files != rows[0]:
            here = [
                f"{name} ({size} bytes)"
                for name, size, digest in rows[0]
                if [name, size, digest] not in files
            ]
            there = [
                f"{name} ({size} bytes)"
                for name, size, digest in files
                if [name, size, digest] not in rows[0]
            ]
            raise ClusterError(
                f"the ranks have different files: only rank 0 has {some_of(here) or 'none'}, "
                f"only rank {rank} has {some_of(there) or 'none'} (by name, size and header)"
            )
