"""Whole tensors into memory of their own, many at a time: what lies together in a file is read together."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import torch

from raywl.checkpoint import TensorEntry
from raywl.checkpoint.dtypes import torch_dtype, torch_shape
from raywl.plan.copies import Copy
from raywl.plan.reads import WINDOW_BYTES, Read, schedule
from raywl.readers.execute import execute
from raywl.readers.files import OpenFiles
from raywl.readers.memory import ByteView

__all__ = ["BATCH_BYTES", "batches_of", "read_whole", "reads_of"]

BATCH_BYTES = WINDOW_BYTES
"""Tensors are read together up to this size, which is one read where they are neighbours."""

_BATCH_TENSORS = 4096
_DISCARD = ""
"""Target of bytes that nobody wants; a tensor by this name has another."""


def batches_of(names: Sequence[str], entries: Mapping[str, TensorEntry]) -> Iterator[list[str]]:
    """Cuts names, in their order, where a batch would grow too large; a larger tensor is one by itself."""
    batch: list[str] = []
    nbytes = 0
    for name in names:
        if batch and (nbytes + entries[name].nbytes > BATCH_BYTES or len(batch) == _BATCH_TENSORS):
            yield batch
            batch, nbytes = [], 0
        batch.append(name)
        nbytes += entries[name].nbytes
    if batch:
        yield batch


def reads_of(
    names: Collection[str], entries: Mapping[str, TensorEntry], discarded: Collection[str] = ()
) -> list[Read]:
    """The reads that bring whole tensors, by file and offset.

    Args:
        names: The tensors.
        entries: Where they lie.
        discarded: Tensors to be read, too, and thrown away, so that a file is read in one go.
    """
    copies = [
        _copy(name, f"tensor {name}", entries[name].file, entries[name].start, entries[name].end)
        for name in names
        if entries[name].nbytes
    ]
    copies += [
        _copy(name, _DISCARD, entries[name].file, start, min(start + WINDOW_BYTES, entries[name].end))
        for name in discarded
        for start in range(entries[name].start, entries[name].end, WINDOW_BYTES)
    ]
    files = {file: at for at, file in enumerate(dict.fromkeys(copy.file for copy in copies))}
    return schedule(copies, files)


def _copy(name: str, target: str, file: str, start: int, end: int) -> Copy:
    """Bytes `[start, end)` of a file, as they are, to the start of the target."""
    return Copy(
        tensor=name,
        file=file,
        target=target,
        src_start=start,
        dst_start=0,
        shape=(end - start,),
        src_strides=(1,),
        dst_strides=(1,),
        src_dtype="uint8",
        dst_dtype="uint8",
    )


def read_whole(
    names: Collection[str],
    entries: Mapping[str, TensorEntry],
    files: OpenFiles,
    *,
    num_threads: int,
    reads: Sequence[Read] | None = None,
    on_bytes: Callable[[int], None] | None = None,
) -> dict[str, torch.Tensor]:
    """Reads tensors into new memory on the CPU, each with a storage of its own.

    Args:
        names: The tensors.
        entries: Where they lie.
        files: Their files.
        num_threads: Reads under way at once.
        reads: As `reads_of` gives them for `names`, where they are known already.
        on_bytes: Called after each read, possibly by several threads, with its bytes; what it raises ends
            the reading.

    Returns:
        The tensors in the order of `names`.

    Raises:
        CheckpointError: A file can't be read, or changed since its header was read.
    """
    if reads is None:
        reads = reads_of(names, entries)
    # On the CPU even where models are made, under `with torch.device("meta")`.
    raw = {name: torch.empty(entries[name].nbytes, dtype=torch.uint8, device="cpu") for name in names}
    targets = {f"tensor {name}": ByteView(memory) for name, memory in raw.items()}
    discarded = [piece.nbytes for read in reads for piece in read.pieces if piece.target == _DISCARD]
    if discarded:
        # All to one place, also by several threads at a time: nobody looks at it.
        targets[_DISCARD] = ByteView(torch.empty(max(discarded), dtype=torch.uint8, device="cpu"))
    if reads:
        execute(reads, files, targets, num_threads=num_threads, on_bytes=on_bytes)
    return {name: _typed(raw.pop(name), entries[name]) for name in names}


def _typed(raw: torch.Tensor, entry: TensorEntry) -> torch.Tensor:
    return raw.view(torch_dtype(entry.dtype)).view(torch_shape(entry.dtype, entry.shape))
