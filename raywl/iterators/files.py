"""What an iterator goes through: files in their order, what each of them gives, and what is wrong with them.

`plan_files` reads all headers, so that damage, names that several files hold and dtypes that can't be read
are known before the first tensor is given out. Every iterator of safetensors files starts from its list of
`FileWork`, whatever library it reads with, and gives out the `names` of each in their order:

    def some_iterator(hf_weights_files, use_tqdm_on_load, local_expert_ids=None):
        # Usage errors at once; nothing is opened before the first tensor is asked for.
        paths, ids = as_paths(hf_weights_files), as_expert_ids(local_expert_ids)
        return _run(paths, use_tqdm_on_load, ids)

    def _run(paths, use_tqdm_on_load, ids):
        works = plan_files(paths, ids)
        tally = Tally(sum(work.nbytes for work in works), use_tqdm_on_load)
        for work in works:
            if work.dtypes & WHAT_THE_LIBRARY_LACKS:
                yield from read_lazily(work, tally)  # raywl's own reader
                continue
            tally.starts(work)
            for name in work.names:
                ...
                tally.add(work.entries[name].nbytes)
                yield name, tensor
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Protocol

from raywl.checkpoint import FileEntry, Manifest, TensorEntry
from raywl.checkpoint.index import natural_sort_key
from raywl.checkpoint.manifest import read_one
from raywl.errors import CheckpointError, MissingFileError, some_of
from raywl.readers import OpenFiles
from raywl.remap.experts import should_skip_weight
from raywl.sources.local import LocalSource
from raywl.types import whole_number

__all__ = [
    "PATHS",
    "FileWork",
    "as_expert_ids",
    "as_paths",
    "at_least_1",
    "find_files",
    "in_order",
    "names_once",
    "open_files",
    "plan_files",
]

_HEADER_THREADS = 8
_COMPARED_BYTES = 4 << 20
PATHS = LocalSource("", "")
"""Names each file by its path, as it was given."""


@dataclass(frozen=True, slots=True)
class FileWork:
    """One file, and which of its tensors an iterator gives out."""

    path: str
    """As the caller gave it."""
    names: tuple[str, ...]
    """The tensors to give out, in this order: by name."""
    entries: Mapping[str, TensorEntry]
    """All tensors of the file, those that aren't given out included."""
    metadata: Mapping[str, str]
    """Its `__metadata__`."""
    file: FileEntry
    """Its size, where its data starts, and how to tell later that it is still the same file."""

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors to give out."""
        return sum(self.entries[name].nbytes for name in self.names)

    @property
    def data_nbytes(self) -> int:
        """Bytes of all its tensors."""
        return self.file.size - self.file.data_start

    @property
    def dtypes(self) -> frozenset[str]:
        """The format's names of their dtypes, as `BF16`."""
        return frozenset(self.entries[name].dtype for name in self.names)

    @property
    def left_out(self) -> tuple[str, ...]:
        """The file's other tensors: experts of other ranks, and what another file gave already."""
        given = set(self.names)
        return tuple(name for name in self.entries if name not in given)


def as_paths(hf_weights_files: Iterable[str | os.PathLike[str]]) -> list[str]:
    """The files as a list of paths.

    Raises:
        TypeError: It is one path, or holds something that is none.
    """
    if isinstance(hf_weights_files, str | bytes | os.PathLike):
        raise TypeError(f"hf_weights_files must be a list of paths, not the one path {hf_weights_files!r}")
    return [os.fsdecode(path) for path in hf_weights_files]


def as_expert_ids(local_expert_ids: Iterable[int] | None) -> frozenset[int] | None:
    """The ids as a set; `None` stays `None`, and no expert is left out.

    Raises:
        ValueError: One of them is no whole number.
    """
    if local_expert_ids is None:
        return None
    return frozenset(whole_number("an expert id", id_) for id_ in local_expert_ids)


def at_least_1(what: str, value: int) -> int:
    """`value` as Python's own int.

    Raises:
        ValueError: It is below 1, or no whole number.
    """
    if (number := whole_number(what, value)) < 1:
        raise ValueError(f"{what} must be at least 1, not {value}")
    return number


def in_order(paths: Iterable[str]) -> list[str]:
    """Paths in the order of every iterator: natural order of base names, then of paths.

    A file that is given twice, by the same or another path, comes once, with a warning.
    """
    ordered = sorted(paths, key=lambda path: (natural_sort_key(path), path))
    places: dict[str, str] = {}
    twice = []
    for path in ordered:
        place = os.path.realpath(path)
        if place in places:
            twice.append(path)
        else:
            places[place] = path
    if twice:
        warnings.warn(f"files given twice are read once: {some_of(twice)}", stacklevel=3)
    return list(places.values())


def plan_files(paths: Iterable[str], local_expert_ids: frozenset[int] | None = None) -> list[FileWork]:
    """Reads all headers, and decides which tensor comes from which file.

    Args:
        paths: Safetensors files, in any order.
        local_expert_ids: The experts whose heavy tensors are given out; all with `None`.

    Returns:
        One for each file, also for those that have nothing to give out, in the order of `in_order`. A name
        that several files hold is given out from the first of them, with one warning for all.

    Raises:
        MissingFileError: Files are absent; all of them are listed.
        CorruptFileError: A header is damaged, or contradicts the file's size.
        CheckpointError: A dtype that torch has no type for; or two files have different tensors by one name.
        SourceError: A file can't be read.
    """
    files = find_files(paths)
    with ThreadPoolExecutor(_HEADER_THREADS if len(files) > 1 else 1) as pool:
        works = [
            replace(work, names=tuple(n for n in work.names if not should_skip_weight(n, local_expert_ids)))
            for work in pool.map(_work_of, files)
        ]
    with open_files(works) as opened:
        names = names_once(
            works, lambda name, one, other: _check_same(name, works[one], works[other], opened)
        )
    return [replace(work, names=kept) for work, kept in zip(works, names, strict=True)]


def find_files(paths: Iterable[str]) -> list[FileEntry]:
    """The files, in the order of `in_order`, with their sizes and stamps.

    Raises:
        MissingFileError: Files are absent; all of them are listed.
        SourceError: A file can't be looked at.
    """
    ordered = in_order(paths)
    sizes = {path: PATHS.size(path) for path in ordered}
    if absent := [path for path, size in sizes.items() if size is None]:
        folder = os.path.commonpath([os.path.dirname(os.path.abspath(path)) for path in absent])
        reason = f"{len(absent)} of {len(ordered)} weight files are absent (incomplete download?)"
        raise MissingFileError(folder, absent, reason)
    return [FileEntry(path, size or 0, stamp=PATHS.stamp(path)) for path, size in sizes.items()]


class HasNames(Protocol):
    """A file that gives tensors."""

    @property
    def path(self) -> str: ...

    @property
    def names(self) -> tuple[str, ...]: ...


def names_once(
    works: Sequence[HasNames], check_same: Callable[[str, int, int], None]
) -> list[tuple[str, ...]]:
    """For each file the names that are given out from it: a name that several files hold, from the first.

    One warning tells of all such names.

    Args:
        works: In order.
        check_same: Raises where two files, given by their places, differ in what they hold by a name.
    """
    first: dict[str, int] = {}
    doubled: list[tuple[str, int, int]] = []
    for place, work in enumerate(works):
        for name in work.names:
            if (other := first.setdefault(name, place)) != place:
                doubled.append((name, other, place))
    for row in doubled:
        check_same(*row)
    if doubled:
        name, one, two = doubled[0]
        warnings.warn(
            f"{len(doubled)} tensors are in several files with equal bytes, and are taken from the first: "
            f"{name} is in {works[one].path} and {works[two].path}",
            stacklevel=4,
        )
    return [tuple(name for name in work.names if first[name] == place) for place, work in enumerate(works)]


def open_files(works: Sequence[FileWork]) -> OpenFiles:
    """Their files, under their paths, to be read by position; opened when first read.

    What was read before a file changed and what after is never taken for one file: a file that isn't the
    one whose header was read is a `CheckpointError`, and so is, from `check_unchanged()`, one that was
    written to meanwhile.
    """
    return OpenFiles(
        Manifest(
            source=PATHS,
            files=tuple(work.file for work in works),
            tensors={},
            identity="",
            metadata={},
        )
    )


def _work_of(file: FileEntry) -> FileWork:
    header = read_one(PATHS, file)
    return FileWork(
        path=file.name,
        names=tuple(sorted(header.tensors)),
        entries=header.tensors,
        metadata=header.metadata,
        file=file._replace(
            data_start=header.data_start, header_sha256=header.digest, header_spans=header.spans
        ),
    )


def _check_same(name: str, one: FileWork, other: FileWork, files: OpenFiles) -> None:
    """Raises `CheckpointError`, naming both files, where they differ in what they hold by a name."""
    ours, theirs = one.entries[name], other.entries[name]
    reason = f"is also in {other.path}, with other"
    for what in ("dtype", "shape"):
        if (a := getattr(ours, what)) != (b := getattr(theirs, what)):
            raise CheckpointError(one.path, name, f"{reason} {what}: {_shown(a)} here, {_shown(b)} there")
    buffers = [memoryview(bytearray(min(_COMPARED_BYTES, ours.nbytes))) for _ in range(2)]
    for start in range(0, ours.nbytes, _COMPARED_BYTES):
        size = min(_COMPARED_BYTES, ours.nbytes - start)
        files.read_into(one.path, ours.start + start, [buffers[0][:size]])
        files.read_into(other.path, theirs.start + start, [buffers[1][:size]])
        if buffers[0][:size] != buffers[1][:size]:
            raise CheckpointError(one.path, name, f"{reason} values, and no index says which one counts")


def _shown(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
