"""Repositories of a hub that hold files of `torch.save`, or both formats."""

from __future__ import annotations

import io
import json

import pytest
import torch
from torch import nn

import raywl
from raywl.opening import open_checkpoint
from raywl.writing import convert
from tests.sources.conftest import shard
from tests.torch_states import INDEX

ONE, TWO = "pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"
LEFT = [
    "training_args.bin",
    "optimizer.bin",
    "optimizer.pt",
    "scheduler.pt",
    "scaler.pt",
    "sub/optimizer.bin",
]


def saved(state: dict) -> bytes:
    out = io.BytesIO()
    torch.save(state, out)
    return out.getvalue()


def repository(count: int = 2) -> dict[str, bytes]:
    """Two files with an index, what a trainer left, and files that the index doesn't name."""
    one = {f"a{i}": torch.full((3, 4), float(i)).t() for i in range(count)}
    two = {"b": torch.arange(6.0)}
    weight_map = dict.fromkeys(one, ONE) | dict.fromkeys(two, TWO)
    return {
        ONE: saved(one),
        TWO: saved(two),
        INDEX: json.dumps({"weight_map": weight_map}).encode(),
        "config.json": b"{}",
        "adapter_model.bin": b"x",
        "pytorch_model.bin": b"x",
        "original/model.bin": b"x",
        **dict.fromkeys(LEFT, b"x"),
    }


def fetched(hub) -> set[str]:
    return {name.removeprefix("org/name/") for name in hub.downloads()}


@pytest.mark.filterwarnings("ignore:left out, as a trainer's state:UserWarning")
def test_exactly_what_the_index_names(client):
    """C05, C07: its files and the small ones; nothing of a trainer's, nothing in another naming."""
    client.add("org/name", repository())
    model = nn.Module()
    for name in ("a0", "a1"):
        model.register_buffer(name, torch.zeros(4, 3))
    model.register_buffer("b", torch.zeros(6))
    raywl.load_into(model, "org/name", strict="exact")
    assert torch.equal(model.a1, torch.full((4, 3), 1.0))
    assert model.b.tolist() == [0, 1, 2, 3, 4, 5]
    assert fetched(client) == {ONE, TWO, INDEX, "config.json"}


def test_without_an_index_what_a_trainer_left_is_not_fetched(client):
    """C07."""
    client.add("org/name", {"pytorch_model.bin": saved({"a": torch.ones(2)}), **dict.fromkeys(LEFT, b"x")})
    with pytest.warns(UserWarning, match=r"a trainer's state and no weights: optimizer\.bin"):
        checkpoint = open_checkpoint("org/name")
    checkpoint.fetch()
    assert list(checkpoint.tensors) == ["a"]
    assert fetched(client) == {"pytorch_model.bin"}


def test_safetensors_are_preferred(client):
    """C07: with both formats there, one of them is fetched; the other one where only it is allowed."""
    client.add(
        "org/name", {"model.safetensors": shard(["a"]), "pytorch_model.bin": saved({"b": torch.ones(2)})}
    )
    checkpoint = open_checkpoint("org/name")
    checkpoint.fetch()
    assert (checkpoint.format, list(checkpoint.tensors)) == ("safetensors", ["a"])
    assert fetched(client) == {"model.safetensors"}
    other = open_checkpoint("org/name", allow_patterns="*.bin")
    assert (other.format, list(other.tensors)) == ("torch", ["b"])


@pytest.mark.filterwarnings("ignore:left out, as a trainer's state:UserWarning")
def test_opening_takes_few_requests(client):
    """However many tensors there are: each request is a round trip."""
    client.add("org/name", repository(200))
    assert len(open_checkpoint("org/name").tensors) == 201
    assert client.count("/*") < 60


@pytest.mark.filterwarnings("ignore:left out, as a trainer's state:UserWarning")
def test_a_repository_is_converted(client, tmp_path):
    client.add("org/name", repository())
    report = convert("org/name", tmp_path / "out")
    assert report.companions == ["config.json"]
    found = dict(open_checkpoint(tmp_path / "out").iter_weights())
    assert torch.equal(found["a1"], torch.full((4, 3), 1.0))
    assert sorted(found) == ["a0", "a1", "b"]
