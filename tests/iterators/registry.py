"""Every way of iterating over weight files. The contract runs each of them over the same checkpoints.

A new iterator is added to `WAYS`; `tests/iterators/test_contract.py` needs no change for it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from raywl import weight_utils

Weights = Iterator[tuple[str, torch.Tensor]]

TORCHAO = "RAYWL_TEST_TORCHAO"
"""Set in the process that the way through torchao is tested in, alone: others must not import it."""


@dataclass(frozen=True)
class Way:
    """One iterator, and one of its strategies."""

    id: str
    iterate: Callable[..., Weights]
    """Called as `iterate(files, use_tqdm_on_load=False)`, with `local_expert_ids` where `has_experts`."""
    kind: str = "safetensors"
    """What its files are: `safetensors`, `torch` (a zip archive) or `legacy` (before torch 1.6)."""
    has_experts: bool = True
    """Whether it takes `local_expert_ids`."""
    reads_whole_files: bool = False
    """Whether experts of others are read, and thrown away."""
    max_files: int = 1
    """Most files in memory."""
    is_mapped: bool = False
    """Whether files are mapped, and not read."""
    needs: str | None = None
    """The library without which it is skipped."""

    def __call__(self, files: Iterable[Any], use_tqdm_on_load: Any = False, **options: Any) -> Weights:
        return self.iterate(files, use_tqdm_on_load, **options)

    @property
    def suffix(self) -> str:
        return ".safetensors" if self.kind == "safetensors" else ".bin"


def _safetensors(strategy: str | None, **options: Any) -> Callable[..., Weights]:
    def iterate(files: Iterable[Any], use_tqdm_on_load: Any, local_expert_ids: Any = None) -> Weights:
        return weight_utils.safetensors_weights_iterator(
            files, use_tqdm_on_load, strategy, local_expert_ids, **options
        )

    return iterate


def _threads(max_workers: int) -> Callable[..., Weights]:
    def iterate(files: Iterable[Any], use_tqdm_on_load: Any, local_expert_ids: Any = None) -> Weights:
        return weight_utils.multi_thread_safetensors_weights_iterator(
            files, use_tqdm_on_load, max_workers, local_expert_ids
        )

    return iterate


def _pt_threads(max_workers: int) -> Callable[..., Weights]:
    def iterate(files: Iterable[Any], use_tqdm_on_load: Any) -> Weights:
        return weight_utils.multi_thread_pt_weights_iterator(files, use_tqdm_on_load, "cpu", max_workers)

    return iterate


def _np_cache(files: Iterable[Any], use_tqdm_on_load: Any) -> Weights:
    folder = Path(os.fspath(files[0])).parent if isinstance(files, list) and files else Path.cwd()
    return weight_utils.np_cache_weights_iterator(
        str(folder), folder / "locks", folder, files, use_tqdm_on_load
    )


WAYS = [
    Way("default", _safetensors(None)),
    Way("lazy", _safetensors("lazy")),
    Way("eager", _safetensors("eager"), reads_whole_files=True),
    Way(
        "prefetch",
        _safetensors("prefetch", safetensors_prefetch_num_threads=2, safetensors_prefetch_block_size=1 << 20),
    ),
    Way("threads-1", _threads(1), max_files=2),
    Way("threads-3", _threads(3), max_files=4),
    Way("pt", weight_utils.pt_weights_iterator, "torch", has_experts=False, is_mapped=True),
    Way("pt-legacy", weight_utils.pt_weights_iterator, "legacy", has_experts=False),
    Way("pt-threads-1", _pt_threads(1), "torch", has_experts=False, max_files=2),
    Way("pt-threads-3", _pt_threads(3), "torch", has_experts=False, max_files=4),
    Way("pt-threads-3-legacy", _pt_threads(3), "legacy", has_experts=False, max_files=4),
    Way("np-cache", _np_cache, has_experts=False),
    Way("np-cache-torch", _np_cache, "torch", has_experts=False),
    Way(
        "runai",
        weight_utils.runai_safetensors_weights_iterator,
        has_experts=False,
        needs="runai_model_streamer",
    ),
    Way(
        "fastsafetensors",
        weight_utils.fastsafetensors_weights_iterator,
        has_experts=False,
        needs="fastsafetensors",
    ),
]
if os.environ.get(TORCHAO):
    WAYS = [Way("torchao", _safetensors("torchao"), needs="torchao")]
