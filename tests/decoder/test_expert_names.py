"""Experts by name: ids, placement, what a rank may skip, and how names reach fused parameters."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raywl.remap.experts import (
    compute_local_expert_ids,
    determine_expert_map,
    make_expert_params_mapping,
    parse_expert_id,
    should_skip_weight,
)


@pytest.mark.parametrize(
    ("name", "expert"),
    [
        ("model.layers.3.block_sparse_moe.experts.12.w1.weight", 12),
        ("model.layers.3.mlp.experts.0.gate_proj.weight_scale", 0),
        ("model.layers.3.mlp.shared_experts.gate_proj.weight", None),
        ("model.layers.3.mlp.shared_experts.1.gate_proj.weight", None),
        ("model.layers.3.mlp.experts.w13_weight", None),
        ("model.layers.3.mlp.experts.gate_up_proj", None),
        ("model.layers.3.self_attn.q_proj.weight", None),
        ("model.layers.3.mlp.experts.7", None),
        (f"model.layers.3.mlp.experts.{'9' * 5000}.w1.weight", None),
    ],
)
def test_expert_id_of_a_name(name, expert):
    assert parse_expert_id(name) == expert


def test_local_experts():
    assert compute_local_expert_ids(8, 1, 0) is None
    blocks = [compute_local_expert_ids(10, 4, rank) for rank in range(4)]
    assert blocks == [{0, 1, 2}, {3, 4, 5}, {6, 7}, {8, 9}]
    assert compute_local_expert_ids(10, 4, 1, "round_robin") == {1, 5, 9}
    for arguments in [(8, 2, 2), (8, 2, -1), (8, 2, 0, "random"), (8, 1, 0, "random")]:
        with pytest.raises(ValueError):
            compute_local_expert_ids(*arguments)


@given(
    experts=st.integers(1, 40),
    ep_size=st.integers(2, 12),
    placement=st.sampled_from(["linear", "round_robin"]),
)
def test_ranks_share_the_experts_and_number_their_own(experts, ep_size, placement):
    owned = []
    for rank in range(ep_size):
        ids = compute_local_expert_ids(experts, ep_size, rank, placement)
        num_local, expert_map = determine_expert_map(ep_size, rank, experts, placement)
        assert num_local == len(ids)
        assert str(expert_map.dtype) == "torch.int32"
        places = {expert: place for expert, place in enumerate(expert_map.tolist()) if place >= 0}
        assert places == {expert: place for place, expert in enumerate(sorted(ids))}
        owned += sorted(ids)
    assert sorted(owned) == list(range(experts))


def test_alone_there_is_no_map():
    assert determine_expert_map(1, 0, 8) == (8, None)


@pytest.mark.parametrize(
    ("name", "skipped"),
    [
        ("experts.5.gate_proj.weight_packed", True),
        ("experts.5.gate_proj.weight", True),
        ("experts.5.gate_proj.qweight", True),
        ("experts.5.gate_proj.weight_scale", False),
        ("experts.5.gate_proj.bias", False),
        ("experts.0.gate_proj.weight_packed", False),
        ("shared_experts.gate_proj.weight", False),
        ("experts.w13_weight", False),
        ("self_attn.q_proj.weight", False),
    ],
)
def test_only_heavy_tensors_of_other_ranks_experts_are_skipped(name, skipped):
    """C15: packed ones too; scales, shared experts, and all experts in one are kept."""
    assert should_skip_weight(f"model.layers.0.mlp.{name}", {0, 1}) == skipped
    assert not should_skip_weight(f"model.layers.0.mlp.{name}", None)


def test_names_of_single_experts_reach_fused_parameters():
    mapping = make_expert_params_mapping("w1", "w2", "w3", num_experts=2, num_redundant_experts=3)
    assert len(mapping) == 15
    assert mapping[:3] == [
        ("experts.w13_", "experts.0.w1.", 0, "w1"),
        ("experts.w2_", "experts.0.w2.", 0, "w2"),
        ("experts.w13_", "experts.0.w3.", 0, "w3"),
    ]
    logical = {expert: weight.split(".")[1] for _, weight, expert, _ in mapping}
    assert logical == {0: "0", 1: "1", 2: "0", 3: "1", 4: "0"}
    name = "model.layers.0.block_sparse_moe.experts.1.w2.weight"
    found = [name.replace(weight, param) for param, weight, *_ in mapping if weight in name]
    assert set(found) == {"model.layers.0.block_sparse_moe.experts.w2_weight"}
    with pytest.raises(ValueError):
        make_expert_params_mapping("w1", "w2", "w3", 0)
