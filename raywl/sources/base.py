"""What every source can do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, Protocol

__all__ = ["RemoteFile", "Report", "Source"]

Report = Callable[[int, int, str], None]
"""Called as `report(done_bytes, total_bytes, phase)`."""


class RemoteFile(NamedTuple):
    """One file of a source that isn't on this machine."""

    name: str
    """Path inside the folder."""
    size: int
    """Bytes."""
    tag: str | None = None
    """What the source tells its content by: an ETag, a version, a hash; `None` if it gives none."""
    ranged: bool = True
    """Whether the source gives parts of it."""


class Source(Protocol):
    """One place that holds a checkpoint's files; immutable, picklable, free of secrets when shown."""

    @property
    def ref(self) -> str:
        """How the user named it; another node opens the same checkpoint by it."""

    @property
    def kind(self) -> str:
        """`local`, `hub`, or a store's protocol, as reports count bytes by."""

    @property
    def identity(self) -> str | None:
        """What the source itself identifies the content by (a commit, ETags), or `None`."""

    @property
    def only(self) -> str | None:
        """The one file that was asked for, by name, or `None` for the folder."""

    @property
    def is_remote(self) -> bool:
        """Whether reads go over a network, so that few and parallel ones are better."""

    def list(self) -> list[str]:
        """Names of the files in its folder, without those of sub-folders."""

    def size(self, name: str) -> int | None:
        """Size of a file in bytes, or `None` where there is none by that name."""

    def stamp(self, name: str) -> str | None:
        """What changes on this node when somebody writes to the file or replaces it; `None` if unknown."""

    def read(self, name: str, start: int, end: int) -> bytes:
        """Bytes `[start, end)` of a file, fewer only at its end; of a remote one, only these are fetched."""

    def path(self, name: str) -> str:
        """The file's path on this node: where it is, or will be once it is fetched."""

    def label(self, name: str) -> str:
        """How messages name a file: its path, where it is on this node."""

    def fetch(self, names: Iterable[str], report: Report | None = None) -> int:
        """Makes files local, and the small ones that belong to the checkpoint; does nothing where they are.

        Of several processes that share a cache, one fetches while the others wait.

        Args:
            names: Files of the checkpoint.
            report: Told how far it is.

        Returns:
            Bytes that came over the network.

        Raises:
            MissingFileError: Working offline, and the cache hasn't got them.
            SourceError, LockError, CapacityError: They can't be fetched.
            CheckpointError: They aren't what was opened any more.
        """

    def known_hashes(self, name: str) -> Mapping[str, str]:
        """Hashes of a file's content that the source gives, in hex, by kind; see `check_hash`."""
