"""Repositories of a Hugging Face hub, through its own client and in its own cache layout."""

from __future__ import annotations

import contextlib
import os
import posixpath
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self

from raywl.errors import AuthError, MissingFileError, NotFoundError, OfflineError, SourceError, some_of
from raywl.sources.base import RemoteFile
from raywl.sources.cache import Repository
from raywl.sources.hub_errors import hub_error
from raywl.sources.selection import as_patterns, folder_names, index_name, indexed_files, weight_files
from raywl.sources.transfer import Limits

if TYPE_CHECKING:
    from raywl.sources.hub_source import HubSource

__all__ = ["HubPin", "parse_hub_ref"]

_COMMIT = re.compile(r"[0-9a-f]{40}")
_HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_DEFAULT_REVISION = "main"
_ASKING_THREADS = 8
_WAIT_S = 3600.0
"""How long a process waits for another one that downloads the same checkpoint."""


def parse_hub_ref(ref: str, revision: str | None = None) -> tuple[str, str]:
    """Repository and revision of `org/name`, `org/name@revision` or `hf://org/name@revision`.

    Raises:
        ValueError: It names no repository, or another revision than `revision`.
    """
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    repo_id, at, written = ref.removeprefix("hf://").partition("@")
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise ValueError(
            f"{ref!r} names no repository: {error} (a folder inside of one is given as subfolder)"
        ) from None
    if at and not written:
        raise ValueError(f"{ref!r} has no revision after the @")
    if written and revision and written != revision:
        raise ValueError(f"{ref!r} names the revision {written!r}, but revision={revision!r} was given too")
    return repo_id, written or revision or _DEFAULT_REVISION


@dataclass(frozen=True, slots=True)
class HubPin:
    """One commit of a repository, and how to get it: sent to the nodes, each of which has a cache of its own.

    Small, and picklable; the token travels with it and isn't shown. `open_checkpoint` takes it as `ref`.
    """

    repo_id: str
    commit: str
    revision: str = _DEFAULT_REVISION
    """What the commit was found by; noted in the cache, so that it is found there offline."""
    subfolder: str | None = None
    allow_patterns: tuple[str, ...] = ()
    endpoint: str | None = None
    """The hub; `None`: as the client of the node has it."""
    cache_dir: str | None = None
    """Cache folder; `None`: as the client of the node has it."""
    offline: bool = False
    """Take what the node's cache holds, and ask nobody."""
    timeout_s: float = _WAIT_S
    """How long to wait for another process that downloads the same."""
    token: str | None = field(default=None, repr=False)
    """`None`: as the client of the node finds one."""
    files: tuple[RemoteFile, ...] = field(default=(), repr=False, compare=False)
    """The commit's files, where the hub was asked."""
    limits: Limits | None = field(default=None, repr=False, compare=False)
    """How the hub is treated; `None`: as the environment of the node says."""

    def __str__(self) -> str:
        return f"hf://{self.repo_id}@{self.commit}"

    @property
    def identity(self) -> str:
        """What the checkpoint is agreed on by: repository and commit, and the folder inside, if any."""
        folder = f"/{posixpath.normpath(self.subfolder)}" if self.subfolder else ""
        return f"hf:{self.repo_id}@{self.commit}{folder}"

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
    ) -> tuple[Self, tuple[str, ...] | None]:
        """Finds the commit that a revision is at now: one request, or a look into the cache.

        Returns:
            The pin, and the repository's files if the hub was asked.

        Raises:
            ValueError: `ref` names no repository.
            NotFoundError: There is no such repository or revision.
            AuthError: The hub wants another token.
            OfflineError: Working offline, and the cache doesn't know the revision.
            SourceError: The hub can't be reached, or fails.
        """
        repo_id, revision = parse_hub_ref(ref, revision)
        options: dict[str, Any] = {
            "revision": revision,
            "subfolder": checked_subfolder(subfolder),
            "allow_patterns": as_patterns(allow_patterns),
            "cache_dir": None if cache_dir is None else os.fsdecode(cache_dir),
            "timeout_s": timeout_s,
            "limits": Limits.of_environment(),
        }
        if is_offline(offline):
            commit = cached_commit(repository_folder(options["cache_dir"], repo_id), repo_id, revision)
            return cls(repo_id, commit, offline=True, **options), None
        options |= {
            "endpoint": os.environ.get("HF_ENDPOINT") or None,
            "token": checked_token(token or own_token(), repo_id),
        }
        commit, files = _find_files(cls(repo_id, revision, **options))
        return cls(repo_id, commit, files=files, **options), tuple(file.name for file in files)

    def without_secrets(self) -> Self:
        """The same, for where anybody may look."""
        return replace(self, token=None)

    def open(self) -> HubSource:
        """The source of the commit's files, which are downloaded when they are used.

        Raises:
            MissingFileError: Offline, files that the index names are absent from the cache.
            NotFoundError: The repository has no such subfolder.
            AuthError, OfflineError, SourceError: As `find`.
        """
        from raywl.sources.hub_source import HubSource

        if self.offline:
            _check_cached(self)
            files = _cached_files(self)
        else:
            files = self.files or _find_files(self)[1]
        names = folder_names([file.name for file in files], self.subfolder)
        prefix = f"{self.subfolder}/" if self.subfolder else ""
        listed = {file.name: file for file in files}
        if self.subfolder and not names:
            raise NotFoundError(
                f"{self.repo_id}@{self.revision}",
                f"the repository has no folder {self.subfolder!r}",
                endpoint=endpoint_of(self),
            )
        return HubSource(
            ref=str(self),
            kind="hub",
            repository=Repository(repository_folder(self.cache_dir, self.repo_id), self.commit),
            inside=self.subfolder or "",
            only=None,
            identity=self.identity,
            files={name: listed[prefix + name]._replace(name=name) for name in names},
            offline=self.offline,
            pin=self,
        )


def checked_subfolder(subfolder: str | None) -> str | None:
    if not subfolder:
        return None
    normal = posixpath.normpath(subfolder)
    if posixpath.isabs(normal) or normal.split("/")[0] == "..":
        raise ValueError(f"subfolder {subfolder!r} leads out of the repository")
    return None if normal == "." else normal


def is_offline(offline: bool | None) -> bool:
    if offline is not None:
        return offline
    from huggingface_hub import constants

    # The client reads it once, at import; here it counts as it is now, too.
    names = ("RAYWL_OFFLINE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    said = next(filter(None, map(os.environ.get, names)), "")
    return said.upper() in ("1", "ON", "YES", "TRUE") or bool(constants.HF_HUB_OFFLINE)


def own_token() -> str | None:
    """The token that the client would use by itself: on a cluster, the driver's goes to all nodes."""
    import huggingface_hub
    from huggingface_hub import constants

    return None if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else huggingface_hub.get_token()


def checked_token(token: str | None, repo_id: str) -> str | None:
    """A token as a header can hold it: read from a file it often ends in a line break."""
    if token is None:
        return None
    if not isinstance(token, str):
        raise TypeError(f"token must be a text, not {type(token).__name__}")
    token = token.strip()
    if not token.isascii() or not token.isprintable() or " " in token:
        # Its text is not shown, nor by the client, which would say what header it can't send.
        raise AuthError(repo_id, "the token has characters in it that no token has (a line break?)")
    return token or None


def repository_folder(cache_dir: str | None, repo_id: str) -> str:
    from huggingface_hub import constants

    cache = os.path.realpath(os.path.expanduser(cache_dir or constants.HF_HUB_CACHE))
    return os.path.join(cache, "models--" + repo_id.replace("/", "--"))


def snapshot_folder(pin: HubPin) -> str:
    return os.path.join(repository_folder(pin.cache_dir, pin.repo_id), "snapshots", pin.commit)


def in_repository(pin: HubPin, name: str) -> str:
    """Path inside the repository of a file of the pin's folder."""
    return f"{pin.subfolder}/{name}" if pin.subfolder else name


def have(pin: HubPin, name: str) -> bool:
    return os.path.isfile(os.path.join(snapshot_folder(pin), in_repository(pin, name)))


def endpoint_of(pin: HubPin) -> str:
    from huggingface_hub import constants

    return (pin.endpoint or constants.ENDPOINT).rstrip("/")


@contextmanager
def translated(pin: HubPin, file: str | None = None) -> Iterator[None]:
    """Errors of the client as raywl's; without their cause, which could show what was sent."""
    try:
        yield
    except Exception as error:
        said = hub_error(
            error,
            repo_id=pin.repo_id,
            revision=pin.revision,
            endpoint=endpoint_of(pin),
            secrets=[pin.token, own_token()],
            file=file,
        )
        if said is None:
            raise
        raise said from None


def _find_files(pin: HubPin) -> tuple[str, tuple[RemoteFile, ...]]:
    """Asks the hub for a revision's commit and files, with sizes and hashes."""
    import huggingface_hub
    from huggingface_hub import constants

    api = huggingface_hub.HfApi(endpoint=endpoint_of(pin), token=pin.token)
    with translated(pin):
        info = api.model_info(
            pin.repo_id,
            revision=pin.commit,
            timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT,
            files_metadata=True,
        )
    if not info.sha or not _COMMIT.fullmatch(info.sha):
        raise SourceError(
            f"{pin.repo_id}@{pin.revision}",
            f"the answer has no commit but {info.sha!r}",
            endpoint=endpoint_of(pin),
        )
    siblings = info.siblings or []
    found = [_file_of(sibling) for sibling in siblings]
    unknown = [sibling.rfilename for sibling, file in zip(siblings, found, strict=True) if file is None]
    asked = _ask_for_each(replace(pin, commit=info.sha), unknown)
    files = [file or asked[sibling.rfilename] for sibling, file in zip(siblings, found, strict=True)]
    return info.sha, tuple(files)


def _file_of(sibling: Any) -> RemoteFile | None:
    """A file as the listing has it; `None` where size or hash aren't given."""
    lfs = sibling.lfs
    tag = (lfs["sha256"] if isinstance(lfs, dict) else lfs.sha256) if lfs else sibling.blob_id
    if sibling.size is None or not isinstance(tag, str) or not _HASH.fullmatch(tag):
        return None
    return RemoteFile(sibling.rfilename, sibling.size, tag)


def _ask_for_each(pin: HubPin, names: list[str]) -> dict[str, RemoteFile]:
    """Sizes and hashes of files, from hubs (mirrors) whose listings don't have them."""
    import huggingface_hub

    def ask(name: str) -> RemoteFile:
        url = huggingface_hub.hf_hub_url(pin.repo_id, name, revision=pin.commit, endpoint=endpoint_of(pin))
        with translated(pin, name):
            about = huggingface_hub.get_hf_file_metadata(url, token=pin.token)
        if about.size is None or not about.etag or not _HASH.fullmatch(about.etag):
            raise SourceError(
                f"{pin.repo_id}@{pin.revision}",
                f"the hub gives neither size nor hash of {name}",
                endpoint=endpoint_of(pin),
            )
        return RemoteFile(name, about.size, about.etag)

    if not names:
        return {}
    with ThreadPoolExecutor(min(_ASKING_THREADS, len(names)), "raywl-ask") as pool:
        return {file.name: file for file in pool.map(ask, names)}


@contextmanager
def download_lock(pin: HubPin) -> Iterator[None]:
    """Held while a repository's files are downloaded into a cache.

    Raises:
        LockError: Another process held it for all of `timeout_s`, or there can be none.
    """
    # Here, since it imports filelock, which opening a local folder needn't wait for.
    from raywl.locks import acquire_within, get_lock

    locks = os.path.join(os.path.dirname(repository_folder(pin.cache_dir, pin.repo_id)), ".locks", "raywl")
    # Not the bare name, which could also be a folder of the directory that the process happens to run in.
    lock = get_lock(f"hf://{pin.repo_id}", locks)
    with acquire_within(lock, pin.timeout_s, f"download of {pin.repo_id}@{pin.revision}"):
        yield


def _matching(pin: HubPin) -> str:
    return f" matches {list(pin.allow_patterns)}" if pin.allow_patterns else ""


def _weights(pin: HubPin, names: list[str]) -> list[str]:
    index = index_name(names, pin.allow_patterns)
    if index is None:
        return weight_files(names, None, pin.allow_patterns)
    with open(os.path.join(snapshot_folder(pin), in_repository(pin, index)), "rb") as file:
        indexed = indexed_files(file.read())
    # With a damaged index nothing more is fetched: reading the checkpoint says what is wrong with it.
    return [] if indexed is None else weight_files(names, indexed, pin.allow_patterns)


def download(pin: HubPin, names: list[str]) -> None:
    """Fetches files of the pin's folder into the cache, at once; the first that fails stops the others.

    Raises:
        MissingFileError: The repository hasn't got them.
        AuthError, SourceError, CapacityError: They can't be fetched.
    """
    if names:
        source = pin.open()
        source.bring(source.lacking(names))


def note_revision(pin: HubPin) -> None:
    """Notes in the cache where a branch or tag is at, as the client does, so that it is found offline."""
    if pin.revision == pin.commit:
        return
    from raywl.locks import atomic_writer

    refs = os.path.join(repository_folder(pin.cache_dir, pin.repo_id), "refs")
    path = os.path.normpath(os.path.join(refs, pin.revision))
    # The cache may be read-only, and works without the note.
    with contextlib.suppress(OSError):
        if path.startswith(refs + os.sep) and _read_note(path) != pin.commit:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with atomic_writer(path) as file:
                file.write(pin.commit)


def _read_note(path: str) -> str | None:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read(200).strip() or None
    except (OSError, ValueError):
        return None


def cached_commit(folder: str, repo_id: str, revision: str) -> str:
    """The commit that the cache has for a revision."""
    refs = os.path.join(folder, "refs")
    path = os.path.normpath(os.path.join(refs, revision))
    commit = revision if _COMMIT.fullmatch(revision) else None
    if commit is None and path.startswith(refs + os.sep):
        commit = _read_note(path)
    # Whatever a note says, it can't lead out of the cache.
    if commit is None or os.path.basename(commit) != commit or commit in (".", ".."):
        raise _not_cached(folder, repo_id, revision)
    return commit


def _not_cached(folder: str, repo_id: str, revision: str) -> OfflineError:
    there = "other revisions of it" if os.path.isdir(os.path.join(folder, "snapshots")) else "nothing of it"
    return OfflineError(
        f"{repo_id}@{revision}",
        f"working offline, and revision {revision!r} of {repo_id} is not in the cache "
        f"{os.path.dirname(folder)}, which has {there}; download it once while online",
    )


def _check_cached(pin: HubPin) -> None:
    """Whether the cache has all weights of a commit. Without the network, the index says which those are."""
    ref, snapshot = f"{pin.repo_id}@{pin.revision}", snapshot_folder(pin)
    if not os.path.isdir(snapshot):
        raise _not_cached(repository_folder(pin.cache_dir, pin.repo_id), pin.repo_id, pin.revision)
    listing = listing_in_cache(pin)
    names = folder_names(listing, pin.subfolder)
    index = index_name(names, pin.allow_patterns)
    if index is not None and not have(pin, index):
        wanted = [index]
    else:
        wanted = _weights(pin, names)
    missing = [in_repository(pin, name) for name in wanted if not have(pin, name)]
    if missing:
        raise MissingFileError(
            ref,
            missing,
            f"working offline, and {len(missing)} of {len(wanted)} files are absent from the cached snapshot "
            f"{snapshot} (incomplete download? run once online)",
        )
    if not wanted and index is None:
        where = f"folder {pin.subfolder!r} of " if pin.subfolder else ""
        raise OfflineError(
            ref,
            f"working offline, and no weights of {where}the cached snapshot {snapshot}"
            f"{_matching(pin) or ' is there'}; it has: {some_of(sorted(names)) or 'no files'}",
        )


def _cached_files(pin: HubPin) -> tuple[RemoteFile, ...]:
    """What the snapshot in the cache holds."""
    found = []
    for name in listing_in_cache(pin):
        path = os.path.join(snapshot_folder(pin), name)
        if os.path.isfile(path):
            found.append(RemoteFile(name, os.path.getsize(path)))
    return tuple(found)


def listing_in_cache(pin: HubPin) -> list[str]:
    """The commit's files as far as the cache knows them: by the client's own record, and what is there."""
    import huggingface_hub
    from huggingface_hub import errors

    names = set()
    snapshot = snapshot_folder(pin)
    for folder, _, files in os.walk(snapshot):
        inside = os.path.relpath(folder, snapshot)
        names |= {os.path.normpath(os.path.join(inside, file)) for file in files}
    # The clients of 2.x keep a record after snapshot_download.
    ask = getattr(huggingface_hub, "get_cached_repo_tree", None)
    if ask is not None:
        with contextlib.suppress(errors.CachedRepoTreeNotFoundError, OSError, ValueError):
            recorded = ask(pin.repo_id, revision=pin.commit, cache_dir=pin.cache_dir)
            names |= {file.path for file in recorded}
    return sorted(names)
