"""The facts that decide how files are read, found in a few milliseconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from raywl.checkpoint import Manifest, TensorEntry
from raywl.errors import RaywlError
from raywl.node.memory import available_ram_bytes
from raywl.node.page_cache import resident_in
from raywl.plan import Read
from raywl.readers.choose import SMALL_BYTES, Facts, Probe, needs_memory, needs_probe
from raywl.readers.files import OpenFiles
from raywl.readers.ways import Buffered, Direct

__all__ = ["gather"]

_NUM_SAMPLES = 64
_SAMPLE_BYTES = 1 << 20
_PROBE_BYTES = 4 << 20
_NUM_PROBES = 4
_DROPPED_BYTES = 128 << 10
"""A hole that is narrower is read over, or read ahead over, by any disk."""


class _Span(NamedTuple):
    file: str
    start: int
    end: int


def gather(
    manifest: Manifest, files: OpenFiles, reads: Sequence[Read], num_local_ranks: int, asked: str | None
) -> Facts:
    """What there is to know about some reads, as far as the choice depends on it.

    Args:
        manifest: The checkpoint.
        files: Its open files.
        reads: By file and offset.
        num_local_ranks: Ranks on this node that load at the same time.
        asked: The strategy that was asked for.
    """
    wanted_bytes = sum(read.end - read.start for read in reads)
    facts = Facts(
        fs_type=files.fs_type(reads[0].file),
        wanted_bytes=wanted_bytes,
        strided_bytes=sum(read.end - read.start for read in reads if not read.direct),
        shared_bytes=_shared_bytes(manifest.tensors, reads) if num_local_ranks > 1 else 0,
        unwanted_bytes=_unwanted_bytes(manifest.tensors, reads, alone=num_local_ranks == 1),
        num_local_ranks=num_local_ranks,
    )
    if wanted_bytes >= SMALL_BYTES:
        facts = replace(facts, resident=_resident(manifest, files, reads))
    if needs_memory(facts, asked):
        facts = replace(facts, available_bytes=available_ram_bytes())
    if needs_probe(facts, asked):
        facts = replace(facts, probe=_probe(files, reads))
    return facts


def _shared_bytes(tensors: Mapping[str, TensorEntry], reads: Sequence[Read]) -> int:
    """Bytes that a rank reads and doesn't keep, and whole tensors: other ranks of its node want them too."""
    shared = 0
    for read in reads:
        kept = 0
        for piece in read.pieces:
            entry = tensors[piece.tensor]
            whole = piece.src_start == entry.start and piece.src_end == entry.end
            kept += 0 if whole else piece.nbytes
        shared += max(0, read.end - read.start - kept)
    return shared


def _unwanted_bytes(tensors: Mapping[str, TensorEntry], reads: Sequence[Read], alone: bool) -> int:
    """Bytes between a file's first and last read that aren't read.

    The rest of a tensor of which a rank reads a part is for another rank, unless it is alone.
    """
    unwanted = 0
    for before, after in pairwise(reads):
        if before.file != after.file:
            continue
        start, end = before.end, after.start
        if not alone:
            start = max(start, tensors[before.pieces[-1].tensor].end)
            end = min(end, tensors[after.pieces[0].tensor].start)
        if end - start > _DROPPED_BYTES:
            unwanted += end - start
    return unwanted


def _samples(reads: Sequence[Read], count: int, nbytes: int) -> Iterator[_Span]:
    """Spans that lie evenly over what is read."""
    total = sum(read.end - read.start for read in reads)
    step, target, seen = total / count, 0.0, 0
    for read in reads:
        length = read.end - read.start
        while target < seen + length:
            start = read.start + int(target - seen)
            yield _Span(read.file, start, min(start + nbytes, read.end))
            target += step
        seen += length


def _resident(manifest: Manifest, files: OpenFiles, reads: Sequence[Read]) -> float | None:
    """Part of the reads that is in the page cache, by samples."""
    looked = found = 0
    for file, start, end in _samples(reads, _NUM_SAMPLES, _SAMPLE_BYTES):
        with files.using(file) as fd:
            resident = resident_in(fd, manifest.path(file), start, end)
        if resident is None:
            return None
        looked += end - start
        found += resident
    return found / looked if looked else None


def _probe(files: OpenFiles, reads: Sequence[Read]) -> Probe | None:
    """Reads a few blocks both ways; `None` where they can't be read, which the load itself will say."""
    blocks = list(_samples(reads, 2 * _NUM_PROBES, _PROBE_BYTES))
    memory = memoryview(bytearray(_PROBE_BYTES))
    buffered, direct = Buffered(files), Direct(files)

    def rate(fill: Callable[..., None], spans: Sequence[_Span]) -> float:
        start_s = time.perf_counter()
        for file, start, end in spans:
            fill(file, start, [memory[: end - start]])
        seconds = time.perf_counter() - start_s
        return sum(end - start for _, start, end in spans) / max(seconds, 1e-9)

    try:
        buffered_rate = rate(buffered.fill, blocks[::2])
        direct_rate = rate(direct.fill, blocks[1::2])
    except RaywlError:
        return None
    return Probe(buffered_rate, None if direct.notes else direct_rate)
