"""A checkpoint as the driver asks its nodes for it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from raywl.checkpoint import Manifest
from raywl.sources import HubSource, LocalSource, ModelScopeSource, Pin, StoreSource, local_path, pin

if TYPE_CHECKING:
    from raywl.opening import Checkpoint

__all__ = ["SourceRequest", "check_options", "request_for_nodes"]


_OPTIONS = {
    "revision",
    "subfolder",
    "cache_dir",
    "token",
    "allow_patterns",
    "storage_options",
    "offline",
}
"""Keyword arguments of `open_checkpoint`."""


@dataclass(frozen=True)
class SourceRequest:
    """A checkpoint as a node is asked to open it: by name, never as another node's path."""

    group: str
    """Who wants it; a node opens it once for all who ask under this name."""
    ref: str | Pin
    """A path, which every node has, or a repository at a commit, or a store as it was listed."""
    options: dict[str, Any] = field(default_factory=dict, repr=False)
    """Keyword arguments of `open_checkpoint`; may hold secrets, so they aren't shown."""

    @property
    def label(self) -> str:
        """The checkpoint for people to read."""
        return str(self.ref)


def check_options(source: Mapping[str, Any]) -> None:
    """Raises `TypeError`, with the names, for arguments that opening a checkpoint doesn't take."""
    unknown = sorted(set(source) - _OPTIONS)
    if unknown:
        raise TypeError(f"unknown arguments: {', '.join(unknown)}")


def request_for_nodes(
    group: str, ref: str | os.PathLike[str] | Pin | Checkpoint, source: Mapping[str, Any]
) -> SourceRequest:
    """What the driver sends to its nodes for a reference as the user gave it.

    A repository or store is looked up once, here, so that every node gets the same. The driver's working
    folder means nothing elsewhere, so a relative path becomes an absolute one.

    Raises:
        NotFoundError: The hub has no such repository or revision.
        RaywlError: As `open_checkpoint`, for what a repository's listing already tells.
        TypeError: `ref` is none of these.
        ValueError: Options that mean nothing for it.
    """
    check_options(source)
    told: Any = ref
    if isinstance(ref, Manifest):
        if source:
            raise ValueError(f"{sorted(source)} are for opening a checkpoint, and this one is open")
        # An open checkpoint stands for its name: its files may lie on this node alone.
        told, source = _name_of(ref)
    if not isinstance(told, Pin | str | os.PathLike):
        raise TypeError(f"ref must be a path, a repository or a checkpoint, not {type(ref).__name__}")
    pinned = pin(told, **source)
    if pinned is not None:
        return SourceRequest(group, pinned)
    path: Any = os.fspath(told)  # type: ignore[arg-type]
    if not isinstance(path, str):
        raise TypeError(f"ref must be a path of str, not {type(path).__name__}")
    path = local_path(path)
    if (revision := source.get("revision")) is not None:
        raise ValueError(f"{path!r} is a local path, which has no revision {revision!r}")
    path = path if path.startswith("~") else os.path.abspath(path)
    return SourceRequest(group, path, dict(source))


def _name_of(checkpoint: Manifest) -> tuple[str | Pin, dict[str, Any]]:
    """What a node opens the same by, and the options to it."""
    source = checkpoint.source
    if isinstance(source, HubSource | ModelScopeSource | StoreSource):
        return source.pin_for_others(), {}
    if isinstance(source, LocalSource):
        return os.path.join(source.folder, source.only or ""), {}
    return source.ref, {}
