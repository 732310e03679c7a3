"""The manifest of a checkpoint, made from headers and index alone."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, Self

from raywl.checkpoint.header import FileHeader, TensorEntry, read_header
from raywl.checkpoint.index import (
    Index,
    check_present,
    choose_files,
    missing_numbered_files,
    natural_sort_key,
    parse_index,
)
from raywl.errors import CheckpointError, CorruptFileError, MissingFileError, some_of
from raywl.progress import Progress, make_progress
from raywl.sources import Source
from raywl.sources.selection import (
    SAFETENSORS,
    TORCH,
    WeightFormat,
    allowed_names,
    as_patterns,
    expected_header_bytes,
    format_of,
    is_leftover,
    own_files,
)

__all__ = ["FileEntry", "Manifest"]

_MAX_INDEX_BYTES = 1 << 30
_HEADER_THREADS = 8
_REMOTE_THREADS = 32
_UNREADABLE = (".ckpt", ".gguf", ".h5", ".msgpack", ".npz", ".onnx")


class FileEntry(NamedTuple):
    """One file that holds weights."""

    name: str
    """Path inside the checkpoint's folder."""
    size: int
    """Bytes, header included."""
    data_start: int = 0
    """First byte of the data, after the header; 0 where data and header take turns."""
    header_sha256: str = ""
    """Of the header's bytes: tells whether it is still the same file when it is read later."""
    header_spans: tuple[tuple[int, int], ...] = ()
    """Where those bytes are."""
    stamp: str | None = None
    """Its state on the node where it was opened: tells there whether anybody has written to it since."""


class IndexFacts(NamedTuple):
    """What is kept of an index, whose map the tensors' entries have in them."""

    sha256: str
    """Of the index file's bytes, in hex."""
    num_tensors: int
    """How many tensors it names. An index that names none counts as none."""
    total_size: int | None
    """Bytes of all tensors, as its writer counted them."""
    name: str
    """Of the index file."""


@dataclass(frozen=True, eq=False)
class Manifest:
    """An immutable list of a checkpoint's files and tensors. Two are equal when their identities are."""

    source: Source
    files: tuple[FileEntry, ...]
    """In natural order of their names."""
    tensors: Mapping[str, TensorEntry]
    """By file, then by name."""
    identity: str
    """The same on every node that has the same checkpoint."""
    metadata: Mapping[str, str]
    """The files' `__metadata__`; of a key that several files give, the first file's value."""
    unindexed: tuple[str, ...] = ()
    """Tensors that are in a file of the index, but that the index doesn't name."""
    format: str = SAFETENSORS.name
    """`safetensors`, or `torch` for the files of `torch.save`."""
    index: IndexFacts | None = None
    """Of the folder's index; `None` where there is none."""
    allow_patterns: tuple[str, ...] = ()
    """What its files were chosen by; empty for all."""
    notes: tuple[str, ...] = ()
    """What of its files, or beside them, is no weight and left out: a sentence each."""

    @classmethod
    def read(cls, source: Source, allow_patterns: str | Sequence[str] | None = None) -> Self:
        """Reads and checks the index and all headers of a source, and nothing else.

        Raises:
            MissingFileError: Files that the index or a numbered set names are absent.
            CheckpointError: There are no weights, or the files and the index contradict each other.
            CorruptFileError: A header or the index is damaged.
        """
        patterns = as_patterns(allow_patterns)
        found = find_weights(source, patterns)
        listed, format, index = found.listed, found.format, found.index
        names, weight_map = found.names, found.weight_map
        files = tuple(FileEntry(name, source.size(name) or 0, stamp=source.stamp(name)) for name in names)
        first_bytes = expected_header_bytes(weight_map or {}) if source.is_remote else {}
        with ThreadPoolExecutor(header_threads(source, len(files))) as pool:
            read = partial(read_one, source, format=format)
            headers = list(pool.map(lambda file: read(file, first_bytes=first_bytes.get(file.name)), files))
        files = tuple(
            file._replace(
                data_start=header.data_start, header_sha256=header.digest, header_spans=header.spans
            )
            for file, header in zip(files, headers, strict=True)
        )
        tensors, unindexed, problems = merge(source, dict(zip(names, headers, strict=True)), weight_map)
        if problems:
            raise problems[0]
        metadata: dict[str, str] = {}
        for header in headers:
            metadata = {**header.metadata, **metadata}
        return cls(
            source=source,
            files=files,
            tensors=MappingProxyType(tensors),
            identity=source.identity or _digest(index and index.sha256, files, headers),
            metadata=MappingProxyType(metadata),
            unindexed=unindexed,
            format=format.name,
            index=index and IndexFacts(index.sha256, len(index.weight_map), index.total_size, index.name),
            allow_patterns=patterns,
            notes=notes_of(listed if source.only is None else [], headers, format),
        )

    @property
    def nbytes(self) -> int:
        """Bytes of tensor data."""
        return sum(entry.nbytes for entry in self.tensors.values())

    def path(self, file: str) -> str:
        """Path of one of its files on this node."""
        return self.source.path(file)

    def fetch(self, files: Iterable[str] | None = None, progress: bool | Progress | None = None) -> int:
        """Makes files local, where they aren't: these, and the small ones that belong to the checkpoint.

        Args:
            files: Names; all weight files by default.
            progress: `True` for a bar on standard error, or a callable.

        Returns:
            Bytes that came over the network.

        Raises:
            MissingFileError: Working offline, and the cache hasn't got them; or there are no such files.
            SourceError, LockError, CapacityError: They can't be fetched.
            CheckpointError: They aren't what was opened any more.
        """
        names = [file.name for file in self.files] if files is None else list(files)
        return self.source.fetch(names, make_progress(progress))

    def entry(self, name: str) -> TensorEntry:
        """The entry of a tensor.

        Raises:
            CheckpointError: There is no tensor by that name.
        """
        try:
            return self.tensors[name]
        except KeyError:
            close = _nearest(name, self.tensors)
            hint = f"; the nearest are {some_of(close)}" if close else ""
            raise CheckpointError(
                root(self.source), name, f"not in the checkpoint ({len(self.tensors)} tensors){hint}"
            ) from None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Manifest):
            return NotImplemented
        return self.identity == other.identity

    def __hash__(self) -> int:
        return hash(self.identity)

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} {self.source.ref!r}: {len(self.tensors)} tensors, "
            f"{self.nbytes} bytes, {len(self.files)} files>"
        )

    def __getstate__(self) -> dict[str, Any]:
        # A mapping proxy doesn't pickle.
        return {**self.__dict__, "tensors": dict(self.tensors), "metadata": dict(self.metadata)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        state["tensors"] = MappingProxyType(state["tensors"])
        state["metadata"] = MappingProxyType(state["metadata"])
        self.__dict__.update(state)


@dataclass(frozen=True, slots=True)
class Weights:
    """What a source's listing and index tell, before any header is read."""

    listed: list[str]
    format: WeightFormat
    index: Index | None
    names: list[str]
    """The weight files, all of which are there."""
    weight_map: Mapping[str, str] | None


def find_weights(source: Source, patterns: tuple[str, ...] = ()) -> Weights:
    """The weight files of a source, by its listing and its index.

    Raises:
        MissingFileError: Files that the index or a numbered set names are absent.
        CheckpointError: There are no weights.
        CorruptFileError: The index is damaged.
    """
    listed = source.list()
    format, index = find_index(source, listed, format_at(source, listed, patterns))
    names, weight_map = choose(source, listed, index, patterns, format)
    there = [name for name in names if source.size(name) is not None]
    check_present(root(source), names, there, _why_absent(source))
    if not weight_map and source.only is None:
        check_numbered(source, names, patterns)
    return Weights(listed, format, index, names, weight_map)


def _nearest(name: str, names: Mapping[str, Any]) -> list[str]:
    import difflib

    return difflib.get_close_matches(name, names, n=3, cutoff=0.8) if len(names) <= 20_000 else []


def root(source: Source) -> str:
    """How messages name the checkpoint."""
    return source.label(source.only or "").rstrip("/") or source.ref


def _why_empty(listed: Sequence[str], patterns: Sequence[str]) -> str:
    weights = [name for format in (SAFETENSORS, TORCH) for name in own_files(listed, format)]
    if patterns:
        return f"no weight file matches {list(patterns)} (there are: {some_of(weights) or 'none'})"
    others = [name for name in listed if name.endswith(_UNREADABLE)]
    left = [name for name in listed if is_leftover(name)]
    reason = f"no weights here: none of its {_files(len(listed))} is a safetensors file or one of torch.save"
    reason += f"; other formats can't be read: {some_of(others)}" if others else ""
    return reason + (f"; a trainer's state is no weights: {some_of(left)}" if left else "")


def _files(count: int) -> str:
    return f"{count} file" if count == 1 else f"{count} files"


def _why_absent(source: Source) -> str:
    return "incomplete upload?" if source.is_remote else "incomplete download?"


def format_at(source: Source, listed: Sequence[str], patterns: Sequence[str]) -> WeightFormat:
    """The format of a source's weights, going by the names of its files."""
    if source.only is None:
        return format_of(listed, patterns)
    if source.only.endswith(SAFETENSORS.suffixes):
        return SAFETENSORS
    if source.only.endswith(TORCH.suffixes):
        return TORCH
    # A name that says nothing: a blob of a hub's cache, or a trainer's `last.ckpt`.
    return TORCH if source.read(source.only, 0, 4).startswith((b"PK\3\4", b"\x80")) else SAFETENSORS


def notes_of(listed: Sequence[str], headers: Sequence[FileHeader], format: WeightFormat) -> tuple[str, ...]:
    """What is left out, as no weights: a trainer's files, and entries of the weight files."""
    left = [
        name for name in listed if format is TORCH and name.endswith(format.suffixes) and is_leftover(name)
    ]
    beside = [f"left out, as a trainer's state and no weights: {some_of(left)}"] if left else []
    return (*beside, *(note for header in headers for note in header.notes))


def choose(
    source: Source,
    listed: Sequence[str],
    index: Index | None,
    patterns: Sequence[str],
    format: WeightFormat = SAFETENSORS,
) -> tuple[list[str], dict[str, str] | None]:
    """The weight files that count, and what the index says about them.

    Raises:
        CheckpointError: There are none.
    """
    weight_map = index and index.weight_map
    if source.only is not None:
        names = allowed_names([source.only], patterns)
    else:
        names = choose_files(listed, weight_map, format, patterns)
    if patterns:
        chosen = set(names)
        weight_map = weight_map and {t: f for t, f in weight_map.items() if f in chosen}
    if not names:
        raise CheckpointError(root(source), None, _why_empty(listed, patterns))
    return names, weight_map


def check_numbered(source: Source, names: list[str], patterns: Sequence[str] = ()) -> None:
    """Raises `MissingFileError` where numbered sets among `names` lack files that patterns ask for."""
    count, missing = missing_numbered_files(names)
    if patterns:
        missing = allowed_names(missing, patterns)
        count = len(missing)
    if count:
        lacking = f"a numbered set lacks {_files(count)} ({_why_absent(source)})"
        raise MissingFileError(root(source), missing, lacking)


def find_index(
    source: Source, listed: Sequence[str], format: WeightFormat
) -> tuple[WeightFormat, Index | None]:
    """The index that counts, if there is one, and the format of its files.

    Raises:
        As `read_index`.
    """
    index = read_index(source, listed, format)
    if format is SAFETENSORS and index is not None and not index.weight_map:
        # An index that names nothing counts as none.
        others = own_files(listed, TORCH) or TORCH.index_name in listed
        if others and not own_files(listed, SAFETENSORS):
            return TORCH, read_index(source, listed, TORCH)
    return format, index


def read_index(source: Source, listed: Sequence[str], format: WeightFormat = SAFETENSORS) -> Index | None:
    """A folder's index, if it has one.

    Raises:
        MissingFileError: It is listed, but leads nowhere.
        CorruptFileError, CheckpointError: As `parse_index`.
    """
    name = format.index_name
    if source.only is not None or name not in listed:
        return None
    size = source.size(name)
    if size is None:
        raise MissingFileError(root(source), [name], "it leads to no file (incomplete download?)")
    if size > _MAX_INDEX_BYTES:
        raise CorruptFileError(source.label(name), None, f"index of {size} bytes is too large")
    return parse_index(source.read(name, 0, size), source.label(name))


def header_threads(source: Source, num_files: int) -> int:
    """How many headers to read at once."""
    return min(_REMOTE_THREADS if source.is_remote else _HEADER_THREADS, num_files) or 1


def read_one(
    source: Source, file: FileEntry, format: WeightFormat = SAFETENSORS, first_bytes: int | None = None
) -> FileHeader:
    """One file's header.

    Args:
        source: Where it is.
        file: Its name and size.
        format: Its format.
        first_bytes: How much to read at first; by default what is read at once anyway.
    """
    read, path = partial(source.read, file.name), source.label(file.name)
    if format is SAFETENSORS:
        return read_header(read, file.size, path=path, file=file.name, first_bytes=first_bytes)
    # Here, since the parsers of pickles and archives take a while to import.
    from raywl.checkpoint.torch_files import read_torch_header

    return read_torch_header(read, file.size, path=path, file=file.name, is_remote=source.is_remote)


def merge(
    source: Source, headers: Mapping[str, FileHeader], weight_map: Mapping[str, str] | None
) -> tuple[dict[str, TensorEntry], tuple[str, ...], list[CheckpointError]]:
    """All files' tensors under one roof; the index says which file a doubled name is taken from.

    Args:
        source: Where the files are.
        headers: By file name, in order.
        weight_map: What the index says.

    Returns:
        The tensors; those of them that the index doesn't name; and what contradicts itself.
    """
    tensors: dict[str, TensorEntry] = {}
    doubled: dict[tuple[str, str], list[str]] = {}
    for file, header in headers.items():
        for name in sorted(header.tensors):
            entry = header.tensors[name]
            other = tensors.get(name)
            wanted = (weight_map or {}).get(name)
            if other is None or wanted == file:
                if wanted is None or wanted == file:
                    tensors[name] = entry
            elif wanted is None:
                doubled.setdefault((other.file, file), []).append(name)
    problems = [
        CheckpointError(
            root(source),
            names[0],
            f"is in two files, {one} and {two}, and no index says which one counts{_such(names)}",
        )
        for (one, two), names in doubled.items()
    ]
    if not weight_map:
        return tensors, (), problems
    absent: dict[str, list[str]] = {}
    for name, file in weight_map.items():
        if name not in tensors and file in headers:
            absent.setdefault(file, []).append(name)
    problems += [
        CheckpointError(
            source.label(file),
            names[0],
            f"the index says that it is in this file, but it isn't{_such(names)}",
        )
        for file, names in absent.items()
    ]
    return tensors, tuple(name for name in tensors if name not in weight_map), problems


def _such(names: Sequence[str]) -> str:
    return f" ({len(names)} such tensors: {some_of(names)})" if names[1:] else ""


def _digest(index: str | None, files: Sequence[FileEntry], headers: Sequence[FileHeader]) -> str:
    rows = [[file.name, file.size, header.digest] for file, header in zip(files, headers, strict=True)]
    return "local:" + hashlib.sha256(json.dumps([index, rows]).encode()).hexdigest()


def sorted_for_iteration(names: Sequence[str], tensors: Mapping[str, TensorEntry]) -> list[str]:
    """Names by file in natural order, then by name: the order of every iterator on every rank."""
    files = sorted({tensors[name].file for name in names}, key=lambda file: (natural_sort_key(file), file))
    order = {file: at for at, file in enumerate(files)}
    return sorted(names, key=lambda name: (order[tensors[name].file], name))
