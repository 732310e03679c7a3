"""Tensor after tensor, as plain tensors on the CPU."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

import torch

from raywl.checkpoint import Manifest
from raywl.checkpoint.dtypes import torch_dtype, torch_shape
from raywl.checkpoint.manifest import sorted_for_iteration
from raywl.plan import copy_of_box
from raywl.plan.copies import contiguous_strides
from raywl.plan.reads import schedule
from raywl.progress import Progress, make_progress
from raywl.readers.execute import choose_num_threads, execute
from raywl.readers.files import OpenFiles
from raywl.readers.memory import ByteView, dtype_name
from raywl.readers.strategy import check_strategy
from raywl.remap.experts import should_skip_weight

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
    return _read(manifest, sorted_for_iteration(wanted, manifest.tensors), make_progress(progress))


def _read(
    manifest: Manifest, names: list[str], progress: Progress | None
) -> Iterator[tuple[str, torch.Tensor]]:
    total = sum(manifest.tensors[name].nbytes for name in names)
    done = 0
    with OpenFiles(manifest) as files:
        for name in names:
            entry = manifest.tensors[name]
            tensor = torch.empty(torch_shape(entry.dtype, entry.shape), dtype=torch_dtype(entry.dtype))
            if entry.nbytes:
                strides = contiguous_strides(tuple(tensor.shape), tensor.itemsize)
                box = tuple((0, size) for size in tensor.shape)
                dtype = dtype_name(tensor.dtype)
                reads = schedule([copy_of_box(name, entry, box, name, strides, dtype)], {entry.file: 0})
                execute(reads, files, {name: ByteView(tensor)}, num_threads=choose_num_threads(1))
            done += entry.nbytes
            if progress is not None:
                progress(done, total, "read")
            yield name, tensor
        files.check_unchanged()
