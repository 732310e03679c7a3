"""Stores that fsspec reaches by URL: `s3://`, `gs://`, `http(s)://`, `memory://` and the like."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import posixpath
import re
import secrets
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit, urlunsplit

from raywl.errors import NotFoundError, OfflineError, SourceError
from raywl.sources.base import RemoteFile
from raywl.sources.cache import Repository, cache_root, store_folder
from raywl.sources.cached import CachedSource, Heads
from raywl.sources.hub_errors import without_secrets
from raywl.sources.selection import (
    INDEX_NAMES,
    as_patterns,
    companions,
    expected_header_bytes,
    folder_names,
    index_name,
    indexed_files,
    weight_files,
)
from raywl.sources.store_errors import StoreWords, harmless, secrets_of
from raywl.sources.transfer import Limits

if TYPE_CHECKING:
    from raywl.sources.remote import Remote

__all__ = ["Seen", "StorePin", "StoreSource", "shown_url"]

_WAIT_S = 3600.0
_LATEST = "latest.json"
_PROBE_BYTES = 256 << 10
"""What is read of a file to look at it: as much as is read of a header at first."""
_SMALL_BYTES = 32 << 10
"""The same, of files that aren't weights."""
_MAX_INDEX_BYTES = 1 << 30
_PROBING_THREADS = 16
_WEB = ("http", "https")
_S3 = ("s3", "s3a")
_USERINFO = re.compile(r"^(\w[\w+.-]*://)[^/@]*@")
_ONE_FILE = (".safetensors", ".bin", ".pt", ".pth")
_USUAL = (INDEX_NAMES[0], "model.safetensors", INDEX_NAMES[1], "pytorch_model.bin")
"""What a web server without listings is asked for: one of them leads to the weights."""
_SMALL = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    "special_tokens_map.json", "added_tokens.json", "tokenizer.model", "vocab.json", "vocab.txt",
    "merges.txt", "chat_template.jinja", "preprocessor_config.json",
)  # fmt: skip
"""Small files that it may have beside them."""


@dataclass(frozen=True, slots=True)
class StorePin:
    """A store's folder as it was listed, and how to get it: sent to the nodes, each with a cache of its own.

    Picklable; the storage options travel with it and aren't shown. `open_checkpoint` takes it as `ref`.
    """

    url: str
    """Of the folder, or of the one file that was asked for; without a trailing slash and without secrets."""
    only: str | None
    """The one file, by name."""
    files: tuple[RemoteFile, ...] = field(repr=False)
    """What it holds, by path inside the folder."""
    weights: tuple[str, ...] = field(repr=False)
    """Which of them the checkpoint is known by: its weights and their index."""
    allow_patterns: tuple[str, ...] = ()
    endpoint: str | None = None
    cache_dir: str | None = None
    """raywl's cache; `None`: as the node's environment says."""
    offline: bool = False
    """Take what the node's cache holds, and ask nobody."""
    timeout_s: float = _WAIT_S
    """How long to wait for another process that fetches the same."""
    nonce: str = ""
    """Stands for the state of files that the store gives no tag of."""
    limits: Limits | None = field(default=None, repr=False, compare=False)
    location: str = field(default="", repr=False, compare=False)
    """The folder's URL with whatever secrets it has."""
    options: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    """fsspec's storage options."""

    def __str__(self) -> str:
        return self.url

    @property
    def kind(self) -> str:
        """The URL's protocol."""
        return self.url.partition("://")[0]

    @property
    def identity(self) -> str | None:
        """What the checkpoint is agreed on by: names, sizes, tags. `None` where the store gives no tags."""
        files = {file.name: file for file in self.files}
        known = [files[name] for name in self.weights if name in files]
        if not known or any(file.tag is None for file in known):
            return None
        rows = [[file.name, file.size, file.tag] for file in sorted(known)]
        return f"{self.kind}:{hashlib.sha256(json.dumps(rows).encode()).hexdigest()}"

    @classmethod
    def find(
        cls,
        ref: str,
        *,
        subfolder: str | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        allow_patterns: str | Sequence[str] | None = None,
        storage_options: Mapping[str, Any] | None = None,
        offline: bool | None = None,
        timeout_s: float = _WAIT_S,
    ) -> tuple[Self, Seen]:
        """Lists the folder as it is now, and reads its index.

        Returns:
            The pin, and what was learnt of the files meanwhile.

        Raises:
            ValueError: No such protocol, or options that it doesn't take.
            NotFoundError: There is no such bucket, key or page.
            AuthError: The store wants other credentials.
            OfflineError: Working offline, and the cache doesn't know the URL.
            SourceError: It can't be reached, or fails.
        """
        location = _folder_url(ref, subfolder)
        scheme = location.partition("://")[0]
        options = _options_of(scheme, storage_options or {})
        patterns = as_patterns(allow_patterns)
        name = posixpath.basename(urlsplit(location).path if scheme in _WEB else location)
        empty = cls(
            url=shown_url(location),
            only=_name_in(location, name) if name.endswith(_ONE_FILE) and not ref.endswith("/") else None,
            files=(),
            weights=(),
            allow_patterns=patterns,
            endpoint=_endpoint_of(scheme, location, options),
            cache_dir=None if cache_dir is None else os.fsdecode(cache_dir),
            timeout_s=timeout_s,
            limits=Limits.of_environment(),
            location=location,
            options=options,
        )
        if _is_offline(offline):
            return empty._cached(), Seen()
        files, weights, seen = _Look(empty).run()
        nonce = "" if all(file.tag for file in files) else secrets.token_hex(8)
        return replace(empty, files=files, weights=weights, nonce=nonce), seen

    def checked_for_nodes(self) -> Self:
        """The pin itself, if other machines can read the store.

        Raises:
            ValueError: It is this process's own memory.
        """
        if self.kind == "memory":
            raise ValueError(f"{self.url!r} is this process's own memory, which no node can read")
        return self

    def without_secrets(self) -> Self:
        """The same, for where anybody may look."""
        return replace(self, location=self.url, options=harmless(self.options))

    def open(self, seen: Seen | None = None) -> StoreSource:
        """The source of the files, which are fetched when they are used.

        Args:
            seen: What is known of them already.
        """
        seen = seen or Seen()
        return StoreSource(
            ref=self.url,
            kind=self.kind,
            repository=self._repository(),
            inside="",
            only=self.only,
            identity=self.identity,
            files={file.name: file for file in self.files},
            offline=self.offline,
            heads=seen.heads,
            remotes=seen.remotes,
            pin=self,
        )

    @property
    def folder_url(self) -> str:
        """The URL of the folder."""
        return self.url if self.only is None else posixpath.dirname(self.url)

    def remote(self) -> Remote:
        """The far end."""
        from raywl.sources.remote import FsspecRemote
        from raywl.sources.s3 import S3Remote
        from raywl.sources.web import WebRemote

        scheme, _, path = self.location.partition("://")
        folder = path
        if self.only is not None:
            head, _, query = path.partition("?") if scheme in _WEB else (path, "", "")
            folder = posixpath.dirname(head) + (f"?{query}" if query else "")
        words = StoreWords(
            self.folder_url,
            bucket=None if scheme in (*_WEB, "memory") else path.partition("/")[0],
            endpoint=self.endpoint,
            secrets=tuple(secrets_of(self.options)),
        )
        kind = S3Remote if scheme in _S3 else WebRemote if scheme in _WEB else FsspecRemote
        return kind(scheme, folder, self.options, self.limits or Limits.of_environment(), words)

    def _repository(self) -> Repository:
        rows = [[file.name, file.size, file.tag or self.nonce] for file in sorted(self.files)]
        version = hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:32]
        return Repository(store_folder(cache_root(self.cache_dir), self.url, self.endpoint), version)

    def _cached(self) -> Self:
        """As it was when it was last fetched."""
        folder = self._repository().folder
        try:
            with open(os.path.join(folder, _LATEST), encoding="utf-8") as file:
                told = json.load(file)
            files = tuple(RemoteFile(*row) for row in told["files"])
            found = replace(
                self, files=files, weights=tuple(told["weights"]), nonce=told["nonce"], offline=True
            )
        except (OSError, ValueError, KeyError, TypeError):
            raise OfflineError(
                self.url,
                f"working offline, and nothing of it is in the cache {cache_root(self.cache_dir)}; fetch it "
                "once while online",
                endpoint=self.endpoint,
            ) from None
        # Other patterns may mean other files than those of then.
        names = [file.name for file in files]
        source = found.open()
        name = index_name(names, self.allow_patterns)
        index = None if name is None else source.read(name, 0, _MAX_INDEX_BYTES)
        weights = _weights(names, index, self.allow_patterns, self.only)
        if absent := [name for name in weights if not source.has(name)]:
            source.lacking(absent)
            raise source.not_cached(absent)
        return replace(found, weights=_known_by(name, weights))

    def note_latest(self) -> None:
        """Notes in the cache what was listed, for when it is offline."""
        from raywl.locks import atomic_writer

        path = os.path.join(self._repository().folder, _LATEST)
        told = {
            "url": self.url,
            "endpoint": self.endpoint,
            "nonce": self.nonce,
            "weights": list(self.weights),
            "files": [list(file) for file in self.files],
        }
        text = json.dumps(told, indent=1)
        # The cache may be read-only, and works without the note.
        with contextlib.suppress(OSError):
            with contextlib.suppress(FileNotFoundError), open(path, encoding="utf-8") as file:
                if file.read() == text:
                    return
            with atomic_writer(path) as new:
                new.write(text)


def _weights(
    names: Sequence[str], index: bytes | None, patterns: tuple[str, ...], only: str | None
) -> list[str]:
    if only is not None:
        return [only]
    indexed = None if index is None else indexed_files(index)
    # With a damaged index there is nothing to choose by: reading the checkpoint says what is wrong with it.
    return [] if index is not None and indexed is None else weight_files(names, indexed, patterns)


def _header_bytes(index: bytes | None) -> dict[str, int]:
    """How long the headers of an index's files may be."""
    if index is None or indexed_files(index) is None:
        return {}
    return expected_header_bytes(json.loads(index)["weight_map"])


def _known_by(index: str | None, weights: Sequence[str]) -> tuple[str, ...]:
    """The files that a checkpoint's identity is made of."""
    return tuple(weights) if index is None else (index, *weights)


class _Remotes:
    """The connection of a source, made when it is first needed, and again in a forked process."""

    def __init__(self) -> None:
        self._made: tuple[int, Remote] | None = None
        self._lock = threading.Lock()

    def get(self, make: Callable[[], Remote]) -> Remote:
        with self._lock:
            if self._made is None or self._made[0] != os.getpid():
                self._made = os.getpid(), make()
            return self._made[1]

    def __reduce__(self) -> tuple[type[_Remotes], tuple[()]]:
        return _Remotes, ()


class Seen:
    """What is known of a store's files beside their names, and the connection that it was learnt by."""

    def __init__(self) -> None:
        self.heads = Heads()
        self.remotes = _Remotes()


class _Look:
    """One look at a store: what it holds now."""

    def __init__(self, pin: StorePin) -> None:
        self._pin, self._seen = pin, Seen()
        self._remote = self._seen.remotes.get(pin.remote)
        self._known: dict[str, RemoteFile] = {}

    def run(self) -> tuple[tuple[RemoteFile, ...], tuple[str, ...], Seen]:
        """Its files, which of them are the checkpoint, and what was learnt meanwhile."""
        pin = self._pin
        if pin.only is not None:
            return tuple(self._probe([pin.only], _PROBE_BYTES)), (pin.only,), self._seen
        listed = self._list_web() if pin.kind in _WEB else self._remote.list()
        inside = set(folder_names([file.name for file in listed], None))
        listed = [file for file in listed if file.name in inside]
        names = [file.name for file in listed]
        found = index_name(names, pin.allow_patterns)
        index = None if found is None else self._index(found, listed)
        # What leads outside is for the one to refuse who reads the index.
        weights = folder_names(_weights(names, index, pin.allow_patterns, None), None)
        if pin.kind in _WEB:
            wanted = _header_bytes(index)
            sizes = {name: wanted.get(name, _PROBE_BYTES) for name in weights}
            files = self._probe([*weights, *companions(names)], may_lack=True, sizes=sizes)
        else:
            files = [*listed, *self._nested(weights)]
        return tuple(files), _known_by(found, weights), self._seen

    def _nested(self, weights: Sequence[str]) -> list[RemoteFile]:
        """Files of the index that lie in folders of the folder."""
        found: list[RemoteFile] = []
        for folder in sorted({posixpath.dirname(name) for name in weights if "/" in name}):
            with contextlib.suppress(NotFoundError):
                found += [file for file in self._remote.list(folder) if file.name in weights]
        return found

    def _index(self, name: str, listed: Sequence[RemoteFile]) -> bytes | None:
        """The index's bytes; `None` where it can't be one."""
        file = next(file for file in listed if file.name == name)
        if self._pin.kind in _WEB:
            (file,) = self._probe([name])
        if file.size > _MAX_INDEX_BYTES:
            return None
        return replace(self._pin, files=(file,)).open(self._seen).read(name, 0, file.size)

    def _list_web(self) -> Sequence[RemoteFile]:
        """A web server's listing, else what of the usual names it has."""
        try:
            return self._remote.list()
        except NotFoundError as error:
            found = next(filter(None, (self._probe([name], may_lack=True) for name in _USUAL)), [])
            if not found:
                raise NotFoundError(
                    self._pin.url,
                    f"no listing of files there ({error.reason}), and none of {', '.join(_USUAL)}",
                    endpoint=self._pin.endpoint,
                    status=error.status,
                ) from None
            return found + self._probe(_SMALL, may_lack=True)

    def _probe(
        self,
        names: Sequence[str],
        nbytes: int = _SMALL_BYTES,
        *,
        may_lack: bool = False,
        sizes: Mapping[str, int] | None = None,
    ) -> list[RemoteFile]:
        """Looks at files, at several at once.

        Args:
            names: Their names.
            nbytes: How much to read of each.
            may_lack: Whether those that aren't there are left out.
            sizes: How much to read of some.
        """

        def look(name: str) -> RemoteFile | None:
            if name in self._known:
                return self._known[name]
            try:
                found = self._remote.probe(name, (sizes or {}).get(name, nbytes))
            except NotFoundError:
                if may_lack:
                    return None
                raise
            self._seen.heads.note(name, 0, found.head)
            return self._known.setdefault(name, found.file)

        with ThreadPoolExecutor(min(_PROBING_THREADS, len(names) or 1), "raywl-probe") as pool:
            return [file for file in pool.map(look, dict.fromkeys(names)) if file is not None]


@dataclass(frozen=True)
class StoreSource(CachedSource):
    """A store's folder as it was listed. Pickles without the options that may be secret."""

    pin: StorePin = field(kw_only=True)
    remotes: _Remotes = field(default_factory=_Remotes, compare=False, repr=False)

    __hash__ = CachedSource.__hash__

    def pin_for_others(self) -> StorePin:
        """What another node opens the same by, with a cache of its own."""
        return replace(self.pin, cache_dir=None).checked_for_nodes()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "pin": self.pin.without_secrets()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    @property
    def base(self) -> str:
        return self.pin.folder_url

    def limits(self) -> Limits:
        return self.pin.limits or Limits.of_environment()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        from raywl.locks import acquire_within, get_lock

        lock = get_lock(self.repository.folder, os.path.join(cache_root(self.pin.cache_dir), "locks"))
        with acquire_within(lock, self.pin.timeout_s, f"download of {self.pin.url}"):
            yield

    def lock(self) -> AbstractContextManager[None]:
        return self._locked()

    def fetched(self) -> None:
        self.pin.note_latest()

    def key(self, file: RemoteFile) -> str:
        row = [file.name, file.size, file.tag or self.pin.nonce]
        return hashlib.sha256(json.dumps(row).encode()).hexdigest()[:40]

    def stream(
        self, file: RemoteFile, start: int, end: int, stop: threading.Event
    ) -> Generator[bytes, None, None]:
        return self.remotes.get(self.pin.remote).stream(file, start, end, stop)

    def hashes(self, file: RemoteFile) -> Mapping[str, str]:
        return self.remotes.get(self.pin.remote).hashes(file)

    def wrong(self, name: str, why: str) -> SourceError:
        return SourceError(
            self.label(name),
            f"the download brought other bytes than the store has ({why}); they were thrown away",
            endpoint=self.pin.endpoint,
        )


# URLs.


def _folder_url(ref: str, subfolder: str | None) -> str:
    scheme, _, rest = ref.partition("://")
    path, mark, query = rest.partition("?") if scheme.lower() in _WEB else (rest, "", "")
    path = path.rstrip("/")
    if scheme != "memory" and (not path or (path.startswith("/") and scheme.lower() in (*_S3, *_WEB, "gs"))):
        raise ValueError(f"{shown_url(ref)!r} names no bucket or host")
    if subfolder:
        normal = posixpath.normpath(subfolder)
        if posixpath.isabs(normal) or normal.split("/")[0] == "..":
            raise ValueError(f"subfolder {subfolder!r} leads out of {shown_url(ref)}")
        path += "" if normal == "." else f"/{normal}"
    return f"{scheme.lower()}://{path}{mark}{query}"


def shown_url(url: str) -> str:
    """A ref as messages may have it: a URL without passwords, and without a query, which may sign it."""
    if url.partition("://")[0] not in _WEB:
        # A key may have a question mark in it.
        return _USERINFO.sub(r"\1", url)
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def _name_in(location: str, name: str) -> str:
    from urllib.parse import unquote

    return unquote(name) if location.partition("://")[0] in _WEB else name


def _options_of(scheme: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Storage options, and what of the environment a node needs as well."""
    found = dict(options)
    if scheme not in _S3:
        return found
    client = found.get("client_kwargs") or {}
    if not (found.get("anon") or {"key", "username", "session", "profile"} & found.keys()
            or "aws_access_key_id" in client):  # fmt: skip
        names = {"key": "AWS_ACCESS_KEY_ID", "secret": "AWS_SECRET_ACCESS_KEY", "token": "AWS_SESSION_TOKEN"}
        values = {option: os.environ.get(name) for option, name in names.items()}
        if values["key"] and values["secret"]:
            found |= {option: value for option, value in values.items() if value}
    if not found.get("endpoint_url") and not client.get("endpoint_url"):
        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        if endpoint:
            found["endpoint_url"] = endpoint
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    if region and "region_name" not in client:
        found["client_kwargs"] = {**client, "region_name": region}
    return found


def _endpoint_of(scheme: str, location: str, options: Mapping[str, Any]) -> str | None:
    if scheme in _WEB:
        parts = urlsplit(location)
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
    client = options.get("client_kwargs") or {}
    endpoint = options.get("endpoint_url") or client.get("endpoint_url")
    return without_secrets(str(endpoint)).rstrip("/") if endpoint else None


def _is_offline(offline: bool | None) -> bool:
    if offline is not None:
        return offline
    return (os.environ.get("RAYWL_OFFLINE") or "").upper() in ("1", "ON", "YES", "TRUE")
