"""Tensors that are made out of weights when they come: the same ones after a reload, with new values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import raywl
from raywl.errors import RaywlError
from raywl.loaders import QKVLoader
from raywl.loaders.sinks import make_attention_sink
from raywl.parameters import direct_reload, refill_derived, replace_parameter, set_weight_attrs


def values(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def save(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    return folder


class Attention(nn.Module):
    """Loads by itself, and makes its derived tensors at the end, once, whatever came in which order."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Parameter(torch.zeros(16, 4), requires_grad=False)
        self.qkv.weight_loader = QKVLoader(2, 1, 4)
        self.sinks = make_attention_sink(4, torch.bfloat16)
        self.sinks_f32: torch.Tensor | None = None
        self.norms: torch.Tensor | None = None
        self.packed: torch.Tensor | None = None
        self.times = 0

    def load_weights(self, weights: Any) -> set[str]:
        for name, weight in weights:
            if name == "sinks":
                self.sinks.weight_loader(self.sinks, weight)
            else:
                self.qkv.weight_loader(self.qkv, weight, name)
        self.times += 1
        refill_derived(self, "sinks_f32", self.sinks.float())
        refill_derived(self, "norms", torch.stack([part.norm() for part in self.qkv.split((8, 4, 4))]))
        refill_derived(self, "packed", self.qkv.t().contiguous())
        return {"qkv", "sinks"}


def tensors_of(seed: int) -> dict[str, torch.Tensor]:
    return {
        "q": values(seed, 8, 4),
        "k": values(seed + 1, 4, 4),
        "v": values(seed + 2, 4, 4),
        "sinks": values(seed + 3, 4).bfloat16(),
    }


def addresses(model: Attention) -> list[int]:
    held = [model.qkv, model.sinks, model.sinks_f32, model.norms, model.packed]
    return [tensor.data_ptr() for tensor in held]


def check(model: Attention, tensors: dict[str, torch.Tensor]) -> None:
    whole = torch.cat([tensors[name] for name in "qkv"])
    assert torch.equal(model.qkv, whole)
    assert torch.equal(model.packed, whole.t())
    assert torch.equal(model.norms, torch.stack([tensors[name].norm() for name in "qkv"]))
    assert torch.equal(model.sinks, tensors["sinks"])
    assert torch.equal(model.sinks_f32, tensors["sinks"].float())


@pytest.mark.parametrize("order", ["qkv", "vkq", "kqv"])
def test_derived_tensors_are_refilled_in_place(tmp_path, order):
    """C24, C36, C40: parts in one bucket or in three, in any order; nothing derived from half of them."""
    model = Attention()
    first = tensors_of(0)
    raywl.load_into(model, save(tmp_path / "first", first))
    check(model, first)
    where = addresses(model)
    for seed in (10, 20):
        new, folder = tensors_of(seed), tmp_path / str(seed)
        folder.mkdir()
        for number, name in enumerate(order):
            part = {name: new[name]} | ({"sinks": new["sinks"]} if number == 1 else {})
            save_file(part, folder / f"model-{number + 1:05}-of-00003.safetensors")
        raywl.reload_into(model, folder)
        check(model, new)
        assert addresses(model) == where


@pytest.mark.parametrize("change", [{"v": (6, 6)}, {"sinks": None}], ids=str)
def test_a_reload_that_is_refused_leaves_derived_tensors_alone(tmp_path, change):
    """C38: they still belong to the old weights, which are there bit for bit; nothing that was set stays."""
    model, first = Attention(), tensors_of(0)
    raywl.load_into(model, save(tmp_path / "first", first))
    where = addresses(model)
    wrong = tensors_of(5)
    for name, shape in change.items():
        if shape is None:
            del wrong[name]
        else:
            wrong[name] = values(1, *shape)
    with pytest.raises(RaywlError):
        raywl.reload_into(model, save(tmp_path / "wrong", wrong))
    check(model, first)
    assert addresses(model) == where
    assert model.times == 1


class Registering(nn.Module):
    """Sets and registers what it likes while it loads."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3), requires_grad=False)
        self.plain = torch.zeros(3)

    def load_weights(self, weights: Any) -> None:
        for _, weight in weights:
            self.weight.data.copy_(weight)
        self.plain = self.weight * 2
        self.more = self.weight + 1
        self.register_buffer("mean", self.weight.mean(), persistent=False)
        self.child = nn.Linear(1, 1)
        self.child.bias.data.copy_(self.weight[:1])


def test_a_check_leaves_nothing_on_the_model(tmp_path):
    """Whatever a model sets while it loads: after a check it is as before, and a load sets real values."""
    model = Registering()
    folder = save(tmp_path, {"weight": values(1, 3)})
    before = dict(vars(model))
    raywl.loading.check_reload(model, folder)
    assert vars(model) == before
    assert not model._buffers
    assert not model._modules
    raywl.reload_into(model, folder)
    assert torch.equal(model.plain, values(1, 3) * 2)
    assert torch.equal(model.more, values(1, 3) + 1)
    assert torch.equal(model.mean, values(1, 3).mean())
    assert model.child.bias.item() == values(1, 3)[0].item()


class Packed(nn.Module):
    """Keeps its weight in another format than the checkpoint's, in the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(6, 4), requires_grad=False)
        set_weight_attrs(self.weight, {"weight_loader": self.load})

    def load(self, param: nn.Parameter, weight: torch.Tensor) -> None:
        with direct_reload():
            replace_parameter(self, "weight", weight.clone())
        replace_parameter(self, "weight", self.weight.t().contiguous().half())


def test_a_conversion_after_the_load_keeps_the_address(tmp_path):
    """C36: another layout and dtype in the parameter's own memory, which its loader makes each time."""
    model = Packed()
    pointer = model.weight.data_ptr()
    for seed in (1, 2, 3):
        new = values(seed, 6, 4)
        raywl.load_into(model, save(tmp_path / str(seed), {"weight": new}))
        assert model.weight.data_ptr() == pointer
        assert torch.equal(model.weight, new.t().half())
