"""Loads from chunks that come while they are read, of a checkpoint whose files are on no disk here."""

from __future__ import annotations

import contextlib
import posixpath
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from raywl.checkpoint import Manifest
from raywl.coordination import ChunkTable
from raywl.errors import CheckpointError
from raywl.plan import Read
from raywl.readers.chunked import ChunkedReads
from raywl.readers.execute import READER_THREADS
from raywl.readers.files import OpenFiles
from raywl.readers.memory import ByteView
from raywl.readers.reader import Reader
from raywl.sources import Source
from raywl.sources.base import Report
from raywl.text import format_bytes
from raywl.timeline import Span, Timeline

__all__ = ["Feed", "StreamedSource", "is_streamed", "open_reader", "streamed"]

_STEP_BYTES = 4 << 20
"""What is asked for at once of what can't wait for its chunk."""


class Feed(Protocol):
    """Where a rank gets a checkpoint's bytes from."""

    @property
    def table(self) -> ChunkTable:
        """The chunks that it comes in."""

    def read(self, file: str, start: int, end: int) -> bytes | memoryview:
        """Bytes of a file at once, fetched for this alone.

        Raises:
            RaywlError: They can't be had.
        """

    def take(self, needs: int) -> Iterator[list[tuple[int, Any]]]:
        """Some chunks, in batches as they come; a batch is done with when the next one is asked for.

        Args:
            needs: All that are wanted, as a set. To be called once, also when nothing is.

        Yields:
            Numbers, and 1-d uint8 arrays which may be read-only.

        Raises:
            RaywlError: They can't be had.
        """


@dataclass(frozen=True)
class StreamedSource:
    """A remote source of which this node has no file, and fetches none: `feed` has the bytes."""

    inner: Source
    feed: Feed = field(compare=False, repr=False)

    @property
    def ref(self) -> str:
        return self.inner.ref

    @property
    def kind(self) -> str:
        return self.inner.kind

    @property
    def identity(self) -> str | None:
        return self.inner.identity

    @property
    def only(self) -> str | None:
        return self.inner.only

    @property
    def is_remote(self) -> bool:
        # Nothing is to be fetched before it is read.
        return False

    def list(self) -> list[str]:
        return self.inner.list()

    def size(self, name: str) -> int | None:
        return self.inner.size(name)

    def stamp(self, name: str) -> str | None:
        return None

    def read(self, name: str, start: int, end: int) -> bytes:
        return bytes(self.feed.read(name, start, min(end, self.size(name) or 0)))

    def path(self, name: str) -> str:
        return self.label(name)

    def label(self, name: str) -> str:
        return posixpath.join(getattr(self.inner, "base", self.ref), name).rstrip("/")

    def fetch(self, names: Iterable[str], report: Report | None = None) -> int:
        return 0

    def known_hashes(self, name: str) -> Mapping[str, str]:
        return {}


def streamed(manifest: Any, feed: Feed) -> Any:
    """A remote checkpoint, of either class, whose bytes come out of a feed."""
    return replace(manifest, source=StreamedSource(manifest.source, feed))


def is_streamed(manifest: Manifest) -> bool:
    """Whether a checkpoint is one that `streamed` made."""
    source: Any = manifest.source
    return isinstance(source, StreamedSource)


@contextlib.contextmanager
def open_reader(
    manifest: Manifest,
    strategy: str | None,
    *,
    num_local_ranks: int = 1,
    timeline: Timeline | None = None,
) -> Iterator[Reader]:
    """The reader of a checkpoint: of its files, or of its feed if it is streamed. Arguments: see `Reader`."""
    source: Any = manifest.source
    if isinstance(source, StreamedSource):
        with _NoFiles(manifest, source.feed) as files:
            yield _StreamReader(manifest, files, num_local_ranks, timeline)
    else:
        with OpenFiles(manifest) as files:
            yield Reader(manifest, files, strategy, num_local_ranks=num_local_ranks, timeline=timeline)


class _NoFiles(OpenFiles):
    """Files that aren't here: nothing can be opened or mapped, and ranges are asked for one by one.

    That they are still what was opened, the node that fetches sees to.
    """

    def __init__(self, manifest: Manifest, feed: Feed) -> None:
        super().__init__(manifest)
        self.feed = feed
        self.early_bytes = 0
        """What was asked for by ranges."""

    @contextlib.contextmanager
    def using(self, name: str) -> Iterator[int]:
        raise CheckpointError(self._manifest.source.label(name), None, "is streamed: there is no file here")
        yield -1  # type: ignore[unreachable]

    def fs_type(self, name: str) -> str:
        return ""

    def is_local(self, name: str) -> bool:
        return False

    def open_all(self, names: Iterable[str]) -> None:
        """There is nothing to open."""

    def read_into(self, name: str, start: int, buffers: Sequence[memoryview]) -> None:
        for buffer in buffers:
            for done in range(0, buffer.nbytes, _STEP_BYTES):
                count = min(_STEP_BYTES, buffer.nbytes - done)
                data = self.feed.read(name, start + done, start + done + count)
                buffer[done : done + count] = data
                self.early_bytes += count
            start += buffer.nbytes

    def check_unchanged(self) -> None:
        """The node that fetches has checked."""


class _StreamReader(Reader):
    """Takes what is read inside `reading` out of chunks, as they come; before that, asks for ranges."""

    word = "chunks"
    is_streamed = True

    def __init__(
        self, manifest: Manifest, files: _NoFiles, num_local_ranks: int, timeline: Timeline | None
    ) -> None:
        super().__init__(manifest, files, "buffered", num_local_ranks=num_local_ranks, timeline=timeline)
        self._unopened, self._feed = files, files.feed
        self._is_streaming = False

    @property
    def notes(self) -> list[str]:
        told = ["streamed: out of chunks as they came, with nothing on this node's disk"]
        if early_bytes := self._unopened.early_bytes:
            told.append(
                f"streamed: {format_bytes(early_bytes)} were asked for before their chunks came, as loaders "
                "looked at values"
            )
        return told

    @contextlib.contextmanager
    def reading(self, reads: Sequence[Read], stacklevel: int = 3) -> Iterator[None]:
        self._is_streaming = True
        yield

    def execute(
        self,
        reads: Sequence[Read],
        targets: Mapping[str, ByteView],
        on_bytes: Callable[[int], None] | None = None,
    ) -> None:
        if not self._is_streaming:
            super().execute(reads, targets, on_bytes)
            return
        work = ChunkedReads(reads, self._feed.table)
        with ThreadPoolExecutor(self.num_threads, thread_name_prefix=READER_THREADS) as pool:

            def place(thread: int, chunk: int, data: Any) -> None:
                began_s = time.perf_counter()
                work.place(chunk, data, targets)
                self._note(thread, chunk, work.nbytes(chunk), began_s)
                if on_bytes is not None:
                    on_bytes(work.nbytes(chunk))

            for batch in self._feed.take(work.needs):
                placing = [
                    pool.submit(place, number % self.num_threads, chunk, data)
                    for number, (chunk, data) in enumerate(batch)
                ]
                for one in placing:
                    one.result()
                # The store must not keep them for a variable that nobody looks at any more.
                placing.clear()
                del batch

    def _note(self, thread: int, chunk: int, nbytes: int, began_s: float) -> None:
        if self._timeline is None:
            return
        span = self._feed.table.span(chunk)
        copied_s, at_s = time.perf_counter() - began_s, began_s - self._timeline.origin_s
        name = self._feed.table.files[span.file][0]
        self._timeline.add(Span(thread, name, span.start, nbytes, at_s, 0.0, copied_s, 0.0))
