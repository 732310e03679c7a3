"""Iterators over safetensors files, by raywl's own reader."""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any

import torch

from raywl.iterators.files import FileWork, as_expert_ids, as_paths, at_least_1, plan_files
from raywl.iterators.pool import FilePool
from raywl.iterators.reading import read_file, read_lazily
from raywl.iterators.tally import Tally
from raywl.node.memory import available_ram_bytes
from raywl.node.mounts import fs_type
from raywl.node.prefetch import (
    checkpoints_size_bytes,
    local_rank_and_size,
    prefetch_all_checkpoints,
    should_prefetch,
)
from raywl.readers import choose_num_threads

__all__ = [
    "LOAD_STRATEGIES",
    "convert_pyslice_to_tensor",
    "multi_thread_safetensors_weights_iterator",
    "safetensors_weights_iterator",
]

LOAD_STRATEGIES = ("lazy", "eager", "prefetch", "torchao")

_log = logging.getLogger(__name__)
_STOP_S = 5.0

Weights = Generator[tuple[str, torch.Tensor], None, None]
Paths = Iterable[str | os.PathLike[str]]


def safetensors_weights_iterator(
    hf_weights_files: Paths,
    use_tqdm_on_load: bool,
    safetensors_load_strategy: str | None = None,
    local_expert_ids: Iterable[int] | None = None,
    *,
    safetensors_prefetch_num_threads: int = 8,
    safetensors_prefetch_block_size: int = 16 << 20,
) -> Weights:
    """Reads safetensors files, and gives out each tensor as a plain one on the CPU.

    Headers are read and checked before the first tensor is given out. Nothing is mapped into memory.

    Args:
        hf_weights_files: Paths, in any order.
        use_tqdm_on_load: Whether the process of local rank 0 shows progress; a callable is called as
            `progress(done_bytes, total_bytes, phase)`.
        safetensors_load_strategy: `"lazy"`: tensor by tensor. `"eager"`: each file whole, in the order of its
            bytes, for network file systems that are slow to seek; holds one file. `"prefetch"`: as `"lazy"`,
            while other threads fill the page cache; the ranks of a node share that work. `"torchao"`: as
            `"eager"`, and puts the quantised tensors of `torchao` together again. `None`: `"prefetch"` where
            the files are on a network file system and take at most 90 % of the memory that is available,
            else `"lazy"`.
        local_expert_ids: Leave out the heavy tensors of all other experts; `None` leaves out none.
        safetensors_prefetch_num_threads: Threads that fill the page cache.
        safetensors_prefetch_block_size: Most bytes that each of them reads at once.

    Yields:
        `(name, tensor)` by file in natural order, then by name; the order is the same on every rank.

    Raises:
        ValueError: An unknown strategy; fewer than 1 thread, or a block under 1 byte; an expert id that is no
            whole number.
        TypeError: `hf_weights_files` is no list of paths.
        ImportError: `torchao` is absent or too old for its strategy.
        MissingFileError: Files are absent.
        CorruptFileError: A file is damaged, or was cut meanwhile.
        CheckpointError: A dtype that torch has no type for; tensors of one name that differ; a file that
            changed meanwhile; pieces of `torchao` tensors that belong to nothing.
    """
    paths, ids = as_paths(hf_weights_files), as_expert_ids(local_expert_ids)
    num_threads = at_least_1("safetensors_prefetch_num_threads", safetensors_prefetch_num_threads)
    block_bytes = at_least_1("safetensors_prefetch_block_size", safetensors_prefetch_block_size)
    if safetensors_load_strategy is None or safetensors_load_strategy in ("lazy", "prefetch"):
        asked = {None: None, "lazy": False, "prefetch": True}[safetensors_load_strategy]
        return _lazy(
            paths, use_tqdm_on_load, ids, lambda files: _prefetch(files, asked, num_threads, block_bytes)
        )
    if safetensors_load_strategy == "eager":
        return _eager(paths, use_tqdm_on_load, ids)
    if safetensors_load_strategy == "torchao":
        from raywl.iterators.torchao import torchao_iterator

        return torchao_iterator(paths, use_tqdm_on_load, ids)
    raise ValueError(
        f"unknown safetensors_load_strategy {safetensors_load_strategy!r}: expected None or one of "
        f"{', '.join(LOAD_STRATEGIES)}"
    )


def multi_thread_safetensors_weights_iterator(
    hf_weights_files: Paths,
    use_tqdm_on_load: bool,
    max_workers: int = 4,
    local_expert_ids: Iterable[int] | None = None,
) -> Weights:
    """Reads safetensors files by several threads, each a file at a time.

    At most `max_workers + 1` files are in memory, however slow the consumer is. Closing the iterator ends the
    threads.

    Args:
        hf_weights_files: Paths, in any order.
        use_tqdm_on_load: As for `safetensors_weights_iterator`.
        max_workers: Threads.
        local_expert_ids: As for `safetensors_weights_iterator`.

    Yields:
        The same tensors in the same order as `safetensors_weights_iterator`.

    Raises:
        ValueError: `max_workers` is under 1.
        As `safetensors_weights_iterator`.
    """
    paths, ids = as_paths(hf_weights_files), as_expert_ids(local_expert_ids)
    return _by_threads(paths, use_tqdm_on_load, at_least_1("max_workers", max_workers), ids)


def convert_pyslice_to_tensor(x: Any) -> torch.Tensor:
    """A tensor as it is; what `safe_open(...).get_slice(name)` gives, read whole.

    Raises:
        TypeError: It is neither, or gives arrays of another framework.
        ValueError: A slice of F4, which the safetensors library can't read; `get_tensor` can.
    """
    if isinstance(x, torch.Tensor):
        return x
    if not hasattr(x, "get_dtype"):
        raise TypeError(f"expected a tensor or a slice of a safetensors file, not {type(x).__name__}")
    if x.get_dtype() == "F4":
        raise ValueError("slices of F4 can't be read by the safetensors library; use get_tensor(name)")
    # `[:]` is refused by tensors without dims.
    tensor = x[...]
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f'expected a slice of a file opened with framework="pt", which gives {type(tensor)}')
    return tensor


def _lazy(
    paths: list[str],
    use_tqdm_on_load: bool,
    ids: frozenset[int] | None,
    prefetch: Callable[[Sequence[str]], contextlib.AbstractContextManager[None]],
) -> Weights:
    works = plan_files(paths, ids)
    tally = Tally(sum(work.nbytes for work in works), use_tqdm_on_load)
    with prefetch([work.path for work in works]):
        for work in works:
            yield from read_lazily(work, tally)


@contextlib.contextmanager
def _prefetch(paths: Sequence[str], asked: bool | None, num_threads: int, block_bytes: int) -> Iterator[None]:
    """Fills the page cache while the block runs, if it was asked for, or the file system calls for it."""
    if asked is False or not paths:
        yield
        return
    decision = should_prefetch(fs_type(paths), checkpoints_size_bytes(paths), available_ram_bytes(), asked)
    if decision.warn:
        warnings.warn(decision.reason, stacklevel=5)
    if not decision.on:
        yield
        return
    _log.info("%s", decision.reason)
    running = prefetch_all_checkpoints(paths, num_threads, block_bytes)
    try:
        yield
    finally:
        running.close()
        # Its threads end after the block that they are at, unless the file system hangs.
        running.join(_STOP_S)


def _eager(paths: list[str], use_tqdm_on_load: bool, ids: frozenset[int] | None) -> Weights:
    works = [work for work in plan_files(paths, ids) if work.names]
    tally = Tally(sum(work.data_nbytes for work in works), use_tqdm_on_load)
    for work in works:
        tally.starts(work)
        threads = choose_num_threads(local_rank_and_size()[1])
        tensors = read_file(work, num_threads=threads, discarded=work.left_out)
        tally.add(work.data_nbytes)
        for name in work.names:
            yield name, tensors.pop(name)


def _by_threads(
    paths: list[str], use_tqdm_on_load: bool, max_workers: int, ids: frozenset[int] | None
) -> Weights:
    works = [work for work in plan_files(paths, ids) if work.names]
    tally = Tally(sum(work.nbytes for work in works), use_tqdm_on_load)

    def read(work: FileWork, check_stop: Callable[[], None]) -> dict[str, torch.Tensor]:
        check_stop()
        return read_file(work, num_threads=1, on_bytes=lambda _: check_stop())

    freed_bytes = 0
    with FilePool(read, works, max_workers) as pool:
        for work in works:
            tally.starts(work)
            tensors = pool.take()
            for name in work.names:
                tally.add(work.entries[name].nbytes)
                yield name, tensors.pop(name)
                if name is work.names[0]:
                    # By now the consumer holds nothing of the file before.
                    pool.begin_next(freed_bytes)
                    freed_bytes = work.nbytes
