"""Zip archives as torch writes them: which bytes of the file each record has, without reading the records.

The records of such an archive are stored as they are. One that is compressed, encrypted, or shares bytes with
another is refused, so that nothing is ever unpacked.
"""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from raywl.checkpoint.header import Record
from raywl.errors import CorruptFileError

__all__ = ["MAGIC", "MAX_DIRECTORY_BYTES", "Archive"]

MAGIC = b"PK\3\4"
"""How an archive starts: with the header of its first record."""

MAX_DIRECTORY_BYTES = 32 << 20
"""The largest directory that is read: of about 300,000 records, as many as a pickle may have tensors."""

_LOCAL = struct.Struct("<4s5H3I2H")
_WINDOW_BYTES = 4096
_ENCRYPTED = 0x1
_UTF8 = 0x800
_DESCRIBED = 0x8
"""A record is followed by its size and checksum, which its header hasn't got."""

_FEW = 8
_REMOTE_THREADS = 32
_MAX_32_BITS = 0xFFFFFFFF


class _Ranges(io.RawIOBase):
    """A file whose bytes come from a function."""

    def __init__(self, read: Callable[[int, int], bytes], size: int) -> None:
        super().__init__()
        self._read, self._size, self._at = read, size, 0
        self.failure: OSError | None = None
        """Why bytes couldn't be read; the library would take it for an archive that is damaged."""

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise OSError("a position before the file's start")
        self._at = base + offset
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        end = self._size if size is None or size < 0 else min(self._at + size, self._size)
        if end - self._at > MAX_DIRECTORY_BYTES:
            wanted = end - self._at
            raise ValueError(f"a directory of {wanted} bytes is over the limit of {MAX_DIRECTORY_BYTES}")
        try:
            data = self._read(self._at, end) if end > self._at else b""
        except OSError as error:
            self.failure = error
            raise
        self._at += len(data)
        return data


class Archive:
    """The directory of an archive.

    Args:
        read: Gives the bytes `[start, end)` of the file.
        size: The file's size in bytes.
        path: How messages name the file.
        is_remote: Whether each read goes over a network.

    Raises:
        CorruptFileError: There is no directory, or it contradicts itself.
    """

    def __init__(
        self, read: Callable[[int, int], bytes], size: int, *, path: str, is_remote: bool = False
    ) -> None:
        self._read, self._size, self._path, self._is_remote = read, size, path, is_remote
        file = _Ranges(read, size)
        try:
            with zipfile.ZipFile(file) as archive:
                members, self.directory_start = archive.infolist(), archive.start_dir
        except zipfile.BadZipFile as error:
            if file.failure is not None:
                raise file.failure from None
            raise self._error(
                None,
                f"starts as a zip archive, but its directory at the end can't be read ({error}): "
                "an incomplete download?",
            ) from None
        except (ValueError, NotImplementedError, OverflowError, struct.error, EOFError) as error:
            raise self._error(None, f"its zip directory can't be read: {error}") from None
        self._members = {member.filename: member for member in members}
        in_order = sorted(members, key=lambda member: member.header_offset)
        if len(self._members) < len(members):
            names = [member.filename for member in members]
            twice = next(name for name in self._members if names.count(name) > 1)
            raise self._error(twice, "is in the archive twice")
        if not in_order or in_order[0].header_offset != 0:
            raise self._error(None, "something stands before the archive's first record")
        ends = [member.header_offset for member in in_order[1:]] + [self.directory_start]
        self._limits = {member.filename: end for member, end in zip(in_order, ends, strict=True)}
        """Where the record after each one starts."""
        self._window = (0, b"")

    def _error(self, name: str | None, reason: str) -> CorruptFileError:
        return CorruptFileError(self._path, None, reason if name is None else f"record {name!r} {reason}")

    @property
    def names(self) -> list[str]:
        """The records' names, in the directory's order."""
        return list(self._members)

    def __contains__(self, name: str) -> bool:
        return name in self._members

    def locate(self, names: Iterable[str], alignment: int = 1) -> dict[str, Record]:
        """Where records lie, read from the headers that stand before each of them.

        Of many records of a remote file only a few headers are read, if these and the directory bear out that
        torch wrote it: each record ends where the next one begins, and starts at a multiple of `alignment`.

        Raises:
            KeyError: There is no such record.
            CorruptFileError: A record isn't plain bytes of its own.
        """
        wanted = sorted(
            {name: self._members[name].header_offset for name in names}.items(), key=lambda x: x[1]
        )
        order = [name for name, _ in wanted]
        if not self._is_remote or len(order) <= _FEW:
            return {name: self._locate(name, self._windowed) for name in order}
        supposed = self._suppose(order, max(alignment, 1))
        with ThreadPoolExecutor(_REMOTE_THREADS) as pool:
            locate = partial(self._locate, read=self._read)
            if supposed is not None:
                sample = [order[at * (len(order) - 1) // (_FEW - 1)] for at in range(_FEW)]
                if list(pool.map(locate, sample)) == [supposed[name] for name in sample]:
                    return supposed
            return dict(zip(order, pool.map(locate, order), strict=True))

    def content(self, name: str, limit_bytes: int) -> bytes:
        """The bytes of a record, or the first ones; raises as `locate`."""
        record = self.locate([name])[name]
        return self._windowed(record.start, min(record.end, record.start + limit_bytes))

    def _suppose(self, names: Sequence[str], alignment: int) -> dict[str, Record] | None:
        """Where torch would have put records; `None` where the next one's place shows that it didn't.

        Its writer fills what stands before a record up with an extra field, of at least four bytes, so that
        the record starts at a multiple of the alignment.
        """
        found = {}
        for name in names:
            member = self._checked(name)
            is_far, is_long = member.header_offset >= _MAX_32_BITS, member.file_size >= _MAX_32_BITS
            first = member.header_offset + _LOCAL.size + len(self._raw_name(member)) + 4
            first += (4 if is_far or is_long else 0) + (16 if is_long else 0) + (8 if is_far else 0)
            start = -(-first // alignment) * alignment
            end = start + member.file_size
            described = (24 if is_far or is_long else 16) if member.flag_bits & _DESCRIBED else 0
            if end + (described if member.file_size else 0) != self._limits[name]:
                return None
            found[name] = Record(name, start, end, member.CRC)
        return found

    def _raw_name(self, member: zipfile.ZipInfo) -> bytes:
        return member.orig_filename.encode("utf-8" if member.flag_bits & _UTF8 else "cp437")

    def _checked(self, name: str) -> zipfile.ZipInfo:
        """A record as the directory has it, which must be plain bytes."""
        member = self._members[name]
        if member.compress_type != zipfile.ZIP_STORED or member.flag_bits & _ENCRYPTED:
            kind = "encrypted" if member.flag_bits & _ENCRYPTED else "compressed"
            raise self._error(name, f"is {kind}; torch.save writes plain bytes, so that parts can be read")
        if member.compress_size != member.file_size:
            raise self._error(name, f"has {member.compress_size} bytes, which are to give {member.file_size}")
        return member

    def _locate(self, name: str, read: Callable[[int, int], bytes]) -> Record:
        member = self._checked(name)
        offset, raw_name = member.header_offset, self._raw_name(member)
        header = read(offset, offset + _LOCAL.size + len(raw_name))
        if len(header) < _LOCAL.size or header[:4] != MAGIC:
            raise self._error(name, f"has no header at byte {offset}")
        fields = _LOCAL.unpack(header[: _LOCAL.size])
        flags, method, name_length, extra_length = fields[2], fields[3], fields[9], fields[10]
        if method != zipfile.ZIP_STORED or flags & _ENCRYPTED or header[_LOCAL.size :] != raw_name:
            raise self._error(name, f"has another header at byte {offset} than the directory says")
        start = offset + _LOCAL.size + name_length + extra_length
        end = start + member.file_size
        if end > self._limits[name]:
            raise self._error(
                name, f"reaches to byte {end}, past {self._limits[name]}, where another one starts"
            )
        return Record(name, start, end, member.CRC)

    def _windowed(self, start: int, end: int) -> bytes:
        """Bytes of the file; small records that follow each other share a read. For one thread."""
        first, window = self._window
        if not first <= start <= end <= first + len(window):
            first, window = start, self._read(start, min(max(end, start + _WINDOW_BYTES), self._size))
            self._window = (first, window)
        return window[start - first : end - first]
