"""A checkpoint's files on one node while they come in chunks."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from functools import partial

from raywl.coordination import ChunkTable
from raywl.errors import CheckpointError, RaywlError, SourceError
from raywl.pace import disk_pace
from raywl.sources import CachedSource, RemoteFile
from raywl.sources.cache import check_room, size_of
from raywl.sources.parts import PartFile
from raywl.sources.transfer import fetch_range

__all__ = ["DiskFailed", "StagedFiles"]

_MAX_OPEN = 32


class DiskFailed(Exception):
    """This node's disk can't take or give the bytes, whoever sends them."""

    def __init__(self, error: RaywlError) -> None:
        super().__init__(str(error))
        self.error = error


@contextlib.contextmanager
def _on_disk() -> Iterator[None]:
    try:
        yield
    except RaywlError as error:
        raise DiskFailed(error) from None


class _Part:
    """An open part file, and how many threads are at it."""

    def __init__(self, file: PartFile) -> None:
        self.file, self.num_users = file, 0


class StagedFiles:
    """Writes, reads and finishes the files of a source by chunks. Safe for threads, free of Ray.

    1. `look` says which chunks are on this node's disk already.
    2. `fetch` brings a chunk from the source, `write` takes one that came from another node, `read` gives
       one away. All of them may be repeated.
    3. `finish` checks a file that is whole and gives it its name.
    4. `close` keeps what there is of the others for the next time.

    Few part files are open at a time, since a checkpoint may have more files than a process may open.
    """

    def __init__(self, source: CachedSource, table: ChunkTable) -> None:
        """Args:
        source: Where the files come from, and where they go on this node.
        table: Of files of that source.

        Raises:
            CheckpointError: The source hasn't got these files.
        """
        self.source, self.table = source, table
        self._files: list[RemoteFile] = []
        for name, size in table.files:
            file = source.files.get(name)
            if file is None or file.size != size:
                told = "isn't there" if file is None else f"has {file.size} bytes"
                raise CheckpointError(source.label(name), None, f"{told}, expected {size} bytes")
            self._files.append(file)
        self._parts: OrderedDict[int, _Part] = OrderedDict()
        self._finishing: dict[int, _Part] = {}
        """Those that are checked: still read, but not written any more."""
        self._whole: set[int] = set()
        self.unhashed: list[str] = []
        """Files of which the source knows no hash, so that only their sizes were checked."""
        self.spoiled: set[int] = set()
        """Files whose bytes were wrong."""
        self._lock = threading.Condition()
        self._closed = False

    def look(self) -> int:
        """The chunks that are on the disk, by the files' own names and by what is left of earlier tries."""
        has = 0
        left = self._left_over()
        for index, file in enumerate(self._files):
            if self.source.has(file.name):
                self._whole.add(index)
                has |= self.table.file_bits(index)
            elif size_of(self.source.repository.blob(self.source.key(file))) == file.size:
                # Of another version, which has the same file; or of a process that was killed just then.
                has |= self.table.file_bits(index)
            elif file.size and self.source.key(file) in left:
                has |= self._in_part(index)
        return has

    def check_room(self) -> None:
        """Raises `CapacityError`, before anything is fetched, where the disk is too small."""
        source = self.source
        lacking = [file for file in self._files if not source.has(file.name)]
        if lacking:
            source.repository.make()
            sizes = [(source.key(file), file.size) for file in lacking]
            check_room(os.path.join(source.repository.folder, "blobs"), sizes)

    def fetch(self, chunk: int, stop: threading.Event) -> int:
        """Brings a chunk from the source, or what is lacking of it; returns the bytes that came.

        Raises:
            Stopped: `stop` was set.
            RaywlError: As the source.
            DiskFailed: It can't be written here.
        """
        index, start, end = self.table.span(chunk)
        file, nbytes = self._files[index], 0
        with self._part(index) as part:

            def sink(position: int, block: bytes) -> None:
                nonlocal nbytes
                nbytes += len(block)
                with _on_disk():
                    part.write(position, block)

            stream, limits = partial(self.source.stream, file), self.source.limits()
            for first, last in part.missing(start, end):
                fetch_range(stream, first, last, sink, limits, stop, disk_pace())
            if part.missing(start, end):
                raise SourceError(
                    self.source.label(file.name), f"bytes {start} to {end} were asked for, and fewer came"
                )
        return nbytes

    def write(self, chunk: int, data: memoryview) -> None:
        """Takes a chunk that another node sent.

        Raises:
            ValueError: It has another size.
            DiskFailed: It can't be written here.
        """
        index, start, end = self.table.span(chunk)
        if data.nbytes != end - start:
            raise ValueError(f"chunk {chunk} has {end - start} bytes, not {data.nbytes}")
        with self._part(index) as part, _on_disk():
            part.write(start, data)

    def read(self, chunk: int) -> bytes:
        """The bytes of a chunk that is here.

        Raises:
            SourceError: They can't be read any more.
        """
        index, start, end = self.table.span(chunk)
        name = self._files[index].name
        with self._lock:
            part = self._parts.get(index) or self._finishing.get(index)
            if part is not None:
                part.num_users += 1
        if part is not None:
            try:
                return part.file.read(start, end)
            except (ValueError, OSError):
                # It got its name meanwhile.
                pass
            finally:
                self._leave(part)
        for path in (
            self.source.path(name),
            self.source.repository.blob(self.source.key(self._files[index])),
        ):
            with contextlib.suppress(FileNotFoundError), open(path, "rb", buffering=0) as whole:
                data = os.pread(whole.fileno(), end - start, start)
                if len(data) == end - start:
                    return data
        with self._part(index) as opened:
            return opened.read(start, end)

    def finish(self, index: int) -> None:
        """Checks a file all of whose chunks are here, and gives it its name; harmless when repeated.

        Raises:
            SourceError: Its bytes are not what the source announced, and were thrown away; or it can't be
                checked or moved.
        """
        if index in self._whole:
            return
        file, source = self._files[index], self.source
        if size_of(source.repository.blob(source.key(file))) != file.size:
            with self._part(index, last=True) as part:
                try:
                    part.finish(partial(self._check, index))
                finally:
                    # What couldn't be checked is kept for the next time.
                    part.close()
        elif (unneeded := self._parts.pop(index, None)) is not None:
            # Another process, or another file with the same content, was there before.
            unneeded.file.discard()
        source.link(file)
        with self._lock:
            self._whole.add(index)

    def _check(self, index: int, path: str) -> None:
        file = self._files[index]
        try:
            if not self.source.check(file, path):
                self.unhashed.append(file.name)
        except RaywlError:
            self.spoiled.add(index)
            raise

    def throw_away(self, indices: Iterable[int]) -> None:
        """Throws away what came of files that turned out wrong somewhere: the wrong bytes may be among it."""
        for index in indices:
            if index not in self._whole and self._files[index].size:
                with contextlib.suppress(DiskFailed, SourceError), self._part(index, last=True) as part:
                    part.discard()

    def whole_again(self) -> bool:
        """Looks whether all files are under their names by now: another node may have filled the folder."""
        self._whole = {index for index, file in enumerate(self._files) if self.source.has(file.name)}
        return len(self._whole) == len(self._files)

    def close(self) -> None:
        """Closes what is open; what came stays on the disk. Threads that are at it get errors."""
        with self._lock:
            self._closed = True
            parts, self._parts = self._parts, OrderedDict()
        for index, part in parts.items():
            if self.source.has(self._files[index].name):
                # Another node that has the same folder was faster.
                part.file.discard()
            else:
                part.file.close()

    def _left_over(self) -> set[str]:
        """Keys of the contents of which a part is there."""
        with contextlib.suppress(OSError):
            names = os.listdir(os.path.join(self.source.repository.folder, "blobs"))
            return {name.rsplit(".", 2)[0] for name in names if name.endswith(".incomplete")}
        return set()

    def _in_part(self, index: int) -> int:
        has = 0
        size = self._files[index].size
        with self._part(index) as part:
            missing = part.missing()
        position = 0
        for start, end in [*missing, (size, size)]:
            if position < start:
                has |= self.table.bits_within(index, position, start)
            position = end
        return has

    @contextlib.contextmanager
    def _part(self, index: int, last: bool = False) -> Iterator[PartFile]:
        """A file's part file, opened where it isn't; for the last time, when the caller finishes it."""
        with self._lock:
            part = self._open(index)
            part.num_users += 1
            if last:
                # Nobody else writes to it; whoever reads it may go on.
                self._finishing[index] = self._parts.pop(index)
        try:
            yield part.file
        finally:
            if last:
                with self._lock:
                    self._finishing.pop(index, None)
            self._leave(part)

    def _leave(self, part: _Part) -> None:
        with self._lock:
            part.num_users -= 1
            self._lock.notify_all()

    def _open(self, index: int) -> _Part:
        if self._closed:
            raise SourceError(self.source.label(self._files[index].name), "the download was ended")
        part = self._parts.get(index)
        if part is None:
            idle = [old for old, other in self._parts.items() if not other.num_users]
            while idle and len(self._parts) >= _MAX_OPEN:
                self._parts.pop(idle.pop(0)).file.close()
            with _on_disk():
                self.source.repository.make()
                part = self._parts[index] = _Part(self.source.open_part(self._files[index]))
        self._parts.move_to_end(index)
        return part
