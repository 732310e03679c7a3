"""Headers of safetensors files: parsed and checked by our own code, never the data.

Format: 8 bytes little-endian header size `n`, `n` bytes of JSON, then the data, which the tensors'
`data_offsets` (relative to the data's start, end exclusive) must tile without hole or overlap.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

from raywl.checkpoint.dtypes import DTYPE_BITS, TORCH_NAMES, nbytes_of
from raywl.checkpoint.strict_json import parse_json
from raywl.errors import CheckpointError, CorruptFileError, some_of

__all__ = [
    "LFS_POINTER",
    "MAX_DIMS",
    "MAX_HEADER_BYTES",
    "FileHeader",
    "Record",
    "TensorEntry",
    "read_header",
]

MAX_HEADER_BYTES = 100_000_000
"""The largest header that the format allows."""

MAX_DIMS = 64
"""The most dims that torch works on."""

LFS_POINTER = b"version https://git-lfs"
"""How a file begins that stands for another one in a git repository."""

_FIRST_READ_BYTES = 256 << 10
_MAX_SIZE = (1 << 63) - 1


class TensorEntry(NamedTuple):
    """Where one tensor lies."""

    dtype: str
    """The format's name, for example `BF16`; for what only torch's files have, one of `TORCH_ONLY`."""
    shape: tuple[int, ...]
    """Logical shape, as the header gives it."""
    file: str
    """Name of its file, relative to the checkpoint's folder."""
    start: int
    """First byte in the file."""
    end: int
    """One past its last byte in the file."""
    strides: tuple[int, ...] | None = None
    """Bytes between neighbours along each dim of torch's shape, for a view that isn't row after row in
    `[start, end)`: turned, with gaps, or with elements that repeat. `None` for all others."""

    @property
    def nbytes(self) -> int:
        """Bytes of data, each element's counted."""
        if self.strides is None:
            return self.end - self.start
        return nbytes_of(self.dtype, self.shape) or 0


class Record(NamedTuple):
    """One part of a file that has a checksum of its own."""

    name: str
    start: int
    end: int
    crc32: int


class FileHeader(NamedTuple):
    """What the header of one file says."""

    tensors: dict[str, TensorEntry]
    """In the file's own order."""
    metadata: dict[str, str]
    data_start: int
    """First byte of the data, counted from the file's start; 0 where data and header take turns."""
    digest: str
    """SHA-256 of the header's bytes, in hex."""
    spans: tuple[tuple[int, int], ...] = ()
    """Where those bytes are."""
    records: tuple[Record, ...] = ()
    """Parts of the data that have checksums."""
    notes: tuple[str, ...] = ()
    """What of the file is no weight and left out, in sentences that start with the file's name."""


def check_size(path: str, expected: int, size: int) -> None:
    """Compares a file's size with the one that its contents ask for.

    Raises:
        CorruptFileError: They differ.
    """
    if expected != size:
        kind = "short by" if size < expected else "longer by"
        cause = "an incomplete download" if size < expected else "trailing bytes, or another file's"
        raise CorruptFileError(
            path,
            None,
            f"expected {expected} bytes, the file has {size}: {kind} {abs(expected - size)} bytes ({cause})",
        )


def read_header(
    read: Callable[[int, int], bytes], size: int, *, path: str, file: str, first_bytes: int | None = None
) -> FileHeader:
    """Reads and checks one file's header.

    Args:
        read: Gives the bytes `[start, end)` of the file, fewer only at its end; called at most twice.
        size: The file's size in bytes.
        path: How messages name the file.
        file: How entries name the file.
        first_bytes: How much the first read asks for, where that should be as little as will do.

    Raises:
        CorruptFileError: The header contradicts itself, the format, or the file's size.
        CheckpointError: A dtype that torch has no type for.
    """
    if size < 8:
        raise CorruptFileError(path, None, f"{size} bytes are too few for a safetensors file (at least 8)")
    first = read(0, min(size, first_bytes or _FIRST_READ_BYTES))
    if len(first) < 8:
        raise CorruptFileError(path, None, f"only {len(first)} bytes could be read, file size is {size}")
    if first.startswith(LFS_POINTER):
        raise CorruptFileError(path, None, "a git-lfs pointer, not the file itself (`git lfs pull` gets it)")
    (length,) = struct.unpack("<Q", first[:8])
    if length > MAX_HEADER_BYTES:
        raise CorruptFileError(
            path, None, f"header of {length} bytes is over the format's limit of {MAX_HEADER_BYTES}"
        )
    if 8 + length > size:
        raise CorruptFileError(
            path,
            None,
            f"header should end at byte {8 + length}, but the file has {size} bytes: "
            "an incomplete download, or not a safetensors file",
        )
    raw = first[8 : 8 + length]
    if len(raw) < length:
        raw += read(len(first), 8 + length)
    if len(raw) != length:
        raise CorruptFileError(path, None, f"header has {length} bytes, only {len(raw)} could be read")
    tensors, metadata = _check(_parse(raw, path), 8 + length, size, path, file)
    digest = hashlib.sha256(raw).hexdigest()
    return FileHeader(tensors, metadata, 8 + length, digest, ((8, 8 + length),))


def _parse(raw: bytes, path: str) -> dict[str, Any]:
    if not raw.startswith(b"{"):
        raise CorruptFileError(
            path, None, f"header starts with {raw[:1]!r}, not with '{{'" if raw else "header is empty"
        )
    header = parse_json(raw, path, "header", offset=8)
    assert isinstance(header, dict)
    return header


def _check(
    header: dict[str, Any], data_start: int, size: int, path: str, file: str
) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    metadata = _checked_metadata(header.pop("__metadata__", None), path)
    tensors = {name: _entry(name, info, data_start, path, file) for name, info in header.items()}
    unsupported = sorted(name for name, entry in tensors.items() if entry.dtype not in TORCH_NAMES)
    if unsupported:
        first = tensors[unsupported[0]]
        reason = f"dtype {first.dtype} has no torch type"
        if len(unsupported) > 1:
            reason += f" (nor can these be read: {some_of(unsupported[1:])})"
        raise CheckpointError(path, unsupported[0], reason)
    _check_tiling(tensors, data_start, size, path)
    return tensors, metadata


def _checked_metadata(metadata: Any, path: str) -> dict[str, str]:
    if metadata is None:
        return {}
    if not isinstance(metadata, dict):
        raise CorruptFileError(path, None, f"__metadata__ is a {type(metadata).__name__}, not an object")
    for key, value in metadata.items():
        if not isinstance(value, str):
            raise CorruptFileError(path, None, f"__metadata__[{key!r}] is {value!r}, not a string")
    return metadata


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _MAX_SIZE


def _entry(name: str, info: Any, data_start: int, path: str, file: str) -> TensorEntry:
    """The checked entry of one tensor; its bounds against the file are checked with the tiling."""
    if not isinstance(info, dict) or not {"dtype", "shape", "data_offsets"} <= info.keys():
        raise CorruptFileError(path, name, f"needs dtype, shape and data_offsets, has {info!r:.200}")
    dtype, shape, offsets = info["dtype"], info["shape"], info["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise CorruptFileError(path, name, f"dtype {dtype!r:.100} is not one of the format's")
    if not isinstance(shape, list) or len(shape) > MAX_DIMS or not all(map(_is_size, shape)):
        raise CorruptFileError(path, name, f"shape {shape!r:.200} is not a list of at most {MAX_DIMS} sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_size, offsets)):
        raise CorruptFileError(path, name, f"data_offsets {offsets!r:.200} are not two byte offsets")
    start, end = offsets
    if 0 in shape and math.prod(size for size in shape if size) > _MAX_SIZE:
        raise CorruptFileError(path, name, f"shape {shape} is too large for a tensor")
    nbytes = nbytes_of(dtype, tuple(shape))
    if nbytes is None or (dtype == "F4" and (not shape or shape[-1] % 2)):
        raise CorruptFileError(path, name, f"{dtype} of shape {shape} does not fill whole bytes")
    if end - start != nbytes:
        raise CorruptFileError(
            path, name, f"{dtype} of shape {shape} takes {nbytes} bytes, its offsets span {end - start}"
        )
    return TensorEntry(dtype, tuple(shape), file, data_start + start, data_start + end)


def _check_tiling(tensors: dict[str, TensorEntry], data_start: int, size: int, path: str) -> None:
    """Tensors must cover the data in full, each byte once, and the file must end where they do."""
    position, previous = data_start, None
    for name, entry in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)):
        if entry.start != position:
            kind = "overlaps" if entry.start < position else "leaves a hole after"
            before = "the header" if previous is None else repr(previous)
            raise CorruptFileError(
                path, name, f"{kind} {before}: starts at byte {entry.start}, expected {position}"
            )
        position, previous = entry.end, name
    check_size(path, position, size)
