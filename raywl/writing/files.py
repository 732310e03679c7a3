"""One safetensors file made of tensors of another checkpoint, tensor after tensor, and its check."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from raywl.checkpoint import Manifest, TensorEntry
from raywl.checkpoint.dtypes import TORCH_ONLY, torch_itemsize, torch_name
from raywl.checkpoint.header import FileHeader
from raywl.checkpoint.manifest import read_one
from raywl.errors import CheckpointError, CorruptFileError, some_of
from raywl.plan import Read
from raywl.readers import OpenFiles, choose_num_threads, execute
from raywl.readers.memory import ByteView, bytes_of
from raywl.readers.whole import read_whole, reads_of
from raywl.sources.local import LocalSource
from raywl.sources.selection import FORMATS
from raywl.verifying import Checksums
from raywl.writing.headers import METADATA, RESERVED, header_bytes

__all__ = [
    "METADATA",
    "TensorReader",
    "check_dtypes",
    "check_file",
    "check_records",
    "distinct_views",
    "read_headers",
    "reading",
    "write_file",
]

_CHECK_BYTES = 16 << 20


class TensorReader:
    """Reads tensors of a checkpoint, each into memory of its own.

    Args:
        manifest: The checkpoint.
        files: Its open files.
    """

    def __init__(self, manifest: Manifest, files: OpenFiles) -> None:
        self.manifest, self._files = manifest, files
        self._num_threads = choose_num_threads(1)

    def read(self, name: str) -> torch.Tensor:
        """The bytes of a tensor, row after row, as a 1-d uint8 tensor."""
        entries = self.manifest.tensors
        return ByteView(read_whole([name], entries, reads_of([name], entries), self._execute)[name]).raw

    def _execute(self, reads: Sequence[Read], targets: Mapping[str, ByteView]) -> None:
        execute(reads, self._files, targets, num_threads=self._num_threads)


@contextmanager
def reading(manifest: Manifest) -> Iterator[TensorReader]:
    """A reader; when the block ends, it is an error if a file changed meanwhile."""
    with OpenFiles(manifest) as files:
        yield TensorReader(manifest, files)
        files.check_unchanged()


def check_dtypes(manifest: Manifest) -> None:
    """Raises `CheckpointError` for a tensor of a dtype, or of the one name, that safetensors doesn't have."""
    for name, entry in manifest.tensors.items():
        if name == RESERVED:
            reason = "no tensor of a safetensors file can have this name"
            raise CheckpointError(manifest.source.label(entry.file), name, reason)
        if entry.dtype in TORCH_ONLY or (entry.dtype == "F4" and not entry.shape):
            shown = f"{torch_name(entry.dtype)} of shape {list(entry.shape)}"
            raise CheckpointError(
                manifest.source.label(entry.file), name, f"is {shown}, which safetensors can't hold"
            )


def read_headers(manifest: Manifest) -> list[FileHeader]:
    """The files' headers, which have what a manifest hasn't: their own order, and checksums."""
    format = next(format for format in FORMATS if format.name == manifest.format)
    return [read_one(manifest.source, file, format) for file in manifest.files]


def check_records(manifest: Manifest, headers: Sequence[FileHeader]) -> None:
    """Compares the parts of files that have checksums with these, reading all of them.

    Raises:
        CorruptFileError: A part is damaged.
    """
    for file, header in zip(manifest.files, headers, strict=True):
        if header.records:
            checksums = Checksums(header.records)
            for start in range(0, file.size, _CHECK_BYTES):
                end = min(start + _CHECK_BYTES, file.size)
                checksums.update(manifest.source.read(file.name, start, end), start)
            if checksums.wrong:
                reason = f"records are damaged, as their checksums tell: {some_of(checksums.wrong)}"
                raise CorruptFileError(manifest.path(file.name), None, reason)


def distinct_views(manifest: Manifest, headers: Sequence[FileHeader]) -> tuple[list[str], dict[str, str]]:
    """The tensors without those that are the same view of the same bytes as one before.

    Args:
        manifest: The checkpoint.
        headers: As `read_headers` gives them.

    Returns:
        The names that are kept, in the order of the files and in each file's own; and the others, each with
        the one that is kept for it.
    """
    first: dict[TensorEntry, str] = {}
    same: dict[str, str] = {}
    for file, header in zip(manifest.files, headers, strict=True):
        for name in header.tensors:
            entry = manifest.tensors.get(name)
            if entry is not None and entry.file == file.name:
                kept = first.setdefault(entry, name)
                if kept != name:
                    same[name] = kept
    return list(first.values()), same


def write_file(
    reader: TensorReader, names: Sequence[str], path: str, on_bytes: Callable[[int], None] | None = None
) -> None:
    """Writes a file anew, and to the disk, holding one tensor at a time.

    Args:
        reader: Where the tensors come from.
        names: Which ones; in the file, wider elements come first, so that all are aligned.
        path: There must be nothing there.
        on_bytes: Called with the bytes of each tensor that is written.

    Raises:
        CheckpointError: A tensor can't be read, or the header would be too long.
        OSError: The file can't be written.
    """
    tensors = reader.manifest.tensors
    order = sorted(names, key=lambda name: -torch_itemsize(tensors[name].dtype))
    header = header_bytes({name: tensors[name] for name in order}, path)
    with open(path, "xb", buffering=0) as file:
        _write_all(file.fileno(), memoryview(header))
        for name in order:
            raw = reader.read(name)
            _write_all(file.fileno(), bytes_of(raw))
            if on_bytes is not None:
                on_bytes(raw.numel())
        os.fsync(file.fileno())


def _write_all(fd: int, data: memoryview) -> None:
    while data.nbytes:
        # One call writes less than 2 GiB.
        data = data[os.write(fd, data) :]


def check_file(
    reader: TensorReader, names: Sequence[str], path: str, on_bytes: Callable[[int], None] | None = None
) -> None:
    """Reads a file that was written and compares it, bit by bit, with the tensors that it was made of.

    Args:
        reader: Where the tensors come from; they are read again.
        names: Which ones the file must hold, and no others.
        path: The file.
        on_bytes: Called with the bytes of each tensor that is compared.

    Raises:
        RuntimeError: It isn't what was written.
    """
    written = Manifest.read(LocalSource(path, os.path.dirname(path), os.path.basename(path)))
    if sorted(written.tensors) != sorted(names) or dict(written.metadata) != METADATA:
        raise RuntimeError(f"{path}: names or metadata aren't what was written")
    with OpenFiles(written) as files:
        buffer = torch.empty(_CHECK_BYTES, dtype=torch.uint8, device="cpu")
        for name in names:
            source, found = reader.manifest.tensors[name], written.tensors[name]
            raw = reader.read(name)
            if (found.dtype, found.shape, found.nbytes) != (source.dtype, source.shape, raw.numel()):
                raise RuntimeError(f"{path}: tensor {name!r} is {found}, expected {source}")
            for first in range(0, raw.numel(), _CHECK_BYTES):
                part = buffer[: min(_CHECK_BYTES, raw.numel() - first)]
                files.read_into(found.file, found.start + first, [bytes_of(part)])
                if not torch.equal(part, raw[first : first + part.numel()]):
                    raise RuntimeError(f"{path}: tensor {name!r} isn't what was written, bit by bit")
            if on_bytes is not None:
                on_bytes(raw.numel())
