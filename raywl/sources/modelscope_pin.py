"""Repositories of ModelScope as sources: `ms://org/name[@revision]`.

Listing and requests are its client's; the transfers are raywl's, as for other remote sources. Files lie in
the client's own cache, where it finds them as those of the commit:

    models/org--name/snapshots/<commit>/<file>      links to
    models/org--name/blobs/<sha256>
    models/org--name/refs/<revision>.json           what a revision was, for when it is offline; raywl's own

ModelScope's listing doesn't say which commit it is of. But each file tells the commit that it was last
changed in: the newest of those has the same files, unless others were deleted since. Whether it has is asked,
and then it stands for the revision. Where it can't, the hash of the listing does.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from raywl.errors import AuthError, NotFoundError, OfflineError, RaywlError, SourceError
from raywl.sources.base import RemoteFile
from raywl.sources.cache import Repository, size_of
from raywl.sources.hub import checked_subfolder, checked_token, is_offline
from raywl.sources.modelscope_errors import modelscope_error, needs_modelscope
from raywl.sources.selection import as_patterns, folder_names, index_name, indexed_files, weight_files
from raywl.sources.transfer import Limits

if TYPE_CHECKING:
    from raywl.sources.modelscope_source import ModelScopeSource

__all__ = ["ModelScopePin", "parse_modelscope_ref"]

SCHEME = "ms://"
_REPOSITORY = re.compile(r"[A-Za-z0-9_][\w.-]*/[A-Za-z0-9_][\w.-]*", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_DEFAULT_REVISION = "master"
_WAIT_S = 3600.0


def parse_modelscope_ref(ref: str, revision: str | None = None) -> tuple[str, str]:
    """Repository and revision of `ms://org/name` or `ms://org/name@revision`.

    Raises:
        ValueError: It names no repository, or another revision than `revision`.
    """
    repo_id, at, written = ref.removeprefix(SCHEME).partition("@")
    if not _REPOSITORY.fullmatch(repo_id):
        raise ValueError(
            f"{ref!r} names no repository of ModelScope: expected ms://org/name (a folder inside of one is "
            "given as subfolder)"
        )
    if at and not written:
        raise ValueError(f"{ref!r} has no revision after the @")
    if written and revision and written != revision:
        raise ValueError(f"{ref!r} names the revision {written!r}, but revision={revision!r} was given too")
    return repo_id, written or revision or _DEFAULT_REVISION


@dataclass(frozen=True, slots=True)
class ModelScopePin:
    """One state of a repository, and how to get it: sent to the nodes, each of which has a cache of its own.

    Picklable; the token travels with it and isn't shown. `open_checkpoint` takes it as `ref`.
    """

    repo_id: str
    revision: str
    """What was asked for."""
    commit: str | None
    """The commit that has these files, where that could be found out."""
    files: tuple[RemoteFile, ...] = field(repr=False)
    """All files, by path in the repository; tags are their SHA-256."""
    subfolder: str | None = None
    allow_patterns: tuple[str, ...] = ()
    endpoint: str | None = None
    """The server; `None`: as the client of the node has it."""
    cache_dir: str | None = None
    """Cache folder; `None`: as the client of the node has it."""
    offline: bool = False
    """Take what the node's cache holds, and ask nobody."""
    timeout_s: float = _WAIT_S
    """How long to wait for another process that downloads the same."""
    token: str | None = field(default=None, repr=False, compare=False)
    """`None`: as the client of the node finds one."""
    limits: Limits | None = field(default=None, repr=False, compare=False)
    """How the server is treated; `None`: as the environment of the node says."""

    def __str__(self) -> str:
        return f"{SCHEME}{self.repo_id}@{self.commit or self.revision}"

    @property
    def state(self) -> str | None:
        """What stands for the files: their commit, or the hash of the listing.

        `None` where the cache holds files that nobody has told the hashes of.
        """
        if self.commit is not None:
            return self.commit
        if any(file.tag is None for file in self.files):
            return None
        return f"{self.revision}+{_digest(self.files)[:40]}"

    @property
    def identity(self) -> str | None:
        """What the checkpoint is agreed on by: repository and state, and the folder inside, if any."""
        folder = f"/{self.subfolder}" if self.subfolder else ""
        return None if self.state is None else f"ms:{self.repo_id}@{self.state}{folder}"

    @classmethod
    def find(
        cls,
        ref: str,
        *,
        revision: str | None = None,
        subfolder: str | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        token: str | None = None,
        allow_patterns: str | Sequence[str] | None = None,
        offline: bool | None = None,
        timeout_s: float = _WAIT_S,
    ) -> ModelScopePin:
        """Lists the files that a revision has now: one or two requests, or a look into the cache.

        Raises:
            ValueError: `ref` names no repository.
            ImportError: The `modelscope` package isn't installed, and the server is to be asked.
            NotFoundError: There is no such repository or revision.
            AuthError: ModelScope wants another token.
            OfflineError: Working offline, and the cache doesn't know the revision.
            SourceError: ModelScope can't be reached, or fails.
        """
        repo_id, revision = parse_modelscope_ref(ref, revision)
        found = cls(
            repo_id=repo_id,
            revision=revision,
            commit=None,
            files=(),
            subfolder=checked_subfolder(subfolder),
            allow_patterns=as_patterns(allow_patterns),
            cache_dir=None if cache_dir is None else os.fsdecode(cache_dir),
            timeout_s=timeout_s,
            limits=Limits.of_environment(),
        )
        if is_offline(offline):
            return _from_cache(found)
        found = replace(found, token=checked_token(token, repo_id))
        found = replace(found, endpoint=_endpoint(found), token=found.token or _own_token())
        files, newest = _list_files(found, revision)
        if _COMMIT.fullmatch(revision):
            return replace(found, files=files, commit=revision)
        return replace(found, files=files, commit=_commit_of(found, files, newest))

    def without_secrets(self) -> ModelScopePin:
        """The same, for where anybody may look."""
        return replace(self, token=None)

    def open(self) -> ModelScopeSource:
        """The source of the files, which are downloaded when they are used.

        Raises:
            NotFoundError: The repository has no such subfolder.
            MissingFileError: Offline, weights are absent from the cache.
        """
        from raywl.sources.modelscope_source import ModelScopeSource

        names = folder_names([file.name for file in self.files], self.subfolder)
        if self.subfolder and not names:
            raise NotFoundError(
                f"{self.repo_id}@{self.revision}",
                f"the repository has no folder {self.subfolder!r}",
                endpoint=self.endpoint,
            )
        prefix = f"{self.subfolder}/" if self.subfolder else ""
        listed = {file.name: file for file in self.files}
        source = ModelScopeSource(
            ref=str(self),
            kind="ms",
            repository=Repository(_folder(self), _version(self)),
            inside=self.subfolder or "",
            only=None,
            identity=self.identity,
            files={name: listed[prefix + name]._replace(name=name) for name in names},
            offline=self.offline,
            pin=self,
        )
        if self.offline:
            _check_cached(source)
        return source


# The server.


def client_of(pin: ModelScopePin) -> Any:
    try:
        from modelscope_hub import HubApi, HubConfig
    except ImportError as error:
        raise needs_modelscope(str(pin)) from error
    options = {"endpoint": pin.endpoint, "token": pin.token}
    return HubApi(config=HubConfig(**{key: value for key, value in options.items() if value is not None}))


@contextmanager
def translated(pin: ModelScopePin, doing: str) -> Iterator[None]:
    """Errors of the client as raywl's; without their cause, which could show what was sent."""
    try:
        yield
    except RaywlError:
        raise
    except Exception as error:
        told = modelscope_error(
            error,
            ref=f"{pin.repo_id}@{pin.revision}",
            endpoint=pin.endpoint,
            secrets=[pin.token, os.environ.get("MODELSCOPE_API_TOKEN")],
            doing=doing,
        )
        if told is None:
            raise
        raise told from None


def _endpoint(pin: ModelScopePin) -> str:
    """The server that has the repository: the one that is set, else one of ModelScope's own."""
    client = client_of(pin)
    with translated(pin, "look-up"):
        endpoint: str = client.resolve_endpoint_for_read(pin.repo_id)
    return endpoint


def _own_token() -> str | None:
    """The token that the client would use by itself: on a cluster, the driver's goes to all nodes."""
    from modelscope_hub import HubConfig

    token: str | None = HubConfig().token
    return token or None


def _list_files(pin: ModelScopePin, revision: str) -> tuple[tuple[RemoteFile, ...], str | None]:
    """A revision's files, and the newest of the commits that they were last changed in."""
    client = client_of(pin)
    with translated(pin, "look-up"):
        rows = client.legacy.list_repo_files(
            repo_id=pin.repo_id, repo_type="model", revision=revision, recursive=True
        )
    files, newest = [], (-1, "")
    for row in rows:
        name, size, tag = row.get("Path"), row.get("Size"), str(row.get("Sha256") or "").lower()
        if row.get("Type") == "tree":
            continue
        if not isinstance(name, str) or isinstance(size, bool) or not isinstance(size, int) or size < 0:
            raise SourceError(
                f"{pin.repo_id}@{revision}",
                f"look-up: the listing has an entry without path or size: {row!r:.200}",
                endpoint=pin.endpoint,
            )
        files.append(RemoteFile(name, size, tag if _SHA256.fullmatch(tag) else None))
        commit, date = str(row.get("Revision") or ""), row.get("CommittedDate")
        if _COMMIT.fullmatch(commit) and isinstance(date, int):
            newest = max(newest, (date, commit))
    return tuple(sorted(files)), newest[1] or None


def _commit_of(pin: ModelScopePin, files: tuple[RemoteFile, ...], newest: str | None) -> str | None:
    """The newest commit, if it has just these files."""
    if newest is None or any(file.tag is None for file in files):
        return None
    try:
        return newest if _list_files(pin, newest)[0] == files else None
    except (NotFoundError, AuthError):
        # A server that takes branches and tags alone.
        return None


def _digest(files: Sequence[RemoteFile]) -> str:
    rows = [[file.name, file.size, file.tag] for file in files]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


# The cache.


def cache_root_of(cache_dir: str | None) -> str:
    chosen = cache_dir or os.environ.get("MODELSCOPE_CACHE") or os.path.join("~", ".cache", "modelscope")
    return os.path.realpath(os.path.expanduser(chosen))


def _folder(pin: ModelScopePin) -> str:
    return os.path.join(cache_root_of(pin.cache_dir), "models", pin.repo_id.replace("/", "--"))


def _version(pin: ModelScopePin) -> str:
    """Name of the snapshot; a branch's own is the client's, which changes what is in it."""
    if pin.commit is not None:
        return pin.commit
    if pin.state is None:
        return pin.revision
    return f"{quote(pin.revision, safe='')}-{_digest(pin.files)[:12]}"


def _ref_path(pin: ModelScopePin, revision: str) -> str:
    return os.path.join(_folder(pin), "refs", f"{quote(revision, safe='')}.json")


def note_files(pin: ModelScopePin) -> None:
    """Notes in the cache what a revision was, so that it is found offline."""
    from raywl.locks import atomic_writer

    text = json.dumps({"commit": pin.commit, "files": [list(file) for file in pin.files]})
    for revision in {pin.revision, pin.commit or pin.revision}:
        path = _ref_path(pin, revision)
        # The cache may be read-only, and works without the note.
        with contextlib.suppress(OSError):
            with contextlib.suppress(FileNotFoundError), open(path, encoding="utf-8") as file:
                if file.read() == text:
                    continue
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with atomic_writer(path) as new:
                new.write(text)


def _from_cache(pin: ModelScopePin) -> ModelScopePin:
    """The pin as it was noted, else as the client downloaded it."""
    pin = replace(pin, offline=True)
    try:
        with open(_ref_path(pin, pin.revision), encoding="utf-8") as file:
            told = json.load(file)
        return replace(pin, commit=told["commit"], files=tuple(RemoteFile(*row) for row in told["files"]))
    except (OSError, ValueError, KeyError, TypeError):
        pass
    snapshot = os.path.join(_folder(pin), "snapshots", pin.revision)
    inside = os.path.normpath(snapshot).startswith(os.path.join(_folder(pin), "snapshots") + os.sep)
    files = tuple(_files_in(snapshot)) if inside else ()
    if not files:
        raise OfflineError(
            f"{pin.repo_id}@{pin.revision}",
            f"working offline, and revision {pin.revision!r} of {pin.repo_id} is not in the cache "
            f"{cache_root_of(pin.cache_dir)}; download it once while online",
        )
    commit = pin.revision if _COMMIT.fullmatch(pin.revision) else None
    return replace(pin, commit=commit, files=files)


def _files_in(folder: str) -> Iterator[RemoteFile]:
    for inside, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(inside, name)
            if (size := size_of(path)) is not None and not name.endswith(".incomplete"):
                yield RemoteFile(os.path.relpath(path, folder), size)


def _check_cached(source: ModelScopeSource) -> None:
    """Raises `MissingFileError`, naming each, where weights are not in the cache."""
    pin = source.pin
    index = index_name(source.files, pin.allow_patterns)
    if index is not None and not source.has(index):
        raise source.not_cached([index])
    indexed = None
    if index is not None:
        indexed = indexed_files(source.read(index, 0, source.files[index].size))
        if indexed is None:
            # Reading the checkpoint says what is wrong with it.
            return
    weights = weight_files(list(source.files), indexed, pin.allow_patterns)
    if missing := [name for name in weights if not source.has(name)]:
        raise source.not_cached(missing)
