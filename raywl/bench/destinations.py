"""What all contestants have in common: the work, where it ends, and what arrived there."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch

from raywl.checkpoint import Manifest
from raywl.empty_model import EmptyModel, build_empty_model, describe_parameters
from raywl.opening import open_checkpoint
from raywl.plan import cut
from raywl.types import ParallelContext, Replicate, Shard

__all__ = ["TOUCHED", "Work", "bytes_of_model", "digest", "part_of", "touched_bytes", "touched_model"]

TOUCHED = 0xA5
"""What memory is filled with before anything is brought there."""


@dataclass(frozen=True, slots=True)
class Work:
    """One rank's share of a run."""

    ref: str
    source: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of `open_checkpoint`."""
    context: ParallelContext = field(default_factory=ParallelContext)
    shards: Mapping[str, int] = field(default_factory=dict)
    """Tensor name to the dim that it is cut along; the others are replicated."""
    folder: str = ""
    """For files of a contestant's own."""

    def manifest(self) -> Manifest:
        """The checkpoint's headers."""
        return open_checkpoint(self.ref, **self.source)

    def specs(self) -> dict[str, Shard]:
        """`shards` as specs."""
        return {name: Shard(dim) for name, dim in self.shards.items()}


def part_of(tensor: torch.Tensor, name: str, work: Work) -> torch.Tensor:
    """The rank's part of a whole tensor."""
    dim, context = work.shards.get(name), work.context
    if dim is None or context.tp_size == 1:
        return tensor
    start, end = cut(tensor.shape[dim], context.tp_rank, context.tp_size)
    return tensor.narrow(dim, start, end - start)


def touched_bytes(num_bytes: int) -> torch.Tensor:
    """Memory, every page of it touched."""
    return torch.empty(num_bytes, dtype=torch.uint8).fill_(TOUCHED)


def touched_model(work: Work) -> EmptyModel:
    """The rank's parameters in memory, every page of them touched, filled with what no one wants."""
    manifest = work.manifest()
    specs = {name: work.specs().get(name, Replicate()) for name in manifest.tensors}
    model = build_empty_model(describe_parameters(manifest), specs, work.context).to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.reshape(-1).view(torch.uint8).fill_(TOUCHED)
    return model


def bytes_of_model(model: EmptyModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter's name and bytes."""
    for name, parameter in model.named_parameters():
        yield name, parameter.data.reshape(-1).view(torch.uint8)


def digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """A hash over names and bytes, whatever their order."""

    def one(name: str) -> bytes:
        return hashlib.sha256(tensors[name].numpy().data).digest()

    names = sorted(tensors)
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        hashes = list(pool.map(one, names))
    whole = hashlib.sha256()
    for name, found in zip(names, hashes, strict=True):
        whole.update(name.encode("utf-8", "surrogateescape") + b"\0" + found)
    return whole.hexdigest()
