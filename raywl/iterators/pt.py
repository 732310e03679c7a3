"""Iterators over files of `torch.save`."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterable
from typing import Any

import torch

from raywl.iterators.files import as_paths, at_least_1
from raywl.iterators.pool import FilePool
from raywl.iterators.tally import Tally
from raywl.iterators.torch_files import TorchFile, check_unchanged, load_torch_file, plan_torch_files

__all__ = ["multi_thread_pt_weights_iterator", "pt_weights_iterator"]

Weights = Generator[tuple[str, torch.Tensor], None, None]
Paths = Iterable[str | os.PathLike[str]]


def pt_weights_iterator(
    hf_weights_files: Paths, use_tqdm_on_load: bool, pt_load_map_location: Any = "cpu"
) -> Weights:
    """Reads files of `torch.save`, one at a time.

    A dict under the key `state_dict` is taken in place of the one that it is in. What has no name or is no
    tensor is left out, with one warning for all files. Zip archives, as torch writes them since version 1.6,
    are mapped if they lie on a file system of this machine, privately: what is written to a tensor doesn't
    reach the file.

    Args:
        hf_weights_files: Paths, in any order.
        use_tqdm_on_load: Whether the process of local rank 0 shows progress; a callable is called as
            `progress(done_bytes, total_bytes, phase)`.
        pt_load_map_location: Where tensors go, as for `torch.load`.

    Yields:
        `(name, tensor)` by file in natural order, then by name; the order is the same on every rank.

    Raises:
        TypeError: `hf_weights_files` is no list of paths.
        MissingFileError: Files are absent.
        CorruptFileError: A file is damaged, or was cut meanwhile.
        CheckpointError: A file needs code to be run, which is named; tensors of one name differ; a file
            changed meanwhile; or torch can't put its tensors at the given location.
    """
    return _one_by_one(as_paths(hf_weights_files), use_tqdm_on_load, pt_load_map_location)


def multi_thread_pt_weights_iterator(
    hf_weights_files: Paths,
    use_tqdm_on_load: bool,
    pt_load_map_location: Any = "cpu",
    max_workers: int = 4,
) -> Weights:
    """Reads files of `torch.save` by several threads, each a file at a time; nothing is mapped.

    At most `max_workers + 1` files are in memory, however slow the consumer is. Closing the iterator ends the
    threads.

    Args:
        hf_weights_files: Paths, in any order.
        use_tqdm_on_load: As for `pt_weights_iterator`.
        pt_load_map_location: As for `pt_weights_iterator`.
        max_workers: Threads.

    Yields:
        The same tensors in the same order as `pt_weights_iterator`.

    Raises:
        ValueError: `max_workers` is under 1.
        As `pt_weights_iterator`.
    """
    paths, num_threads = as_paths(hf_weights_files), at_least_1("max_workers", max_workers)
    return _by_threads(paths, use_tqdm_on_load, pt_load_map_location, num_threads)


def _one_by_one(paths: list[str], use_tqdm_on_load: bool, map_location: Any) -> Weights:
    works = plan_torch_files(paths)
    tally = Tally(sum(work.nbytes for work in works), use_tqdm_on_load)
    for work in works:
        if not work.names:
            continue
        tally.starts(work)
        tensors = load_torch_file(work, map_location, can_map=True)
        for name in work.names:
            tally.add(work.sizes[name])
            yield name, tensors.pop(name)
        check_unchanged(work)


def _by_threads(paths: list[str], use_tqdm_on_load: bool, map_location: Any, max_workers: int) -> Weights:
    works = [work for work in plan_torch_files(paths) if work.names]
    tally = Tally(sum(work.nbytes for work in works), use_tqdm_on_load)

    def read(work: TorchFile, check_stop: Callable[[], None]) -> dict[str, torch.Tensor]:
        check_stop()
        return load_torch_file(work, map_location, check_stop=check_stop)

    freed_bytes = 0
    with FilePool(read, works, max_workers) as pool:
        for work in works:
            tally.starts(work)
            tensors = pool.take()
            for name in work.names:
                tally.add(work.sizes[name])
                yield name, tensors.pop(name)
                if name is work.names[0]:
                    # By now the consumer holds nothing of the file before.
                    pool.begin_next(freed_bytes)
                    freed_bytes = work.nbytes
