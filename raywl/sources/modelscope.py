"""A model's folder from ModelScope, downloaded by its own client, once for all processes of a node.

The client checks every file of a snapshot against its hash whenever it is asked for one. So the process that
asks leaves a note beside the lock, and the others that want the same, at the same time or soon after, take
the folder from that.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import logging
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from raywl.errors import MissingFileError, RaywlError
from raywl.sources.hub import is_offline
from raywl.sources.hub_errors import without_secrets
from raywl.sources.modelscope_errors import modelscope_error, needs_modelscope
from raywl.sources.selection import INDEX_NAME, indexed_files

__all__ = ["maybe_download_from_modelscope"]

_log = logging.getLogger(__name__)

_SWITCHES = ("VLLM_USE_MODELSCOPE", "RAYWL_USE_MODELSCOPE")
_WAIT_S = 3600.0
"""How long a process waits for another one that downloads the same."""
_FRESH_S = 600.0
"""How long others of a launch take a process's result: ranks don't all start at once."""


def maybe_download_from_modelscope(
    model: str | os.PathLike[str],
    revision: str | None = None,
    download_dir: str | os.PathLike[str] | None = None,
    ignore_patterns: Sequence[str] | str | None = None,
    allow_patterns: Sequence[str] | str | None = None,
) -> str | None:
    """The folder of a model of ModelScope, if that is what is to be used.

    Does nothing unless `VLLM_USE_MODELSCOPE` or `RAYWL_USE_MODELSCOPE` is true. Of several processes of a
    node, one asks ModelScope; the others wait, and take the folder that it got, as do those of the same
    launch that come within 10 minutes. When it fails, it raises the error, and the next one tries. With
    `HF_HUB_OFFLINE`, nobody is asked, and the client's cache must have the model.

    Args:
        model: An existing path, which is given back as it is, or a repository, as `org/name`.
        revision: Branch, tag or commit; ModelScope's default, `master`, if `None`.
        download_dir: The client's cache folder; `None`: where it has one. The lock is there, too.
        ignore_patterns: Leave out files that match one.
        allow_patterns: Only files that match one.

    Returns:
        The folder; `None` if ModelScope isn't to be used.

    Raises:
        ImportError: The `modelscope` package isn't installed; the message names the extra.
        NotFoundError: There is no such repository or revision.
        AuthError, OfflineError, SourceError: ModelScope refuses, isn't to be asked, or fails.
        MissingFileError: Offline, and the cached folder lacks files that its index names.
        LockError: Another process held the lock for an hour, or there can be none.
    """
    if not any(os.environ.get(name, "").strip().lower() in ("1", "true", "yes", "on") for name in _SWITCHES):
        return None
    from raywl.locks import acquire_within, get_lock

    name = os.fsdecode(model)
    lock = get_lock(name, download_dir)
    note = lock.lock_file.removesuffix(".lock") + ".modelscope.json"
    before = _Outcome.read(note)
    with acquire_within(lock, _WAIT_S, f"download of {name} from ModelScope"):
        if os.path.exists(os.path.expanduser(name)):
            return name
        download, key = _call(name, revision, download_dir, ignore_patterns, allow_patterns)
        found = _Outcome.read(note)
        if found is not None and found.key == key:
            waited_for = before is None or before.token != found.token
            if found.path is not None and found.can_be_taken(waited_for):
                _log.info("%s: as process %d found it: %s", name, found.pid, found.path)
                return found.path
            if found.error is not None and waited_for:
                _log.warning("%s: process %d failed, and this one tries: %s", name, found.pid, found.error)
        return _lead(download, note, key, name, found if found is not None and found.error else None)


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What came of a download: the note that a process leaves for the others."""

    key: str
    """What was asked for, and of whom."""
    token: str
    """Another one for every download."""
    pid: int
    thread: int
    host: str
    launch: list[str]
    """What it shares with the other ranks of its launch."""
    at_s: float
    path: str | None = None
    error: str | None = None

    @classmethod
    def of_this(cls, key: str, path: str | None, error: str | None) -> _Outcome:
        return cls(
            key=key,
            token=secrets.token_hex(8),
            pid=os.getpid(),
            thread=threading.get_ident(),
            host=socket.gethostname(),
            launch=_launch(),
            at_s=time.time(),
            path=path,
            error=error,
        )

    @classmethod
    def read(cls, note: str) -> _Outcome | None:
        try:
            with open(note, encoding="utf-8") as file:
                return cls(**json.load(file))
        except (OSError, ValueError, TypeError):
            # There is none, or it is of another version.
            return None

    def can_be_taken(self, waited_for: bool) -> bool:
        """Whether its folder stands for what this process would get."""
        if self.path is None or not os.path.isdir(self.path):
            return False
        is_recent = 0 <= time.time() - self.at_s < _FRESH_S
        is_another = (self.pid, self.thread) != (os.getpid(), threading.get_ident())
        is_of_this_launch = self.host == socket.gethostname() and not set(self.launch).isdisjoint(_launch())
        return waited_for or (is_recent and is_another and is_of_this_launch)


def _launch() -> list[str]:
    """What the processes of one launch have in common, and those of two have not."""
    found = [f"group {os.getpgid(0)}"]
    parent = os.getppid()
    # A shell or the system's first process starts launches, and isn't one.
    if parent not in (1, os.getsid(0)):
        found.append(f"parent {parent}")
    return [f"{what} of job {os.environ.get('RAY_JOB_ID', '')}" for what in found]


def _lead(download: Callable[[], str], note: str, key: str, name: str, failed: _Outcome | None) -> str:
    """Downloads, and leaves the note, whatever comes of it."""
    path, said = None, None
    try:
        path = download()
        return path
    except BaseException as error:
        told = f"{type(error).__name__}: {error}"
        said = without_secrets(told, [os.environ.get("MODELSCOPE_API_TOKEN")])
        if failed is not None:
            error.add_note(f"before it, process {failed.pid} failed to download {name}: {failed.error}")
        raise
    finally:
        _leave(note, _Outcome.of_this(key, path, said))


def _leave(note: str, outcome: _Outcome) -> None:
    from raywl.locks import atomic_writer

    try:
        with atomic_writer(note) as file:
            json.dump(asdict(outcome), file)
    except OSError as error:
        # The next one asks again: more work, and no harm.
        _log.warning("%s can't be written: %s", note, error)


def _call(
    name: str,
    revision: str | None,
    download_dir: str | os.PathLike[str] | None,
    ignore_patterns: Sequence[str] | str | None,
    allow_patterns: Sequence[str] | str | None,
) -> tuple[Callable[[], str], str]:
    """The client's call, and what its result depends on."""
    snapshot_download = _client(name)
    told: dict[str, Any] = {
        "model_id": name,
        "revision": revision,
        "cache_dir": None if download_dir is None else os.fsdecode(download_dir),
        "local_files_only": is_offline(None),
    }
    for key, patterns in (("ignore_patterns", ignore_patterns), ("allow_patterns", allow_patterns)):
        if patterns is not None:
            told[key] = [patterns] if isinstance(patterns, str) else list(patterns)
    environment = {name: value for name, value in os.environ.items() if name.startswith("MODELSCOPE_")}
    module = sys.modules.get(snapshot_download.__module__)
    what = [told, environment, getattr(module, "__file__", None), os.path.expanduser("~")]
    # A hash, since the environment may hold a token.
    digest = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()

    def download() -> str:
        try:
            path: str = os.fspath(snapshot_download(**told))
            if told["local_files_only"]:
                _check_whole(path, told.get("allow_patterns"), told.get("ignore_patterns"))
            return path
        except RaywlError:
            raise
        except Exception as error:
            endpoint = os.environ.get("MODELSCOPE_ENDPOINT") or os.environ.get("MODELSCOPE_DOMAIN") or None
            secret = os.environ.get("MODELSCOPE_API_TOKEN")
            ref = f"{name}@{revision or 'master'}"
            told_error = modelscope_error(error, ref=ref, endpoint=endpoint, secrets=[secret])
            if told_error is None:
                raise
            raise told_error from None

    return download, digest


def _check_whole(folder: str, allow_patterns: list[str] | None, ignore_patterns: list[str] | None) -> None:
    """Whether a cached folder has the files that its index names, as far as they are asked for.

    Raises:
        MissingFileError: Some are absent. The client gives a folder back whatever is in it.
    """
    try:
        with open(os.path.join(folder, INDEX_NAME), "rb") as file:
            indexed = indexed_files(file.read())
    except OSError:
        return
    missing = [
        name
        for name in sorted(indexed or ())
        if (allow_patterns is None or any(fnmatch.fnmatch(name, pattern) for pattern in allow_patterns))
        and not any(fnmatch.fnmatch(name, pattern) for pattern in ignore_patterns or ())
        and not os.path.isfile(os.path.join(folder, name))
    ]
    if missing:
        raise MissingFileError(
            folder,
            missing,
            f"working offline, and {len(missing)} files that {INDEX_NAME} names are absent from the cache "
            "(incomplete download? run once online)",
        )


def _client(name: str) -> Callable[..., Any]:
    """The client's function.

    Raises:
        ImportError: The package isn't installed.
    """
    try:
        try:
            from modelscope.hub.snapshot_download import snapshot_download
        except ModuleNotFoundError:
            # Where the package has it, whatever its modules are called.
            from modelscope import snapshot_download
    except ImportError as error:
        raise needs_modelscope(f"{name}: a download from ModelScope") from error
    found: Callable[..., Any] = snapshot_download
    return found
