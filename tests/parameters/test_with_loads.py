"""Parameters that were moved, retired, packed or share a storage, when checkpoints come and come again."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import Module, Parameter

import raywl
from raywl.loaders import sharded_weight_loader
from raywl.loaders.sinks import load_attention_sink, make_attention_sink
from raywl.parameters import (
    direct_reload,
    get_live_param,
    kernel_parameters,
    move_parameter,
    replace_parameter,
    retire_parameter,
    set_kernel_parameter,
    storage_view,
)
from raywl.types import ParallelContext

INF = float("inf")


def layer_of(**tensors):
    layer = Module()
    for name, tensor in tensors.items():
        layer.register_parameter(name, Parameter(tensor, requires_grad=False))
    return layer


def storage(tensor):
    return tensor.untyped_storage().data_ptr()


def place(tensor):
    return storage(tensor), tensor.storage_offset(), tuple(tensor.stride()), tensor.dtype


def save(tmp_path, number, **tensors):
    folder = tmp_path / str(number)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_a_moved_parameter_is_reloaded_under_the_checkpoints_name(tmp_path):
    """Kernels see the values under theirs: it is one object."""
    layer = layer_of(weight=torch.zeros(4, 2))
    layer.weight.weight_loader = sharded_weight_loader(0)
    move_parameter(layer, "weight", "w13")
    before = place(layer.w13)
    for number in (1, 2):
        new = torch.rand(8, 2)
        folder = save(tmp_path, number, weight=new)
        context = ParallelContext(tp_rank=1, tp_size=2)
        load = raywl.load_into if number == 1 else raywl.reload_into
        load(layer, folder, parallel=context, strict="exact")
        assert layer.weight is layer.w13
        assert place(layer.w13) == before
        assert torch.equal(kernel_parameters(layer)["w13"], new[4:])


def test_a_retired_parameter_is_reloaded_and_stays_retired(tmp_path):
    layer = layer_of(weight=torch.zeros(4), other=torch.zeros(1))
    retire_parameter(layer, "weight")
    before = place(layer.weight)
    for number, load in ((1, raywl.load_into), (2, raywl.reload_into)):
        load(layer, save(tmp_path, number, weight=torch.full((4,), float(number)), other=torch.ones(1)))
        assert layer.weight.tolist() == [number] * 4
        assert place(layer.weight) == before
        assert get_live_param(layer, "weight") is None
        assert list(kernel_parameters(layer)) == ["other"]


def test_a_packed_weight_takes_the_checkpoints_format_again(tmp_path):
    """Packed in place for kernels and unpacked for each reload: one storage, one offset, one loader."""
    layer = layer_of(weight=torch.zeros(4, 8))
    loader = layer.weight.weight_loader = sharded_weight_loader(0)
    old, where = layer.weight, storage(layer.weight)
    for number, load in enumerate((raywl.load_into, raywl.reload_into, raywl.reload_into)):
        if number:
            with direct_reload():
                replace_parameter(layer, "weight", torch.empty(4, 8))
        new = torch.rand(4, 8)
        load(layer, save(tmp_path, number, weight=new))
        assert torch.equal(layer.weight, new)
        set_kernel_parameter(layer, "weight", new.t().contiguous().bfloat16())
        assert layer.weight is old
        assert layer.weight.weight_loader is loader
        assert (storage(layer.weight), layer.weight.storage_offset()) == (where, 0)


def test_a_source_of_requantization_is_reloaded_as_the_new_object(tmp_path):
    layer = layer_of(weight=torch.zeros(4))
    calls = []

    def load(param, weight):
        calls.append(param)
        param.data.copy_(weight)

    layer.weight.weight_loader, layer.weight.requantization_source = load, True
    raywl.load_into(layer, save(tmp_path, 0, weight=torch.ones(4)))
    source = layer.weight
    replace_parameter(layer, "weight", layer.weight * 2)
    assert layer.weight is not source
    raywl.reload_into(layer, save(tmp_path, 1, weight=torch.full((4,), 3.0)))
    assert source.tolist() == [1] * 4
    assert layer.weight.tolist() == [3] * 4
    assert calls[-1] is layer.weight


def test_scales_that_are_views_of_one_storage(tmp_path):
    """C44: four scalars side by side, and one that is the whole; each its own place, before and after."""
    arena = torch.zeros(6)
    names = ["q_scale", "k_scale", "v_scale", "prob_scale"]
    layer = layer_of(**{name: arena[i + 1] for i, name in enumerate(names)}, empty=arena[:0])
    before = {name: place(param) for name, param in layer.named_parameters()}
    for number, load in ((1, raywl.load_into), (2, raywl.reload_into)):
        tensors = {name: torch.tensor([10.0 * number + i]) for i, name in enumerate(names)}
        load(layer, save(tmp_path, number, **tensors, empty=torch.zeros(0)), strict="exact")
        assert arena.tolist() == [0, *[10 * number + i for i in range(4)], 0]
        assert {name: place(param) for name, param in layer.named_parameters()} == before


@pytest.mark.parametrize(
    "dtype", [torch.float4_e2m1fn_x2, torch.float8_e8m0fnu, torch.float8_e4m3fn, torch.uint8], ids=str
)
def test_a_view_inside_an_arena_is_filled_and_nothing_beside_it(tmp_path, dtype):
    arena = torch.full((64,), 7, dtype=torch.uint8)
    layer = Module()
    layer.weight = Parameter(storage_view(arena.untyped_storage(), 16, (4, 8), (8, 1), dtype), False)
    raw = torch.arange(32, dtype=torch.uint8)
    for number, load in ((1, raywl.load_into), (2, raywl.reload_into)):
        load(layer, save(tmp_path, number, weight=(raw + number).view(dtype).view(4, 8)))
        assert arena[16:48].tolist() == (raw + number).tolist()
        assert arena[:16].tolist() == arena[48:].tolist() == [7] * 16
        assert storage(layer.weight) == storage(arena)


def test_meta_parameters_keep_ties_names_and_attributes(tmp_path):
    layer = layer_of(weight=torch.empty(4, 2, device="meta"))
    layer.weight.weight_loader, layer.weight.note = sharded_weight_loader(0), "kept"
    move_parameter(layer, "weight", "w13")
    model = nn.ModuleList([layer, Module()])
    model[1].tied = layer.weight
    raywl.load_into(model, save(tmp_path, 0, **{"0.weight": torch.ones(4, 2)}), strict="exact")
    assert layer.weight is layer.w13 is model[1].tied
    assert (layer.weight.note, layer.weight.runtime_name) == ("kept", "w13")
    assert layer.weight.eq(1).all()
    assert not layer.weight.is_meta


# Attention sinks, by whatever way they come


@pytest.mark.parametrize("meta", [False, True], ids=["memory", "meta"])
def test_sinks_keep_their_padding_whichever_way_they_come(tmp_path, meta):
    """Loaded, reloaded, and by a plan that was recorded before, which calls no loader."""
    context = ParallelContext(tp_rank=1, tp_size=2)

    def make():
        with torch.device("meta" if meta else "cpu"):
            return layer_of_sinks(make_attention_sink(4, torch.float32))

    first = save(tmp_path, 0, sinks=torch.arange(6.0))
    model = make()
    report = raywl.load_into(model, first, parallel=context, device="cpu")
    assert model.sinks.tolist() == [3, 4, 5, -INF]
    model.sinks.data.fill_(9.0)
    raywl.reload_into(model, save(tmp_path, 1, sinks=torch.arange(10.0, 16.0)), parallel=context)
    assert model.sinks.tolist() == [13, 14, 15, -INF]
    assert model.sinks.weight_loader is load_attention_sink
    report.plan.save(tmp_path / "plan")
    again = make()
    if not meta:
        again.sinks.data.fill_(9.0)
    plan = raywl.LoadPlan.load(tmp_path / "plan")
    raywl.load_into(again, first, parallel=context, plan=plan, device="cpu")
    assert again.sinks.tolist() == [3, 4, 5, -INF]


def layer_of_sinks(sinks):
    layer = Module()
    layer.sinks = sinks
    return layer


def test_sinks_that_are_saved_and_loaded_again(tmp_path):
    """The heads alone, of all ranks; padding is no part of the checkpoint."""
    folder = save(tmp_path, 0, sinks=torch.arange(6.0))
    for rank in range(2):
        context = ParallelContext(tp_rank=rank, tp_size=2)
        model = layer_of_sinks(make_attention_sink(4, torch.float32))
        raywl.load_into(model, folder, parallel=context)
        raywl.save_sharded(model, tmp_path / "out", parallel=context)
    saved = dict(raywl.open_checkpoint(tmp_path / "out").iter_weights())
    assert saved["sinks"].tolist() == [0, 1, 2, 3, 4, 5]
