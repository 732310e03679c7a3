"""Scales of the KV cache and experts one level deeper reach their parameters when raywl loads a model."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import raywl
from raywl.errors import CheckpointError, MissingWeightsError
from raywl.loaders import ExpertLoader
from raywl.remap import kv_scales
from raywl.weight_utils import WeightsMapper, make_expert_params_mapping

from .conftest import Model


@pytest.fixture(autouse=True)
def nothing_warned_yet():
    kv_scales._warned.clear()


def nested(shapes: dict[str, tuple[int, ...]], value: float = 7.0) -> nn.Module:
    """A model of parameters with dots in their names, in modules as deep as those."""
    root = nn.Module()
    for name, shape in shapes.items():
        module = root
        *parents, last = name.split(".")
        for parent in parents:
            if not hasattr(module, parent):
                module.add_module(parent, nn.Module())
            module = getattr(module, parent)
        module.register_parameter(last, nn.Parameter(torch.full(shape, value), requires_grad=False))
    return root


def values(model: nn.Module) -> dict[str, object]:
    return {name: param.tolist() for name, param in model.named_parameters()}


def attention(*kinds: str, layers: int = 1, stem: str = "layers.{}.self_attn.attn") -> nn.Module:
    return nested({f"{stem.format(layer)}.{kind}": () for layer in range(layers) for kind in kinds})


KS, VS = "layers.0.self_attn.attn.k_scale", "layers.0.self_attn.attn.v_scale"


def scale(value: float) -> torch.Tensor:
    return torch.tensor(value)


@pytest.mark.parametrize("shape", [(), (1,)])
def test_kv_scale_fills_k_scale_and_v_scale(write, shape):
    """One tensor, two parameters; said to be deprecated once, not for each layer."""
    model = attention("k_scale", "v_scale", layers=3)
    folder = write({f"layers.{at}.self_attn.kv_scale": torch.full(shape, at + 0.5) for at in range(3)})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        report = raywl.load_into(model, folder)
    assert values(model) == {
        f"layers.{at}.self_attn.attn.{kind}": at + 0.5 for at in range(3) for kind in ("k_scale", "v_scale")
    }
    (warning,) = caught
    assert "kv_scale in checkpoints is deprecated: layers.0.self_attn.kv_scale" in str(warning.message)
    assert len(report.loaded) == 3
    assert (report.missing, report.unexpected) == ([], [])


def test_kv_scale_fills_the_one_that_there_is(write):
    model = attention("k_scale")
    with pytest.warns(UserWarning, match="deprecated"):
        raywl.load_into(model, write({"layers.0.self_attn.kv_scale": scale(0.25)}))
    assert values(model) == {KS: 0.25}


@pytest.mark.parametrize(
    ("k", "v"),
    [
        ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"),
        ("self_attn.qkv_proj.k_scale", "self_attn.qkv_proj.v_scale"),
        ("self_attn.qkqkv_proj.k_scale", "self_attn.qkqkv_proj.v_scale"),
        ("self_attn.k_scale", "self_attn.v_scale"),
        ("self_attn.k_cache.scale", "self_attn.v_cache.scale"),
        ("self_attn.k_proj.output_scale", "self_attn.v_proj.output_scale"),
    ],
)
def test_every_spelling_reaches_the_attention(write, k, v):
    """C09, C12."""
    model = attention("k_scale", "v_scale")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        raywl.load_into(model, write({f"layers.0.{k}": scale(0.5), f"layers.0.{v}": scale(2.0)}))
    assert values(model) == {KS: 0.5, VS: 2.0}


def test_mla_and_mixers(write):
    model = nested({"0.self_attn.mla_attn.mla_attn.k_scale": (), "1.mixer.attn.v_scale": ()})
    raywl.load_into(
        model, write({"0.self_attn.k_proj.k_scale": scale(3), "1.mixer.v_proj.v_scale": scale(4)})
    )
    assert list(values(model).values()) == [3.0, 4.0]


def test_the_rule_for_scales_comes_before_stacked_parameters(write):
    """C12: a stacked rename makes `qkv_proj.k_scale` of it, which is another parameter here."""
    model = nested(
        {KS: (), "layers.0.self_attn.qkv_proj.k_scale": (), "layers.0.self_attn.qkv_proj.weight": (4, 2)}
    )
    for name in ("k_scale", "weight"):
        param = model.get_parameter(f"layers.0.self_attn.qkv_proj.{name}")
        param.weight_loader = lambda param, weight, shard: param.data.reshape(-1)[: weight.numel()].copy_(
            weight.reshape(-1)
        )
    folder = write(
        {
            "layers.0.self_attn.k_proj.k_scale": scale(0.5),
            "layers.0.self_attn.k_proj.weight": torch.ones(4, 2),
        }
    )
    raywl.load_into(model, folder, stacked=[("qkv_proj", "k_proj", "k")], strict=False)
    assert values(model)[KS] == 0.5
    assert values(model)["layers.0.self_attn.qkv_proj.k_scale"] == 7.0


def test_what_the_model_has_by_its_own_name_stays_there(write):
    """Before any rule."""
    model = nested({"layers.0.self_attn.k_scale": (), KS: ()})
    raywl.load_into(model, write({"layers.0.self_attn.k_scale": scale(0.5), KS: scale(0.25)}))
    assert values(model) == {"layers.0.self_attn.k_scale": 0.5, KS: 0.25}


def test_two_scales_for_one_place_are_an_error(write):
    model = attention("k_scale", "v_scale")
    folder = write({"layers.0.self_attn.k_scale": scale(1), "layers.0.self_attn.k_proj.k_scale": scale(2)})
    with pytest.raises(CheckpointError, match="which one counts"):
        raywl.load_into(model, folder)


def test_a_loader_gets_the_scale(write):
    """As any parameter's does, for each of the two."""
    model, seen = attention("k_scale", "v_scale"), []
    for name, param in model.named_parameters():
        param.weight_loader = lambda param, weight, name=name: (seen.append(name), param.data.copy_(weight))
    with pytest.warns(UserWarning, match="deprecated"):
        raywl.load_into(model, write({"layers.0.self_attn.kv_scale": scale(0.5)}))
    assert seen == [KS, VS]
    assert values(model) == {KS: 0.5, VS: 0.5}


def test_a_reload_fills_both_again(write, tmp_path):
    model = attention("k_scale", "v_scale")
    with pytest.warns(UserWarning, match="deprecated"):
        raywl.load_into(model, write({"layers.0.self_attn.kv_scale": scale(0.5)}))
    addresses = [param.data_ptr() for param in model.parameters()]
    write({"layers.0.self_attn.kv_scale": scale(0.75)})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        raywl.reload_into(model, tmp_path)
    assert values(model) == {KS: 0.75, VS: 0.75}
    assert [param.data_ptr() for param in model.parameters()] == addresses


def test_a_mapper_comes_first(write):
    model = attention("k_scale", "v_scale")
    mapper = WeightsMapper(
        orig_to_new_prefix={"model.": ""}, orig_to_new_substr={".attention.": ".self_attn."}
    )
    names = [f"model.layers.0.attention.{x}_proj.{x}_scale" for x in "kv"]
    raywl.load_into(model, write(dict(zip(names, [scale(1), scale(2)], strict=True))), mapper=mapper)
    assert values(model) == {KS: 1.0, VS: 2.0}


def test_scales_that_end_unused_are_one_warning_with_count_and_example(write):
    """C12: 1.0 in their place gives finite outputs that are wrong."""
    model = Model({"a": torch.zeros(2)})
    names = [f"layers.{at}.self_attn.{x}_proj.{x}_scale" for at in range(3) for x in "kv"]
    folder = write({"a": torch.ones(2), "b": torch.ones(3), **{name: scale(1) for name in names}})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        report = raywl.load_into(model, folder)
    told = [str(warning.message) for warning in caught]
    assert len(told) == 2
    assert told[0].startswith("1 tensors of")
    assert told[0].endswith("have no place in the model: b")
    assert "these scales of the KV cache are not used" in told[1]
    assert f"3 k_scale (for example {names[0]}), 3 v_scale (for example {names[1]})" in told[1]
    assert sorted(report.unexpected) == sorted(["b", *names])
    with pytest.raises(MissingWeightsError, match="k_scale"):
        raywl.load_into(model, folder, strict="exact")


def test_scales_that_the_model_says_to_ignore_are_told_of(write):
    """C12: dropped by an ignore list."""
    model = Model({"a": torch.zeros(2)})
    model._keys_to_ignore_on_load_unexpected = [r"_scale$", "rotary"]
    folder = write({"a": torch.ones(2), "l.self_attn.k_scale": scale(1), "l.rotary": scale(1)})
    with pytest.warns(UserWarning, match=r"1 k_scale \(for example l\.self_attn\.k_scale\)") as caught:
        report = raywl.load_into(model, folder)
    assert len(caught) == 1
    assert sorted(report.skipped) == ["l.rotary", "l.self_attn.k_scale"]


def test_scales_that_a_loader_leaves_are_told_of(write):
    model = attention("k_scale")
    model.get_parameter(KS).weight_loader = lambda param, weight: param.data.fill_(1.0)
    with pytest.warns(UserWarning, match=r"1 k_scale \(for example layers\.0\.self_attn\.k_scale\)"):
        raywl.load_into(model, write({"layers.0.self_attn.k_scale": scale(0.5)}))


def test_scales_of_another_stage_are_not_told_of(write):
    context = raywl.ParallelContext.of_rank(1, pp_size=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = raywl.load_into(
            Model({"a": torch.zeros(2)}),
            write({"a": torch.ones(2), "l.self_attn.k_scale": scale(1)}),
            parallel=context,
        )
    assert report.skipped == {"l.self_attn.k_scale": "no place on stage 1 of 2"}


# Experts one level deeper.


@pytest.mark.parametrize("kind", ["w13_weight", "w2_weight_scale_inv", "w13_bias", "w2_qweight", "w13_g_idx"])
def test_fused_experts_reach_routed_experts(write, kind):
    model = nested({f"layers.0.mlp.experts.routed_experts.{kind}": (2, 3)})
    tensor = torch.arange(6.0).reshape(2, 3)
    report = raywl.load_into(model, write({f"layers.0.mlp.experts.{kind}": tensor}))
    assert list(values(model).values()) == [tensor.tolist()]
    assert report.unexpected == []


def test_single_experts_reach_routed_experts(write):
    """C19: by the mapping for checkpoints with a tensor for each expert; loaders are told the model name."""
    stem = "layers.0.mlp.experts.routed_experts"
    model, told = nested({f"{stem}.w13_weight": (2, 4, 3), f"{stem}.w2_weight": (2, 3, 2)}), []
    loader = ExpertLoader(2)
    for param in model.parameters():

        def weight_loader(param, weight, name, shard_id, expert_id):
            told.append(name)
            return loader(param, weight, name, shard_id=shard_id, expert_id=expert_id)

        param.weight_loader = weight_loader
    parts = {"gate_proj": (2, 3), "up_proj": (2, 3), "down_proj": (3, 2)}
    tensors = {
        f"layers.0.mlp.experts.{expert}.{part}.weight": torch.full(shape, 10.0 * expert + at)
        for expert in range(2)
        for at, (part, shape) in enumerate(parts.items())
    }
    mapping = make_expert_params_mapping("gate_proj", "down_proj", "up_proj", 2)
    raywl.load_into(model, write(tensors), expert_mapping=mapping)
    w13 = model.get_parameter(f"{stem}.w13_weight")
    assert w13[:, :2].unique(sorted=True).tolist() == [0.0, 10.0]
    assert w13[:, 2:].unique(sorted=True).tolist() == [1.0, 11.0]
    assert model.get_parameter(f"{stem}.w2_weight")[1].unique().tolist() == [12.0]
    assert set(told) == {f"{stem}.w13_weight", f"{stem}.w2_weight"}


def test_experts_stay_where_the_model_has_them(write):
    """The name itself comes first; what is no expert weight isn't moved."""
    model = nested({"l.experts.w2_weight": (2,), "l.experts.routed_experts.w2_weight": (2,)})
    folder = write(
        {"l.experts.w2_weight": torch.ones(2), "l.experts.routed_experts.w2_weight": torch.zeros(2)}
    )
    raywl.load_into(model, folder)
    assert values(model) == {
        "l.experts.w2_weight": [1.0] * 2,
        "l.experts.routed_experts.w2_weight": [0.0] * 2,
    }
    other = nested({"l.experts.routed_experts.gate": (2,)})
    with pytest.warns(UserWarning, match="no place"):
        report = raywl.load_into(other, write({"l.experts.gate": torch.ones(2)}), strict=False)
    assert report.unexpected == ["l.experts.gate"]
