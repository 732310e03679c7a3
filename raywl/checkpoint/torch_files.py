"""Files that `torch.save` writes: which bytes each tensor has, from the pickle and the directory alone.

Two formats are read. Since torch 1.6 a file is a zip archive with the pickle, and each storage as a record of
its own. Before that it is five pickles (among them the state dict, and the order of the storages), and the
storages one after the other, each with its number of elements before it.
"""

from __future__ import annotations

import hashlib
import io
import math
import struct
import zlib
from collections.abc import Callable, Iterable
from typing import Any

from raywl.checkpoint.dtypes import dtype_of, torch_itemsize
from raywl.checkpoint.header import (
    LFS_POINTER,
    MAX_DIMS,
    MAX_HEADER_BYTES,
    FileHeader,
    Record,
    TensorEntry,
    check_size,
)
from raywl.checkpoint.pickles import Opaque, read_pickle
from raywl.checkpoint.torch_globals import GLOBALS, StorageRef, TensorRef, storage_of
from raywl.checkpoint.zips import MAGIC, Archive
from raywl.errors import CheckpointError, CorruptFileError, some_of

__all__ = ["read_torch_header"]

Read = Callable[[int, int], bytes]

_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_LEGACY_PROTOCOL = 1001
_USUAL_ALIGNMENT = b"64"
"""What the places of storages in an archive are multiples of."""

_MARK_BYTES = 16
_FEW = 8
_LEGACY_CHUNKS = (1 << 20, 16 << 20, MAX_HEADER_BYTES)
"""How much is read of a file whose pickles may end anywhere, until they do."""

_MAX_REPEATED_BYTES = 1 << 30
"""A view whose elements repeat may take so much when written out, and as much as its whole file."""


def read_torch_header(read: Read, size: int, *, path: str, file: str, is_remote: bool = False) -> FileHeader:
    """The tensors of the state dict in one file, as ranges of its bytes.

    A dict under the key `state_dict` is taken in place of the one that it is in. Entries that are no tensors
    are left out, and noted.

    Args:
        read: Gives the bytes `[start, end)` of the file, fewer only at its end.
        size: The file's size in bytes.
        path: How messages name the file.
        file: How entries name the file.
        is_remote: Whether each read goes over a network: then there are few of them, however many storages.

    Raises:
        CorruptFileError: The file contradicts itself, the format, or its size.
        CheckpointError: It needs code to be run, or holds what can't be read as ranges.
    """
    first = read(0, min(size, 512))
    if first.startswith(MAGIC):
        return _read_zip(read, size, path, file, is_remote)
    if first.startswith(b"\x80"):
        return _read_legacy(read, size, path, file, is_remote)
    raise CorruptFileError(path, None, _what_else(first, size))


def _what_else(first: bytes, size: int) -> str:
    if first.startswith(LFS_POINTER):
        return "a git-lfs pointer, not the file itself (`git lfs pull` gets it)"
    if first[257:262] == b"ustar":
        return "a tar archive, as torch wrote before version 0.1.11: load it with torch, and save it again"
    if len(first) > 8 and first[8:9] == b"{":
        return "looks like a safetensors file under another name: rename it to end in .safetensors"
    return f"is no file of torch.save ({size} bytes, starting with {first[:8]!r}): a zip archive or a pickle"


# Files since torch 1.6.


def _read_zip(read: Read, size: int, path: str, file: str, is_remote: bool) -> FileHeader:
    archive = Archive(read, size, path=path, is_remote=is_remote)
    prefix = archive.names[0].partition("/")[0]
    where = f"{prefix}/data.pkl"
    if f"{prefix}/constants.pkl" in archive:
        raise CheckpointError(path, None, "a TorchScript archive, which holds a program and no state dict")
    if where not in archive:
        raise CorruptFileError(path, None, f"a zip archive without {where}: {some_of(archive.names)}")
    record = archive.locate([where])[where]
    order, aligned = f"{prefix}/byteorder", f"{prefix}/.storage_alignment"
    if order in archive and archive.content(order, _MARK_BYTES) != b"little":
        shown = archive.content(order, _MARK_BYTES)
        raise CheckpointError(
            path, None, f"its byte order is {shown!r}; only little-endian files can be read"
        )
    # Since torch 2.8 the archive says it.
    alignment = archive.content(aligned, _MARK_BYTES) if aligned in archive else _USUAL_ALIGNMENT
    if record.end - record.start > MAX_HEADER_BYTES:
        reason = f"its pickle of {record.end - record.start} bytes is over the limit of {MAX_HEADER_BYTES}"
        raise CorruptFileError(path, None, reason)
    raw = read(record.start, record.end)
    if record.crc32 and zlib.crc32(raw) != record.crc32:
        raise CorruptFileError(path, None, f"record {where!r} is damaged: its checksum is not the archive's")
    storages: dict[str, StorageRef] = {}
    state = read_pickle(io.BytesIO(raw), GLOBALS, _collector(storages), path=path, what="pickle")
    records = {key: f"{prefix}/data/{key}" for key in storages}
    absent = [name for name in records.values() if name not in archive]
    if absent:
        raise CorruptFileError(
            path, None, f"the pickle names storages that the archive lacks: {some_of(absent)}"
        )
    located = archive.locate(records.values(), int(alignment) if alignment.isdigit() else 1)
    places: dict[str, tuple[int, int]] = {}
    for key, name in records.items():
        storage, found = storages[key], located[name]
        nbytes = storage.num_elements * storage.itemsize
        if found.end - found.start != nbytes:
            reason = f"record {name!r} has {found.end - found.start} bytes, its pickle expects {nbytes}"
            raise CorruptFileError(path, None, reason)
        places[key] = (found.start, found.end)
    spans = ((record.start, record.end), (archive.directory_start, size))
    # A writer that was told to leave checksums out writes zeros.
    checked = tuple(found for found in [record, *located.values()] if found.crc32)
    return _header(state, places, read, spans, checked, size, path, file)


# Files from before torch 1.6.


def _read_legacy(read: Read, size: int, path: str, file: str, is_remote: bool) -> FileHeader:
    for limit in _LEGACY_CHUNKS:
        chunk = read(0, min(size, limit))
        try:
            state, storages, order, end = _read_pickles(io.BytesIO(chunk), path)
            break
        except CorruptFileError:
            if len(chunk) == size or limit == _LEGACY_CHUNKS[-1]:
                raise
    places: dict[str, tuple[int, int]] = {}
    position = end
    for at, key in enumerate(order):
        storage = storages.get(key)
        if storage is None or key in places:
            raise CorruptFileError(
                path, None, f"lists the storage {key[:100]!r}, which no tensor has, or twice"
            )
        # Of many in a remote file a few are enough, as the end must be the file's.
        looked_at = not is_remote or at < _FEW or at >= len(order) - _FEW
        raw = read(position, min(position + 8, size)) if looked_at and position < size else b""
        (count,) = struct.unpack("<q", raw) if len(raw) == 8 else (None,)
        if count is not None and count != storage.num_elements:
            reason = f"storage {key[:100]!r} has {count} elements, its pickle expects {storage.num_elements}"
            raise CorruptFileError(path, None, reason)
        start = position + 8
        position = start + storage.num_elements * storage.itemsize
        places[key] = (start, position)
        if position > size:
            break
    check_size(path, position, size)
    if lacking := sorted(storages.keys() - places.keys()):
        raise CorruptFileError(path, None, f"has no bytes for the storages {some_of(lacking)}")
    return _header(state, places, read, ((0, end),), (), size, path, file)


def _read_pickles(stream: io.BytesIO, path: str) -> tuple[Any, dict[str, StorageRef], list[str], int]:
    """The state, its storages by key, the keys in the order of their bytes, and where the pickles end."""
    storages: dict[str, StorageRef] = {}

    def take(what: str) -> Any:
        return read_pickle(stream, GLOBALS, _collector(storages), path=path, what=what)

    if take("first pickle") != _LEGACY_MAGIC:
        raise CheckpointError(path, None, "a pickle that torch.save didn't write")
    protocol = take("pickle of the format's version")
    if protocol != _LEGACY_PROTOCOL:
        raise CorruptFileError(path, None, f"format version {protocol!r:.100}, expected {_LEGACY_PROTOCOL}")
    system = take("pickle of the writer's machine")
    if type(system) is not dict or system.get("little_endian") is not True:
        raise CheckpointError(path, None, "isn't marked as little-endian; only such files can be read")
    state = take("pickle of the state")
    order = take("pickle of the storages' order")
    if type(order) is not list or not all(type(key) is str for key in order):
        raise CorruptFileError(path, None, "the order of its storages is no list of names")
    return state, storages, order, stream.tell()


# What both have in common.


def _collector(storages: dict[str, StorageRef]) -> Callable[[Any], StorageRef]:
    """Takes persistent ids, and notes the storages, of which all ids of one key must say the same."""

    def load(value: Any) -> StorageRef:
        storage = storage_of(value)
        whole = storage._replace(view=None)
        if storages.setdefault(storage.key, whole) != whole:
            raise ValueError(f"gives the storage {storage.key[:100]!r} two sizes or dtypes")
        return storage

    return load


def _header(
    state: Any,
    places: dict[str, tuple[int, int]],
    read: Read,
    spans: tuple[tuple[int, int], ...],
    records: tuple[Record, ...],
    size: int,
    path: str,
    file: str,
) -> FileHeader:
    digest = hashlib.sha256()
    for start, end in spans:
        digest.update(read(start, end))
    weights, notes = _weights_of(state, path, file)
    tensors = {name: _entry(name, ref, places, size, path, file) for name, ref in weights.items()}
    return FileHeader(tensors, {}, 0, digest.hexdigest(), spans, records, notes)


def _weights_of(state: Any, path: str, file: str) -> tuple[dict[str, TensorRef], tuple[str, ...]]:
    """The state dict's tensors, and what is left out, in sentences."""
    if type(state) is not dict:
        raise CheckpointError(path, None, f"holds {_kind_of(state)}, expected a dict of tensors")
    inner = state.get("state_dict")
    notes = []
    if type(inner) is dict:
        rest = {key: value for key, value in state.items() if key != "state_dict"}
        if rest:
            notes.append(f"{file}: left out, as they stand beside its state_dict: {_listed(rest)}")
        state = inner
    weights = {
        key: value for key, value in state.items() if isinstance(value, TensorRef) and type(key) is str
    }
    others = {key: value for key, value in state.items() if key not in weights}
    if state and not weights:
        hint = "; only a dict of tensors, or one under the key 'state_dict', can be read"
        raise CheckpointError(path, None, f"has no tensors at its top, but {_listed(others)}{hint}")
    if others:
        notes.append(f"{file}: left out, as they are no tensors with names: {_listed(others)}")
    return weights, tuple(notes)


def _listed(entries: dict[Any, Any]) -> str:
    return some_of([f"{str(key)[:100]} ({_kind_of(value)})" for key, value in entries.items()])


def _kind_of(value: Any) -> str:
    if isinstance(value, TensorRef):
        return "a tensor"
    if isinstance(value, StorageRef):
        return "a storage"
    if isinstance(value, Opaque):
        return value.kind
    if type(value) in (dict, list, tuple):
        return f"{type(value).__name__} of {len(value)}"
    return "None" if value is None else type(value).__name__


def _entry(
    name: str, ref: TensorRef, places: dict[str, tuple[int, int]], size: int, path: str, file: str
) -> TensorEntry:
    """The checked entry of one tensor."""
    try:
        name.encode()
    except UnicodeEncodeError:
        raise CorruptFileError(
            path, ascii(name), "its name has half a surrogate pair: not valid Unicode"
        ) from None
    if ref.problem is not None:
        raise CheckpointError(path, name, ref.problem)
    storage = ref.storage
    if not isinstance(storage, StorageRef):
        raise CorruptFileError(path, name, "is a view of what is no storage")
    dtype = dtype_of(ref.dtype)
    if dtype is None:
        raise CheckpointError(path, name, f"is {ref.dtype}, which can't be read")
    shape, strides = ref.shape, ref.strides
    if (
        not _are_sizes(shape)
        or not _are_sizes(strides)
        or len(shape) != len(strides)
        or not _is_size(ref.offset)
    ):
        reason = f"shape {shape!r:.100}, strides {strides!r:.100} and offset {ref.offset!r:.50} make no view"
        raise CorruptFileError(path, name, reason)
    itemsize = torch_itemsize(dtype)
    first, last = places[storage.key]
    if storage.view is not None:
        part_start, part_size = storage.view
        first += part_start * storage.itemsize
        last = min(last, first + part_size * storage.itemsize)
    start = first + ref.offset * itemsize
    if 0 in shape:
        end = start = min(start, last)
        row_major = True
    else:
        end = start + (1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))) * itemsize
        row_major = _is_row_major(shape, strides)
    if end > last or start > last:
        reason = f"takes bytes {start - first} to {end - first} of a storage of {max(last - first, 0)}"
        raise CorruptFileError(path, name, reason)
    nbytes = math.prod(shape) * itemsize
    if nbytes > max(size, _MAX_REPEATED_BYTES) or math.prod(n or 1 for n in shape) >= 1 << 63:
        reason = f"repeats its bytes: {nbytes} when written out, from a file of {size}"
        raise CorruptFileError(path, name, reason)
    logical = (*shape[:-1], shape[-1] * 2) if dtype == "F4" and shape else shape
    byte_strides = None if row_major else tuple(stride * itemsize for stride in strides)
    return TensorEntry(dtype, logical, file, start, end, byte_strides)


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _are_sizes(values: Any) -> bool:
    return type(values) is tuple and len(values) <= MAX_DIMS and all(map(_is_size, values))


def _is_row_major(shape: Iterable[int], strides: Iterable[int]) -> bool:
    step = 1
    for size, stride in reversed(list(zip(shape, strides, strict=True))):
        if size != 1 and stride != step:
            return False
        step *= size
    return True
