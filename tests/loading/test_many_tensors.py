"""Work grows with the number of tensors, not with its square: counted, not timed."""

from __future__ import annotations

import collections

import pytest
import torch
from torch import nn

import raywl
from raywl.loading import destinations, record
from raywl.plan import pending, places

from .conftest import Model

NUM, COLUMNS = 300, 8


class Parts(nn.Module):
    """Parameters that are parts of one buffer, and perhaps the buffer too; or each with memory of its own."""

    def __init__(self, kind: str, load=None) -> None:
        super().__init__()
        flat = torch.full((NUM * COLUMNS,), 7.0)
        for index in range(NUM):
            part = flat[index * COLUMNS : (index + 1) * COLUMNS]
            part = part.clone() if kind == "own memory" else part
            self.register_parameter(f"w{index}", nn.Parameter(part, requires_grad=False))
        if kind == "parts and the whole":
            self.register_buffer("whole", flat, persistent=False)
        if load is not None:
            self.load_weights = lambda weights: load(self, weights)


@pytest.fixture
def tensors():
    generator = torch.Generator().manual_seed(0)
    return {f"w{index}": torch.randn(COLUMNS, generator=generator) for index in range(NUM)}


@pytest.fixture
def counted(monkeypatch):
    """How often copies were compared, memories asked for what is noted, and places looked up."""
    counts = collections.Counter()

    def count(owner, name):
        real = getattr(owner, name)

        def call(*args):
            counts[name] += 1
            return real(*args)

        monkeypatch.setattr(owner, name, call)

    count(pending, "may_overlap")
    count(destinations, "may_overlap")
    count(destinations.Destination, "take")
    count(places.Places, "holding")
    count(places.Places, "meeting")
    return counts


def copy_all(model, weights):
    for name, weight in weights:
        model.get_parameter(name).copy_(weight)


def copy_and_compute(model, weights):
    """Every parameter is looked at at once, so that its copy can't wait."""
    for name, weight in weights:
        parameter = model.get_parameter(name)
        parameter.copy_(weight)
        parameter.mul_(2)


@pytest.mark.parametrize("kind", ["parts", "parts and the whole", "own memory"])
@pytest.mark.parametrize("load", [None, copy_all, copy_and_compute])
def test_what_is_counted(write, tensors, counted, kind, load):
    """A few look-ups for each tensor, whatever memory the parameters lie in, and the right values."""
    model = Parts(kind, load)
    raywl.load_into(model, write(tensors))
    for name, tensor in tensors.items():
        assert torch.equal(model.get_parameter(name), tensor * (2 if load is copy_and_compute else 1)), name
    for name, number in counted.items():
        assert number <= 4 * NUM, name
    if load is not None:
        assert counted["holding"] == (0 if kind == "own memory" else NUM)
        assert counted["take"] >= (NUM if load is copy_and_compute else 1)


def test_shared_memory_of_many(write, monkeypatch):
    """Pairs of parameters that each share some memory: what is set of them is found by their own copies."""
    num, tensors, parameters = 100, {}, {}
    for index in range(num):
        memory = torch.full((6,), 7.0)
        tensors |= {
            f"a{index}": torch.full((4,), 2.0 * index),
            f"b{index}": torch.full((2,), 2.0 * index + 1),
        }
        parameters |= {f"a{index}": memory[:4], f"b{index}": memory[4:]}
    model = Model(parameters)
    runs = []
    real = record.runs_of
    monkeypatch.setattr(record, "runs_of", lambda copy: runs.append(copy) or real(copy))
    report = raywl.load_into(model, write(tensors))
    assert (report.missing, report.partial) == ([], {})
    assert len(runs) == 2 * num
    for name, tensor in tensors.items():
        assert torch.equal(model.get_parameter(name), tensor)
