"""From what the user wrote to the source that it means."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from raywl.sources.base import Source
from raywl.sources.hub import HubPin
from raywl.sources.local import LocalSource

__all__ = ["pin", "resolve"]

_SCHEME = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]*)://")
_REPOSITORY = re.compile(r"^\w[\w.-]*/\w[\w.-]*(@.*)?$", re.ASCII | re.DOTALL)
_SUPPORTED = "a local path, org/name[@revision], and hf://org/name[@revision]"


def resolve(
    ref: str | os.PathLike[str] | HubPin,
    *,
    revision: str | None = None,
    subfolder: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    token: str | None = None,
    allow_patterns: str | Sequence[str] | None = None,
    storage_options: Mapping[str, Any] | None = None,
    offline: bool | None = None,
) -> Source:
    """The source that `ref` names; a repository's files are downloaded first.

    Args: as of `open_checkpoint`.

    Raises:
        ValueError: Options that mean nothing for such a ref, or a ref of an unknown kind.
        NotFoundError: There is no such path, repository or revision.
        RaywlError: As `open_checkpoint`.
    """
    if isinstance(ref, HubPin):
        if revision or subfolder or cache_dir or token or allow_patterns or offline is not None:
            raise ValueError("a pin has all options in itself; give them to raywl.sources.pin")
        return ref.open()
    name = os.fsdecode(ref)
    _check_kind(name, storage_options)
    if not _is_hub_ref(ref):
        if revision is not None:
            raise ValueError(f"{name!r} is a local path, which has no revision {revision!r}")
        return LocalSource.open(name, subfolder)
    found, names = HubPin.find(
        name,
        revision=revision,
        subfolder=subfolder,
        cache_dir=cache_dir,
        token=token,
        allow_patterns=allow_patterns,
        offline=offline,
    )
    return found.open(names)


def pin(
    ref: str | os.PathLike[str] | HubPin,
    *,
    revision: str | None = None,
    subfolder: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    token: str | None = None,
    allow_patterns: str | Sequence[str] | None = None,
    storage_options: Mapping[str, Any] | None = None,
    offline: bool | None = None,
    timeout_s: float = 3600.0,
) -> HubPin | None:
    """What a driver sends to its nodes instead of a repository's name, so that all open the same commit.

    Downloads nothing: opening the pin on a node does, into that node's cache.

    Args:
        ref: As for `open_checkpoint`; a pin is given back as it is.
        revision, subfolder, cache_dir, token, allow_patterns, storage_options, offline: As for
            `open_checkpoint`. Without a token, the one that the hub's client finds on the driver goes along.
        timeout_s: How long each opening waits for another process that downloads the same.

    Returns:
        `None` for a local path, which each node opens itself.

    Raises:
        ValueError, NotFoundError, AuthError, OfflineError, SourceError: As `open_checkpoint`.
    """
    if isinstance(ref, HubPin):
        return ref
    name = os.fsdecode(ref)
    _check_kind(name, storage_options)
    if not _is_hub_ref(ref):
        return None
    return HubPin.find(
        name,
        revision=revision,
        subfolder=subfolder,
        cache_dir=cache_dir,
        token=token,
        allow_patterns=allow_patterns,
        offline=offline,
        timeout_s=timeout_s,
    )[0]


def _check_kind(ref: str, storage_options: Mapping[str, Any] | None) -> None:
    scheme = _SCHEME.match(ref)
    if scheme and scheme[1] != "hf" and not os.path.lexists(ref):
        raise ValueError(f"{scheme[1]}:// can't be opened; what can is {_SUPPORTED}")
    if storage_options:
        raise ValueError("storage_options mean nothing for a local path or a hub's repository")


def _is_hub_ref(ref: str | os.PathLike[str]) -> bool:
    """Whether it names a repository. What is there on this machine is a path, whatever it looks like."""
    if not isinstance(ref, str) or os.path.lexists(os.path.expanduser(ref)):
        return False
    if ref.startswith("hf://"):
        return True
    return bool(_REPOSITORY.match(ref)) and not ref.endswith(".safetensors")
