"""The checkpoints that one node keeps in memory."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from raywl.errors import CapacityError, RaywlError
from raywl.locks import atomic_writer
from raywl.node.memory import available_ram_bytes
from raywl.node.pinned import PinnedFiles

__all__ = ["PinBoard", "Pinned"]


@dataclass(frozen=True, slots=True)
class Pinned:
    """A checkpoint in memory."""

    identity: str
    asked: tuple[str, ...]
    """How users named it."""
    paths: tuple[str, ...]
    nbytes: int
    locked: bool
    """Whether the kernel can't push it out; else it is read again when it did."""


class PinBoard:
    """Part of a node's agent; every method runs in the agent's process and may be repeated.

    What is pinned is noted in a file, so that an agent that starts again on the same cluster pins it again.
    """

    def __init__(
        self, label: str, notes_path: str | None, on_change: Callable[[], None] = lambda: None
    ) -> None:
        """Args:
        label: What to call the node.
        notes_path: Where to note what is pinned; `None` for nowhere.
        on_change: Called when `names` has another answer.
        """
        self._label, self._notes_path, self._on_change = label, notes_path, on_change
        self._lock = threading.Lock()
        self._pins: dict[str, tuple[Pinned, PinnedFiles]] = {}
        threading.Thread(target=self._pin_again, name="raywl-pins", daemon=True).start()

    def names(self) -> tuple[str, ...]:
        """What is pinned; the agent is needed as long as anything is."""
        return tuple(f"pin/{identity}" for identity in list(self._pins))

    def paths(self) -> list[str]:
        """All files that are pinned."""
        return [path for pinned, _ in list(self._pins.values()) for path in pinned.paths]

    def pin(
        self, identity: str, asked: Sequence[str], paths: Sequence[str], quota_bytes: int | None
    ) -> Pinned:
        """Keeps files in memory.

        Args:
            identity: The checkpoint's.
            asked: How the user named it.
            paths: Its files.
            quota_bytes: The most that this node may pin in all; by default `RAYWL_PIN_BYTES`, else half of
                the memory that is available or pinned.

        Raises:
            CapacityError: They are more than that. Nothing was read.
            OSError: A file can't be read.
        """
        with self._lock:
            known = self._pins.get(identity)
            if known is not None:
                pinned = Pinned(
                    identity,
                    tuple(dict.fromkeys((*known[0].asked, *asked))),
                    known[0].paths,
                    known[0].nbytes,
                    known[0].locked,
                )
                self._pins[identity] = pinned, known[1]
                self._note()
                return pinned
            held = sum(other.nbytes for other, _ in self._pins.values())
            needed = sum(map(os.path.getsize, paths))
            quota = _quota(quota_bytes, held)
            if held + needed > quota:
                raise CapacityError(
                    "memory for pins",
                    held + needed,
                    quota,
                    f"on {self._label}, of which {held} are pinned already; unpin something, or allow more "
                    "by RAYWL_PIN_BYTES",
                    unit="bytes",
                )
            files = PinnedFiles(paths)
            pinned = Pinned(identity, tuple(asked), tuple(paths), needed, files.locked)
            self._pins[identity] = pinned, files
            self._note()
        self._on_change()
        return pinned

    def unpin(self, names: Sequence[str]) -> int:
        """Lets go of what has one of these names or identities; returns how many that were."""
        with self._lock:
            found = [key for key, (pinned, _) in self._pins.items() if {key, *pinned.asked} & set(names)]
            for key in found:
                self._pins.pop(key)[1].close()
            self._note()
        if found:
            self._on_change()
        return len(found)

    def status(self) -> list[dict[str, Any]]:
        """As JSON values."""
        return [
            {
                "identity": pinned.identity,
                "names": list(pinned.asked),
                "nbytes": pinned.nbytes,
                "locked": pinned.locked,
            }
            for pinned, _ in list(self._pins.values())
        ]

    def _note(self) -> None:
        if self._notes_path is None:
            return
        rows = [[p.identity, list(p.asked), list(p.paths)] for p, _ in self._pins.values()]
        # Without the note a pin ends with the process, and that is all.
        with contextlib.suppress(OSError):
            if rows:
                os.makedirs(os.path.dirname(self._notes_path), exist_ok=True)
                with atomic_writer(self._notes_path) as file:
                    json.dump(rows, file)
            else:
                os.unlink(self._notes_path)

    def _pin_again(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            if self._notes_path is None:
                return
            with open(self._notes_path, encoding="utf-8") as file:
                rows = json.load(file)
            for identity, asked, paths in rows:
                with contextlib.suppress(OSError, RaywlError):
                    self.pin(identity, asked, paths, None)


def _quota(quota_bytes: int | None, held_bytes: int) -> int:
    told = os.environ.get("RAYWL_PIN_BYTES")
    if quota_bytes is not None:
        return quota_bytes
    return int(told) if told else (available_ram_bytes() + held_bytes) // 2
