"""What is measured: each way to bring a checkpoint's bytes into memory that was touched before.

`prepare` makes everything ready that isn't the work itself: imports, destinations, their pages. `run`
is what is timed. `digest` tells afterwards what arrived.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from raywl.checkpoint import Manifest, TensorEntry
from raywl.empty_model import EmptyModel, build_empty_model, describe_parameters
from raywl.opening import open_checkpoint
from raywl.plan import cut, local_box
from raywl.report import LoadReport
from raywl.types import ParallelContext, Replicate, Shard

__all__ = ["Contestant", "LoadInto", "Raw", "SafeOpenLoop", "Work", "make_contestant"]

_BLOCK_BYTES = 16 << 20
_TOUCHED = 0xA5


@dataclass(frozen=True, slots=True)
class Work:
    """One rank's share of a run."""

    ref: str
    source: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of `open_checkpoint`."""
    context: ParallelContext = field(default_factory=ParallelContext)
    shards: Mapping[str, int] = field(default_factory=dict)
    """Tensor name to the dim that it is cut along; the others are replicated."""

    def manifest(self) -> Manifest:
        """The checkpoint's headers; its files are local."""
        manifest = open_checkpoint(self.ref, **self.source)
        manifest.fetch()
        return manifest

    def specs(self) -> dict[str, Shard]:
        """`shards` as specs."""
        return {name: Shard(dim) for name, dim in self.shards.items()}


class Contestant(Protocol):
    """One way to do the work, used once in a process of its own."""

    def prepare(self, work: Work) -> None:
        """Imports, opens nothing that is timed, and touches the destinations."""

    def run(self) -> int:
        """Does the work; returns the bytes that were asked of the source."""

    def digest(self) -> str | None:
        """A hash over the name and bytes of every tensor, or `None` where the bytes aren't comparable."""


def make_contestant(name: str) -> Contestant:
    """The contestant of that name: `load_into`, `safe_open`, or `raw-N` with N threads."""
    if name == "load_into":
        return LoadInto()
    if name == "safe_open":
        return SafeOpenLoop()
    kind, _, threads = name.partition("-")
    if kind == "raw" and threads.isdecimal():
        return Raw(int(threads))
    raise ValueError(f"unknown contestant {name!r}: load_into, safe_open, raw-N")


class LoadInto:
    """`raywl.load_into`, from opening the checkpoint on."""

    def prepare(self, work: Work) -> None:
        import raywl

        self._load = raywl.load_into
        self._work = work
        self._model = _touched_model(work)

    def run(self) -> int:
        report: LoadReport = self._load(
            self._model,
            self._work.ref,
            parallel=self._work.context,
            shards=self._work.specs(),
            **self._work.source,
        )
        return report.bytes_read

    def digest(self) -> str | None:
        return _digest(dict(_bytes_of_model(self._model)))


class SafeOpenLoop:
    """What is usually written: `safetensors.safe_open`, and a copy of each tensor or slice of it."""

    def prepare(self, work: Work) -> None:
        from safetensors import safe_open

        self._safe_open = safe_open
        self._work = work
        manifest = work.manifest()
        self._names = {file.name: [] for file in manifest.files}  # type: dict[str, list[str]]
        for name, entry in manifest.tensors.items():
            self._names[entry.file].append(name)
        self._paths = {file.name: manifest.path(file.name) for file in manifest.files}
        self._model = _touched_model(work)
        self._parameters = dict(self._model.named_parameters())

    def run(self) -> int:
        num_bytes = 0
        for file, names in self._names.items():
            with self._safe_open(self._paths[file], framework="pt") as handle, torch.no_grad():
                for name in names:
                    parameter = self._parameters[name]
                    parameter.copy_(self._part(handle, name))
                    num_bytes += parameter.nbytes
        return num_bytes

    def _part(self, handle: Any, name: str) -> torch.Tensor:
        dim, context = self._work.shards.get(name), self._work.context
        if dim is None or context.tp_size == 1:
            whole: torch.Tensor = handle.get_tensor(name)
            return whole
        lazy = handle.get_slice(name)
        shape = lazy.get_shape()
        index = [slice(None)] * len(shape)
        index[dim] = slice(*cut(shape[dim], context.tp_rank, context.tp_size))
        part: torch.Tensor = lazy[tuple(index)]
        return part

    def digest(self) -> str | None:
        return _digest(dict(_bytes_of_model(self._model)))


class Raw:
    """The limit: as many bytes by parallel `preadv` in large blocks, and nothing else."""

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads

    def prepare(self, work: Work) -> None:
        manifest = work.manifest()
        self._manifest = manifest
        self._whole = work.context.tp_size == 1
        self._spans = [(manifest.path(file), start, end) for file, start, end in _spans(manifest, work)]
        self._buffers = [_touched_bytes(end - start) for _, start, end in self._spans]

    def run(self) -> int:
        paths = dict.fromkeys(path for path, _, _ in self._spans)
        files = {path: os.open(path, os.O_RDONLY) for path in paths}
        try:
            with ThreadPoolExecutor(self._num_threads) as pool:
                done = [
                    pool.submit(_read_block, files[path], view, start, offset)
                    for (path, start, end), buffer in zip(self._spans, self._buffers, strict=True)
                    for view in [buffer.numpy().data]
                    for offset in range(0, end - start, _BLOCK_BYTES)
                ]
                for block in done:
                    block.result()
        finally:
            for descriptor in files.values():
                os.close(descriptor)
        return sum(end - start for _, start, end in self._spans)

    def digest(self) -> str | None:
        if not self._whole:
            return None
        found = {name: torch.empty(0, dtype=torch.uint8) for name in self._manifest.tensors}
        for (path, start, end), buffer in zip(self._spans, self._buffers, strict=True):
            for name, entry in self._manifest.tensors.items():
                inside = self._manifest.path(entry.file) == path and start <= entry.start < end
                if inside and entry.nbytes:
                    found[name] = buffer[entry.start - start : entry.end - start]
        return _digest(found)


def _read_block(descriptor: int, view: memoryview, start: int, offset: int) -> None:
    end = min(offset + _BLOCK_BYTES, len(view))
    while offset < end:
        count = os.preadv(descriptor, [view[offset:end]], start + offset)
        if count == 0:
            raise OSError(f"file ended at byte {start + offset}")
        offset += count


def _spans(manifest: Manifest, work: Work) -> Iterator[tuple[str, int, int]]:
    """Runs of the files, as many bytes as the rank keeps: of a cut tensor, that share in one run."""
    rank, size = work.context.tp_rank, work.context.tp_size
    shares: list[tuple[str, int, int]] = []
    for file in manifest.files:
        entries = [(name, e) for name, e in manifest.tensors.items() if e.file == file.name]
        for name, entry in sorted(entries, key=lambda item: item[1].start):
            start, end = _share(name, entry, work, rank, size)
            if start == end:
                continue
            if shares and shares[-1][0] == file.name and shares[-1][2] == start:
                shares[-1] = (file.name, shares[-1][1], end)
            else:
                shares.append((file.name, start, end))
    yield from shares


def _share(name: str, entry: TensorEntry, work: Work, rank: int, size: int) -> tuple[int, int]:
    if name not in work.shards or size == 1:
        return entry.start, entry.end
    box = local_box(name, entry.shape, work.specs()[name], rank, size)
    dim = work.shards[name] % len(entry.shape)
    per_index = entry.nbytes // max(1, entry.shape[dim])
    return entry.start + box[dim][0] * per_index, entry.start + box[dim][1] * per_index


def _touched_bytes(num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8).fill_(_TOUCHED)


def _touched_model(work: Work) -> EmptyModel:
    """The rank's parameters in memory, every page of them touched, filled with what no one wants."""
    manifest = work.manifest()
    specs = {name: work.specs().get(name, Replicate()) for name in manifest.tensors}
    model = build_empty_model(describe_parameters(manifest), specs, work.context).to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.reshape(-1).view(torch.uint8).fill_(_TOUCHED)
    return model


def _bytes_of_model(model: EmptyModel) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in model.named_parameters():
        yield name, parameter.data.reshape(-1).view(torch.uint8)


def _digest(tensors: Mapping[str, torch.Tensor]) -> str:
    def one(name: str) -> bytes:
        return hashlib.sha256(tensors[name].numpy().data).digest()

    names = sorted(tensors)
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        hashes = list(pool.map(one, names))
    whole = hashlib.sha256()
    for name, digest in zip(names, hashes, strict=True):
        whole.update(name.encode("utf-8", "surrogateescape") + b"\0" + digest)
    return whole.hexdigest()
