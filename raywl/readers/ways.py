"""The ways to bring a file's bytes to memory: through the page cache, past it, or out of a mapping.

Each gives the same bytes and the same errors. A way that a file system doesn't take is replaced by plain
reads, file by file, and a note says so.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from raywl.readers.files import OpenFiles, max_open_files
from raywl.readers.memory import bytes_of

__all__ = ["SCRATCH_BYTES", "Buffered", "Direct", "Mapped", "Scratch", "make_way", "map_privately"]

SCRATCH_BYTES = 256 << 10
"""Scratch of one thread: small enough to stay in the core's cache between read and copy."""

BOUNCE_BYTES = 4 << 20
"""Aligned memory of one thread, for reads past the page cache."""

_MAPPED_STEP_BYTES = 2 << 20
"""What is mapped in at a time, and let go of again: the process never counts more of it as its own."""

_ALIGNMENT = 4096
"""Addresses, offsets and lengths of reads past the page cache: what every disk and file system takes."""

_POPULATE_READ = 22
"""`MADV_POPULATE_READ` (Linux 5.14): maps pages in, and fails where touching them would kill."""

# A private mapping that may be written to counts against the system's memory, all of it, unless it is
# told not to: a file larger than the memory couldn't be mapped. Python has the flag from 3.13 on.
_NORESERVE: int = getattr(mmap, "MAP_NORESERVE", 0x4000 if platform.machine() in ("x86_64", "aarch64") else 0)


def map_privately(fd: int, size: int) -> mmap.mmap:
    """A private mapping of a file: what is written to it stays with this process."""
    return mmap.mmap(fd, size, mmap.MAP_PRIVATE | _NORESERVE, mmap.PROT_READ | mmap.PROT_WRITE)


def make_way(strategy: str | None, files: OpenFiles) -> Buffered:
    """The way that a strategy reads by; `auto` and `prefetch` read through the page cache."""
    if strategy == "direct":
        return Direct(files)
    return Mapped(files) if strategy == "mmap" else Buffered(files)


class Scratch:
    """Memory of one thread, made when it is first needed, and bigger only while one read wants more."""

    def __init__(self) -> None:
        self._raw: torch.Tensor | None = None
        self._memory = memoryview(b"")

    def take(self, nbytes: int) -> tuple[torch.Tensor, memoryview]:
        """The first `nbytes` of it and a little more as a tensor, and exactly those as bytes."""
        if self._raw is None or self._raw.numel() < nbytes:
            self._raw = torch.empty(max(nbytes + 64, SCRATCH_BYTES + 64), dtype=torch.uint8)
            self._memory = bytes_of(self._raw)
        return self._raw, self._memory[:nbytes]


class Buffered:
    """`preadv` through the page cache. Safe for use by several threads."""

    step_bytes = SCRATCH_BYTES
    """Bytes to ask of `window` at a time."""

    def __init__(self, files: OpenFiles) -> None:
        self.files = files
        self.notes: dict[str, None] = {}
        """Where it couldn't be used, and why."""

    def fill(self, name: str, start: int, buffers: Sequence[memoryview]) -> None:
        """Fills `buffers`, in order, from byte `start` of a file.

        Raises:
            CheckpointError: As `OpenFiles.read_into`.
        """
        self.files.read_into(name, start, buffers)

    @contextmanager
    def window(self, name: str, start: int, end: int, scratch: Scratch) -> Iterator[torch.Tensor]:
        """Bytes of a file to be looked at until the block ends, as a 1-d uint8 tensor.

        Args:
            name: The file.
            start: First byte; the tensor's byte 0.
            end: One past the last; the tensor may be longer.
            scratch: Memory for it, of the calling thread.

        Raises:
            CheckpointError: As `OpenFiles.read_into`.
        """
        raw, memory = scratch.take(end - start)
        self.fill(name, start, [memory])
        yield raw

    def close(self) -> None:
        """Lets go of what it holds; not of the files."""


class Direct(Buffered):
    """`preadv` past the page cache (`O_DIRECT`), through aligned memory of each thread."""

    def __init__(self, files: OpenFiles) -> None:
        super().__init__(files)
        self._bounce = threading.local()

    def fill(self, name: str, start: int, buffers: Sequence[memoryview]) -> None:
        """As `Buffered.fill`."""
        sink = _Sink(start, buffers)
        with self.files.using_direct(name) as fd:
            if fd is None:
                self._refused(name, "takes no O_DIRECT")
            else:
                self._read_past_cache(fd, name, sink)
        # What is left: all of it, or what failed, which plain reads then say in their words.
        if sink.position < sink.end:
            self.files.read_into(name, sink.position, sink.rest())

    def _read_past_cache(self, fd: int, name: str, sink: _Sink) -> None:
        raw, memory = self._memory()
        while sink.position < sink.end:
            base = sink.position - sink.position % _ALIGNMENT
            wanted = min(BOUNCE_BYTES, sink.end - base + -sink.end % _ALIGNMENT)
            try:
                got = os.preadv(fd, [memory[:wanted]], base)
            except OSError as error:
                if error.errno == errno.EINVAL:
                    self._refused(name, "refuses reads past the page cache")
                return
            until = min(base + got, sink.end)
            if until <= sink.position:
                return
            sink.take(raw[sink.position - base : until - base])

    def _memory(self) -> tuple[torch.Tensor, memoryview]:
        held: tuple[torch.Tensor, memoryview] | None = getattr(self._bounce, "memory", None)
        if held is None:
            # Anonymous mappings begin on a page.
            raw = torch.frombuffer(mmap.mmap(-1, BOUNCE_BYTES), dtype=torch.uint8)
            held = self._bounce.memory = raw, bytes_of(raw)
        return held

    def _refused(self, name: str, what: str) -> None:
        kind = self.files.fs_type(name) or "the file system"
        self.notes[f"direct: {kind} {what}; read through the page cache there"] = None


class Mapped(Buffered):
    """Copies out of a mapping, a few pages at a time; only on file systems of this machine.

    Elsewhere a page that can't be brought kills the process that touches it, so that files there are read
    by `preadv`. A file that was cut is an error here too: its size is asked for, and its pages are mapped
    in by a call that fails, before any is touched.
    """

    step_bytes = _MAPPED_STEP_BYTES

    def __init__(self, files: OpenFiles) -> None:
        super().__init__(files)
        self._lock = threading.Lock()
        self._mappings: OrderedDict[str, _Mapping | None] = OrderedDict()
        self._max_mappings = max_open_files()

    def fill(self, name: str, start: int, buffers: Sequence[memoryview]) -> None:
        """As `Buffered.fill`."""
        sink = _Sink(start, buffers)
        mapping = self._mapping(name)
        while mapping is not None and sink.position < sink.end:
            until = min(sink.position + _MAPPED_STEP_BYTES, sink.end)
            if not mapping.is_there(sink.position, until):
                break
            first = sink.position
            sink.take(mapping.raw[first:until])
            mapping.let_go(first, until)
        if sink.position < sink.end:
            self.files.read_into(name, sink.position, sink.rest())

    @contextmanager
    def window(self, name: str, start: int, end: int, scratch: Scratch) -> Iterator[torch.Tensor]:
        """As `Buffered.window`; the bytes aren't copied."""
        mapping = self._mapping(name)
        if mapping is None or not mapping.is_there(start, end):
            with super().window(name, start, end, scratch) as raw:
                yield raw
            return
        yield mapping.raw[start:]
        mapping.let_go(start, end)

    def close(self) -> None:
        """Lets go of the mappings."""
        with self._lock:
            self._mappings.clear()

    def _mapping(self, name: str) -> _Mapping | None:
        with self._lock:
            if name not in self._mappings:
                # A mapping holds a descriptor; it lives on while a thread copies out of it.
                if len(self._mappings) >= self._max_mappings:
                    self._mappings.popitem(last=False)
                self._mappings[name] = self._map(name)
            return self._mappings[name]

    def _map(self, name: str) -> _Mapping | None:
        if not self.files.is_local(name):
            kind = self.files.fs_type(name) or "an unknown file system"
            self.notes[
                f"mmap: files on {kind} are read by preadv: a mapping there could kill the process"
            ] = None
            return None
        with self.files.using(name) as fd:
            return _Mapping(map_privately(fd, os.fstat(fd).st_size))


class _Mapping:
    """A file's pages, mapped in and let go of by ranges."""

    def __init__(self, pages: mmap.mmap) -> None:
        self._pages = pages
        self.raw = torch.frombuffer(pages, dtype=torch.uint8)
        self._address = self.raw.data_ptr()
        self._libc = ctypes.CDLL(None, use_errno=True)

    def is_there(self, start: int, end: int) -> bool:
        """Maps a range in; `False` where that can't be done."""
        if self._pages.size() < end:
            return False
        if not self._advise(start, end, _POPULATE_READ):
            return True
        # An older kernel doesn't know the advice: the size has to do.
        return ctypes.get_errno() == errno.EINVAL

    def let_go(self, start: int, end: int) -> None:
        """Pages of the cache count as the process's own until then."""
        self._advise(start, end, mmap.MADV_DONTNEED)

    def _advise(self, start: int, end: int, advice: int) -> int:
        # Not by Python's own, which holds the interpreter while the disk is read.
        first = start - start % mmap.PAGESIZE
        address = ctypes.c_void_p(self._address + first)
        return int(self._libc.madvise(address, ctypes.c_size_t(end - first), advice))


class _Sink:
    """Buffers that are filled one after the other, out of pieces of any length."""

    def __init__(self, start: int, buffers: Sequence[memoryview]) -> None:
        self._left = [buffer for buffer in buffers if buffer.nbytes]
        self._left.reverse()
        self.position = start
        """Byte of the file that comes next."""
        self.end = start + sum(buffer.nbytes for buffer in self._left)

    def take(self, piece: torch.Tensor) -> None:
        """Copies the next bytes, a 1-d uint8 tensor no longer than what is left."""
        done, total = 0, piece.numel()
        while done < total:
            buffer = self._left[-1]
            count = min(total - done, buffer.nbytes)
            # By torch, which lets other threads run meanwhile.
            torch.frombuffer(buffer, dtype=torch.uint8, count=count).copy_(piece[done : done + count])
            done += count
            if count == buffer.nbytes:
                self._left.pop()
            else:
                self._left[-1] = buffer[count:]
        self.position += total

    def rest(self) -> list[memoryview]:
        """What isn't filled."""
        return self._left[::-1]
