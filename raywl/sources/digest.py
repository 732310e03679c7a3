"""Hashes of files as sources give them."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Mapping

__all__ = ["Digest", "strongest"]

_STRONGEST = ("sha256", "sha1", "git", "md5", "crc32")
"""Hashes that sources give; the first of them is compared. `git` is SHA-1 after a header with the length."""


def strongest(known: Mapping[str, str]) -> str | None:
    """The kind of hash to compare a file by; `None` where none is known."""
    return next((kind for kind in _STRONGEST if kind in known), None)


class Digest:
    """One kind of hash of a file, from its bytes in order."""

    def __init__(self, kind: str, size: int) -> None:
        """Args:
        kind: One of the names that sources give hashes by.
        size: Of the file in bytes.
        """
        self._crc = 0
        self._hash = None
        if kind != "crc32":
            self._hash = hashlib.new("sha1" if kind == "git" else kind, usedforsecurity=False)
        if kind == "git" and self._hash is not None:
            self._hash.update(b"blob %d\0" % size)

    def update(self, block: bytes | memoryview) -> None:
        """Takes the next bytes."""
        if self._hash is None:
            self._crc = zlib.crc32(block, self._crc)
        else:
            self._hash.update(block)

    def hex(self) -> str:
        """The hash of what came."""
        return f"{self._crc:08x}" if self._hash is None else self._hash.hexdigest()
