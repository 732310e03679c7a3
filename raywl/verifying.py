"""Whether a checkpoint is whole, and whether it is still what was opened."""

from __future__ import annotations

import fnmatch
import hashlib
import os
import re
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

from raywl.checkpoint import FileEntry, Manifest
from raywl.checkpoint.header import FileHeader
from raywl.checkpoint.index import INDEX_NAME, Index, numbered_set
from raywl.checkpoint.manifest import IndexFacts, check_numbered, choose, merge, read_index, read_one
from raywl.errors import CheckpointError, MissingFileError, RaywlError, some_of
from raywl.sources import Source

__all__ = ["VerifyReport", "notes_on", "problems_of", "verify", "verify_source"]

_BLOCK_BYTES = 8 << 20
_HEADER_THREADS = 8
_SHA256 = re.compile(r"^[0-9a-f]{64}$")
_OTHER_FORMATS = (".bin", ".ckpt", ".gguf", ".h5", ".msgpack", ".npz", ".onnx", ".pt", ".pth")
_LEFTOVERS = (
    "optimizer*.bin",
    "optimizer*.pt",
    "*optim_states.pt",
    "random_states_*.pkl",
    "rng_state*.pth",
    "scaler*.pt",
    "scheduler*.bin",
    "scheduler*.pt",
    "trainer_state.json",
    "training_args.bin",
)


@dataclass(slots=True)
class VerifyReport:
    """What a check found."""

    problems: list[str] = field(default_factory=list)
    """One sentence each; empty when all is well."""
    notes: list[str] = field(default_factory=list)
    """Worth knowing, but no error: where index and files disagree, and files that are left out."""
    files_checked: int = 0
    bytes_checked: int = 0
    """Bytes of data that were read (0 unless deep)."""
    deep: bool = False
    sha256: dict[str, str] = field(default_factory=dict)
    """Hash of each file that was read in full."""
    compared: list[str] = field(default_factory=list)
    """Files whose hash was known and compared."""

    @property
    def ok(self) -> bool:
        """Whether there are no problems."""
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON values."""
        return {"ok": self.ok, **asdict(self)}


def verify_source(
    source: Source, allow_patterns: str | Sequence[str] | None = None, *, deep: bool = False
) -> VerifyReport:
    """Checks a checkpoint that needn't be whole enough to be opened, and lists all that is wrong with it.

    Args:
        source: Where it is.
        allow_patterns: As of `open_checkpoint`.
        deep: Whether to read and hash every byte of the files whose headers are right.

    Raises:
        SourceError: The source can't be listed.
    """
    patterns = (allow_patterns,) if isinstance(allow_patterns, str) else tuple(allow_patterns or ())
    found = _survey(source, patterns)
    report = VerifyReport(found.problems, found.notes, found.files_checked, deep=deep)
    if deep:
        for name in found.headers:
            _verify_bytes(source.path(name), name, found.sizes[name], report)
    return report


def verify(manifest: Manifest, *, deep: bool) -> VerifyReport:
    """Reads headers, sizes and index again and compares; `deep` reads and hashes every byte."""
    report = VerifyReport(deep=deep)
    try:
        found = _survey(manifest.source, manifest.allow_patterns)
    except RaywlError as error:
        report.problems += problems_of(error)
        return report
    report.problems, report.notes = found.problems, found.notes
    report.files_checked = found.files_checked
    report.problems += _index_changes(manifest, found)
    for file in manifest.files:
        header = found.headers.get(file.name)
        if header is None:
            continue
        changes = _header_changes(manifest, file, header)
        if changes:
            report.problems.append(
                f"{manifest.path(file.name)}: header changed since it was opened: {changes}"
            )
        elif deep:
            _verify_bytes(manifest.path(file.name), file.name, file.size, report)
    return report


def notes_on(manifest: Manifest) -> list[str]:
    """What is worth knowing about a checkpoint that could be opened: index disagreements, files left out."""
    return _notes(
        [] if manifest.source.only is not None else manifest.source.list(),
        [file.name for file in manifest.files],
        manifest.index,
        manifest.allow_patterns,
        manifest.unindexed,
        manifest.nbytes - sum(manifest.tensors[name].nbytes for name in manifest.unindexed),
    )


def problems_of(error: RaywlError) -> list[str]:
    """An error as lines of a report: one for each file that is missing."""
    if not isinstance(error, MissingFileError):
        return [str(error)]
    return [f"{os.path.join(error.path or '', name)}: {error.reason}" for name in error.files]


@dataclass(slots=True)
class _Survey:
    """Everything that index and headers say, read one by one, so that no damage hides another."""

    names: list[str]
    """The weight files that count, present or not."""
    index: Index | None = None
    index_read: bool = True
    """Whether the index could be read, or isn't there."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Of the files that are there."""
    headers: dict[str, FileHeader] = field(default_factory=dict)
    """Of the files that are whole."""
    files_checked: int = 0
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def _survey(source: Source, patterns: tuple[str, ...]) -> _Survey:
    listed = source.list()
    found = _Survey([])
    try:
        found.index = read_index(source, listed)
    except RaywlError as error:
        found.index_read = False
        found.problems += problems_of(error)
    weight_map: dict[str, str] | None = None
    try:
        found.names, weight_map = choose(source, listed, found.index, patterns)
    except CheckpointError as error:
        # Where the index is damaged, the weights may well be elsewhere.
        found.problems += [str(error)] if found.index_read else []
    _find_files(source, found)
    if not weight_map and not patterns and source.only is None:
        try:
            check_numbered(source, found.names)
        except MissingFileError as error:
            found.problems += problems_of(error)
    _read_headers(source, found)
    tensors, unindexed, contradictions = merge(source, found.headers, weight_map)
    # Which file counts is for the index to say: a damaged one leaves it open.
    found.problems += [str(error) for error in contradictions if found.index_read]
    all_whole = len(found.headers) == len(found.names) and found.index_read and not contradictions
    indexed = tensors.keys() - set(unindexed)
    found.notes = _notes(
        listed if source.only is None else [],
        found.names,
        found.index and IndexFacts(found.index.sha256, len(found.index.weight_map), found.index.total_size),
        patterns,
        unindexed,
        sum(tensors[name].nbytes for name in indexed) if all_whole else None,
    )
    return found


def _find_files(source: Source, found: _Survey) -> None:
    for name in found.names:
        try:
            size = source.size(name)
        except RaywlError as error:
            found.problems.append(str(error))
            continue
        if size is None:
            found.problems.append(f"{source.path(name)}: absent (incomplete download?)")
        else:
            found.sizes[name] = size


def _read_headers(source: Source, found: _Survey) -> None:
    def read(name: str) -> FileHeader | RaywlError:
        try:
            return read_one(source, FileEntry(name, found.sizes[name]))
        except RaywlError as error:
            return error

    found.files_checked = len(found.sizes)
    with ThreadPoolExecutor(_HEADER_THREADS if len(found.sizes) > 1 else 1) as pool:
        for name, header in zip(found.sizes, pool.map(read, found.sizes), strict=True):
            if isinstance(header, RaywlError):
                found.problems.append(str(header))
            else:
                found.headers[name] = header


def _index_changes(manifest: Manifest, found: _Survey) -> Iterable[str]:
    """What is part of the checkpoint now and wasn't, or was and isn't."""
    if not found.index_read:
        return
    before, now = {file.name for file in manifest.files}, set(found.names)
    was = manifest.index and manifest.index.sha256
    if was != (found.index and found.index.sha256):
        what = "added" if was is None else "removed" if found.index is None else "changed"
        yield f"{manifest.path(INDEX_NAME)}: {what} since the checkpoint was opened"
    for name in found.names:
        if name not in before:
            yield f"{manifest.path(name)}: belongs to the checkpoint, but didn't when it was opened"
    for file in manifest.files:
        # Without any file left, that there are no weights has been said.
        if now and file.name not in now:
            yield f"{manifest.path(file.name)}: belongs to the checkpoint no more, but did when it was opened"


def _header_changes(manifest: Manifest, file: FileEntry, header: FileHeader) -> str:
    """How a file's header differs from the opened one; empty where it doesn't."""
    if (header.digest, header.data_start) == (file.header_sha256, file.data_start):
        return ""
    before = {name for name, entry in manifest.tensors.items() if entry.file == file.name}
    changed = sorted(
        name
        for name in before | header.tensors.keys()
        if manifest.tensors.get(name) != header.tensors.get(name)
    )
    return f"{len(changed)} tensors, for example {changed[0]}" if changed else "not the tensors' places"


def _notes(
    listed: Collection[str],
    names: Collection[str],
    index: IndexFacts | None,
    patterns: Collection[str],
    unindexed: Sequence[str],
    nbytes: int | None,
) -> list[str]:
    """The notes on a checkpoint.

    Args:
        listed: Its folder's files; none for a single file.
        names: Those that hold its weights.
        index: Its index.
        patterns: What the files were chosen by. What wasn't asked for needs no note.
        unindexed: Tensors that the index doesn't name.
        nbytes: Bytes of the tensors that it names; `None` where that isn't known.
    """
    notes = []
    if index is not None and not index.num_tensors:
        notes.append(f"{INDEX_NAME} has an empty weight_map: taken as no index")
    elif index is not None and not patterns and nbytes is not None and index.total_size not in (None, nbytes):
        notes.append(
            f"{INDEX_NAME} gives a total_size of {index.total_size} bytes, but its tensors have {nbytes}"
        )
    if unindexed:
        notes.append(
            f"{len(unindexed)} tensors are in the files but not in the index: {some_of(list(unindexed))}"
        )
    if not patterns:
        notes += _left_out(listed, set(names))
    return notes


def _left_out(listed: Collection[str], used: set[str]) -> Iterable[str]:
    rest = [name for name in listed if name not in used]
    sets = set(filter(None, map(numbered_set, used)))
    unused = [name for name in rest if name.endswith(".safetensors")]
    siblings = [name for name in unused if numbered_set(name) in sets]
    others = [name for name in unused if numbered_set(name) not in sets]
    leftovers = [name for name in rest if any(fnmatch.fnmatchcase(name, p) for p in _LEFTOVERS)]
    formats = [name for name in rest if name.endswith(_OTHER_FORMATS) and name not in leftovers]
    if siblings:
        yield f"{len(siblings)} files of the same numbered set are not in the index: {some_of(siblings)}"
    if others:
        yield f"{len(others)} safetensors files of the folder are not used: {some_of(others)}"
    if formats:
        yield f"{len(formats)} files of other formats are left out: {some_of(formats)}"
    if leftovers:
        yield f"{len(leftovers)} files that a trainer left are not used: {some_of(leftovers)}"


def _verify_bytes(path: str, name: str, size: int, report: VerifyReport) -> None:
    digest, done = hashlib.sha256(), 0
    try:
        with open(path, "rb", buffering=0) as file:
            while block := file.read(_BLOCK_BYTES):
                digest.update(block)
                done += len(block)
    except OSError as error:
        report.problems.append(f"{path}: can't be read at byte {done}: {error.strerror}")
        return
    report.bytes_checked += done
    report.sha256[name] = digest.hexdigest()
    if done != size:
        report.problems.append(f"{path}: expected {size} bytes, read {done}")
    # The hub's cache names a large file's blob by its SHA-256, and links to it.
    blob = os.path.basename(os.path.realpath(path))
    if _SHA256.match(blob):
        report.compared.append(name)
        if blob != report.sha256[name]:
            report.problems.append(f"{path}: its SHA-256 is {report.sha256[name]}, expected {blob}")
