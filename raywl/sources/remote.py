"""Stores as fsspec opens them: lists, and ranges of files that are still what was listed."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import posixpath
import threading
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

from raywl.errors import CheckpointError, NotFoundError, SourceError
from raywl.sources.base import RemoteFile
from raywl.sources.store_errors import StoreWords, store_error
from raywl.sources.transfer import Interrupted, Limits, Stopped, again, read_range

__all__ = ["FsspecRemote", "LoopCalls", "Probe", "Remote", "changed_error", "open_filesystem"]

_BLOCK_BYTES = 1 << 20
_BLOCK_S = 1.0
"""Blocks are handed on after this time, however small, so that little is lost when a transfer breaks."""
_PIECE_BYTES = 4 << 20
_SLOWEST_BYTES_PER_S = 64 << 10
_WAKE_S = 0.25

T = TypeVar("T")


class Probe(NamedTuple):
    """What a look at a file brings."""

    file: RemoteFile
    head: bytes
    """Its first bytes."""


class Remote(Protocol):
    """One folder of a store. Safe for use by several threads; every error is one of raywl's."""

    endpoint: str | None
    """Where it is asked, for messages."""

    def list(self, folder: str = "") -> Sequence[RemoteFile]:
        """Files of the folder, or of a folder inside of it, in full and as of now; no folders, no markers.

        Raises:
            NotFoundError: There is no such bucket, or nothing there.
        """

    def probe(self, name: str, nbytes: int) -> Probe:
        """Looks at one file, which needn't be listed, and brings its first bytes."""

    def stream(
        self, file: RemoteFile, start: int, end: int, stop: threading.Event
    ) -> Generator[bytes, None, None]:
        """The bytes `[start, end)`, in blocks.

        Raises:
            Interrupted: Another try may help.
            CheckpointError: The file isn't what was listed any more.
        """

    def hashes(self, file: RemoteFile) -> Mapping[str, str]:
        """Hashes of the whole file that the store knows, in hex, by `hashlib`'s names, or `crc32`.

        Raises:
            CheckpointError: The file isn't what was listed any more.
        """


def changed_error(label: str, file: RemoteFile, now: str) -> CheckpointError:
    """What to raise where a file isn't the listed one any more."""
    was = f"{file.size} bytes" + (f", ETag {file.tag}" if file.tag else "")
    return CheckpointError(
        label, None, f"changed in the store since it was opened: it was {was}, now it is {now}"
    )


_MADE: dict[bytes, Any] = {}
"""File systems of this process, by what they were made with."""
_MADE_LOCK = threading.Lock()
_MAX_MADE = 8


def open_filesystem(protocol: str, url: str, options: Mapping[str, Any]) -> Any:
    """An fsspec file system of raywl's own, that remembers no listings.

    Args:
        protocol: The URL's.
        url: It may say host and user, where these are options of the file system.
        options: fsspec's, for the protocol.

    Raises:
        ValueError: No such protocol, or options that it doesn't take.
        SourceError: The package that it needs isn't installed.
    """
    import fsspec

    try:
        kind = fsspec.get_filesystem_class(protocol)
    except ValueError:
        raise ValueError(f"{protocol}:// is no protocol of fsspec") from None
    except ImportError as error:
        raise SourceError(f"{protocol}://", f"needs a package that isn't installed: {error}") from None
    told = {**kind._get_kwargs_from_urls(url), **options}
    # Making one takes a good part of a second. What the environment says of credentials counts as it is now.
    around = sorted((name, value) for name, value in os.environ.items() if name.startswith("AWS_"))
    key = hashlib.sha256(repr((os.getpid(), protocol, fsspec.utils.tokenize(told), around)).encode()).digest()
    with _MADE_LOCK:
        if key not in _MADE:
            try:
                made = kind(skip_instance_cache=True, use_listings_cache=False, **told)
            except TypeError as error:
                raise _unfit(options, protocol, error) from None
            if len(_MADE) >= _MAX_MADE:
                del _MADE[next(iter(_MADE))]
            _MADE[key] = made
        return _MADE[key]


def _unfit(options: Mapping[str, Any], protocol: str, error: TypeError) -> ValueError:
    return ValueError(f"storage_options {sorted(options)} don't suit {protocol}://: {error}")


class LoopCalls:
    """Runs coroutines of a file system in its own loop, from any thread, with a way out."""

    def __init__(self, fs: Any) -> None:
        self._fs = fs

    def call(self, coroutine: Awaitable[T], stop: threading.Event | None = None) -> T:
        """The result of a coroutine.

        Raises:
            Stopped: `stop` was set meanwhile.
        """
        future: Any = asyncio.run_coroutine_threadsafe(coroutine, self._fs.loop)  # type: ignore[arg-type]
        try:
            while True:
                try:
                    result: T = future.result(_WAKE_S)
                    return result
                except TimeoutError:
                    if future.done():
                        raise
                if stop is not None and stop.is_set():
                    raise Stopped
        except BaseException:
            future.cancel()
            raise

    def blocks(
        self,
        read: Callable[[int], Awaitable[bytes]],
        close: Callable[[], Any],
        nbytes: int,
        stall_s: float,
        stop: threading.Event,
        content: Any = None,
    ) -> Generator[bytes, None, None]:
        """At most `nbytes` of a stream, in blocks of about 1 MiB or 1 s.

        Args:
            read: Gives some bytes, at most as many as it is told; none at the end.
            close: Closes it.
            nbytes: How many are wanted.
            stall_s: How long to wait for the next one.
            stop: Ends it when set.
            content: aiohttp's stream that `read` reads of, if it is one.

        Raises:
            TimeoutError: Nothing came for `stall_s`.
            Stopped: `stop` was set.
        """
        try:
            while nbytes:
                block, error = self.call(_block(read, min(_BLOCK_BYTES, nbytes), stall_s, content), stop)
                if block:
                    nbytes -= len(block)
                    yield block
                if error is not None:
                    raise error
                if not block:
                    return
        finally:
            with contextlib.suppress(RuntimeError):
                self._fs.loop.call_soon_threadsafe(close)


async def _block(
    read: Callable[[int], Awaitable[bytes]], nbytes: int, stall_s: float, content: Any
) -> tuple[bytes, Exception | None]:
    """What comes of a stream, and what ended it after that: what has come isn't lost by what comes then."""
    pieces: list[bytes] = []
    size, loop = 0, asyncio.get_running_loop()
    hand_on_s = loop.time() + _BLOCK_S
    try:
        while size < nbytes:
            # With something to hand on, the stall is for the next block to find out.
            wait_s = min(stall_s, hand_on_s - loop.time()) if pieces else stall_s
            if wait_s <= 0:
                break
            try:
                async with asyncio.timeout(wait_s):
                    piece = await read(nbytes - size)
            except TimeoutError:
                if pieces:
                    break
                raise
            if not piece:
                break
            pieces.append(piece)
            size += len(piece)
    except Exception as error:
        return (b"".join(pieces) + _received(content))[:nbytes], error
    return b"".join(pieces), None


def _received(content: Any) -> bytes:
    """What had come before a connection broke, which aiohttp's stream gives nobody any more."""
    try:
        return b"".join(content._buffer)[content._buffer_offset :]
    except (AttributeError, TypeError):
        return b""


class FsspecRemote:
    """Any store of fsspec, through the calls that all of them have."""

    def __init__(
        self, protocol: str, path: str, options: Mapping[str, Any], limits: Limits, words: StoreWords
    ) -> None:
        """Opens nothing yet.

        Args:
            protocol: The URL's.
            path: Of the folder, without protocol and trailing slash.
            options: fsspec's, for the protocol.
            limits: How to treat the store.
            words: For messages.
        """
        self._words, self._limits, self._protocol, self._options = words, limits, protocol, options
        with self._said("opening"):
            self._fs = open_filesystem(protocol, f"{protocol}://{path}", options)
        self._path: str = self._fs._strip_protocol(f"{protocol}://{path}").rstrip("/")
        self.endpoint: str | None = words.endpoint

    @contextlib.contextmanager
    def _said(self, doing: str, *, transient: bool = False) -> Generator[None, None, None]:
        """What the store raises, as raywl's own."""
        try:
            yield
        except TypeError as error:
            # What clients say of options, as late as when they connect.
            if "unexpected keyword argument" not in str(error):
                raise
            raise _unfit(self._options, self._protocol, error) from None
        except Exception as error:
            told, wait_s = store_error(error, self._words, doing)
            if told is None:
                raise
            raise (Interrupted.if_transient(told, wait_s) if transient else told) from None

    def _full(self, name: str) -> str:
        return f"{self._path}/{name}" if name else self._path

    def list(self, folder: str = "") -> Sequence[RemoteFile]:
        return again(lambda: self._list(folder), self._limits)

    def _list(self, folder: str) -> Sequence[RemoteFile]:
        with self._said("listing", transient=True):
            entries = self._fs.ls(self._full(folder), detail=True)
        prefix = self._full(folder) + "/"
        found = []
        for entry in entries:
            name = str(entry["name"])
            if entry["type"] == "file" and name.startswith(prefix) and not name.endswith("/"):
                inside = name.removeprefix(prefix)
                found.append(_file_of(f"{folder}/{inside}" if folder else inside, entry))
        if not found and not entries:
            raise NotFoundError(self._words.ref, "there is nothing there", endpoint=self.endpoint)
        return found

    def probe(self, name: str, nbytes: int) -> Probe:
        def look() -> Mapping[str, Any]:
            with self._said(f"looking at {name}", transient=True):
                found: Mapping[str, Any] = self._fs.info(self._full(name))
                return found

        entry = again(look, self._limits)
        if entry.get("type") != "file":
            raise NotFoundError(self._words.file(name), "is a folder", endpoint=self.endpoint)
        file = _file_of(name, entry)
        return Probe(file, read_range(partial(self.stream, file), 0, min(nbytes, file.size), self._limits))

    def stream(
        self, file: RemoteFile, start: int, end: int, stop: threading.Event
    ) -> Generator[bytes, None, None]:
        while start < end:
            nbytes = min(_PIECE_BYTES, end - start)
            with self._said(f"download of {file.name}", transient=True):
                data = self._cat(self._full(file.name), start, start + nbytes, stop)
            if len(data) != nbytes:
                # Shorter than a moment ago, or broken off: the next look tells.
                self._check(file)
                raise Interrupted(
                    SourceError(
                        self._words.file(file.name),
                        f"bytes {start} to {start + nbytes} were asked for, {len(data)} bytes came",
                        endpoint=self.endpoint,
                    )
                )
            yield data
            start += nbytes

    def _cat(self, path: str, start: int, end: int, stop: threading.Event) -> bytes:
        if not getattr(self._fs, "async_impl", False):
            data: bytes = self._fs.cat_file(path, start=start, end=end)
            return data

        async def cat() -> bytes:
            # The byte that comes last can't be told from none, so a piece has the time of a slow link more.
            async with asyncio.timeout(self._limits.stall_s + (end - start) / _SLOWEST_BYTES_PER_S):
                data: bytes = await self._fs._cat_file(path, start=start, end=end)
                return data

        return LoopCalls(self._fs).call(cat(), stop)

    def _check(self, file: RemoteFile) -> None:
        with self._said(f"looking at {file.name}"):
            now = _file_of(file.name, self._fs.info(self._full(file.name)))
        if now[1:3] == file[1:3]:
            return
        # Not every store tells the same of a file when it is asked for and when it is listed.
        listed = self._list(posixpath.dirname(file.name))
        if not any(one[:3] == file[:3] for one in listed):
            told = f"{now.size} bytes" + (f", ETag {now.tag}" if now.tag else "")
            raise changed_error(self._words.file(file.name), file, told)

    def hashes(self, file: RemoteFile) -> Mapping[str, str]:
        # No condition goes with the reads of every store, so what was read is compared with what is there.
        self._check(file)
        return {}


_TAGS = ("ETag", "etag", "VersionId", "generation", "content_md5", "md5Hash", "LastModified", "last_modified",
         "updated", "mtime", "created")  # fmt: skip


def _file_of(name: str, entry: Mapping[str, Any]) -> RemoteFile:
    tag = next((entry[key] for key in _TAGS if entry.get(key) not in (None, "")), None)
    if isinstance(tag, datetime):
        tag = tag.timestamp()
    return RemoteFile(name, int(entry.get("size") or 0), None if tag is None else str(tag))
