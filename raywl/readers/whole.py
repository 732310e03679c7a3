"""Whole tensors into memory of their own, many at a time: what lies together in a file is read together."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import torch

from raywl.checkpoint import TensorEntry
from raywl.checkpoint.dtypes import torch_dtype, torch_name, torch_shape
from raywl.node.memory import want_huge_pages
from raywl.plan import copy_of_box
from raywl.plan.copies import Copy, contiguous_strides, itemsize_of
from raywl.plan.reads import WINDOW_BYTES, Read, schedule
from raywl.readers.memory import ByteView

__all__ = ["BATCH_BYTES", "batches_of", "read_whole", "reads_of"]

BATCH_BYTES = WINDOW_BYTES
"""Tensors are read together up to this size, which is one read where they are neighbours."""

_BATCH_TENSORS = 4096
_HUGE_BYTES = 32 << 20
"""glibc gives so much, and more, from a mapping of its own, which goes with it."""
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
    copies = [_copy_of(name, entries[name]) for name in names if entries[name].nbytes]
    copies += [
        _bytes(name, _DISCARD, entries[name].file, start, min(start + WINDOW_BYTES, entries[name].end))
        for name in discarded
        for start in range(entries[name].start, entries[name].end, WINDOW_BYTES)
    ]
    files = {file: at for at, file in enumerate(dict.fromkeys(copy.file for copy in copies))}
    return schedule(copies, files)


def _target(name: str) -> str:
    return f"tensor {name}"


def _copy_of(name: str, entry: TensorEntry) -> Copy:
    if entry.strides is None:
        # As mere bytes: the memory is laid out as the file is, whatever the dtype.
        return _bytes(name, _target(name), entry.file, entry.start, entry.end)
    shape, dtype = torch_shape(entry.dtype, entry.shape), torch_name(entry.dtype)
    box = tuple((0, size) for size in shape)
    return copy_of_box(name, entry, box, _target(name), contiguous_strides(shape, itemsize_of(dtype)), dtype)


def _bytes(name: str, target: str, file: str, start: int, end: int) -> Copy:
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
    reads: Sequence[Read],
    execute: Callable[[Sequence[Read], Mapping[str, ByteView]], None],
) -> dict[str, torch.Tensor]:
    """Reads tensors into new memory on the CPU, each with a storage of its own.

    Args:
        names: The tensors.
        entries: Where they lie.
        reads: As `reads_of` gives them for `names`.
        execute: Makes the reads; raises what fails.

    Returns:
        The tensors in the order of `names`.
    """
    tensors = {name: _empty(entries[name]) for name in names}
    targets = {_target(name): ByteView(tensor) for name, tensor in tensors.items()}
    discarded = [piece.nbytes for read in reads for piece in read.pieces if piece.target == _DISCARD]
    if discarded:
        # All to one place, also by several threads at a time: nobody looks at it.
        targets[_DISCARD] = ByteView(torch.empty(max(discarded), dtype=torch.uint8, device="cpu"))
    if reads:
        execute(reads, targets)
    return tensors


def _empty(entry: TensorEntry) -> torch.Tensor:
    # On the CPU even where models are made, under `with torch.device("meta")`.
    shape = torch_shape(entry.dtype, entry.shape)
    tensor = torch.empty(shape, dtype=torch_dtype(entry.dtype), device="cpu")
    if entry.nbytes >= _HUGE_BYTES:
        want_huge_pages(tensor.data_ptr(), entry.nbytes)
    return tensor
