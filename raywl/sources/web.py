"""Plain web servers, through fsspec's session."""

from __future__ import annotations

import asyncio
import contextlib
import html
import re
import threading
from collections.abc import Generator, Mapping, Sequence
from typing import Any
from urllib.parse import quote, unquote, urljoin, urlsplit, urlunsplit

from raywl.errors import CheckpointError, NotFoundError, SourceError
from raywl.sources.base import RemoteFile
from raywl.sources.remote import FsspecRemote, LoopCalls, Probe, changed_error
from raywl.sources.store_errors import StoreWords, status_error
from raywl.sources.transfer import Interrupted, Limits, again, retry_after_s

__all__ = ["UNKNOWN_BYTES", "WebRemote"]

UNKNOWN_BYTES = -1
"""Size of a listed file that wasn't looked at."""

_SPAN = re.compile(r"bytes (?:(\d+)-(\d+)|\*)/(\d+)$")
_LINK = re.compile(r"""<a\s[^>]*?href\s*=\s*(?:"([^"]*)"|'([^']*)'|([^\s>]+))""", re.IGNORECASE)
_MAX_LISTING_BYTES = 16 << 20
_PLAIN = {"Accept-Encoding": "identity"}
"""Ranges are of the file as it is."""


class WebRemote(FsspecRemote):
    """A folder of a web server: its listing, where it gives one, and files by name."""

    def __init__(
        self, protocol: str, path: str, options: Mapping[str, Any], limits: Limits, words: StoreWords
    ) -> None:
        """Opens nothing yet.

        Args: as of `FsspecRemote`; `path` may have a query, which then goes with every request.
        """
        # Proxies of the environment count, as for every other client.
        client = {"trust_env": True, **(options.get("client_kwargs") or {})}
        super().__init__(protocol, "", {**options, "client_kwargs": client}, limits, words)
        parts = urlsplit(f"{protocol}://{path}")
        self._base = urlunsplit((parts.scheme, parts.netloc, parts.path.rstrip("/") + "/", "", ""))
        self._query = f"?{parts.query}" if parts.query else ""
        self._calls = LoopCalls(self._fs)

    def _url(self, name: str) -> str:
        # The names are taken as they are; the folder is a URL already.
        return self._base + quote(name) + self._query

    async def _get(self, url: str, headers: Mapping[str, str]) -> Any:
        import aiohttp
        import yarl

        options = dict(self._fs.kwargs)
        headers = {**_PLAIN, **(options.pop("headers", None) or {}), **headers}
        session = await self._fs.set_session()
        # Of the whole there is no telling; that bytes come is watched while they are read.
        options.setdefault("timeout", aiohttp.ClientTimeout(total=None, sock_connect=self._limits.stall_s))
        async with asyncio.timeout(self._limits.stall_s):
            return await session.get(yarl.URL(url, encoded=True), headers=headers, **options)

    def _answer(self, url: str, headers: Mapping[str, str], doing: str, stop: threading.Event | None) -> Any:
        """An answer that isn't an error."""
        with self._said(doing, transient=True):
            answer = self._calls.call(self._get(url, headers), stop)
        if answer.status < 400:
            return answer
        self._close(answer)
        error = status_error(answer.status, "", answer.reason or "", self._words, doing)
        raise Interrupted.if_transient(error, retry_after_s(answer.headers.get("Retry-After")))

    def _close(self, answer: Any) -> None:
        with contextlib.suppress(RuntimeError):
            self._fs.loop.call_soon_threadsafe(answer.close)

    def _list(self, folder: str) -> Sequence[RemoteFile]:
        url = self._url(f"{folder}/" if folder else "")
        answer = self._answer(url, {}, "listing", None)
        if answer.content_type != "text/html":
            self._close(answer)
            raise NotFoundError(self._words.ref, "the server gives no listing", endpoint=self.endpoint)
        with self._said("listing", transient=True):
            blocks = self._calls.blocks(
                answer.content.read, answer.close, _MAX_LISTING_BYTES, self._limits.stall_s, threading.Event()
            )
            text = b"".join(blocks).decode("utf-8", "replace")
        base = urljoin(str(answer.url).partition("?")[0], ".")
        names = set()
        for groups in _LINK.findall(text):
            link = urljoin(str(answer.url), html.unescape(next(filter(None, groups), "")))
            path = link.partition("#")[0].partition("?")[0]
            name = unquote(path.removeprefix(base))
            if path.startswith(base) and name and "/" not in name:
                names.add(f"{folder}/{name}" if folder else name)
        return [RemoteFile(name, UNKNOWN_BYTES) for name in sorted(names)]

    def probe(self, name: str, nbytes: int) -> Probe:
        return again(lambda: self._probe(name, nbytes), self._limits)

    def _probe(self, name: str, nbytes: int) -> Probe:
        doing = f"looking at {name}" if name else "looking"
        span = {"Range": f"bytes=0-{nbytes - 1}"}
        try:
            answer = self._answer(self._url(name), span, doing, None)
        except SourceError as error:
            # No range of an empty file can be had.
            if error.status == 416:
                return Probe(RemoteFile(name, 0), b"")
            raise
        if answer.content_type == "text/html" and not name.endswith((".html", ".htm")):
            self._close(answer)
            raise SourceError(
                self._words.file(name),
                f"{doing}: a web page came in its place (from a proxy, or to sign in?)",
                endpoint=self.endpoint,
                status=answer.status,
            )
        file = self._file_of(name, answer)
        stop = threading.Event()
        return Probe(file, b"".join(self._blocks(file, answer, 0, min(nbytes, file.size), stop)))

    def _file_of(self, name: str, answer: Any) -> RemoteFile:
        match = _SPAN.match(answer.headers.get("Content-Range") or "")
        size = match[3] if answer.status == 206 and match else answer.headers.get("Content-Length")
        if size is None or answer.headers.get("Content-Encoding", "identity") != "identity":
            self._close(answer)
            raise SourceError(
                self._words.file(name), "the server doesn't say how large the file is", endpoint=self.endpoint
            )
        tag = answer.headers.get("ETag") or answer.headers.get("Last-Modified")
        return RemoteFile(name, int(size), tag, ranged=answer.status == 206)

    def stream(
        self, file: RemoteFile, start: int, end: int, stop: threading.Event
    ) -> Generator[bytes, None, None]:
        headers = {"Range": f"bytes={start}-{end - 1}"} if file.ranged else {}
        if file.tag and file.tag.startswith('"'):
            headers["If-Match"] = file.tag
        try:
            answer = self._answer(self._url(file.name), headers, f"download of {file.name}", stop)
        except SourceError as error:
            if error.status in (412, 416):
                raise changed_error(self._words.file(file.name), file, "another") from None
            raise
        now = self._file_of(file.name, answer)
        if (now.size, now.tag) != (file.size, file.tag):
            self._close(answer)
            told = f"{now.size} bytes" + (f", ETag {now.tag}" if now.tag else "")
            raise changed_error(self._words.file(file.name), file, told)
        yield from self._blocks(file, answer, start, end, stop)

    def _blocks(
        self, file: RemoteFile, answer: Any, start: int, end: int, stop: threading.Event
    ) -> Generator[bytes, None, None]:
        match = _SPAN.match(answer.headers.get("Content-Range") or "") if answer.status == 206 else None
        # Without ranges the whole comes, and what is there already has to go by.
        position = int(match[1]) if match and match[1] else 0
        if position > start or (match and position != start):
            self._close(answer)
            raise CheckpointError(
                self._words.file(file.name),
                None,
                f"bytes from {start} on were asked for, those from {position} came",
            )
        with self._said(f"download of {file.name}", transient=True):
            for block in self._calls.blocks(
                answer.content.read, answer.close, end - position, self._limits.stall_s, stop, answer.content
            ):
                first, position = position, position + len(block)
                if position > start:
                    yield block[max(0, start - first) :]
        if position != end:
            told = f"the server broke off at byte {position} of {end}"
            raise Interrupted(SourceError(self._words.file(file.name), told, endpoint=self.endpoint))

    def hashes(self, file: RemoteFile) -> Mapping[str, str]:
        # Every read was conditional on the ETag, or compared with it.
        return {}
