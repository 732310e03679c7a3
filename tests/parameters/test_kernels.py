"""Names that kernels know, retired parameters, derived tensors, attributes and modes."""

import contextvars
import threading

import pytest
import torch
from torch.nn import Module, Parameter

from raywl.parameters import (
    are_weights_already_processed,
    direct_reload,
    get_live_param,
    kernel_parameters,
    move_parameter,
    refill_derived,
    replace_parameter,
    retire_parameter,
    set_kernel_parameter,
    set_weight_attrs,
    weights_already_processed,
)
from raywl.parameters.modes import is_direct_reload


def layer_of(**tensors):
    layer = Module()
    for name, tensor in tensors.items():
        layer.register_parameter(name, None if tensor is None else Parameter(tensor, requires_grad=False))
    return layer


def test_attributes_are_set_all_or_none():
    weight = Parameter(torch.zeros(1))
    set_weight_attrs(weight, None)
    set_weight_attrs(weight, {"output_dim": 0, "group": None})
    assert (weight.output_dim, weight.group) == (0, None)
    for kind in (ValueError, AssertionError):
        with pytest.raises(kind, match="already: output_dim"):
            set_weight_attrs(weight, {"fresh": 1, "output_dim": 1})
    assert weight.output_dim == 0
    assert not hasattr(weight, "fresh")


def test_a_moved_parameter_is_one_object_under_both_names():
    layer = layer_of(weight=torch.ones(2))
    weight = layer.weight
    move_parameter(layer, "weight", "w13")
    assert layer.weight is layer.w13 is weight
    assert weight.runtime_name == "w13"
    assert dict(kernel_parameters(layer)) == {"w13": weight}
    replace_parameter(layer, "weight", torch.zeros(1, 2))
    assert layer.w13 is weight
    assert layer.w13.tolist() == [[0, 0]]
    move_parameter(layer, "weight", "w13")
    assert list(layer.state_dict()) == ["weight", "w13"]


def test_a_moved_meta_parameter_stays_one_object_when_it_gets_memory():
    layer = layer_of(weight=torch.empty(2, device="meta"))
    move_parameter(layer, "weight", "w13")
    replace_parameter(layer, "weight", torch.ones(2))
    assert layer.weight is layer.w13
    assert layer.w13.runtime_name == "w13"
    assert not layer.w13.is_meta


def test_a_name_that_is_taken_is_refused():
    layer = layer_of(weight=torch.ones(2), other=torch.zeros(1), absent=None)
    layer.register_buffer("mean", torch.zeros(1))
    layer.plain = None
    for dst, kind in (("other", "parameter"), ("mean", "attribute")):
        with pytest.raises(ValueError, match=f"another {kind} '{dst}'"):
            move_parameter(layer, "weight", dst)
    with pytest.raises(ValueError, match="no parameter 'gone'"):
        move_parameter(layer, "gone", "w13")
    with pytest.raises(ValueError, match="no parameter 'absent'"):
        move_parameter(layer, "absent", "w13")
    assert layer.other.tolist() == [0]
    for dst in ("absent", "plain"):
        move_parameter(layer, "weight", dst)
        assert layer._parameters[dst] is layer.weight


def test_a_retired_parameter_stays_registered_and_reloadable():
    layer = layer_of(weight=torch.ones(2), scale=torch.ones(1))
    weight = layer.weight
    weight.weight_loader = lambda param, loaded: param.data.copy_(loaded)
    retire_parameter(layer, "weight")
    assert get_live_param(layer, "weight") is None
    assert list(kernel_parameters(layer)) == ["scale"]
    assert dict(layer.named_parameters())["weight"] is weight
    weight.weight_loader(weight, torch.full((2,), 5.0))
    assert layer.weight.tolist() == [5, 5]
    replace_parameter(layer, "weight", torch.zeros(2))
    assert get_live_param(layer, "weight") is None
    set_kernel_parameter(layer, "weight", torch.ones(2))
    assert get_live_param(layer, "weight") is weight


def test_retirement_is_not_handed_on_with_the_contents():
    layer = layer_of(weight=torch.ones(2), packed=torch.zeros(2))
    retire_parameter(layer, "weight")
    replace_parameter(layer, "packed", layer.weight)
    assert get_live_param(layer, "packed") is layer.packed


def test_only_parameters_can_be_retired():
    layer = layer_of(bias=None)
    layer.register_buffer("mean", torch.zeros(1))
    layer.absent = None
    retire_parameter(layer, "bias")
    retire_parameter(layer, "absent")
    for name in ("mean", "gone"):
        with pytest.raises(ValueError, match=f"no parameter '{name}' to retire"):
            retire_parameter(layer, name)


def test_what_is_live():
    layer = layer_of(weight=torch.ones(1), bias=None, empty=torch.empty(0, 4))
    layer.register_buffer("mean", torch.empty(0))
    layer.note = "text"
    assert get_live_param(layer, "weight") is layer.weight
    assert get_live_param(layer, "mean") is layer.mean
    assert get_live_param(layer, "note") == "text"
    for name in ("bias", "empty", "gone"):
        assert get_live_param(layer, name) is None


def test_kernel_parameters_are_the_layers_own_each_once():
    layer = layer_of(weight=torch.ones(1), bias=None, empty=torch.empty(0), scale=torch.ones(1))
    layer.child = layer_of(inner=torch.ones(1))
    layer.tied = layer.scale
    assert list(kernel_parameters(layer)) == ["weight", "scale"]
    move_parameter(layer, "scale", "tied")
    assert list(kernel_parameters(layer)) == ["weight", "tied"]


def test_a_runtime_name_of_another_layer_does_not_count():
    one, other = layer_of(weight=torch.ones(1)), Module()
    other.shared = one.weight
    move_parameter(one, "weight", "w13")
    assert list(kernel_parameters(other)) == ["shared"]


def test_setting_a_kernel_parameter_keeps_the_address_and_takes_the_name():
    layer = layer_of(weight=torch.zeros(4))
    pointer = layer.weight.data_ptr()
    set_kernel_parameter(layer, "weight", torch.ones(2, 2))
    assert layer.weight.data_ptr() == pointer
    assert not hasattr(layer.weight, "runtime_name")
    move_parameter(layer, "weight", "w13")
    set_kernel_parameter(layer, "weight", torch.zeros(4))
    assert layer.weight.runtime_name == "weight"
    assert list(kernel_parameters(layer)) == ["weight"]
    set_kernel_parameter(layer, "fresh", torch.ones(1))
    assert list(kernel_parameters(layer)) == ["weight", "fresh"]
    set_kernel_parameter(layer, "fresh", None)
    assert layer.fresh is None


def test_a_derived_tensor_is_refilled_in_place():
    """A copy of the sinks in another dtype, made again at each reload (C24)."""
    layer = layer_of(sinks=torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.bfloat16))
    first = refill_derived(layer, "sinks_f32", layer.sinks.float())
    pointer = layer.sinks_f32.data_ptr()
    layer.sinks.data.copy_(torch.arange(4.0))
    again = refill_derived(layer, "sinks_f32", layer.sinks.float())
    assert again is first is layer.sinks_f32
    assert layer.sinks_f32.data_ptr() == pointer
    assert layer.sinks_f32.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "new", [torch.ones(5), torch.ones(4).half(), torch.empty(4, device="meta"), None], ids=str
)
def test_another_kind_of_derived_tensor_takes_its_place(new):
    layer = type("Plain", (), {})()
    layer.table = torch.zeros(4)
    held = layer.table
    assert refill_derived(layer, "table", new) is new
    assert layer.table is new
    assert held.tolist() == [0] * 4


def test_derived_tensors_keep_their_own_strides():
    layer = Module()
    layer.table = torch.zeros(2, 3).t()
    held, new = layer.table, torch.arange(6.0).view(3, 2)
    assert refill_derived(layer, "table", new) is held
    assert held.stride() == (1, 3)
    assert torch.equal(held, new)


def test_derived_tensors_that_repeat_elements_are_set():
    layer = Module()
    layer.table = torch.zeros(1).expand(3)
    new = torch.arange(3.0)
    assert refill_derived(layer, "table", new) is new


@pytest.mark.parametrize(
    ("mode", "is_on"),
    [(weights_already_processed, are_weights_already_processed), (direct_reload, is_direct_reload)],
    ids=["processed", "direct"],
)
def test_modes_nest_end_with_errors_and_are_of_one_context(mode, is_on):
    assert is_on() is False
    with mode():
        with mode():
            assert is_on() is True
        assert is_on() is True
        seen = []
        thread = threading.Thread(target=lambda: seen.append(is_on()))
        thread.start()
        thread.join()
        assert seen == [False]
        assert contextvars.copy_context().run(is_on) is True
    assert is_on() is False
    with pytest.raises(KeyError), mode():
        raise KeyError
    assert is_on() is False


def test_the_modes_are_independent():
    with weights_already_processed():
        assert not is_direct_reload()
    with direct_reload():
        assert not are_weights_already_processed()
