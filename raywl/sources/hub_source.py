"""A commit of a hub's repository: ranges of its files over HTTP, and their place in the hub's own cache.

Requests go through the session of the hub's client, with its proxies and certificates. The transfers are
raywl's: the client can't fetch ranges, nor go on with what a killed process left.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from raywl.errors import RaywlError, SourceError
from raywl.sources import hub
from raywl.sources.base import RemoteFile
from raywl.sources.cached import CachedSource
from raywl.sources.transfer import Interrupted, Limits, joined, retry_after_s

if TYPE_CHECKING:
    from raywl.sources.hub import HubPin

__all__ = ["HubSource"]

_SHA256 = re.compile(r"[0-9a-f]{64}")
_SHA1 = re.compile(r"[0-9a-f]{40}")
_SPAN = re.compile(r"bytes (\d+)-(\d+)/(\d+)$")
_LOCATION_S = 300.0
"""How long a storage's signed URL is used again. Hubs sign them for an hour or so."""


class _Locations:
    """Where the hub redirected to, by file; of this process."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[str, float]] = {}

    def get(self, name: str) -> str | None:
        url, since_s = self._known.get(name, ("", 0.0))
        return url if url and time.monotonic() - since_s < _LOCATION_S else None

    def note(self, name: str, url: str) -> None:
        self._known[name] = url, time.monotonic()

    def drop(self, name: str) -> None:
        self._known.pop(name, None)

    def __reduce__(self) -> tuple[type[_Locations], tuple[()]]:
        return _Locations, ()


@dataclass(frozen=True)
class HubSource(CachedSource):
    """A commit of a repository. Pickles without the token."""

    pin: HubPin = field(kw_only=True)
    locations: _Locations = field(default_factory=_Locations, compare=False, repr=False)

    __hash__ = CachedSource.__hash__

    @property
    def repo_id(self) -> str:
        """The repository."""
        return self.pin.repo_id

    @property
    def commit(self) -> str:
        """Its commit."""
        return self.pin.commit

    def pin_for_others(self) -> HubPin:
        """What another node opens the same by, with a cache of its own."""
        # A source that came from another process has lost its token.
        return replace(self.pin, cache_dir=None, token=self.pin.token or hub.own_token())

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "pin": self.pin.without_secrets()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def limits(self) -> Limits:
        return self.pin.limits or Limits.of_environment()

    def lock(self) -> AbstractContextManager[None]:
        return hub.download_lock(self.pin)

    def fetched(self) -> None:
        hub.note_revision(self.pin)

    def key(self, file: RemoteFile) -> str:
        assert file.tag is not None
        return file.tag

    def hashes(self, file: RemoteFile) -> Mapping[str, str]:
        # Large files are known by their SHA-256, the others by that of git.
        if _SHA256.fullmatch(file.tag or ""):
            return {"sha256": file.tag or ""}
        return {"git": file.tag or ""} if _SHA1.fullmatch(file.tag or "") else {}

    def wrong(self, name: str, why: str) -> SourceError:
        return SourceError(
            f"{self.pin.repo_id}@{self.pin.revision}",
            f"download of {hub.in_repository(self.pin, name)} brought other bytes than the hub announced "
            f"({why}); they were thrown away",
            endpoint=hub.endpoint_of(self.pin),
        )

    def stream(
        self, file: RemoteFile, start: int, end: int, stop: threading.Event
    ) -> Generator[bytes, None, None]:
        path = hub.in_repository(self.pin, file.name)
        wait_s: list[float | None] = [None]
        position = start
        try:
            with hub.translated(self.pin, path), self._answer(file, start, end) as answer:
                if answer.status_code >= 400:
                    self.locations.drop(file.name)
                    wait_s[0] = retry_after_s(answer.headers.get("Retry-After"))
                    answer.read()
                    _raise_for(answer)
                self._note_location(file, answer)
                position = self._first_byte(path, answer, start, file)
                for block in joined(answer.iter_raw()):
                    first, position = position, position + len(block)
                    if position > start:
                        yield block[max(0, start - first) : max(0, end - first)]
                    if position >= end or stop.is_set():
                        break
        except RaywlError as error:
            raise Interrupted.if_transient(error, wait_s[0]) from None
        if position < end and not stop.is_set():
            broken = SourceError(
                f"{self.pin.repo_id}@{self.pin.revision}",
                f"download of {path}: it broke off at byte {position} of {end}",
                endpoint=hub.endpoint_of(self.pin),
            )
            raise Interrupted(broken)

    def _answer(self, file: RemoteFile, start: int, end: int) -> AbstractContextManager[Any]:
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import build_hf_headers, get_session  # type: ignore[attr-defined]

        url = self.locations.get(file.name)
        # Where the hub leads to, the URL itself is the permission.
        headers = build_hf_headers(token=self.pin.token if url is None else False)
        headers |= {"Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}
        if url is None:
            path = hub.in_repository(self.pin, file.name)
            url = hf_hub_url(
                self.pin.repo_id, path, revision=self.pin.commit, endpoint=hub.endpoint_of(self.pin)
            )
        session: Any = get_session()
        answer: AbstractContextManager[Any] = session.stream(
            "GET", url, headers=headers, timeout=self.limits().stall_s, follow_redirects=True
        )
        return answer

    def _note_location(self, file: RemoteFile, answer: Any) -> None:
        if answer.history and answer.url.host != answer.history[0].url.host:
            self.locations.note(file.name, str(answer.url))

    def _first_byte(self, path: str, answer: Any, start: int, file: RemoteFile) -> int:
        """Which byte of the file the answer's first is."""
        told = None
        match = _SPAN.match(answer.headers.get("Content-Range") or "")
        if answer.headers.get("Content-Encoding", "identity") != "identity":
            told = f"it came as {answer.headers['Content-Encoding']}"
        elif answer.status_code == 200:
            length = answer.headers.get("Content-Length")
            if length is None or int(length) == file.size:
                return 0
            told = f"{length} bytes came, not {file.size}"
        elif match is None or int(match[1]) != start or int(match[3]) != file.size:
            came = answer.headers.get("Content-Range")
            told = f"bytes from {start} on of {file.size} were asked for, {came} came"
        if told is None:
            return start
        raise SourceError(
            f"{self.pin.repo_id}@{self.pin.revision}",
            f"download of {path}: {told}",
            endpoint=hub.endpoint_of(self.pin),
            status=answer.status_code,
        )


def _raise_for(answer: Any) -> None:
    from huggingface_hub.utils import hf_raise_for_status  # type: ignore[attr-defined]

    hf_raise_for_status(answer)
