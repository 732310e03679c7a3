"""Tensors one after the other: order, choice, and equality with the library's own reader."""

from __future__ import annotations

import os

import torch
from safetensors.torch import load_file, save_file

import raywl
from raywl.plan.reads import schedule
from raywl.readers import files as files_module


def test_order_is_by_file_in_natural_order_then_by_name(tmp_path):
    for index in (2, 10, 1):
        save_file(
            {f"b{index}": torch.ones(index), f"a{index}": torch.zeros(3)},
            tmp_path / f"model{index}.safetensors",
        )
    names = [name for name, _ in raywl.open_checkpoint(tmp_path).iter_weights()]
    assert names == ["a1", "b1", "a2", "b2", "a10", "b10"]


def test_chosen_names_and_experts(tmp_path):
    weights = {f"experts.{e}.w1.weight": torch.full((2,), float(e)) for e in range(4)} | {
        "dense": torch.ones(1)
    }
    save_file(weights, tmp_path / "model.safetensors")
    checkpoint = raywl.open_checkpoint(tmp_path)
    assert [name for name, _ in checkpoint.iter_weights(names=["dense"])] == ["dense"]
    own = dict(checkpoint.iter_weights(local_expert_ids=[1, 3]))
    assert sorted(own) == ["dense", "experts.1.w1.weight", "experts.3.w1.weight"]


def test_planned_bytes_are_those_asked_of_the_system(tmp_path, monkeypatch):
    """`bytes_read` is what `preadv` was asked for, for whole tensors and for parts."""
    asked = []
    real = os.preadv

    def counted(fd, buffers, offset):
        asked.append(sum(buffer.nbytes for buffer in buffers))
        return real(fd, buffers, offset)

    weights = {f"w{i}": torch.randn(40, 3 + i) for i in range(30)}
    save_file(weights, tmp_path / "model.safetensors")
    monkeypatch.setattr(files_module.os, "preadv", counted)
    for shards in ({}, {"*": raywl.Shard(0)}, {"*": raywl.Shard(1)}):
        asked.clear()
        model = torch.nn.Module()
        for name, tensor in weights.items():
            setattr(model, name, torch.nn.Parameter(torch.empty_like(tensor, device="meta")))
        context = raywl.ParallelContext(tp_rank=1, tp_size=2) if shards else raywl.ParallelContext()
        report = raywl.load_into(model, tmp_path, shards=shards, parallel=context)
        assert sum(asked) == report.bytes_read == report.plan.nbytes == sum(report.bytes_by_file.values())
        assert report.plan.reads == tuple(schedule(report.plan.copies, {"model.safetensors": 0}))


def test_what_is_read_is_what_the_library_reads(tmp_path):
    weights = {f"w{i}": torch.randn(i, 5).to(torch.bfloat16) for i in range(5)}
    save_file(weights, tmp_path / "model.safetensors")
    expected = load_file(tmp_path / "model.safetensors")
    got = dict(raywl.open_checkpoint(tmp_path).iter_weights())
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], expected[name]) for name in got)


def test_small_tensors_come_together_and_large_ones_alone(tmp_path, monkeypatch):
    """Few reads for many tensors, in the order of names, and no more than is about to be given out."""
    weights = {f"s{i}": torch.full((3,), float(i)) for i in range(300)}
    weights |= {f"t{i}": torch.full((5_000_000,), float(i)) for i in range(2)}
    save_file(weights, tmp_path / "model.safetensors")
    asked = []
    real = os.preadv

    def counted(fd, buffers, offset):
        asked.append(sum(buffer.nbytes for buffer in buffers))
        return real(fd, buffers, offset)

    tensors = raywl.open_checkpoint(tmp_path).iter_weights(strategy="buffered")
    monkeypatch.setattr(files_module.os, "preadv", counted)
    name, first = next(tensors)
    assert (name, len(asked), sum(asked)) == ("s0", 1, 300 * 12)
    held = {name: first} | {name: next(tensors)[1] for name in sorted(weights)[1:-1]}
    assert sum(asked) == 300 * 12 + 20_000_000
    held |= dict(tensors)
    assert all(torch.equal(held[name], tensor) for name, tensor in weights.items())
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in held.values())


def test_under_a_default_device(tmp_path):
    """Models are made on `meta`; what is read is not."""
    save_file({"a": torch.ones(4)}, tmp_path / "model.safetensors")
    with torch.device("meta"):
        ((_, tensor),) = raywl.open_checkpoint(tmp_path).iter_weights()
    assert tensor.tolist() == [1.0] * 4
