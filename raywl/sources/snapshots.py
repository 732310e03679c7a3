"""Chosen files of a hub's repository as a folder: for callers that read files rather than open checkpoints.

`HubPin.open` chooses by itself what belongs to a checkpoint. Here the caller says which formats to look for,
in which order. Both use the same cache and lock.
"""

from __future__ import annotations

import fnmatch
import logging
import os
import posixpath
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from raywl.errors import (
    AuthError,
    CheckpointError,
    CorruptFileError,
    MissingFileError,
    NotFoundError,
    OfflineError,
    SourceError,
    some_of,
)
from raywl.sources import hub
from raywl.sources.hub import HubPin
from raywl.sources.local import LocalSource
from raywl.sources.selection import (
    INDEX_NAME,
    TRAINING_FILES,
    folder_names,
    indexed_files,
    missing_numbered_files,
    weight_files,
)

__all__ = [
    "download_safetensors_index_file_from_hf",
    "download_weights_from_hf",
    "enable_xet_high_performance",
    "fetch_top_level_files",
]

_log = logging.getLogger(__name__)

_XET_HIGH_PERFORMANCE = "HF_XET_HIGH_PERFORMANCE"
_SAFETENSORS = "*.safetensors"
_WAIT_S = 3600.0
"""How long a process waits for another one that downloads the same."""
_xet_was_set_here = False


def enable_xet_high_performance() -> None:
    """Lets the hub's client download with all of the machine's bandwidth and cores.

    Sets `HF_XET_HIGH_PERFORMANCE` for this process, which the part of the client that transfers data reads
    when it starts, and the client's own note of it. Where the user has set the variable, whatever to, nothing
    is changed.
    """
    global _xet_was_set_here
    if _XET_HIGH_PERFORMANCE in os.environ and not _xet_was_set_here:
        return
    from huggingface_hub import constants

    os.environ[_XET_HIGH_PERFORMANCE] = "1"
    constants.HF_XET_HIGH_PERFORMANCE = True
    _xet_was_set_here = True


def download_weights_from_hf(
    model_name_or_path: str | os.PathLike[str],
    cache_dir: str | os.PathLike[str] | None,
    allow_patterns: Sequence[str] | str,
    revision: str | None = None,
    subfolder: str | None = None,
    ignore_patterns: Sequence[str] | str | None = None,
) -> str:
    """Downloads a repository's weights, as far as the hub's cache hasn't got them.

    Of several processes that want the same, one downloads while the others wait, and each file is under its
    name only when it is whole. A pattern without a `/` means files of the folder itself, not of folders in
    it, and never what trainers write beside the weights (`optimizer.bin`, ...), unless it names that.

    `*.safetensors` means exactly the files that `model.safetensors.index.json` names; those of the folder
    where there is none, or where it names nothing; without copies in another naming (`consolidated*`)
    beside others.

    When the hub fails to list the repository, there is a warning, and for each pattern the hub is asked once
    more; then the cache must do.

    Args:
        model_name_or_path: A repository, as `org/name` or `org/name@revision`. An existing folder is given
            back as it is.
        cache_dir: The hub's cache folder; `None`: where its own client has it.
        allow_patterns: What to look for; the first pattern that files match is used, and no other.
        revision: Branch, tag or commit; `main` by default.
        subfolder: Only look in this folder of the repository.
        ignore_patterns: Leave out files whose path in the repository matches one, as the client does.

    Returns:
        Path of the snapshot. The weights are in it, or in `subfolder` in it.

    Raises:
        ValueError: No pattern, or a name that can be neither a repository's nor a path.
        NotFoundError: There is no such path, repository, revision or subfolder.
        MissingFileError: The index names files that the repository doesn't have; or, offline, that the cache
            doesn't have.
        CheckpointError: No file matches, or the index is damaged.
        OfflineError: Working offline, and the cache has nothing that matches.
        AuthError, SourceError: The hub refuses, can't be reached, or fails.
        LockError: Another process went on downloading for an hour, or the cache can't be locked.
    """
    patterns = _as_list(allow_patterns)
    if not patterns:
        raise ValueError("allow_patterns is empty: what is to be downloaded?")
    if folder := _local_folder(model_name_or_path):
        return folder
    name = os.fsdecode(model_name_or_path)
    choice = _Choice(tuple(patterns), tuple(_as_list(ignore_patterns)))
    pin, listing = _find(name, cache_dir, revision, subfolder, num_tries=1 + len(patterns))
    if listing is None:
        _check_cached(pin, choice)
    else:
        _fetch(pin, listing, choice)
    return hub.snapshot_folder(pin)


def download_safetensors_index_file_from_hf(
    model_name_or_path: str | os.PathLike[str],
    index_file: str,
    cache_dir: str | os.PathLike[str] | None,
    subfolder: str | None = None,
    revision: str | None = None,
) -> None:
    """Downloads the index of a repository's safetensors files into the hub's cache, if it has one.

    A repository without one is no error, nor, offline, a cache without one.

    Args:
        model_name_or_path: A repository. With an existing folder nothing is done.
        index_file: The index's name.
        cache_dir: The hub's cache folder; `None`: where its own client has it.
        subfolder: The folder of the repository that it is in.
        revision: Branch, tag or commit; `main` by default.

    Raises:
        ValueError: A name that can be neither a repository's nor a path.
        NotFoundError: There is no such path, repository or revision.
        AuthError, SourceError: The hub refuses, can't be reached, or fails.
        LockError: Another process went on downloading for an hour, or the cache can't be locked.
    """
    if _local_folder(model_name_or_path):
        return
    name = os.fsdecode(model_name_or_path)
    try:
        pin, listing = _find(name, cache_dir, revision, subfolder, num_tries=2)
    except OfflineError as error:
        _log.info("no %s: %s", index_file, error)
        return
    there = hub.have(pin, index_file)
    if not there and listing is not None and index_file in folder_names(listing, pin.subfolder):
        _download_locked(pin, [index_file])
    elif not there:
        where = "cache" if listing is None else "repository"
        _log.info("%s: no %s in the %s", pin, index_file, where)


def fetch_top_level_files(
    model: str | os.PathLike[str],
    wanted: Callable[[str], bool],
    *,
    cache_dir: str | os.PathLike[str] | None = None,
    revision: str | None = None,
) -> str:
    """The folder of a model with some of its small files, downloaded under the lock if it isn't a local one.

    Args:
        model: A folder or a repository.
        wanted: Tells by name which files of the folder itself are needed. None of them need be there.
        cache_dir: The hub's cache folder; `None`: where its own client has it.
        revision: Branch, tag or commit; `main` by default.

    Raises:
        ValueError, NotFoundError, AuthError, OfflineError, SourceError, LockError: As
            `download_weights_from_hf`.
    """
    if folder := _local_folder(model):
        return folder
    pin, listing = _find(os.fsdecode(model), cache_dir, revision, None, num_tries=2)
    names = [name for name in folder_names(listing or (), None) if "/" not in name and wanted(name)]
    absent = [name for name in names if not hub.have(pin, name)]
    if absent:
        _download_locked(pin, absent)
    if listing is not None:
        hub.note_revision(pin)
    return hub.snapshot_folder(pin)


@dataclass(frozen=True, slots=True)
class _Choice:
    """Which files are wanted."""

    patterns: tuple[str, ...]
    ignored: tuple[str, ...]

    def without_ignored(self, pin: HubPin, names: list[str]) -> list[str]:
        from huggingface_hub.utils import filter_repo_objects  # type: ignore[attr-defined]

        return list(
            filter_repo_objects(
                names, ignore_patterns=list(self.ignored), key=lambda name: hub.in_repository(pin, name)
            )
        )

    def matching(self, pin: HubPin, names: list[str], pattern: str) -> list[str]:
        """Names of the pin's folder that one pattern means, where no index decides."""
        found = [name for name in names if _means(pin, pattern, name)]
        chosen = weight_files(found, None) if _is_safetensors(pin, pattern) else found
        chosen = [n for n in chosen if not n.endswith(TRAINING_FILES) or pattern.endswith(TRAINING_FILES)]
        if left_out := sorted(set(found) - set(chosen)):
            _log.info("%s: %s doesn't mean %s", pin, pattern, some_of(left_out))
        return self.without_ignored(pin, sorted(chosen))


def _as_list(patterns: Sequence[str] | str | None) -> list[str]:
    return [patterns] if isinstance(patterns, str) else list(patterns or ())


def _local_folder(model: str | os.PathLike[str]) -> str | None:
    """The model's path if it is a folder of this machine; `None` if it can be a repository's name.

    Raises:
        NotFoundError: It can only be a path, and nothing is there.
        ValueError: It is a file.
    """
    name = os.fsdecode(model)
    path = os.path.expanduser(name)
    if os.path.isdir(path):
        return path
    if os.path.isfile(path):
        raise ValueError(f"{name} is a file; expected a folder or a repository's name")
    plain = name.removeprefix("hf://")
    is_path = os.path.isabs(path) or plain.startswith((".", "~")) or plain.partition("@")[0].count("/") > 1
    if is_path or not isinstance(model, str):
        # Says that nothing is there.
        LocalSource.open(name)
    return None


def _find(
    name: str,
    cache_dir: str | os.PathLike[str] | None,
    revision: str | None,
    subfolder: str | None,
    num_tries: int,
) -> tuple[HubPin, tuple[str, ...] | None]:
    """The commit, and its files if the hub could be asked; else what the cache has it as."""
    failed: SourceError | None = None
    for _ in range(num_tries):
        try:
            return HubPin.find(name, revision=revision, subfolder=subfolder, cache_dir=cache_dir)
        except (AuthError, NotFoundError, OfflineError):
            # An answer, and not that the hub failed to give one.
            raise
        except SourceError as error:
            if failed is None:
                warnings.warn(f"the files of {name} can't be listed: {error}", stacklevel=3)
            failed = error
            if error.status is None:
                break
    try:
        return HubPin.find(name, revision=revision, subfolder=subfolder, cache_dir=cache_dir, offline=True)
    except OfflineError:
        assert failed is not None
        raise failed from None


def _fetch(pin: HubPin, listing: tuple[str, ...], choice: _Choice) -> None:
    names = folder_names(listing, pin.subfolder)
    if pin.subfolder and not names:
        raise NotFoundError(
            f"{pin.repo_id}@{pin.revision}", f"the repository has no folder {pin.subfolder!r}"
        )
    chosen = _choose(pin, names, choice)
    if not all(hub.have(pin, name) for name in chosen):
        _download_locked(pin, chosen)
    hub.note_revision(pin)


def _download_locked(pin: HubPin, names: list[str]) -> None:
    """Downloads what is absent, under the model's lock, and the one that other ways of downloading take."""
    from raywl.locks import acquire_within, get_lock

    model_lock = get_lock(pin.repo_id, pin.cache_dir)
    with acquire_within(model_lock, _WAIT_S, f"download of {pin}"), hub.download_lock(pin):
        hub.download(pin, [name for name in names if not hub.have(pin, name)])


def _choose(pin: HubPin, names: list[str], choice: _Choice) -> list[str]:
    """What is to be downloaded, by the first pattern that files match; fetches the index if that decides."""
    ref = f"{pin.repo_id}@{pin.revision}"
    for pattern in choice.patterns:
        if _is_safetensors(pin, pattern) and INDEX_NAME in names:
            if not hub.have(pin, INDEX_NAME):
                _download_locked(pin, [INDEX_NAME])
            if indexed := _indexed(pin):
                if unknown := sorted(set(indexed) - set(names)):
                    raise MissingFileError(
                        ref, unknown, f"{INDEX_NAME} names files that the repository doesn't have"
                    )
                if kept := _without_ignored(pin, indexed, choice):
                    return _said(pin, f"by {INDEX_NAME}", kept)
                continue
        if chosen := choice.matching(pin, names, pattern):
            return _said(pin, f"that match {pattern!r}", chosen)
    there = [name for name in names if name.endswith((".safetensors", ".bin", ".pt", ".pth"))]
    raise CheckpointError(
        ref, None, f"no file matches {list(choice.patterns)}; weights there: {some_of(there) or 'none'}"
    )


def _said(pin: HubPin, why: str, chosen: list[str]) -> list[str]:
    _log.info("%s: %d files %s", pin, len(chosen), why)
    return chosen


def _without_ignored(pin: HubPin, indexed: list[str], choice: _Choice) -> list[str]:
    kept = choice.without_ignored(pin, indexed)
    if len(kept) < len(indexed):
        warnings.warn(
            f"{pin}: {len(indexed) - len(kept)} of {len(indexed)} files that {INDEX_NAME} names are ignored: "
            f"{some_of(sorted(set(indexed) - set(kept)))}",
            stacklevel=5,
        )
    return kept


def _indexed(pin: HubPin) -> list[str]:
    """The files that the cached index names.

    Raises:
        CorruptFileError: It is damaged.
        CheckpointError: A name leads out of the folder.
    """
    path = os.path.join(hub.snapshot_folder(pin), hub.in_repository(pin, INDEX_NAME))
    with open(path, "rb") as file:
        found = indexed_files(file.read())
    if found is None:
        raise CorruptFileError(path, None, "index is damaged: no JSON object with a weight_map of file names")
    for name in found:
        if posixpath.isabs(name) or name.split("/")[0] == "..":
            raise CheckpointError(path, None, f"file name {name!r} leads outside the folder")
    return sorted(found)


def _is_safetensors(pin: HubPin, pattern: str) -> bool:
    return pattern in (_SAFETENSORS, hub.in_repository(pin, _SAFETENSORS))


def _means(pin: HubPin, pattern: str, name: str) -> bool:
    """Whether a pattern matches a name of the folder, as seen from there or from the repository."""
    return _matches(pattern, name) or _matches(pattern, hub.in_repository(pin, name))


def _matches(pattern: str, name: str) -> bool:
    if "**" in pattern:
        return fnmatch.fnmatchcase(name, pattern)
    parts, wanted = name.split("/"), pattern.split("/")
    return len(parts) == len(wanted) and all(map(fnmatch.fnmatchcase, parts, wanted))


def _check_cached(pin: HubPin, choice: _Choice) -> None:
    """Whether the cache has all files of the first pattern that it knows files of."""
    ref, snapshot = f"{pin.repo_id}@{pin.revision}", hub.snapshot_folder(pin)
    names = folder_names(hub.listing_in_cache(pin), pin.subfolder)
    for pattern in choice.patterns:
        indexed: list[str] = []
        if _is_safetensors(pin, pattern) and INDEX_NAME in names:
            if not hub.have(pin, INDEX_NAME):
                raise _incomplete(pin, [INDEX_NAME])
            indexed = _indexed(pin)
        if indexed:
            chosen = _without_ignored(pin, indexed, choice)
        else:
            chosen = choice.matching(pin, names, pattern)
        missing = [name for name in chosen if not hub.have(pin, name)]
        if not indexed and not choice.ignored:
            missing += missing_numbered_files(chosen)[1]
        if missing:
            raise _incomplete(pin, missing)
        if chosen:
            return
    where = f"folder {pin.subfolder!r} of " if pin.subfolder else ""
    raise OfflineError(
        ref,
        f"working offline, and no file of {where}the cached snapshot {snapshot} matches "
        f"{list(choice.patterns)}; it has: {some_of(names) or 'no files'}",
    )


def _incomplete(pin: HubPin, missing: list[str]) -> MissingFileError:
    return MissingFileError(
        f"{pin.repo_id}@{pin.revision}",
        [hub.in_repository(pin, name) for name in missing],
        f"the cached snapshot {hub.snapshot_folder(pin)} lacks {len(missing)} files, and the hub isn't asked "
        "for them (incomplete download? run once online)",
    )
