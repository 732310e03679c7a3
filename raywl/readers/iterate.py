"""Tensor after tensor, as plain tensors on the CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator

import torch

from raywl.checkpoint import Manifest
from raywl.checkpoint.manifest import sorted_for_iteration
from raywl.progress import Progress, make_progress
from raywl.readers.files import OpenFiles
from raywl.readers.reader import Reader
from raywl.readers.whole import batches_of, read_whole, reads_of
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
    batches = list(batches_of(names, manifest.tensors))
    plans = [reads_of(batch, manifest.tensors) for batch in batches]
    all_reads = [read for reads in plans for read in reads]
    total = sum(manifest.tensors[name].nbytes for name in names)
    done = 0
    manifest.fetch(dict.fromkeys(read.file for read in all_reads), progress)
    with OpenFiles(manifest) as files, contextlib.ExitStack() as stack:
        reader = Reader(manifest, files, strategy)
        stack.enter_context(reader.reading(all_reads))
        for batch, reads in zip(batches, plans, strict=True):
            tensors = read_whole(batch, manifest.tensors, reads, reader.execute)
            for name in batch:
                done += manifest.tensors[name].nbytes
                if progress is not None:
                    progress(done, total, "read")
                # Popped, so that what the consumer drops is free at once.
                yield name, tensors.pop(name)
        files.check_unchanged()
