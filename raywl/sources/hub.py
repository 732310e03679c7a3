"""Repositories of a Hugging Face hub, through its own client and in its own cache layout."""

from __future__ import annotations

import contextlib
import hashlib
import os
import posixpath
import re
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self

from raywl.errors import (
    AuthError,
    CheckpointError,
    MissingFileError,
    NotFoundError,
    OfflineError,
    SourceError,
    some_of,
)
from raywl.sources.hub_errors import hub_error
from raywl.sources.local import LocalSource
from raywl.sources.selection import INDEX_NAME, companions, folder_names, indexed_files, weight_files

__all__ = ["HubPin", "HubSource", "parse_hub_ref"]

_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_HASH_BLOCK_BYTES = 8 << 20
_DEFAULT_REVISION = "main"
_DOWNLOAD_THREADS = 8
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
            "allow_patterns": (
                (allow_patterns,) if isinstance(allow_patterns, str) else tuple(allow_patterns or ())
            ),
            "cache_dir": None if cache_dir is None else os.fsdecode(cache_dir),
            "timeout_s": timeout_s,
        }
        if is_offline(offline):
            commit = cached_commit(repository_folder(options["cache_dir"], repo_id), repo_id, revision)
            return cls(repo_id, commit, offline=True, **options), None
        options |= {
            "endpoint": os.environ.get("HF_ENDPOINT") or None,
            "token": checked_token(token or own_token(), repo_id),
        }
        commit, names = look_up(cls(repo_id, revision, **options))
        return cls(repo_id, commit, **options), names

    def open(self, names: tuple[str, ...] | None = None) -> HubSource:
        """Makes sure that this node's cache has the files; downloads what is absent.

        Of several processes that share a cache, one downloads while the others wait; each file is under its
        final name only when it is whole.

        Args:
            names: The commit's files, where the hub was asked just now.

        Raises:
            MissingFileError: Files that the index names are absent from the repository, or, offline, from
                the cache.
            CheckpointError: There are no weights that can be read.
            LockError: Another process held the lock for all of `timeout_s`, or there can be none.
            NotFoundError, AuthError, OfflineError, SourceError: As `find`.
        """
        fetched: list[str] = []
        if self.offline:
            _check_cached(self)
        else:
            fetched = _fetch(self, look_up(self)[1] if names is None else names)
        nbytes = sum(os.path.getsize(os.path.join(snapshot_folder(self), name)) for name in fetched)
        folder = os.path.join(snapshot_folder(self), self.subfolder or "").rstrip("/")
        return HubSource(str(self), folder, None, self.identity, self.repo_id, self.commit, nbytes)


@dataclass(frozen=True, slots=True)
class HubSource(LocalSource):
    """A commit of a repository in this node's cache, with all files that its weights need."""

    repo_id: str = ""
    commit: str = ""
    fetched_bytes: int = field(default=0, compare=False)
    """Bytes that were downloaded when it was opened; 0 where the cache had it all."""


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
    said = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or ""
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


def _endpoint(pin: HubPin) -> str:
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
            endpoint=_endpoint(pin),
            secrets=[pin.token, own_token()],
            file=file,
        )
        if said is None:
            raise
        raise said from None


def look_up(pin: HubPin) -> tuple[str, tuple[str, ...]]:
    """Asks the hub for a revision's commit and files; one request."""
    import huggingface_hub
    from huggingface_hub import constants

    api = huggingface_hub.HfApi(endpoint=_endpoint(pin), token=pin.token)
    with translated(pin):
        info = api.model_info(pin.repo_id, revision=pin.commit, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT)
    if not info.sha or not _COMMIT.fullmatch(info.sha):
        raise SourceError(
            f"{pin.repo_id}@{pin.revision}",
            f"the answer has no commit but {info.sha!r}",
            endpoint=_endpoint(pin),
        )
    return info.sha, tuple(sibling.rfilename for sibling in info.siblings or ())


def _fetch(pin: HubPin, listing: tuple[str, ...]) -> list[str]:
    """Brings the pin's files into the cache; writes nothing where all of them are there.

    Returns:
        Names of the files that this process downloaded, in the repository.
    """
    names = folder_names(listing, pin.subfolder)
    if pin.subfolder and not names:
        raise NotFoundError(
            f"{pin.repo_id}@{pin.revision}",
            f"the repository has no folder {pin.subfolder!r}",
            endpoint=_endpoint(pin),
        )
    has_index = INDEX_NAME not in names or have(pin, INDEX_NAME)
    if has_index and not _absent(pin, names):
        note_revision(pin)
        return []
    with download_lock(pin):
        index = [INDEX_NAME] if INDEX_NAME in names and not have(pin, INDEX_NAME) else []
        download(pin, index)
        absent = _absent(pin, names)
        download(pin, absent)
        note_revision(pin)
        return [in_repository(pin, name) for name in (*index, *absent)]


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


def _absent(pin: HubPin, names: list[str]) -> list[str]:
    """What is to be fetched, going by the index in the cache, if the folder has one."""
    weights = _weights(pin, names)
    unknown = sorted(set(weights) - set(names))
    if unknown:
        raise MissingFileError(
            f"{pin.repo_id}@{pin.revision}", unknown, "the index names files that the repository doesn't have"
        )
    if not weights and INDEX_NAME not in names:
        others = [name for name in names if name.endswith((".safetensors", ".bin", ".pt", ".pth"))]
        reason = f"no safetensors file here{_matching(pin)}; other weights: {some_of(others) or 'none'}"
        raise CheckpointError(f"{pin.repo_id}@{pin.revision}", None, reason)
    return [name for name in [*companions(names), *weights] if not have(pin, name)]


def _matching(pin: HubPin) -> str:
    return f" matches {list(pin.allow_patterns)}" if pin.allow_patterns else ""


def _weights(pin: HubPin, names: list[str]) -> list[str]:
    if INDEX_NAME not in names:
        return weight_files(names, None, pin.allow_patterns)
    with open(os.path.join(snapshot_folder(pin), in_repository(pin, INDEX_NAME)), "rb") as file:
        indexed = indexed_files(file.read())
    # With a damaged index nothing more is fetched: reading the checkpoint says what is wrong with it.
    return [] if indexed is None else weight_files(names, indexed, pin.allow_patterns)


class _Stopped(Exception):
    """Another file failed."""


def download(pin: HubPin, names: list[str]) -> None:
    """Fetches files at once; the first that fails stops the others."""
    if not names:
        return
    stop = threading.Event()
    bar = _stoppable_bar(stop)
    with ThreadPoolExecutor(min(_DOWNLOAD_THREADS, len(names)), "raywl-download") as pool:
        try:
            for done in as_completed([pool.submit(_download_one, pin, name, bar) for name in names]):
                done.result()
        except BaseException:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _download_one(pin: HubPin, name: str, bar: type) -> None:
    import huggingface_hub
    from huggingface_hub import constants

    path = in_repository(pin, name)
    with translated(pin, path):
        link = huggingface_hub.hf_hub_download(
            pin.repo_id,
            path,
            revision=pin.commit,
            cache_dir=os.path.dirname(repository_folder(pin.cache_dir, pin.repo_id)),
            endpoint=_endpoint(pin),
            token=pin.token,
            etag_timeout=constants.HF_HUB_ETAG_TIMEOUT,
            tqdm_class=bar,
        )
    _check_hash(pin, path, link)


def _check_hash(pin: HubPin, name: str, link: str) -> None:
    """Throws away what isn't what the hub announced: a large file's blob is named by its SHA-256."""
    blob = os.path.realpath(link)
    told = os.path.basename(blob)
    if not _SHA256.fullmatch(told):
        return
    digest = hashlib.sha256()
    with open(blob, "rb", buffering=0) as file:
        while block := file.read(_HASH_BLOCK_BYTES):
            digest.update(block)
    if digest.hexdigest() != told:
        for path in {link, blob}:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        raise SourceError(
            f"{pin.repo_id}@{pin.revision}",
            f"download of {name} brought other bytes than the hub announced (hash {digest.hexdigest()}, "
            f"expected {told}); it was thrown away",
            endpoint=_endpoint(pin),
        )


def _stoppable_bar(stop: threading.Event) -> type:
    """The client's progress bar, which can also end the download that it shows; nothing else can."""
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

    class Bar(tqdm):
        def update(self, n: float | None = 1) -> Any:
            if stop.is_set():
                raise _Stopped
            return super().update(n)

    return Bar


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
    if INDEX_NAME in names and not have(pin, INDEX_NAME):
        wanted = [INDEX_NAME]
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
    if not wanted and INDEX_NAME not in names:
        where = f"folder {pin.subfolder!r} of " if pin.subfolder else ""
        raise OfflineError(
            ref,
            f"working offline, and no safetensors file of {where}the cached snapshot {snapshot}"
            f"{_matching(pin) or ' is there'}; it has: {some_of(sorted(names)) or 'no files'}",
        )


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
