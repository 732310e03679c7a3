"""Whether a checkpoint is whole, and whether it is still what was opened."""

from __future__ import annotations

import hashlib
import os
import re
import zlib
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

from raywl.checkpoint import FileEntry, Manifest
from raywl.checkpoint.header import FileHeader, Record, TensorEntry
from raywl.checkpoint.index import Index, numbered_set
from raywl.checkpoint.manifest import (
    IndexFacts,
    check_numbered,
    choose,
    find_index,
    format_at,
    merge,
    notes_of,
    read_one,
)
from raywl.errors import CheckpointError, MissingFileError, RaywlError, SourceError, some_of
from raywl.sources import Source
from raywl.sources.cache import check_hash
from raywl.sources.selection import FORMATS, SAFETENSORS, WeightFormat, as_patterns, is_leftover

__all__ = ["Checksums", "VerifyReport", "notes_on", "problems_of", "verify", "verify_source"]

_BLOCK_BYTES = 8 << 20
_HEADER_THREADS = 8
_SHA256 = re.compile(r"^[0-9a-f]{64}$")
_OTHER_FORMATS = (".bin", ".ckpt", ".gguf", ".h5", ".msgpack", ".npz", ".onnx", ".pt", ".pth", ".safetensors")


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
    patterns = as_patterns(allow_patterns)
    found = _survey(source, patterns)
    report = VerifyReport(found.problems, found.notes, found.files_checked, deep=deep)
    if deep:
        source.fetch(found.headers)
        for name, header in found.headers.items():
            _verify_bytes(source, name, found.sizes[name], header.records, report)
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
            label = manifest.source.label(file.name)
            report.problems.append(f"{label}: header changed since it was opened: {changes}")
        elif deep:
            manifest.fetch([file.name])
            _verify_bytes(manifest.source, file.name, file.size, header.records, report)
    return report


def notes_on(manifest: Manifest) -> list[str]:
    """What is worth knowing about a checkpoint that could be opened: index disagreements, files left out."""
    indexed = manifest.tensors.keys() - set(manifest.unindexed)
    return _notes(
        [] if manifest.source.only is not None else manifest.source.list(),
        [file.name for file in manifest.files],
        next(format for format in FORMATS if format.name == manifest.format),
        manifest.index,
        manifest.allow_patterns,
        manifest.unindexed,
        [manifest.tensors[name] for name in indexed],
        manifest.notes,
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
    format: WeightFormat = SAFETENSORS
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
    found = _Survey([], format_at(source, listed, patterns))
    try:
        found.format, found.index = find_index(source, listed, found.format)
    except RaywlError as error:
        found.index_read = False
        found.problems += problems_of(error)
    weight_map: dict[str, str] | None = None
    try:
        found.names, weight_map = choose(source, listed, found.index, patterns, found.format)
    except CheckpointError as error:
        # Where the index is damaged, the weights may well be elsewhere.
        found.problems += [str(error)] if found.index_read else []
    _find_files(source, found)
    if not weight_map and source.only is None:
        try:
            check_numbered(source, found.names, patterns)
        except MissingFileError as error:
            found.problems += problems_of(error)
    _read_headers(source, found)
    tensors, unindexed, contradictions = merge(source, found.headers, weight_map)
    # Which file counts is for the index to say: a damaged one leaves it open.
    found.problems += [str(error) for error in contradictions if found.index_read]
    all_whole = len(found.headers) == len(found.names) and found.index_read and not contradictions
    indexed = tensors.keys() - set(unindexed)
    listed = listed if source.only is None else []
    index = found.index
    found.notes = _notes(
        listed,
        found.names,
        found.format,
        index and IndexFacts(index.sha256, len(index.weight_map), index.total_size, index.name),
        patterns,
        unindexed,
        [tensors[name] for name in indexed] if all_whole else None,
        notes_of(listed, list(found.headers.values()), found.format),
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
            found.problems.append(f"{source.label(name)}: absent (incomplete download?)")
        else:
            found.sizes[name] = size


def _read_headers(source: Source, found: _Survey) -> None:
    def read(name: str) -> FileHeader | RaywlError:
        try:
            return read_one(source, FileEntry(name, found.sizes[name]), found.format)
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
    was, now_index = manifest.index, found.index
    if (was and was.sha256) != (now_index and now_index.sha256):
        what = "added" if was is None else "removed" if now_index is None else "changed"
        name = now_index.name if now_index else was.name if was else found.format.index_name
        yield f"{manifest.source.label(name)}: {what} since the checkpoint was opened"
    for name in found.names:
        if name not in before:
            yield f"{manifest.source.label(name)}: belongs to the checkpoint, but didn't when it was opened"
    for file in manifest.files:
        # Without any file left, that there are no weights has been said.
        if now and file.name not in now:
            label = manifest.source.label(file.name)
            yield f"{label}: belongs to the checkpoint no more, but did when it was opened"


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
    format: WeightFormat,
    index: IndexFacts | None,
    patterns: Collection[str],
    unindexed: Sequence[str],
    indexed: Sequence[TensorEntry] | None,
    said: Sequence[str],
) -> list[str]:
    """The notes on a checkpoint.

    Args:
        listed: Its folder's files; none for a single file.
        names: Those that hold its weights.
        format: What these are.
        index: Its index.
        patterns: What the files were chosen by. What wasn't asked for needs no note.
        unindexed: Tensors that the index doesn't name.
        indexed: Entries of those that it names; `None` where that isn't known.
        said: What reading the files had to say.
    """
    notes = list(said)
    nbytes = None if indexed is None else _nbytes_of(indexed)
    if index is not None and not index.num_tensors:
        notes.append(f"{index.name} has an empty weight_map: taken as no index")
    elif index is not None and not patterns and nbytes and index.total_size not in (None, *nbytes):
        notes.append(
            f"{index.name} gives a total_size of {index.total_size} bytes, but its tensors have {nbytes[0]}"
        )
    if unindexed:
        notes.append(
            f"{len(unindexed)} tensors are in the files but not in the index: {some_of(list(unindexed))}"
        )
    if not patterns:
        notes += _left_out(listed, set(names), format)
    return notes


def _nbytes_of(entries: Sequence[TensorEntry]) -> tuple[int, ...]:
    """Bytes of all tensors; and of those in places of their own, as some writers count shared ones once."""
    places = {(entry.file, entry.start, entry.end): entry.nbytes for entry in entries}
    return sum(entry.nbytes for entry in entries), sum(places.values())


def _left_out(listed: Collection[str], used: set[str], format: WeightFormat) -> Iterable[str]:
    rest = [name for name in listed if name not in used]
    sets = set(filter(None, map(numbered_set, used)))
    leftovers = [name for name in rest if is_leftover(name)]
    unused = [name for name in rest if name.endswith(format.suffixes) and name not in leftovers]
    siblings = [name for name in unused if numbered_set(name) in sets]
    others = [name for name in unused if numbered_set(name) not in sets]
    formats = [name for name in rest if name.endswith(_OTHER_FORMATS) and name not in leftovers + unused]
    if format is not SAFETENSORS:
        # These were said where the others were chosen.
        leftovers = [name for name in leftovers if not name.endswith(format.suffixes)]
    if siblings:
        yield f"{len(siblings)} files of the same numbered set are not in the index: {some_of(siblings)}"
    if others:
        kind = " and ".join(f"*{suffix}" for suffix in format.suffixes)
        kind = "safetensors" if format is SAFETENSORS else kind
        yield f"{len(others)} {kind} files of the folder are not used: {some_of(others)}"
    if formats:
        yield f"{len(formats)} files of other formats are left out: {some_of(formats)}"
    if leftovers:
        yield f"{len(leftovers)} files that a trainer left are not used: {some_of(leftovers)}"


class Checksums:
    """Checksums of a file's records, taken while its bytes pass by in order."""

    def __init__(self, records: Sequence[Record]) -> None:
        self._records = sorted(records, key=lambda record: record.start)
        self._at, self._crc = 0, 0
        self.wrong: list[str] = []
        """Names of the records that aren't what their checksums say."""

    def update(self, block: bytes, first: int) -> None:
        """Takes the bytes from byte `first` of the file on."""
        view = memoryview(block)
        while self._at < len(self._records):
            record = self._records[self._at]
            if record.start >= first + len(block):
                return
            part = view[max(record.start - first, 0) : record.end - first]
            self._crc = zlib.crc32(part, self._crc)
            if record.end > first + len(block):
                return
            if self._crc != record.crc32:
                self.wrong.append(record.name)
            self._at, self._crc = self._at + 1, 0


def _verify_bytes(
    source: Source, name: str, size: int, records: Sequence[Record], report: VerifyReport
) -> None:
    path = source.path(name)
    digest, done, checksums = hashlib.sha256(), 0, Checksums(records)
    try:
        with open(path, "rb", buffering=0) as file:
            while block := file.read(_BLOCK_BYTES):
                digest.update(block)
                checksums.update(block, done)
                done += len(block)
    except OSError as error:
        report.problems.append(f"{path}: can't be read at byte {done}: {error.strerror}")
        return
    report.bytes_checked += done
    if checksums.wrong:
        report.problems.append(
            f"{path}: {len(checksums.wrong)} of {len(records)} records are damaged, as their checksums tell: "
            f"{some_of(checksums.wrong)}"
        )
    report.sha256[name] = digest.hexdigest()
    if done != size:
        report.problems.append(f"{path}: expected {size} bytes, read {done}")
    # The hub's cache names a large file's blob by its SHA-256, and links to it.
    blob = os.path.basename(os.path.realpath(path))
    if _SHA256.match(blob):
        report.compared.append(name)
        if blob != report.sha256[name]:
            report.problems.append(f"{path}: its SHA-256 is {report.sha256[name]}, expected {blob}")
    elif known := source.known_hashes(name):
        report.compared.append(name)
        try:
            check_hash(path, known, lambda why: SourceError(path, why))
        except SourceError as error:
            report.problems.append(str(error))
