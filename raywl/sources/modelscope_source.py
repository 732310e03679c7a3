"""A state of a repository of ModelScope: ranges of its files, and their place in the cache of its client."""

from __future__ import annotations

import contextlib
import hashlib
import os
import posixpath
import re
import threading
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from raywl.errors import RaywlError, SourceError
from raywl.sources.base import RemoteFile, Report
from raywl.sources.cache import check_hash, size_of
from raywl.sources.cached import CachedSource
from raywl.sources.modelscope_pin import (
    SCHEME,
    ModelScopePin,
    cache_root_of,
    client_of,
    note_files,
    translated,
)
from raywl.sources.transfer import Interrupted, Limits

__all__ = ["ModelScopeSource"]

_SPAN = re.compile(r"bytes (\d+)-(\d+)/(\d+)$")
_BLOCK_BYTES = 256 << 10


class _Clients:
    """The client of a source, made when it is first needed, and again in a forked process."""

    def __init__(self) -> None:
        self._made: tuple[int, Any] | None = None
        self._lock = threading.Lock()

    def get(self, pin: ModelScopePin) -> Any:
        with self._lock:
            if self._made is None or self._made[0] != os.getpid():
                self._made = os.getpid(), client_of(pin)
            return self._made[1]

    def __reduce__(self) -> tuple[type[_Clients], tuple[()]]:
        return _Clients, ()


@dataclass(frozen=True)
class ModelScopeSource(CachedSource):
    """One state of a repository. Pickles without the token."""

    pin: ModelScopePin = field(kw_only=True)
    clients: _Clients = field(default_factory=_Clients, compare=False, repr=False)

    __hash__ = CachedSource.__hash__

    def pin_for_others(self) -> ModelScopePin:
        """What another node opens the same by, with a cache of its own."""
        return replace(self.pin, cache_dir=None)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "pin": self.pin.without_secrets()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def limits(self) -> Limits:
        return self.pin.limits or Limits.of_environment()

    def lock(self) -> AbstractContextManager[None]:
        return self._locked()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        from raywl.locks import acquire_within, get_lock

        pin = self.pin
        lock = get_lock(
            f"{SCHEME}{pin.repo_id}", os.path.join(cache_root_of(pin.cache_dir), ".lock", "raywl")
        )
        with acquire_within(lock, pin.timeout_s, f"download of {pin}"):
            yield

    def fetched(self) -> None:
        note_files(self.pin)

    def bring(self, files: Sequence[RemoteFile], report: Report | None = None) -> int:
        self.repository.make()
        for file in files:
            self._adopt(file)
        return super().bring(files, report)

    def _adopt(self, file: RemoteFile) -> None:
        """Takes a file that the client downloaded for the revision, if it is the same."""
        blob = self.repository.blob(self.key(file))
        name = os.path.join(self.inside, file.name)
        there = os.path.join(self.repository.folder, "snapshots", self.pin.revision, name)
        if file.tag is None or size_of(blob) is not None or size_of(there) != file.size:
            return
        with contextlib.suppress(OSError):
            check_hash(there, self.hashes(file), lambda why: SourceError(there, why))
            # A second name for the same bytes; the client replaces its files, and never writes into them.
            os.link(os.path.realpath(there), blob)

    def key(self, file: RemoteFile) -> str:
        if file.tag is not None:
            return file.tag
        return hashlib.sha256(f"{self.pin.state}\0{self.inside}\0{file.name}".encode()).hexdigest()[:40]

    def hashes(self, file: RemoteFile) -> Mapping[str, str]:
        return {} if file.tag is None else {"sha256": file.tag}

    def wrong(self, name: str, why: str) -> SourceError:
        return SourceError(
            f"{self.pin.repo_id}@{self.pin.revision}",
            f"download of {posixpath.join(self.inside, name)} brought other bytes than were listed ({why}); "
            "they were thrown away",
            endpoint=self.pin.endpoint,
        )

    def stream(
        self, file: RemoteFile, start: int, end: int, stop: threading.Event
    ) -> Generator[bytes, None, None]:
        path = posixpath.join(self.inside, file.name)
        doing = f"download of {path}"
        position = start
        try:
            with translated(self.pin, doing), closing(self._answer(path, start, end)) as answer:
                position = self._first_byte(doing, answer, start, file)
                for block in answer.iter_content(_BLOCK_BYTES):
                    first, position = position, position + len(block)
                    if position > start:
                        yield block[max(0, start - first) : max(0, end - first)]
                    if position >= end or stop.is_set():
                        break
        except RaywlError as error:
            raise Interrupted.if_transient(error) from None
        if position < end and not stop.is_set():
            raise Interrupted(self._error(f"{doing}: it broke off at byte {position} of {end}"))

    def _answer(self, path: str, start: int, end: int) -> Any:
        headers = {"Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}
        revision = self.pin.commit or self.pin.revision
        legacy = self.clients.get(self.pin).legacy
        return legacy.download_stream(self.pin.repo_id, "model", path, revision, headers=headers)

    def _first_byte(self, doing: str, answer: Any, start: int, file: RemoteFile) -> int:
        """Which byte of the file the answer's first is."""
        match = _SPAN.match(answer.headers.get("Content-Range") or "")
        length = answer.headers.get("Content-Length")
        if answer.status_code == 200:
            if length is None or int(length) == file.size:
                return 0
            told = f"{length} bytes came, not {file.size}"
        elif match is not None and int(match[1]) == start and int(match[3]) == file.size:
            return start
        else:
            came = answer.headers.get("Content-Range")
            told = f"bytes from {start} on of {file.size} were asked for, {came} came"
        raise self._error(f"{doing}: {told}", answer.status_code)

    def _error(self, text: str, status: int | None = None) -> SourceError:
        ref = f"{self.pin.repo_id}@{self.pin.revision}"
        return SourceError(ref, text, endpoint=self.pin.endpoint, status=status)
