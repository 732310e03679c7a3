"""How nodes find out that they share a cache folder: by what they see in it, never by its path."""

from __future__ import annotations

import contextlib
import os

__all__ = ["FolderMarker"]


class FolderMarker:
    """One node's mark in its cache folder, for one run. In a folder that can't be written there is none.

    1. `make` leaves it there.
    2. `others` says which nodes' marks are in the folder as well: they are the same folder.
    3. `remove` takes it away.
    """

    def __init__(self, cache_folder: str, run: str, node_id: str) -> None:
        """Args:
        cache_folder: The folder that may be shared.
        run: Unique, so that the copy of a disk doesn't count as the same folder.
        node_id: This node's id.
        """
        self._folder = os.path.join(cache_folder, ".locks", "raywl", f"stage-{run}")
        self._node_id = node_id

    def make(self) -> None:
        """Leaves the mark."""
        with contextlib.suppress(OSError):
            os.makedirs(self._folder, exist_ok=True)
            with open(os.path.join(self._folder, self._node_id), "w") as file:
                file.write("")

    def others(self) -> tuple[str, ...]:
        """Ids of the other nodes that have left theirs here."""
        with contextlib.suppress(OSError):
            return tuple(sorted(name for name in os.listdir(self._folder) if name != self._node_id))
        return ()

    def remove(self) -> None:
        """Takes the mark away, and the folder with the last one."""
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(self._folder, self._node_id))
        with contextlib.suppress(OSError):
            os.rmdir(self._folder)
