"""Executes reads with several threads: straight into parameters, or through a small scratch buffer."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait

import torch

from raywl.errors import CheckpointError
from raywl.plan.copies import Copy, split
from raywl.plan.reads import GAP_BYTES, Read
from raywl.readers.files import OpenFiles
from raywl.readers.memory import ByteView, bytes_of, int_dtype, strided

__all__ = ["READER_THREADS", "SCRATCH_BYTES", "choose_num_threads", "execute"]

READER_THREADS = "raywl-read"
"""How the names of the threads that read begin."""

SCRATCH_BYTES = 256 << 10
"""Scratch of one thread: small enough to stay in the core's cache between read and copy."""


def choose_num_threads(local_size: int) -> int:
    """Threads for one rank that shares its node with `local_size` ranks."""
    cores = len(os.sched_getaffinity(0))
    return max(2, min(8, 2 * cores) // local_size)


def execute(
    reads: Sequence[Read],
    files: OpenFiles,
    targets: Mapping[str, ByteView],
    *,
    num_threads: int,
    on_bytes: Callable[[int], None] | None = None,
) -> None:
    """Makes all reads; returns when every byte is at its place.

    The reads are handed to the threads in order. The first failure stops all threads after the read
    that they are at.

    Args:
        reads: In the order to start them in.
        files: The checkpoint's files.
        targets: Where each target of the reads' pieces lies.
        num_threads: Reads under way at once.
        on_bytes: Called by the threads with the bytes of each read that is done.

    Raises:
        CheckpointError: A read failed; the destinations are partly written.
    """
    pending = iter(reads)
    lock, stop = threading.Lock(), threading.Event()

    def work() -> None:
        scratch = _Scratch()
        while not stop.is_set():
            with lock:
                read = next(pending, None)
            if read is None:
                return
            try:
                if read.direct and all(targets[piece.target].memory is not None for piece in read.pieces):
                    _read_direct(read, files, targets)
                else:
                    _read_through(read, files, targets, scratch)
                if on_bytes is not None:
                    on_bytes(read.end - read.start)
            except BaseException:
                stop.set()
                raise

    num_threads = max(1, min(num_threads, len(reads)))
    if num_threads == 1:
        work()
        return
    with ThreadPoolExecutor(num_threads, thread_name_prefix=READER_THREADS) as pool:
        futures = [pool.submit(work) for _ in range(num_threads)]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            stop.set()
    for future in futures:
        future.result()


class _Scratch:
    """Memory of one thread, made when it is first needed, and bigger only while one read wants more."""

    def __init__(self) -> None:
        self._raw: torch.Tensor | None = None
        self._memory = memoryview(b"")

    def take(self, nbytes: int) -> tuple[torch.Tensor, memoryview]:
        if self._raw is None or self._raw.numel() < nbytes:
            self._raw = torch.empty(max(nbytes + 64, SCRATCH_BYTES + 64), dtype=torch.uint8)
            self._memory = bytes_of(self._raw)
        return self._raw, self._memory[:nbytes]


def _read_direct(read: Read, files: OpenFiles, targets: Mapping[str, ByteView]) -> None:
    buffers: list[memoryview] = []
    position = read.start
    for piece in read.pieces:
        if piece.src_start > position:
            buffers.append(memoryview(bytearray(piece.src_start - position)))
        memory = targets[piece.target].memory
        assert memory is not None
        buffers.append(memory[piece.dst_start : piece.dst_start + piece.nbytes])
        position = piece.src_end
    files.read_into(read.file, read.start, buffers)


def _read_through(read: Read, files: OpenFiles, targets: Mapping[str, ByteView], scratch: _Scratch) -> None:
    """Reads by steps of about the scratch's size; pieces that share bytes share the step."""
    if len(read.pieces) == 1:
        for step in split(read.pieces[0], SCRATCH_BYTES, GAP_BYTES):
            raw, memory = scratch.take(step.src_end - step.src_start)
            files.read_into(read.file, step.src_start, [memory])
            _place(step, raw, step.src_start, targets[step.target])
        return
    raw, memory = scratch.take(read.end - read.start)
    files.read_into(read.file, read.start, [memory])
    for piece in read.pieces:
        _place(piece, raw, read.start, targets[piece.target])


def _place(piece: Copy, raw: torch.Tensor, first: int, target: ByteView) -> None:
    """Copies one piece from scratch, whose byte 0 is byte `first` of the file."""
    if piece.src_dtype == piece.dst_dtype:
        dtype = int_dtype(piece.itemsize)
    else:
        dtype = getattr(torch, piece.src_dtype)
    source = strided(raw, piece.src_start - first, dtype, piece.shape, piece.src_strides)
    try:
        target.view_for(piece).copy_(source)
    except RuntimeError as error:
        raise CheckpointError(
            piece.file, piece.tensor, f"can't be copied into {piece.target} ({target.dtype}): {error}"
        ) from error
