"""Tensor after tensor, as plain tensors on the CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator

import torch

from raywl.checkpoint import Manifest
from raywl.checkpoint.dtypes import torch_dtype, torch_name, torch_shape
from raywl.checkpoint.manifest import sorted_for_iteration
from raywl.plan import copy_of_box
from raywl.plan.copies import contiguous_strides, itemsize_of
from raywl.plan.reads import Read, schedule
from raywl.progress import Progress, make_progress
from raywl.readers.files import OpenFiles
from raywl.readers.memory import ByteView
from raywl.readers.reader import Reader
from raywl.remap.experts import should_skip_weight
from raywl.strategies import check_strategy

__all__ = ["iter_weights"]


def iter_weights(
    manifest: Manifest,
    names: Iterable[str] | None,
    strategy: str | None,
    local_expert_ids: Collection[int] | None,
    progress: bool | Progress | None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Checks its arguments at once; the iterator that it gives reads while it is consumed."""
    check_strategy(strategy)
    wanted = list(manifest.tensors) if names is None else list(dict.fromkeys(names))
    for name in wanted:
        manifest.entry(name)
    ids = None if local_expert_ids is None else set(local_expert_ids)
    wanted = [name for name in wanted if not should_skip_weight(name, ids)]
    return _read(manifest, sorted_for_iteration(wanted, manifest.tensors), strategy, make_progress(progress))


def _read(
    manifest: Manifest, names: list[str], strategy: str | None, progress: Progress | None
) -> Iterator[tuple[str, torch.Tensor]]:
    plans = {name: _reads_of(manifest, name) for name in names}
    all_reads = [read for reads in plans.values() for read in reads]
    total = sum(manifest.tensors[name].nbytes for name in names)
    done = 0
    manifest.fetch(dict.fromkeys(read.file for read in all_reads), progress)
    with OpenFiles(manifest) as files, contextlib.ExitStack() as stack:
        reader = Reader(manifest, files, strategy)
        stack.enter_context(reader.reading(all_reads))
        for name in names:
            entry = manifest.tensors[name]
            tensor = torch.empty(torch_shape(entry.dtype, entry.shape), dtype=torch_dtype(entry.dtype))
            if entry.nbytes:
                reader.execute(plans[name], {name: ByteView(tensor)})
            done += entry.nbytes
            if progress is not None:
                progress(done, total, "read")
            yield name, tensor
        files.check_unchanged()


def _reads_of(manifest: Manifest, name: str) -> list[Read]:
    """The reads of one whole tensor into memory of its own."""
    entry = manifest.tensors[name]
    shape, dtype = torch_shape(entry.dtype, entry.shape), torch_name(entry.dtype)
    if not entry.nbytes:
        return []
    box = tuple((0, size) for size in shape)
    copy = copy_of_box(name, entry, box, name, contiguous_strides(shape, itemsize_of(dtype)), dtype)
    return schedule([copy], {entry.file: 0})
