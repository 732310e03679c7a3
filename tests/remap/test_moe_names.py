"""Expert weights one level deeper, and the mapping that a model gives."""

import pytest
import torch
from torch.nn import Module

from raywl.remap.experts import make_expert_params_mapping
from raywl.remap.moe_names import (
    get_moe_expert_mapping,
    maybe_remap_moe_expert_param_name,
    remap_moe_expert_weights,
)

KINDS = (
    "weight weight_scale weight_scale_inv input_scale bias scale g_idx qweight qzeros weight_shape".split()
)


class Anything:
    """A model that has every parameter."""

    def __contains__(self, name):
        return True


@pytest.mark.parametrize("prefix", ["w13", "w2"])
@pytest.mark.parametrize("kind", KINDS)
def test_each_suffix(prefix, kind):
    name, new = f"l.mlp.experts.{prefix}_{kind}", f"l.mlp.experts.routed_experts.{prefix}_{kind}"
    assert maybe_remap_moe_expert_param_name(name, {new: 0}) == new
    assert maybe_remap_moe_expert_param_name(name, {name: 0}) == name
    assert maybe_remap_moe_expert_param_name(new, {new: 0}) == new


@pytest.mark.parametrize(
    "name",
    [
        "l.mlp.experts.w1_weight",
        "l.mlp.experts.3.gate_proj.weight",
        "l.mlp.experts.gate_up_proj",
        "l.mlp.shared_experts.w13_weight",
        "experts.w13_weight",
        "l.experts.routed_experts.w2_bias",
        "l.experts.w2_zeros",
        "w2_weight",
    ],
)
def test_other_names_are_left_alone_whatever_the_model_has(name):
    assert maybe_remap_moe_expert_param_name(name, Anything()) == name


@pytest.mark.parametrize(
    ("name", "new"),
    [
        ("a.experts.b.experts.w2_bias", "a.experts.routed_experts.b.experts.w2_bias"),
        ("a.experts.w2_weight_packed", "a.experts.routed_experts.w2_weight_packed"),
        ("a.experts.w13_weight.0", "a.experts.routed_experts.w13_weight.0"),
        ("a.experts.base_w13_weight", "a.experts.routed_experts.base_w13_weight"),
    ],
)
def test_a_suffix_may_start_a_part_or_end_the_name(name, new):
    """The insertion is after the first `.experts.`."""
    assert maybe_remap_moe_expert_param_name(name, Anything()) == new


def test_weights_are_renamed_lazily():
    def weights():
        yield "l.experts.w2_bias", 1
        yield "l.norm", 2
        raise AssertionError("asked for too much")

    out = remap_moe_expert_weights(weights(), {"l.experts.routed_experts.w2_bias": 0})
    assert next(out) == ("l.experts.routed_experts.w2_bias", 1)
    assert next(out) == ("l.norm", 2)


class Experts(Module):
    def __init__(self, num_experts):
        super().__init__()
        self.num_experts = num_experts

    def get_expert_mapping(self):
        return make_expert_params_mapping("gate", "down", "up", self.num_experts)


def test_the_first_module_with_a_mapping_gives_it():
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Sequential(Experts(2)), Experts(3))
    assert get_moe_expert_mapping(model) == make_expert_params_mapping("gate", "down", "up", 2)
    assert len(get_moe_expert_mapping(Experts(4))) == 12


def test_no_module_has_one():
    with pytest.raises(ValueError, match="no module of Linear has get_expert_mapping"):
        get_moe_expert_mapping(torch.nn.Linear(1, 1))
