"""Reloading in place: every address stays, every value is new; or nothing changes at all."""

from __future__ import annotations

import gc
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

import raywl
from raywl.errors import (
    CheckpointError,
    CorruptFileError,
    MissingWeightsError,
    NotFoundError,
    RaywlError,
    ShapeMismatchError,
)
from tests.loading.conftest import Model, filled, mappings, open_fds


def bits(model: nn.Module) -> dict[str, bytes]:
    """Every byte of every parameter and buffer."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {
        name: tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        for name, tensor in named
    }


def addresses(model: nn.Module) -> dict[str, tuple[Any, ...]]:
    """Where each lies, and as what object."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: (id(t), t.data_ptr(), t.stride(), t.dtype, type(t)) for name, t in named}


def save(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def refused(model: nn.Module, ref: Any, kind: type[Exception] = RaywlError, **arguments: Any) -> Exception:
    """The error of a reload that is refused; nothing has changed and nothing is left open."""
    before, where = bits(model), addresses(model)
    try:
        raywl.reload_into(model, ref, **arguments)
    except kind as error:
        told = error.with_traceback(None)
        # What it came of has a traceback too, which holds the frames, and they the files.
        told.__context__ = told.__cause__ = None
    else:
        pytest.fail("it was not refused")
    assert bits(model) == before
    assert addresses(model) == where
    if isinstance(told, RaywlError):
        assert not told.partly_loaded
    gc.collect()
    assert not open_fds()
    assert not mappings()
    return told


def values(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_twice(tmp_path):
    """C36: parameters, buffers and tensors derived from them keep their addresses; all values are new."""
    model = Model({"a": filled(4, 3), "b": filled(5, dtype=torch.bfloat16)})
    model.register_buffer("mean", filled(3))
    model.transposed, model.part = model.a.detach().t(), model.a.detach()[1:3]
    where = addresses(model)
    for seed in (1, 2):
        tensors = {"a": values(seed, 4, 3), "b": values(seed, 5), "mean": values(seed, 3)}
        report = raywl.reload_into(model, save(tmp_path / str(seed), tensors))
        assert addresses(model) == where
        assert report.restored == []
        assert sorted(report.loaded) == ["a", "b", "mean"]
        assert report.bytes_read == (12 + 5 + 3) * 4
        assert report.phases["check"] > 0
        for name, tensor in tensors.items():
            now = getattr(model, name)
            assert torch.equal(now.detach(), tensor.to(now.dtype))
        assert torch.equal(model.transposed, tensors["a"].t())
        assert torch.equal(model.part, tensors["a"][1:3])


GOOD = {"first": (4, 4), "second": (4, 4), "third": (6,)}


@pytest.mark.parametrize(
    ("change", "kind", "told"),
    [
        # C38: the first fits, the second doesn't.
        ({"second": torch.zeros(6, 6)}, ShapeMismatchError, "second"),
        ({"second": torch.zeros(4, 1)}, ShapeMismatchError, "second"),
        ({"second": torch.zeros(16)}, ShapeMismatchError, "second"),
        ({"third": torch.zeros(6, dtype=torch.complex64)}, CheckpointError, "third"),
        ({"third": torch.zeros(6, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)}, CheckpointError, "third"),
        ({"third": None}, MissingWeightsError, "third"),
        ({"second": None, "2nd": torch.zeros(4, 4)}, MissingWeightsError, "second"),
    ],
    ids=["larger", "repeated", "flat", "complex", "fp4", "lacking", "another name"],
)
@pytest.mark.parametrize("how", ["plain", "loaders", "own", "own, told"])
def test_another_architecture(tmp_path, change, kind, told, how):
    """Whatever doesn't fit is found before the first write, with every way of loading."""

    def load(model: Model, weights: Any) -> Any:
        for name, weight in weights:
            if name in GOOD:
                getattr(model, name).data.copy_(weight)
        return set(GOOD) & {"first", "second"} if how == "own, told" else None

    model = Model(
        {name: filled(*shape) for name, shape in GOOD.items()}, load if how.startswith("own") else None
    )
    if how == "loaders":
        for parameter in model.parameters():
            parameter.weight_loader = lambda param, weight: param.data.copy_(weight)
    new = {name: values(1, *shape) for name, shape in GOOD.items()}
    for name, tensor in change.items():
        if tensor is None:
            del new[name]
        else:
            new[name] = tensor
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if how != "plain" and "third" in new and new["third"].is_complex():
            return  # torch's copy_ takes the real part, and so does the loader
        broadcasts = how != "plain" and change.get("second") is not None and change["second"].shape == (4, 1)
        if broadcasts:
            # torch's copy_ repeats it, and so the loader's.
            raywl.reload_into(model, save(tmp_path, new))
            return
        error = refused(model, save(tmp_path, new), kind)
    assert told in str(error)


def test_integers_dont_take_floats(tmp_path):
    """Values would lose their meaning."""
    model = Model({"a": filled(3)})
    model.register_buffer("count", torch.tensor([5, 6]))
    error = refused(model, save(tmp_path, {"a": torch.zeros(3), "count": torch.tensor([0.5, 1.5])}))
    assert "count" in str(error)


def test_what_can_be_no_checkpoint(tmp_path):
    """Absent, damaged, or open with more arguments; a model that was never loaded."""
    model = Model({"a": filled(4, 4)})
    good = save(tmp_path / "good", {"a": torch.zeros(4, 4)})
    refused(model, tmp_path / "none", NotFoundError)
    cut = shutil.copytree(good, tmp_path / "cut") / "model.safetensors"
    cut.write_bytes(cut.read_bytes()[:-1])
    refused(model, tmp_path / "cut", CorruptFileError)
    checkpoint = raywl.open_checkpoint(good)
    refused(model, checkpoint, ValueError, subfolder="x")
    refused(model, good, ValueError, strategy="lazy")
    refused(model, good, ValueError, strict="very")
    with pytest.raises(ValueError, match="a is on meta"):
        raywl.reload_into(Model({"a": torch.empty(4, 4, device="meta")}), good)
    save(good, {"a": torch.ones(4, 5)})
    refused(model, checkpoint, CorruptFileError)


def test_strictness(tmp_path):
    """What has no place is an error, unless it had none before; what is lacking may be allowed to."""
    model = Model({"a": filled(2), "b": filled(2)})
    more = save(tmp_path / "more", {"a": torch.zeros(2), "b": torch.ones(2), "c": torch.ones(2)})
    assert "c" in str(refused(model, more, MissingWeightsError, strict="exact"))
    assert "c" in str(refused(model, more, MissingWeightsError))
    for strict in (False, True):
        with pytest.warns(UserWarning, match="no place") as caught:
            assert raywl.reload_into(model, more, strict=strict).unexpected == ["c"]
        assert len(caught) == 1
    less = save(tmp_path / "less", {"a": torch.full((2,), 3.0)})
    assert raywl.reload_into(model, less, strict=False).missing == ["b"]
    assert (model.a.tolist(), model.b.tolist()) == ([3, 3], [1, 1])


def test_tied_weights(tmp_path):
    """One tensor under two names, and two tensors of one memory, stay so."""
    model = nn.Module()
    model.embed, model.head, model.twin = (
        nn.Linear(3, 4, bias=False),
        nn.Linear(3, 4, bias=False),
        nn.Module(),
    )
    model.head.weight = model.embed.weight
    model.twin.weight = nn.Parameter(model.embed.weight.data)
    where = addresses(model)
    for seed, names in enumerate((["embed"], ["head"], ["twin"], ["embed", "head", "twin"])):
        tensor = values(seed, 4, 3)
        raywl.reload_into(
            model, save(tmp_path / str(seed), {f"{name}.weight": tensor.clone() for name in names})
        )
        assert addresses(model) == where
        assert model.head.weight is model.embed.weight
        assert torch.equal(model.twin.weight.detach(), tensor)


def test_parts_of_one_memory(tmp_path):
    """q and k as views of a fused parameter that the checkpoint doesn't have: their bytes are its bytes."""
    model = Model({"qk": filled(6, 2)})
    model.q, model.k = (nn.Parameter(part, False) for part in model.qk.data.split(3))
    new = {"q": values(1, 3, 2), "k": values(2, 3, 2)}
    where = addresses(model)
    raywl.reload_into(model, save(tmp_path / "new", new))
    assert addresses(model) == where
    assert torch.equal(model.qk.detach(), torch.cat([new["q"], new["k"]]))
    refused(model, save(tmp_path / "half", {"q": new["q"]}), MissingWeightsError)


def rebinding(param: nn.Parameter, weight: torch.Tensor) -> None:
    param.data = weight.clone() * 2


def computing(param: nn.Parameter, weight: torch.Tensor) -> None:
    param.data.copy_(weight)
    param.data.mul_(2)


def converting(param: nn.Parameter, weight: torch.Tensor) -> None:
    param.data = (weight.to(torch.float64) * 2).to(param.dtype)


def piecewise(param: nn.Parameter, weight: torch.Tensor) -> None:
    for index in range(weight.shape[0]):
        param.data[index] = weight[index] + weight[index]


def accumulating(param: nn.Parameter, weight: torch.Tensor) -> None:
    twice = torch.empty_like(param)
    twice.copy_(weight)
    param.data.copy_(param.data * 0 + twice + weight)


def masked(param: nn.Parameter, weight: torch.Tensor) -> None:
    mask = torch.ones(weight.shape[0], dtype=torch.bool)
    param.data[mask] = weight.to(param.dtype) * torch.tensor(2.0)
    param.data[torch.tensor([0])] = weight[:1].mul(2).to(param.dtype)


def adding(param: nn.Parameter, weight: torch.Tensor) -> None:
    torch.add(weight, weight, out=param.data)


@pytest.mark.parametrize(
    "loader", [rebinding, computing, converting, piecewise, accumulating, masked, adding]
)
def test_loaders_that_compute_or_rebind(tmp_path, loader):
    """The address stays, and what was derived from it sees the values; a failure leaves all as it was."""
    model = Model({"a": filled(4, 3), "b": filled(2)})
    model.a.weight_loader = loader
    derived = model.a.detach().t()
    where = addresses(model)
    for seed in (1, 2):
        new = {"a": values(seed, 4, 3), "b": values(seed, 2)}
        report = raywl.reload_into(model, save(tmp_path / str(seed), new))
        assert addresses(model) == where
        assert torch.equal(model.a.detach(), new["a"] * 2)
        assert torch.equal(derived, new["a"].t() * 2)
        assert report.restored == (["a"] if loader in (rebinding, converting) else [])
    refused(model, save(tmp_path / "less", {"a": torch.zeros(4, 3)}), MissingWeightsError)
    refused(model, save(tmp_path / "other", {"a": torch.zeros(5, 3), "b": torch.zeros(2)}), Exception)


def test_a_loader_that_knows_live_memory(tmp_path):
    """One that writes to a view that it kept, or to its module, writes nothing in the check."""
    model = Model({"a": filled(4, 3), "b": filled(2)})
    view = model.a.detach()[:2]

    def through_a_view(param: nn.Parameter, weight: torch.Tensor) -> None:
        view.copy_(weight[:2])
        view.mul_(1)
        view[0].add_(0)
        model.a.data[2:].copy_(weight[2:])

    model.a.weight_loader = through_a_view
    refused(model, save(tmp_path / "less", {"a": torch.zeros(4, 3)}), MissingWeightsError)
    new = {"a": values(1, 4, 3), "b": values(1, 2)}
    where = addresses(model)
    raywl.reload_into(model, save(tmp_path / "new", new))
    assert addresses(model) == where
    assert torch.equal(model.a.detach(), new["a"])


def test_a_loader_that_registers_another_parameter(tmp_path):
    """The old object and its memory come back with the new values."""
    model = Model({"a": filled(4, 3)})

    def anew(param: nn.Parameter, weight: torch.Tensor) -> None:
        model.a = nn.Parameter(weight.clone(), requires_grad=False)
        model.a.weight_loader = anew

    model.a.weight_loader = anew
    where = addresses(model)
    new = values(1, 4, 3)
    assert raywl.reload_into(model, save(tmp_path / "new", {"a": new})).restored == ["a"]
    assert addresses(model) == where
    assert torch.equal(model.a.detach(), new)
    error = refused(model, save(tmp_path / "other", {"a": values(1, 3, 3)}), ShapeMismatchError)
    assert "a" in str(error)


class Own(nn.Parameter):
    """A class of parameter with methods of its own, as vLLM has them."""

    def load_rows(self, weight: torch.Tensor) -> None:
        self.data.copy_(weight)


def test_parameters_of_own_classes(tmp_path):
    """Loaders find their methods and attributes, in the check as well."""
    model = Model({"a": torch.Tensor._make_subclass(Own, filled(4, 3))})
    model.a.weight_loader = lambda param, weight: param.load_rows(weight * param.scale)
    model.a.scale = 3
    where = addresses(model)
    raywl.reload_into(model, save(tmp_path, {"a": torch.ones(4, 3)}))
    assert addresses(model) == where
    assert model.a.eq(3).all()


STACKED = [("qkv", "q", "q"), ("qkv", "k", "k"), ("qkv", "v", "v")]


def stacked_model() -> Model:
    model = Model({"qkv": filled(6, 4), "norm": filled(4)})

    def load(param: nn.Parameter, weight: torch.Tensor, shard_id: str) -> None:
        param.data.narrow(0, 2 * "qkv".index(shard_id), 2).copy_(weight)

    model.qkv.weight_loader = load
    return model


@pytest.mark.parametrize("lacking", ["q", "k", "v"])
def test_a_stacked_part_that_is_lacking(tmp_path, lacking):
    """Found in the check, which is what ranks of a group wait for before any of them writes."""
    model = stacked_model()
    new = {name: values(1, 2, 4) for name in "qkv" if name != lacking} | {"norm": values(1, 4)}
    folder = save(tmp_path, new)
    error = refused(model, folder, MissingWeightsError, stacked=STACKED)
    assert lacking in str(error)
    with pytest.raises(MissingWeightsError, match=f"no {lacking}"):
        raywl.loading.check_reload(model, folder, stacked=STACKED)


def test_buckets_of_any_size(tmp_path):
    """C40: q, k and v in one file or in three, in any order, come to the same."""
    new = {name: values(ord(name), 2, 4) for name in "qkv"} | {"norm": values(1, 4)}
    for number, order in enumerate(("qkv", "vkq", "kqv")):
        folder = tmp_path / str(number)
        folder.mkdir()
        for index, name in enumerate(order):
            part = {name: new[name]} | ({"norm": new["norm"]} if index == 1 else {})
            save_file(part, folder / f"model-{index + 1:05}-of-00003.safetensors")
        model = stacked_model()
        where = addresses(model)
        raywl.reload_into(model, folder, stacked=STACKED)
        assert addresses(model) == where
        assert torch.equal(model.qkv.detach(), torch.cat([new[name] for name in "qkv"]))


def test_own_load_weights(tmp_path):
    """It may keep what it likes; computed weights are judged by what it writes."""

    def load(model: Model, weights: Any) -> None:
        params = dict(model.named_parameters())
        for name, weight in weights:
            if name.startswith("x."):
                params[name[2:]].data.copy_(weight * 2 if name == "x.a" else weight)

    model = Model({"a": filled(3), "b": filled(2, 2)}, load)
    where = addresses(model)
    new = {"x.a": values(1, 3), "x.b": values(2, 2, 2)}
    raywl.reload_into(model, save(tmp_path / "new", new))
    assert addresses(model) == where
    assert torch.equal(model.a.detach(), new["x.a"] * 2)
    assert torch.equal(model.b.detach(), new["x.b"])
    error = refused(model, save(tmp_path / "less", {"x.a": new["x.a"]}), MissingWeightsError)
    assert "b" in str(error)
    with pytest.raises(MissingWeightsError):
        raywl.loading.check_reload(model, tmp_path / "less")


def test_a_loader_that_fails_halfway(tmp_path):
    """Its own error comes through; the model is as it was."""
    model = Model({"a": filled(3), "b": filled(3)})

    def load(param: nn.Parameter, weight: torch.Tensor) -> None:
        param.data = weight.clone()
        if weight[0] == 0:
            raise KeyError("no such thing")

    model.a.weight_loader = model.b.weight_loader = load
    refused(model, save(tmp_path, {"a": torch.ones(3), "b": torch.zeros(3)}), KeyError)


def test_a_loader_that_fails_only_when_it_loads(tmp_path):
    """After the check nothing should; if it does, addresses are kept and what wasn't written stays."""
    model = Model({"a": filled(3), "b": filled(3)})

    def load(param: nn.Parameter, weight: torch.Tensor) -> None:
        if param.device.type != "meta" and weight[0] == 0:
            raise KeyError("no such thing")
        param.data = weight.clone()

    model.a.weight_loader = model.b.weight_loader = load
    refused(model, save(tmp_path, {"a": torch.ones(3), "b": torch.zeros(3)}), KeyError)


def test_zero_size_and_strided_parameters(tmp_path):
    """Memory of every layout."""
    model = Model({"none": filled(0, 3), "t": filled(3, 4).t(), "part": filled(8, 8)[2:6, 1:4]})
    model.part.weight_loader = lambda param, weight: param.data.copy_(weight)
    where = addresses(model)
    new = {"none": torch.zeros(0, 3), "t": values(1, 4, 3), "part": values(2, 4, 3)}
    raywl.reload_into(model, save(tmp_path / "new", new))
    assert addresses(model) == where
    assert torch.equal(model.t.detach(), new["t"])
    assert torch.equal(model.part.detach(), new["part"])
    refused(model, save(tmp_path / "less", {"t": new["t"], "none": new["none"]}), MissingWeightsError)


# Those that write all of their parameter, or fail.
LOADERS: list[Callable[..., None] | None] = [None, rebinding, computing, converting, accumulating]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_all_or_nothing(data, tmp_path_factory):
    """Law: whatever the models and checkpoints, a reload keeps every address; and if it fails, every byte."""
    sizes = st.integers(1, 3)
    shapes = data.draw(
        st.dictionaries(st.sampled_from("abcd"), st.lists(sizes, min_size=1, max_size=2), min_size=1)
    )
    model = Model({name: filled(*shape) for name, shape in shapes.items()})
    for name in shapes:
        loader = data.draw(st.sampled_from(LOADERS))
        if loader is not None:
            getattr(model, name).weight_loader = loader
    new = {}
    for name, shape in shapes.items():
        if data.draw(st.integers(0, 5)):
            other = data.draw(st.lists(sizes, min_size=1, max_size=2))
            taken = other if data.draw(st.integers(0, 5)) == 0 else shape
            dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.complex64]))
            new[name] = values(1, *taken, dtype=dtype if data.draw(st.booleans()) else torch.float32)
    if not new:
        new["z"] = torch.zeros(1)
    folder = save(tmp_path_factory.mktemp("law"), new)
    before, where = bits(model), addresses(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            raywl.reload_into(model, folder)
        except Exception:
            assert bits(model) == before
        else:
            for name in shapes:
                param = getattr(model, name)
                twice = 1 if getattr(param, "weight_loader", None) is None else 2
                # One element goes into a parameter of one, whatever their shapes.
                weight = new[name].reshape(()) if new[name].numel() == 1 else new[name]
                expected = torch.broadcast_to(weight.to(torch.float32) * twice, param.shape)
                assert torch.allclose(param.detach(), expected, rtol=1e-2)
    assert addresses(model) == where
