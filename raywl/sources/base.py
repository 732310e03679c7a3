"""What every source can do."""

from __future__ import annotations

from typing import Protocol

__all__ = ["Source"]


class Source(Protocol):
    """One place that holds a checkpoint's files; immutable, picklable, free of secrets when shown."""

    @property
    def ref(self) -> str:
        """How the user named it; another node opens the same checkpoint by it."""

    @property
    def identity(self) -> str | None:
        """What the source itself identifies the content by (a commit), or `None`."""

    @property
    def only(self) -> str | None:
        """The one file that was asked for, by name, or `None` for the folder."""

    def list(self) -> list[str]:
        """Names of the files in its folder, without those of sub-folders."""

    def size(self, name: str) -> int | None:
        """Size of a file in bytes, or `None` where there is none by that name."""

    def stamp(self, name: str) -> str | None:
        """What changes on this node when somebody writes to the file or replaces it; `None` if unknown."""

    def read(self, name: str, start: int, end: int) -> bytes:
        """Bytes `[start, end)` of a file, fewer only at its end."""

    def path(self, name: str) -> str:
        """The file's path on this node."""
