"""Loads out of chunks, in any order and of any size: the parameters are those of a load from files."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import raywl
from raywl.coordination import ChunkTable
from raywl.coordination.chunks import each_bit
from raywl.readers.streamed import streamed

SHARDS = {"rows": raywl.Shard(0), "columns": raywl.Shard(1), "wide": raywl.Shard(0)}


class Model(nn.Module):
    """Cuts along both dims, a conversion, and a parameter whose loader looks at what it is given."""

    def __init__(self, context: raywl.ParallelContext, peeks: bool = False) -> None:
        super().__init__()
        size = context.tp_size
        self.rows = nn.Parameter(torch.empty(64 // size, 33))
        self.columns = nn.Parameter(torch.empty(41, 48 // size, dtype=torch.bfloat16))
        self.wide = nn.Parameter(torch.empty(64 // size, 5, dtype=torch.float64))
        self.whole = nn.Parameter(torch.empty(101, 7, dtype=torch.float64))
        self.scaled = nn.Parameter(torch.empty(16, 16))
        if peeks:
            self.scaled.weight_loader = self._scale

    @staticmethod
    def _scale(param: nn.Parameter, weight: torch.Tensor) -> None:
        param.data.copy_(weight)
        param.data.mul_(1 / weight.abs().max())


def tensors(seed: int) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    return {
        "rows": torch.randn(64, 33, generator=made),
        "columns": torch.randn(41, 48, generator=made).bfloat16(),
        "wide": torch.randn(64, 5, generator=made).half(),
        "whole": torch.randn(101, 7, generator=made, dtype=torch.float64),
        "scaled": torch.randn(16, 16, generator=made),
    }


class LocalFeed:
    """Chunks of files of this machine, shuffled, as read-only arrays."""

    def __init__(self, checkpoint: raywl.Checkpoint, chunk_bytes: int, seed: int = 0) -> None:
        self._checkpoint, self._random = checkpoint, random.Random(seed)
        self.table = ChunkTable(tuple((file.name, file.size) for file in checkpoint.files), chunk_bytes)
        self.taken: list[int] = []
        self.asked: list[tuple[str, int, int]] = []

    def read(self, file: str, start: int, end: int) -> bytes:
        self.asked.append((file, start, end))
        return Path(self._checkpoint.path(file)).read_bytes()[start:end]

    def take(self, needs):
        left = list(each_bit(needs))
        self._random.shuffle(left)
        while left:
            batch, left = left[:3], left[3:]
            self.taken += batch
            yield [(chunk, self._chunk(chunk)) for chunk in batch]

    def _chunk(self, chunk):
        file, start, end = self.table.span(chunk)
        data = Path(self._checkpoint.path(self.table.files[file][0])).read_bytes()[start:end]
        array = np.frombuffer(data, dtype=np.uint8)
        assert not array.flags.writeable
        return array


@pytest.fixture
def checkpoint(tmp_path):
    found = tensors(1)
    save_file({name: found[name] for name in ("rows", "columns", "scaled")}, tmp_path / "a.safetensors")
    save_file({name: found[name] for name in ("wide", "whole")}, tmp_path / "b.safetensors")
    return raywl.open_checkpoint(tmp_path)


@pytest.mark.parametrize("chunk_bytes", [7, 100, 1001, 4096, 1 << 20])
@pytest.mark.parametrize("tp_size", [1, 2])
def test_same_as_from_files(checkpoint, chunk_bytes, tp_size):
    for rank in range(tp_size):
        context = raywl.ParallelContext(tp_rank=rank, tp_size=tp_size)
        wanted, got = Model(context), Model(context)
        from_files = raywl.load_into(wanted, checkpoint, parallel=context, shards=SHARDS)
        feed = LocalFeed(checkpoint, chunk_bytes, seed=rank)
        report = raywl.load_into(got, streamed(checkpoint, feed), parallel=context, shards=SHARDS)
        for name, parameter in wanted.named_parameters():
            assert torch.equal(parameter, got.get_parameter(name)), name
        assert len(feed.taken) == len(set(feed.taken))
        assert not feed.asked
        assert report.loaded == from_files.loaded
        assert report.bytes_read == report.bytes_by_source["chunks"] == from_files.bytes_read
        assert any("streamed" in note for note in report.notes)


def test_only_chunks_of_what_is_kept_are_taken(checkpoint):
    """A rank that keeps half the rows takes about half the chunks of them."""
    context = raywl.ParallelContext(tp_rank=1, tp_size=2)
    feed = LocalFeed(checkpoint, 64)
    raywl.load_into(Model(context), streamed(checkpoint, feed), parallel=context, shards=SHARDS)
    entry = checkpoint.tensors["rows"]
    of_rows = [
        chunk
        for chunk in feed.taken
        if feed.table.files[feed.table.span(chunk).file][0] == entry.file
        and entry.start <= feed.table.span(chunk).start < entry.end
    ]
    assert len(of_rows) <= entry.nbytes / 64 / 2 + 2


def test_a_loader_that_looks_at_values(checkpoint):
    """What it looks at is asked for at once, and that is told; the rest comes by chunks."""
    context = raywl.ParallelContext()
    wanted, got = Model(context, peeks=True), Model(context, peeks=True)
    raywl.load_into(wanted, checkpoint)
    feed = LocalFeed(checkpoint, 512)
    report = raywl.load_into(got, streamed(checkpoint, feed))
    for name, parameter in wanted.named_parameters():
        assert torch.equal(parameter, got.get_parameter(name)), name
    entry = checkpoint.tensors["scaled"]
    assert {file for file, _, _ in feed.asked} == {entry.file}
    assert all(entry.start <= start < end <= entry.end for _, start, end in feed.asked)
    assert any("looked at values" in note for note in report.notes)


def test_reload_in_place(checkpoint, tmp_path):
    """Through a feed too: addresses are kept."""
    other = tmp_path / "other"
    other.mkdir()
    save_file(tensors(2), other / "model.safetensors")
    model = Model(raywl.ParallelContext())
    raywl.load_into(model, checkpoint)
    before = [parameter.data_ptr() for parameter in model.parameters()]
    opened = raywl.open_checkpoint(other)
    raywl.reload_into(model, streamed(opened, LocalFeed(opened, 333)))
    assert [parameter.data_ptr() for parameter in model.parameters()] == before
    assert torch.equal(model.wide, tensors(2)["wide"].double())
    assert torch.equal(model.whole, tensors(2)["whole"])


def test_nothing_wanted_is_said_too(checkpoint):
    """A rank without any of it: whoever feeds it must know that it needs nothing."""
    feed = LocalFeed(checkpoint, 512)
    asked = []
    take = feed.take
    feed.take = lambda needs: (asked.append(needs), take(needs))[1]
    with pytest.warns(UserWarning, match="have no place"):
        raywl.load_into(nn.Module(), streamed(checkpoint, feed), strict=False)
    assert asked == [0]
