"""What is measured: each way to bring a checkpoint's bytes into memory that was touched before.

`prepare` makes everything ready that isn't the work itself: imports, destinations, their pages. `run`
is what is timed. `digest` tells afterwards what arrived.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import torch

from raywl.bench.destinations import Work, bytes_of_model, digest, touched_bytes, touched_model
from raywl.bench.peers import PEERS
from raywl.bench.reloads import CopyOnly, ReloadInto
from raywl.checkpoint import Manifest, TensorEntry
from raywl.plan import cut, local_box
from raywl.report import LoadReport
from raywl.strategies import check_strategy

__all__ = ["Contestant", "LoadInto", "Raw", "SafeOpenLoop", "Work", "make_contestant"]

_BLOCK_BYTES = 16 << 20


class Contestant(Protocol):
    """One way to do the work, used once in a process of its own."""

    def prepare(self, work: Work) -> None:
        """Imports, opens nothing that is timed, and touches the destinations."""

    def run(self) -> int:
        """Does the work; returns the bytes that were asked of the source."""

    def digest(self) -> str | None:
        """A hash over the name and bytes of every tensor, or `None` where the bytes aren't comparable."""

    @property
    def files(self) -> Sequence[str]:
        """Files that it reads beside the checkpoint's own."""


def make_contestant(name: str) -> Contestant:
    """The contestant of that name.

    Args:
        name: `load_into`, or `load_into-WORD` with a strategy; `safe_open`; `raw-N` with N threads; a word
            of `PEERS`; for reloads `reload_into`, or `copy-N` with N threads.

    Raises:
        ValueError: Another name.
    """
    if name in PEERS:
        return PEERS[name]()
    if name == "load_into":
        return LoadInto()
    if name.startswith("load_into-"):
        return LoadInto(name.partition("-")[2])
    if name in _BY_NAME:
        return _BY_NAME[name]()
    kind, _, threads = name.partition("-")
    if kind in _BY_THREADS and threads.isdecimal():
        return _BY_THREADS[kind](int(threads))
    words = ", ".join(
        ["load_into", "load_into-WORD", *_BY_NAME, *(f"{kind}-N" for kind in _BY_THREADS), *PEERS]
    )
    raise ValueError(f"unknown contestant {name!r}: {words}")


class LoadInto:
    """`raywl.load_into`, from opening the checkpoint on."""

    files: Sequence[str] = ()

    def __init__(self, strategy: str | None = None) -> None:
        check_strategy(strategy)
        self._strategy = strategy

    def prepare(self, work: Work) -> None:
        import raywl

        self._load = raywl.load_into
        self._work = work
        self._model = touched_model(work)

    def run(self) -> int:
        report: LoadReport = self._load(
            self._model,
            self._work.ref,
            parallel=self._work.context,
            shards=self._work.specs(),
            strategy=self._strategy,
            **self._work.source,
        )
        return report.bytes_read

    def digest(self) -> str | None:
        return digest(dict(bytes_of_model(self._model)))


class SafeOpenLoop:
    """What is usually written: `safetensors.safe_open`, and a copy of each tensor or slice of it."""

    files: Sequence[str] = ()

    def prepare(self, work: Work) -> None:
        from safetensors import safe_open

        self._safe_open = safe_open
        self._work = work
        manifest = work.manifest()
        self._names = {file.name: [] for file in manifest.files}  # type: dict[str, list[str]]
        for name, entry in manifest.tensors.items():
            self._names[entry.file].append(name)
        self._paths = {file.name: manifest.path(file.name) for file in manifest.files}
        self._model = touched_model(work)
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
        return digest(dict(bytes_of_model(self._model)))


class Raw:
    """The limit: as many bytes by parallel `preadv` in large blocks, and nothing else."""

    files: Sequence[str] = ()

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads

    def prepare(self, work: Work) -> None:
        manifest = work.manifest()
        self._manifest = manifest
        self._whole = work.context.tp_size == 1
        self._spans = [(manifest.path(file), start, end) for file, start, end in _spans(manifest, work)]
        self._buffers = [touched_bytes(end - start) for _, start, end in self._spans]

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
        return digest(found)


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


_BY_NAME: dict[str, Callable[[], Contestant]] = {
    "safe_open": SafeOpenLoop,
    "reload_into": ReloadInto,
}
_BY_THREADS: dict[str, Callable[[int], Contestant]] = {"raw": Raw, "copy": CopyOnly}
