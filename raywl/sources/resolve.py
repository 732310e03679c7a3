"""From what the user wrote to the source that it means."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from raywl.sources.base import Source
from raywl.sources.hub import HubPin
from raywl.sources.local import LocalSource
from raywl.sources.modelscope_pin import ModelScopePin
from raywl.sources.store import Seen, StorePin, shown_url

__all__ = ["Pin", "is_remote", "local_path", "pin", "resolve"]

Pin = HubPin | ModelScopePin | StorePin
"""One state of a remote checkpoint, and how to get it."""

_CHAINED = re.compile(r"^\w+::|::\w+://")
_SCHEME = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]*)://")
_REPOSITORY = re.compile(r"^\w[\w.-]*/\w[\w.-]*(@.*)?$", re.ASCII | re.DOTALL)
_LOCAL = ("file", "local")
_REPOSITORIES = {"hf": "hub", "ms": "modelscope"}
_HUB_URL = re.compile(r"^https?://(www\.)?huggingface\.co/(?P<repo>[^/?#]+/[^/?#]+)/?$")


def resolve(
    ref: str | os.PathLike[str] | Pin,
    *,
    revision: str | None = None,
    subfolder: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    token: str | None = None,
    allow_patterns: str | Sequence[str] | None = None,
    storage_options: Mapping[str, Any] | None = None,
    offline: bool | None = None,
) -> Source:
    """The source that `ref` names; of a remote one, only its listing and index are read.

    Args: as of `open_checkpoint`.

    Raises:
        ValueError: Options that mean nothing for such a ref, or a ref of an unknown kind.
        NotFoundError: There is no such path, repository, revision, bucket or key.
        RaywlError: As `open_checkpoint`.
    """
    if isinstance(ref, Pin):
        if (
            revision
            or subfolder
            or cache_dir
            or token
            or allow_patterns
            or storage_options
            or offline is not None
        ):
            raise ValueError("a pin has all options in itself; give them to raywl.sources.pin")
        return ref.open()
    found, seen = _find(
        ref,
        revision=revision,
        subfolder=subfolder,
        cache_dir=cache_dir,
        token=token,
        allow_patterns=allow_patterns,
        storage_options=storage_options,
        offline=offline,
    )
    if found is None:
        return LocalSource.open(local_path(ref), subfolder)
    return found.open(seen) if isinstance(found, StorePin) else found.open()


def pin(
    ref: str | os.PathLike[str] | Pin,
    *,
    revision: str | None = None,
    subfolder: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    token: str | None = None,
    allow_patterns: str | Sequence[str] | None = None,
    storage_options: Mapping[str, Any] | None = None,
    offline: bool | None = None,
    timeout_s: float = 3600.0,
) -> Pin | None:
    """What a driver sends to its nodes instead of a remote checkpoint's name, so that all open the same.

    Fetches no data: a node does when it uses the pin, into its own cache.

    Args:
        ref: As for `open_checkpoint`; a pin is given back as it is.
        revision, subfolder, cache_dir, token, allow_patterns, storage_options, offline: As for
            `open_checkpoint`. Without a token, the one that the hub's client finds on the driver goes along;
            so do storage options, and the driver's `AWS_*` keys and endpoint where they hold none.
        timeout_s: How long each fetch waits for another process that fetches the same.

    Returns:
        `None` for a local path, which each node opens itself.

    Raises:
        ValueError, NotFoundError, AuthError, OfflineError, SourceError: As `open_checkpoint`.
    """
    if isinstance(ref, Pin):
        return ref
    found, _ = _find(
        ref,
        revision=revision,
        subfolder=subfolder,
        cache_dir=cache_dir,
        token=token,
        allow_patterns=allow_patterns,
        storage_options=storage_options,
        offline=offline,
        timeout_s=timeout_s,
    )
    return found.checked_for_nodes() if isinstance(found, StorePin) else found


def _find(
    ref: str | os.PathLike[str],
    *,
    revision: str | None,
    token: str | None,
    storage_options: Mapping[str, Any] | None,
    **options: Any,
) -> tuple[Pin | None, Seen | None]:
    """The pin that a ref means now, `None` for a local path; and what a store was seen to hold, else `None`.

    Args: as of `pin`; `options` are those that every pin is found with.
    """
    name = os.fsdecode(ref)
    kind = _kind_of(ref)
    _check_options(name, kind, revision, token, storage_options)
    if kind == "local":
        return None, None
    if kind == "store":
        return StorePin.find(name, storage_options=storage_options, **options)
    if kind == "modelscope":
        return ModelScopePin.find(name, revision=revision, token=token, **options), None
    return HubPin.find(name, revision=revision, token=token, **options)[0], None


def local_path(ref: str | os.PathLike[str]) -> str:
    """The path that a local ref names; `file://` has it as it is, nothing in it is decoded."""
    name = os.fsdecode(ref)
    scheme = _SCHEME.match(name)
    if scheme and scheme[1].lower() in _LOCAL and not os.path.lexists(name):
        return name[scheme.end() :]
    return name


def is_remote(ref: str | os.PathLike[str] | Pin) -> bool:
    """Whether a ref names something that isn't on this machine's file systems.

    Raises:
        ValueError: It is of an unknown kind.
    """
    return isinstance(ref, Pin) or _kind_of(ref) != "local"


def _kind_of(ref: str | os.PathLike[str]) -> str:
    """`local`, `hub`, `modelscope` or `store`. What is there on this machine is a path, whatever its name.

    Raises:
        ValueError: It is none of these.
    """
    name = os.fsdecode(ref)
    if os.path.lexists(os.path.expanduser(name)):
        return "local"
    if _CHAINED.search(name):
        raise ValueError(
            f"{shown_url(name)!r}: chained URLs can't be opened; give the one that holds the files"
        )
    scheme = _SCHEME.match(name)
    if scheme:
        kind = scheme[1].lower()
        if found := _HUB_URL.match(name):
            raise ValueError(
                f"{name!r} is a page about a repository; the repository itself is {found['repo']!r}"
            )
        return "local" if kind in _LOCAL else _REPOSITORIES.get(kind, "store")
    is_file = name.endswith((".safetensors", ".bin", ".pt", ".pth"))
    is_repository = isinstance(ref, str) and _REPOSITORY.match(name) and not is_file
    return "hub" if is_repository else "local"


def _check_options(
    name: str,
    kind: str,
    revision: str | None,
    token: str | None,
    storage_options: Mapping[str, Any] | None,
) -> None:
    """Raises `ValueError` for options that mean nothing for such a ref."""
    if revision is not None and kind not in ("hub", "modelscope"):
        what = "a local path" if kind == "local" else "a store's URL"
        raise ValueError(f"{shown_url(name)!r} is {what}, which has no revision {revision!r}")
    if storage_options and kind != "store":
        raise ValueError("storage_options mean nothing for a local path or a hub's repository")
    if token is not None and kind == "store":
        raise ValueError("token is for a hub; a store's credentials are given as storage_options")
