"""Expert parameters and the companions of quantised experts, on every rank of every layout."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import raywl
from raywl import ParallelContext
from raywl.errors import MissingWeightsError, ShapeMismatchError
from raywl.loaders import ExpertLoader
from raywl.readers import OpenFiles
from raywl.remap.experts import (
    compute_local_expert_ids,
    determine_expert_map,
    make_expert_params_mapping,
)

from .companions import KIND_NAMES, UNSET, kinds, numbered

HIDDEN = 12


def expert_kind(name, unit):
    return next(kind for kind in kinds(unit, first_dim=1) if kind.name == name)


def tensors_of(kind, experts, inner, *, in_checkpoint_turned):
    """Gate, up and down of all experts, in the orientation of the checkpoint, and as rows one by one."""
    gate = numbered(experts, *kind.shape(inner, HIDDEN)) + 1
    up = gate + 10_000
    down = numbered(experts, *kind.shape(HIDDEN, inner)) + 20_001
    turn = kind.turned != in_checkpoint_turned
    return [(t.mT.contiguous() if turn else t) for t in (gate, up, down)], (gate, up, down)


LAYOUTS = st.tuples(st.sampled_from([1, 2, 3]), st.sampled_from([1, 2, 4]))


@settings(deadline=None, max_examples=200)
@given(
    kind_name=st.sampled_from(KIND_NAMES),
    unit=st.sampled_from([1, 2, 3, 4, 8]),
    layout=LAYOUTS,
    experts=st.integers(1, 5),
    redundant=st.integers(0, 3),
    parts=st.integers(1, 10),
    placement=st.sampled_from(["linear", "round_robin"]),
    transposed=st.booleans(),
    form=st.sampled_from(["one by one", "w1 and w3", "both in one"]),
)
def test_law_parts_make_the_whole(
    kind_name, unit, layout, experts, redundant, parts, placement, transposed, form
):
    """What each rank has of each of its experts is what the cut says; refused only inside a block."""
    ep_size, moe_tp = layout
    kind, inner = expert_kind(kind_name, unit), parts * moe_tp
    (gate, up, down), rows = tensors_of(kind, experts, inner, in_checkpoint_turned=transposed)
    out_dim = kind.output_dim if transposed == kind.turned else kind.input_dim
    whole = {"w1": gate, "w3": up, "w2": down}
    if form == "both in one":
        if inner % kind.outputs:
            return  # no kernel could read it
        whole = {"w1": torch.cat((gate, up), out_dim), "w2": down}
    num_ids = experts + redundant
    for rank in range(ep_size * moe_tp):
        with ParallelContext.of_rank(rank, tp_size=ep_size * moe_tp, ep_size=ep_size) as context:
            num_local, expert_map = determine_expert_map(ep_size, context.ep_rank, num_ids, placement)
            loader = ExpertLoader(
                experts, expert_map, transposed, intermediate_size=inner, num_redundant_experts=redundant
            )
            w13 = kind.parameter(num_local, *kind.shape(2 * parts, HIDDEN))
            w2 = kind.parameter(num_local, *kind.shape(HIDDEN, parts))
            told = load_all(loader, {"w1": w13, "w3": w13, "w2": w2}, whole, form, experts, redundant)
            if not num_local:
                assert told == {}
                continue
            edges = context.moe_tp_rank * parts, (context.moe_tp_rank + 1) * parts
            check_refusals(told, kind, edges, inner, moe_tp, form)
            places = range(num_ids) if expert_map is None else expert_map.tolist()
            for expert, place in enumerate(places):
                if place >= 0:
                    check_expert(kind, w13, w2, place, [t[expert % experts] for t in rows], edges, told)


def load_all(loader, params, whole, form, experts, redundant):
    """Loads everything; what was refused, by shard id."""
    told = {}
    for shard_id, weight in whole.items():
        try:
            if form == "one by one":
                for expert in range(experts + redundant):
                    loader(params[shard_id], weight[expert % experts], "w", shard_id, expert)
            else:
                loader(params[shard_id], weight, "w", shard_id, None)
        except ShapeMismatchError:
            raise
        except ValueError as error:
            told[shard_id] = str(error)
    return told


def check_refusals(told, kind, edges, inner, moe_tp, form):
    cuts_out = any(edge % kind.outputs and edge != inner for edge in edges)
    starts_inside = (edges[1] - edges[0]) % kind.outputs != 0
    for shard_id, text in told.items():
        unit = kind.inputs if shard_id == "w2" else kind.outputs
        assert f"of {unit}" in text
        assert f"of {moe_tp} of each expert" in text
        if shard_id == "w2":
            assert any(edge % kind.inputs and edge != inner for edge in edges)
        else:
            assert cuts_out or starts_inside
    if moe_tp == 1 and not starts_inside:
        assert not told


def check_expert(kind, w13, w2, place, rows, edges, told):
    """One expert's companions, each element taken for all the rows that it stands for."""
    length = edges[1] - edges[0]
    gate, up, down = rows
    if "w1" not in told and "w3" not in told:
        dim = kind.output_dim - 1
        got = kind.expanded(w13[place], dim, kind.outputs, 2 * length).split(length, dim)
        for mine, whole in zip(got, (gate, up), strict=True):
            wanted = kind.expanded(whole, dim, kind.outputs, edges[1]).narrow(dim, edges[0], length)
            assert torch.equal(mine, wanted)
    if "w2" not in told:
        dim = kind.input_dim - 1
        got = kind.expanded(w2[place], dim, kind.inputs, length)
        wanted = kind.expanded(down, dim, kind.inputs, edges[1]).narrow(dim, edges[0], length)
        assert torch.equal(got, wanted)


@settings(deadline=None, max_examples=150)
@given(
    kind_name=st.sampled_from(KIND_NAMES),
    unit=st.sampled_from([1, 2, 4, 8]),
    moe_tp=st.sampled_from([1, 2, 3, 4]),
    inner=st.integers(1, 60),
    more=st.integers(0, 2),
)
def test_law_padded_to_blocks(kind_name, unit, moe_tp, inner, more):
    """C28: with `multiple_of`, weight and companions are padded alike before they are cut; never refused."""
    kind = expert_kind(kind_name, unit)
    multiple = math.lcm(kind.outputs, kind.inputs)
    each = -(-inner // (moe_tp * multiple)) * multiple
    room = each + more * multiple
    loader = ExpertLoader(1, intermediate_size=inner, multiple_of=multiple)
    (gate, up, down), _ = tensors_of(kind, 1, inner, in_checkpoint_turned=kind.turned)
    loader.transposed = kind.turned
    got = {"w1": [], "w3": [], "w2": []}
    for rank in range(moe_tp):
        w13 = kind.parameter(1, *kind.shape(2 * room, HIDDEN))
        w2 = kind.parameter(1, *kind.shape(HIDDEN, room))
        with ParallelContext.of_rank(rank, tp_size=moe_tp):
            loader(w13, gate, "w", "w1", None)
            loader(w13, up, "w", "w3", None)
            loader(w2, down, "w", "w2", None)
        halves = kind.expanded(w13, kind.output_dim, kind.outputs, 2 * room).split(room, kind.output_dim)
        down_rows = kind.expanded(w2, kind.input_dim, kind.inputs, room)
        for shard_id, part, dim, block in (
            ("w1", halves[0], kind.output_dim, kind.outputs),
            ("w3", halves[1], kind.output_dim, kind.outputs),
            ("w2", down_rows, kind.input_dim, kind.inputs),
        ):
            real = min(max(inner - rank * each, 0), each)
            blocks = -(-real // block) * block
            assert not part.narrow(dim, blocks, room - blocks).any()
            got[shard_id].append(part.narrow(dim, 0, real))
    for shard_id, whole, dim, block in (
        ("w1", gate, kind.output_dim, kind.outputs),
        ("w3", up, kind.output_dim, kind.outputs),
        ("w2", down, kind.input_dim, kind.inputs),
    ):
        assert torch.equal(torch.cat(got[shard_id], dim), kind.expanded(whole, dim, block, inner))


def test_a_block_that_two_ranks_would_share_is_refused_with_the_numbers():
    """Before anything is written, and by every rank alike."""
    scale = numbered(2, 24, 3)
    for rank in range(16):
        param = expert_kind("block scale", 4).parameter(2, 4, 3)
        with (
            ParallelContext.of_rank(rank, tp_size=16),
            pytest.raises(ValueError, match=rf"experts\.w13_scale: .*24 blocks of 4 .*rank {rank} of 16"),
        ):
            ExpertLoader(2)(param, scale, "experts.w13_scale", "w1", None)
        assert (param == UNSET).all()


@pytest.mark.parametrize("moe_tp", [1, 2, 4])
def test_mxfp4_blocks_and_scales_of_gpt_oss(moe_tp):
    """C25: gate and up alternate; blocks of 32 values are a dim of their own, in the parameter or not."""
    experts, inner, hidden = 2, 128, 64
    blocks = torch.randint(256, (experts, 2 * inner, hidden // 32, 16), dtype=torch.uint8)
    scales = torch.randint(256, (experts, 2 * inner, hidden // 32), dtype=torch.uint8)
    down_blocks = torch.randint(256, (experts, hidden, inner // 32, 16), dtype=torch.uint8)
    down_scales = torch.randint(256, (experts, hidden, inner // 32), dtype=torch.uint8)
    part = inner // moe_tp
    loader = ExpertLoader(experts, interleaved=True, intermediate_size=inner)

    def bytes_of(*shape, **marks):
        param = torch.nn.Parameter(torch.zeros(shape, dtype=torch.uint8), requires_grad=False)
        for name, value in marks.items():
            setattr(param, name, value)
        return param

    for rank in range(moe_tp):
        packed = {"packed_dim": 2, "packed_factor": 2, "group_size": 32}
        flat13 = bytes_of(experts, 2 * part, hidden // 2, **packed)
        flat2 = bytes_of(experts, hidden, part // 2, **packed)
        own13 = bytes_of(experts, 2 * part, hidden // 32, 16, group_size=32)
        own2 = bytes_of(experts, hidden, part // 32, 16, group_size=32)
        scale13 = bytes_of(experts, 2 * part, hidden // 32, group_size=32)
        scale2 = bytes_of(experts, hidden, part // 32, group_size=32)
        with ParallelContext.of_rank(rank, tp_size=moe_tp):
            for param, tensor, shard_id in [
                (flat13, blocks, "w1"),
                (own13, blocks, "w1"),
                (scale13, scales, "w1"),
                (flat2, down_blocks, "w2"),
                (own2, down_blocks, "w2"),
                (scale2, down_scales, "w2"),
            ]:
                assert loader(param, tensor, "experts.w", shard_id, None)
        rows, groups = (slice(rank * n, (rank + 1) * n) for n in (2 * part, part // 32))
        assert torch.equal(flat13, blocks[:, rows].flatten(2))
        assert torch.equal(own13, blocks[:, rows])
        assert torch.equal(scale13, scales[:, rows])
        assert torch.equal(flat2, down_blocks[:, :, groups].flatten(2))
        assert torch.equal(own2, down_blocks[:, :, groups])
        assert torch.equal(scale2, down_scales[:, :, groups])


def test_mxfp4_over_more_ranks_than_blocks_allow():
    """2880 inputs are 90 blocks of 32: four ranks keep 23, 23, 23 and 21 when asked to pad, else none."""
    scales = torch.randint(1, 256, (1, 4, 90), dtype=torch.uint8)
    param = torch.nn.Parameter(torch.zeros(1, 4, 23, dtype=torch.uint8), requires_grad=False)
    param.group_size = 32
    kept = []
    for rank in range(4):
        with ParallelContext.of_rank(rank, tp_size=4):
            with pytest.raises(ValueError, match=rf"group of 32|groups of 32.*rank {rank} of 4"):
                ExpertLoader(1, intermediate_size=2880)(param, scales, "w2_scale", "w2", None)
            ExpertLoader(1, intermediate_size=2880, multiple_of=32)(param, scales, "w2_scale", "w2", None)
        kept.append(param.clone())
    again = torch.cat(kept, 2)
    assert torch.equal(again[..., :90], scales)
    assert not again[..., 90:].any()


def test_padding_of_a_rank_is_finite():
    """C25: local I padded from 2 to 4; the padded scales are the byte 0, the smallest scale there is."""
    tagged = torch.arange(10, 18, dtype=torch.uint8).view(1, 8, 1)
    loader = ExpertLoader(1, interleaved=True, intermediate_size=4)
    param = torch.nn.Parameter(
        torch.full((1, 8, 1), 255, dtype=torch.uint8).view(torch.float8_e8m0fnu), False
    )
    with ParallelContext.of_rank(1, tp_size=2):
        loader(param, tagged, "w13_scale", "w1", None)
    assert param.view(torch.uint8).flatten().tolist() == [14, 15, 16, 17, 0, 0, 0, 0]
    assert param.float().isfinite().all()


def test_alternating_rows_share_no_block():
    """A block of rows would hold gate and up: only a checkpoint that has both in one can have such."""
    kind = expert_kind("block scale", 4)
    loader = ExpertLoader(1, interleaved=True, intermediate_size=32)
    param = kind.parameter(1, 8, 3)
    both = numbered(1, 16, 3)
    with ParallelContext.of_rank(1, tp_size=2):
        loader(param, both, "w13_scale", "w1", None)
        assert torch.equal(param, both[:, 8:])
        with pytest.raises(ValueError, match="gate and up alternate, so that a block of 4 rows holds both"):
            loader(param, both[:, :8], "w13_scale", "w3", None)


@pytest.mark.parametrize("moe_tp", [1, 2])
@pytest.mark.parametrize("marks", [{}, {"quant_method": "tensor"}, {"per_tensor": True}], ids=str)
def test_scales_of_whole_tensors(moe_tp, marks):
    """Two for w13 and one for w2, each expert's own."""
    w13, w2 = torch.zeros(2, 2), torch.zeros(2)
    for param in (w13, w2):
        for name, value in marks.items():
            setattr(param, name, value)
    loader = ExpertLoader(4, [-1, 1, -1, 0])
    with ParallelContext.of_rank(moe_tp - 1, tp_size=moe_tp):
        for expert in range(4):
            here = expert in (1, 3)
            for number, (param, shard_id) in enumerate([(w13, "w1"), (w2, "w2"), (w13, "w3")]):
                scale = torch.tensor(10.0 * expert + number).view(() if expert % 3 else (1,))
                assert loader(param, scale, "w", shard_id, expert) == here
    assert w13.tolist() == [[30, 32], [10, 12]]
    assert w2.tolist() == [31, 11]
    with ParallelContext.of_rank(moe_tp - 1, tp_size=moe_tp):
        loader(w13, torch.tensor([1.0, 2, 3, 4]), "w", "w3", None)
        loader(w2, torch.tensor([[1.0], [2], [3], [4]]), "w", "w2", None)
    assert w13[:, 1].tolist() == [4, 2]
    assert w2.tolist() == [4, 2]
    if marks:
        with ParallelContext.of_rank(moe_tp - 1, tp_size=moe_tp):
            loader(w13, torch.arange(8.0).view(4, 2), "w", "w1", None)
        assert w13.tolist() == [[6, 7], [2, 3]]


def test_one_scale_for_gate_and_up():
    """Where they have one place in common, up's must be what gate's was."""
    param = torch.zeros(2)
    loader = ExpertLoader(2)
    loader(param, torch.tensor([3.0, 4.0]), "w", "w1", None)
    loader(param, torch.tensor(4.0), "w", "w3", 1)
    loader(param, torch.tensor([3.0, 4.0]), "w", "w3", None)
    assert param.tolist() == [3, 4]
    with pytest.raises(ValueError, match=r"w: is \[5\.0\], and \[4\.0\] was .* give it \(experts, 2\)"):
        loader(param, torch.tensor(5.0), "w", "w3", 1)
    assert param.tolist() == [3, 4]
    with pytest.raises(ShapeMismatchError, match=r"expected \[1, 2\], got \[1\]"):
        loader(param, torch.ones(2), "w", "w1", 1)


def test_one_scale_for_gate_and_up_in_files(tmp_path):
    """Read and compared as they come; a reload checks what can be checked without values."""
    names = [f"experts.{expert}.{name}.input_scale" for expert in range(2) for name in ("gate", "up")]
    model = Experts(w13_input_scale=torch.nn.Parameter(torch.zeros(2), requires_grad=False))
    model.experts.w13_input_scale.weight_loader = ExpertLoader(2)
    mapping = make_expert_params_mapping("gate", "down", "up", 2)
    for number, load in ((1, raywl.load_into), (5, raywl.reload_into)):
        folder = tmp_path / str(number)
        folder.mkdir()
        tensors = {name: torch.tensor([float(number + i // 2)]) for i, name in enumerate(names)}
        save_file(tensors, folder / "model.safetensors")
        load(model, folder, expert_mapping=mapping, strict="exact")
        assert model.experts.w13_input_scale.tolist() == [number, number + 1]
    save_file(tensors | {names[-1]: torch.zeros(1)}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"experts\.1\.up\.input_scale: is \[0\.0\], and \[6\.0\] was"):
        raywl.load_into(model, folder, expert_mapping=mapping)


def test_one_scale_for_all_inputs_is_on_every_rank():
    """Per channel, `(experts, outputs, 1)`: w2's isn't cut, w13's is."""
    w2 = torch.nn.Parameter(torch.zeros(2, 6, 1), requires_grad=False)
    w13 = torch.nn.Parameter(torch.zeros(2, 8, 1), requires_grad=False)
    scale2, scale13 = torch.rand(2, 6, 1), torch.rand(2, 16, 1)
    for marks in ({}, {"quant_method": "channel"}, {"group_size": -1}):
        for param in (w2, w13):
            for name, value in marks.items():
                setattr(param, name, value)
        with ParallelContext.of_rank(1, tp_size=2):
            ExpertLoader(2)(w2, scale2, "w", "w2", None)
            ExpertLoader(2)(w13, scale13, "w", "w1", None)
        assert torch.equal(w2, scale2)
        assert torch.equal(w13, scale13[:, [4, 5, 6, 7, 12, 13, 14, 15]])
    w2 = torch.zeros(2, 6, 1)
    w2.group_size = 128
    with ParallelContext.of_rank(1, tp_size=2), pytest.raises(ValueError, match="group"):
        ExpertLoader(2)(w2, scale2, "w", "w2", None)


def test_group_indices():
    """`g_idx` runs along the inputs: w2's are cut, w13's are whole, gate's standing for up's."""
    w13 = torch.nn.Parameter(torch.zeros(1, 6, dtype=torch.int32), requires_grad=False)
    w2 = torch.nn.Parameter(torch.zeros(1, 4, dtype=torch.int32), requires_grad=False)
    whole = torch.nn.Parameter(torch.zeros(1, 8, dtype=torch.int32), requires_grad=False)
    for param in (w13, w2, whole):
        param.output_dim, param.input_dim = None, 1
    whole.load_full_w2 = True
    with ParallelContext.of_rank(1, tp_size=2):
        loader = ExpertLoader(1)
        loader(w13, numbered(6) + 1, "w", "w1", 0)
        loader(w13, numbered(6) + 9, "w", "w3", 0)
        loader(w2, numbered(8), "w", "w2", 0)
        loader(whole, numbered(8), "w", "w2", 0)
    assert torch.equal(w13[0], numbered(6) + 1)
    assert torch.equal(w2[0], numbered(8)[4:])
    assert torch.equal(whole[0], numbered(8))


def test_experts_of_other_ranks_are_ignored_whatever_their_shape():
    """The filter keeps scales of all experts: a loader leaves those alone that it has no place for."""
    param = expert_kind("block scale", 4).parameter(1, 4, 3)
    loader = ExpertLoader(2, [-1, 0])
    assert not loader(param, numbered(7, 1), "w", "w1", 0)
    assert (param == UNSET).all()


def test_redundant_experts_need_their_originals():
    """C13: 8 experts and 2 copies on 2 ranks: rank 1 holds copies of experts 0 and 1, filtered or not."""
    mapping = make_expert_params_mapping("gate", "down", "up", 8, num_redundant_experts=2)
    local = compute_local_expert_ids(10, 2, 1)
    assert local == {5, 6, 7, 8, 9}
    assert {row[1].split(".")[1] for row in mapping if row[2] in local} == {"5", "6", "7", "0", "1"}


@pytest.mark.parametrize("form", ["one by one", "all in one"])
def test_redundant_experts_are_loaded(tmp_path, form):
    """C13, through `load_into`, for both kinds of checkpoint."""
    num_logical, num_redundant = 8, 2
    down = torch.rand(8, 6, 4)
    if form == "one by one":
        tensors = {f"experts.{i}.down.weight": down[i].clone() for i in range(8)}
        mapping = make_expert_params_mapping("gate", "down", "up", num_logical, num_redundant)
    else:
        tensors, mapping = {"experts.down": down}, [("experts.w2_weight", "experts.down", None, "w2")]
    save_file(tensors, tmp_path / "model.safetensors")
    got = []
    for rank in range(2):
        context = ParallelContext.of_rank(rank, tp_size=2, ep_size=2)
        model = torch.nn.Module()
        model.experts = torch.nn.Module()
        model.experts.w2_weight = torch.nn.Parameter(torch.zeros(5, 6, 4), requires_grad=False)
        model.experts.w2_weight.weight_loader = ExpertLoader(num_logical, num_redundant_experts=num_redundant)
        report = raywl.load_into(model, tmp_path, parallel=context, expert_mapping=mapping)
        assert report.bytes_loaded == model.experts.w2_weight.nbytes
        got.append(model.experts.w2_weight.detach())
    assert torch.equal(got[0], down[:5])
    assert torch.equal(got[1], down[[5, 6, 7, 0, 1]])


def test_all_experts_in_one_by_a_map_with_gaps():
    """C17: 8 experts over 4 ranks, in turn: rank 3 has 3 and 7."""
    down, param = torch.rand(8, 4, 6), torch.zeros(2, 4, 6)
    _, expert_map = determine_expert_map(4, 3, 8, "round_robin")
    ExpertLoader(8, expert_map)(param, down, "experts.w2_weight", "w2", None)
    assert torch.equal(param, down[[3, 7]])
    with ParallelContext.of_rank(3, tp_size=4, ep_size=4):
        ExpertLoader(8)(param, down, "experts.w2_weight", "w2", None)
    assert torch.equal(param, down[6:])


class Experts(torch.nn.Module):
    def __init__(self, **parameters):
        super().__init__()
        self.experts = torch.nn.Module()
        for name, param in parameters.items():
            self.experts.register_parameter(name, param)


def test_names_of_experts_reach_their_parameters(tmp_path):
    """C19: w1 before w3 in w13; what is packed goes to `w2_qweight`, never to `w2_weight.0.qweight`."""
    tensors = {
        "experts.0.w1.weight": torch.rand(4, 3),
        "experts.0.w3.weight": torch.rand(4, 3),
        "experts.0.w2.qweight": numbered(3, 4),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    model = Experts(
        w13_weight=torch.nn.Parameter(torch.zeros(1, 8, 3)),
        w2_qweight=torch.nn.Parameter(torch.zeros(1, 3, 4, dtype=torch.int32), requires_grad=False),
    )
    for param in model.parameters():
        param.weight_loader = ExpertLoader(1)
    mapping = make_expert_params_mapping("w1", "w2", "w3", 1)
    raywl.load_into(model, tmp_path, expert_mapping=mapping, strict="exact")
    w13 = model.experts.w13_weight[0]
    assert torch.equal(w13[:4], tensors["experts.0.w1.weight"])
    assert torch.equal(w13[4:], tensors["experts.0.w3.weight"])
    assert torch.equal(model.experts.w2_qweight[0], tensors["experts.0.w2.qweight"])


def test_an_unknown_suffix_names_the_nearest_parameters(tmp_path):
    """C19: an error under `strict="exact"`, else a warning, either with what was tried and what there is."""
    tensors = {f"experts.0.{name}": torch.zeros(4, 3) for name in ("w1.weight", "w3.weight", "w1.wieght")}
    save_file(tensors, tmp_path / "model.safetensors")
    model = Experts(w13_weight=torch.nn.Parameter(torch.zeros(1, 8, 3)))
    model.experts.w13_weight.weight_loader = ExpertLoader(1)
    mapping = make_expert_params_mapping("w1", "w2", "w3", 1)
    told = r"experts\.0\.w1\.wieght.*experts\.w13_weight"
    with pytest.warns(UserWarning, match=told):
        report = raywl.load_into(model, tmp_path, expert_mapping=mapping)
    assert report.unexpected == ["experts.0.w1.wieght"]
    with pytest.raises(MissingWeightsError, match=told):
        raywl.load_into(model, tmp_path, expert_mapping=mapping, strict="exact")


@pytest.mark.parametrize("misnamed", [{"w3"}, {"w1", "w3"}], ids=["a part", "all"])
def test_what_stays_unset_is_told_with_what_is_called_like_it(misnamed, tmp_path):
    """C19: the error has the checkpoint's name that led nowhere, and the parameter that needed it."""
    tensors = {
        f"experts.0.{name}.{'wieght' if name in misnamed else 'weight'}": torch.zeros(4, 3)
        for name in ("w1", "w3")
    }
    save_file(tensors, tmp_path / "model.safetensors")
    model = Experts(w13_weight=torch.nn.Parameter(torch.zeros(1, 8, 3)))
    model.experts.w13_weight.weight_loader = ExpertLoader(1)
    mapping = make_expert_params_mapping("w1", "w2", "w3", 1)
    told = r"experts\.0\.w3\.wieght is near to .*experts\.w13_weight"
    with pytest.warns(UserWarning, match=told), pytest.raises(MissingWeightsError, match=told):
        raywl.load_into(model, tmp_path, expert_mapping=mapping)


@settings(deadline=None, max_examples=40)
@given(
    kind_names=st.lists(st.sampled_from(KIND_NAMES), min_size=1, max_size=3, unique=True),
    unit=st.sampled_from([2, 4]),
    layout=LAYOUTS,
    parts=st.integers(1, 6),
    transposed=st.booleans(),
    all_in_one=st.booleans(),
    data=st.data(),
)
def test_law_lazy_and_eager_agree_and_read_what_they_keep(
    tmp_path_factory, kind_names, unit, layout, parts, transposed, all_in_one, data
):
    """Whole layers with several companions: the same values, the bytes that are kept, or nothing read."""
    (ep_size, moe_tp), experts = layout, 4
    inner = parts * moe_tp
    all_kinds = {name.replace(" ", "_"): expert_kind(name, unit) for name in kind_names}
    mapping = make_expert_params_mapping("gate", "down", "up", experts)
    tensors = {}
    for name, kind in all_kinds.items():
        for which, tensor in zip(
            ("gate", "up", "down"),
            tensors_of(kind, experts, inner, in_checkpoint_turned=transposed)[0],
            strict=True,
        ):
            if all_in_one:
                tensors[f"experts.{which}.{name}"] = tensor
            else:
                for expert in range(experts):
                    tensors[f"experts.{expert}.{which}.{name}"] = tensor[expert].clone()
    if all_in_one:
        mapping = [
            (f"experts.{param}_", f"experts.{which}.", None, shard_id)
            for which, param, shard_id in (("gate", "w13", "w1"), ("up", "w13", "w3"), ("down", "w2", "w2"))
        ]
    folder = tmp_path_factory.mktemp("experts")
    save_file(tensors, folder / "model.safetensors")
    rank = data.draw(st.integers(0, ep_size * moe_tp - 1))
    context = ParallelContext.of_rank(rank, tp_size=ep_size * moe_tp, ep_size=ep_size)
    num_local, expert_map = determine_expert_map(ep_size, context.ep_rank, experts)
    loader = ExpertLoader(experts, expert_map, transposed, intermediate_size=inner)

    def make_model():
        model = Experts()
        for name, kind in all_kinds.items():
            for prefix, shape in (
                ("w13", kind.shape(2 * parts, HIDDEN)),
                ("w2", kind.shape(HIDDEN, parts)),
            ):
                param = kind.parameter(num_local, *shape)
                param.weight_loader = loader
                model.experts.register_parameter(f"{prefix}_{name}", param)
        return model

    lazy, eager, reads = make_model(), make_model(), []
    with pytest.MonkeyPatch.context() as patch:
        read = OpenFiles.read_into
        patch.setattr(OpenFiles, "read_into", lambda *args: (reads.append(args), read(*args))[1])
        try:
            report = raywl.load_into(lazy, folder, parallel=context, expert_mapping=mapping)
        except ValueError:
            report = None
    if report is None:
        assert not reads
        assert all((param == UNSET).all() for param in lazy.parameters())
        assert any(parts % kind.outputs or parts % kind.inputs for kind in all_kinds.values())
        return
    with context:
        for param_name, weight_name, expert, shard_id in mapping:
            for name, tensor in tensors.items():
                if weight_name in name:
                    target = eager.get_parameter(name.replace(weight_name, param_name))
                    loader(target, tensor, name, shard_id, expert)
    for a, b in zip(lazy.parameters(), eager.parameters(), strict=True):
        assert torch.equal(a, b)
        assert not (a == UNSET).any()
    assert report.bytes_loaded == sum(param.nbytes for param in lazy.parameters())


@pytest.mark.parametrize("both", [False, True], ids=["apart", "in one"])
def test_unmarked_block_scales(both):
    """With `intermediate_size`, the size of the blocks is plain from the shape, and cuts are checked."""
    scale = numbered(1, 24, 3)
    gate, up = scale[:, :12], scale[:, 12:]
    loader = ExpertLoader(1, intermediate_size=12 * 128)
    calls = [(scale, "w1")] if both else [(gate, "w1"), (up, "w3")]
    for rank in range(3):
        w13, w2 = torch.zeros(1, 8, 3, dtype=torch.int32), torch.zeros(1, 3, 4, dtype=torch.int32)
        with ParallelContext.of_rank(rank, tp_size=3):
            for tensor, shard_id in calls:
                loader(w13, tensor, "w13_scale", shard_id, None)
            loader(w2, gate.mT, "w2_scale", "w2", None)
        mine = slice(4 * rank, 4 * rank + 4)
        assert torch.equal(w13, torch.cat((gate[:, mine], up[:, mine]), 1))
        assert torch.equal(w2, gate.mT[:, :, mine])
    w2 = torch.zeros(1, 3, 2, dtype=torch.int32)
    with ParallelContext.of_rank(1, tp_size=8), pytest.raises(ValueError, match="cuts a block of 128"):
        loader(w2, gate.mT, "w2_scale", "w2", None)
