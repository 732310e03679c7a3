"""Zip archives as torch writes them: which bytes of the file each record has, without reading the records.

The records of such an archive are stored as they are. One that is compressed, encrypted, or shares bytes with
another is refused, so that nothing is ever unpacked.
"""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Callable, Iterable

from raywl.checkpoint.header import MAX_HEADER_BYTES, Record
from raywl.errors import CorruptFileError

__all__ = ["MAGIC", "Archive"]

MAGIC = b"PK\3\4"
"""How an archive starts: with the header of its first record."""

_LOCAL = struct.Struct("<4s5H3I2H")
_WINDOW_BYTES = 4096
_ENCRYPTED = 0x1
_UTF8 = 0x800


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
        if end - self._at > MAX_HEADER_BYTES:
            raise ValueError(f"a directory of {end - self._at} bytes is over the limit of {MAX_HEADER_BYTES}")
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

    Raises:
        CorruptFileError: There is no directory, or it contradicts itself.
    """

    def __init__(self, read: Callable[[int, int], bytes], size: int, *, path: str) -> None:
        self._read, self._size, self._path = read, size, path
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

    def locate(self, names: Iterable[str]) -> dict[str, Record]:
        """Where records lie, read from the headers that stand before each of them.

        Raises:
            KeyError: There is no such record.
            CorruptFileError: A record isn't plain bytes of its own.
        """
        wanted = sorted(
            {name: self._members[name].header_offset for name in names}.items(), key=lambda x: x[1]
        )
        return {name: self._locate(name) for name, _ in wanted}

    def _locate(self, name: str) -> Record:
        member = self._members[name]
        if member.compress_type != zipfile.ZIP_STORED or member.flag_bits & _ENCRYPTED:
            kind = "encrypted" if member.flag_bits & _ENCRYPTED else "compressed"
            raise self._error(name, f"is {kind}; torch.save writes plain bytes, so that parts can be read")
        if member.compress_size != member.file_size:
            raise self._error(name, f"has {member.compress_size} bytes, which are to give {member.file_size}")
        offset = member.header_offset
        raw_name = member.orig_filename.encode("utf-8" if member.flag_bits & _UTF8 else "cp437")
        header = self._bytes(offset, offset + _LOCAL.size + len(raw_name))
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

    def _bytes(self, start: int, end: int) -> bytes:
        """Bytes of the file; small records that follow each other share a read."""
        first, window = self._window
        if not first <= start <= end <= first + len(window):
            first, window = start, self._read(start, min(max(end, start + _WINDOW_BYTES), self._size))
            self._window = (first, window)
        return window[start - first : end - first]
