"""Loaders: every rank's part is exact, the ranks' parts make the whole, and nothing passes in silence."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raywl import ParallelContext
from raywl.errors import ShapeMismatchError
from raywl.loaders import (
    ExpertLoader,
    MergedColumnLoader,
    QKVLoader,
    VocabLoader,
    composed_weight_loader,
    default_weight_loader,
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    row_parallel_weight_loader,
    sharded_weight_loader,
)
from raywl.remap.experts import determine_expert_map

NAN = float("nan")


def numbered(*shape):
    """Every element another number."""
    return torch.arange(1, 1 + torch.Size(shape).numel(), dtype=torch.float32).view(shape)


def unset(*shape):
    return torch.nn.Parameter(torch.full(shape, NAN), requires_grad=False)


def tp(rank, size):
    return ParallelContext(tp_rank=rank, tp_size=size)


# One tensor into one parameter


def test_default_copies_equal_shapes_and_converts_dtype():
    param = torch.nn.Parameter(torch.zeros(2, 3))
    address = param.data_ptr()
    default_weight_loader(param, numbered(2, 3).to(torch.bfloat16))
    assert torch.equal(param, numbered(2, 3))
    assert param.data_ptr() == address


@pytest.mark.parametrize(("param", "weight"), [((), (1,)), ((1,), ()), ((1, 1), (1,)), ((1,), (1, 1, 1))])
def test_default_puts_one_element_into_one_element(param, weight):
    """C31: scales come as `[]` or as `[1]`."""
    param = unset(*param)
    default_weight_loader(param, torch.full(weight, 7.0))
    assert param.item() == 7.0


@pytest.mark.parametrize(
    ("param", "weight"), [((4, 3), (4, 1)), ((4, 3), (1,)), ((4, 3), ()), ((3, 4), (4, 3)), ((4,), (4, 1))]
)
def test_default_never_broadcasts(param, weight):
    """C31: `copy_` by itself would."""
    target = unset(*param)
    with pytest.raises(ShapeMismatchError) as caught:
        default_weight_loader(target, torch.zeros(weight))
    assert caught.value.expected == param
    assert caught.value.got == weight
    assert str(list(param)) in str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, AssertionError)
    assert target.isnan().all()


@pytest.mark.parametrize("coded", [torch.float8_e8m0fnu, torch.float4_e2m1fn_x2], ids=str)
@pytest.mark.parametrize("shape", [(4, 64), (1, 1)], ids=str)
def test_byte_coded_dtypes_are_copied_as_bits(coded, shape):
    raw = torch.arange(torch.Size(shape).numel()).to(torch.uint8).view(shape)
    param = torch.nn.Parameter(torch.zeros(shape, dtype=torch.uint8).view(coded), requires_grad=False)
    default_weight_loader(param, raw)
    assert torch.equal(param.view(torch.uint8), raw)
    back = torch.nn.Parameter(torch.zeros(shape, dtype=torch.uint8), requires_grad=False)
    default_weight_loader(back, param.data)
    assert torch.equal(back, raw)


@settings(deadline=None)
@given(
    size=st.integers(1, 6),
    part=st.lists(st.integers(0, 4), min_size=1, max_size=3),
    axis=st.integers(-3, 2),
    data=st.data(),
)
def test_sharded_parts_make_the_whole(size, part, axis, data):
    axis = data.draw(st.integers(-len(part), len(part) - 1))
    whole_shape = list(part)
    whole_shape[axis] *= size
    whole = numbered(*whole_shape)
    parts = []
    for rank in range(size):
        param = unset(*part)
        with tp(rank, size):
            sharded_weight_loader(axis)(param, whole)
        parts.append(param.data)
    assert torch.equal(torch.cat(parts, axis), whole)


def test_row_parallel_cuts_dim_0_and_replicates_vectors():
    matrix, vector = unset(2, 3), unset(2)
    with tp(1, 2):
        row_parallel_weight_loader(matrix, numbered(4, 3))
        row_parallel_weight_loader(vector, numbered(2))
    assert torch.equal(matrix, numbered(4, 3)[2:])
    assert torch.equal(vector, numbered(2))


@pytest.mark.parametrize("rows", [3, 5, 7, 2], ids=lambda rows: f"{rows} rows")
@pytest.mark.parametrize("rank", [0, 1])
def test_a_part_out_of_range_or_rows_that_no_rank_keeps_are_an_error(rank, rows):
    param = unset(2, 3)
    with (
        tp(rank, 2),
        pytest.raises(ShapeMismatchError, match=rf"rank {rank} of 2 .*\[4, 3\], got \[{rows}, 3\]"),
    ):
        sharded_weight_loader(0)(param, numbered(rows, 3))
    assert param.isnan().all()


def test_an_axis_that_the_parameter_lacks_is_an_error():
    with tp(0, 2), pytest.raises(ShapeMismatchError, match="no dim 2"):
        sharded_weight_loader(2)(unset(2, 3), numbered(4, 3))


def test_composed_runs_the_loader_then_the_function():
    param = unset(2)
    address = param.data_ptr()
    with tp(1, 2):
        composed_weight_loader(sharded_weight_loader(0), lambda weight: -weight.exp())(param, torch.zeros(4))
    assert param.tolist() == [-1.0, -1.0]
    assert param.data_ptr() == address
    with pytest.raises(ShapeMismatchError):
        composed_weight_loader(default_weight_loader, lambda weight: weight.sum())(param, torch.zeros(2))


@pytest.mark.parametrize(
    "fn",
    [torch.t, lambda w: w.data.t(), lambda w: w.flip(0), lambda w: w, lambda w: w.data.mul_(2), torch.neg],
    ids=["transpose", "data", "flipped", "itself", "in place", "new"],
)
def test_composed_with_a_function_that_gives_the_parameters_own_memory(fn):
    param = unset(3, 3)
    address = param.data_ptr()
    composed_weight_loader(default_weight_loader, fn)(param, numbered(3, 3))
    assert torch.equal(param, fn(numbered(3, 3)))
    assert param.data_ptr() == address


def test_composed_copies_byte_coded_dtypes_as_bits():
    param = torch.nn.Parameter(torch.zeros(2, dtype=torch.float8_e8m0fnu), requires_grad=False)
    loader = composed_weight_loader(default_weight_loader, lambda weight: weight.view(torch.uint8) + 1)
    loader(param, torch.tensor([126, 3], dtype=torch.uint8))
    assert param.view(torch.uint8).tolist() == [127, 4]


def test_composed_with_a_function_that_gives_nothing():
    with pytest.raises(TypeError, match="gave None"):
        composed_weight_loader(default_weight_loader, lambda weight: None)(unset(2), torch.zeros(2))


def test_ranks_come_from_the_context_else_are_alone():
    assert (get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()) == (0, 1)
    with tp(3, 4):
        assert (get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()) == (3, 4)


def test_ranks_come_from_the_default_process_group(tmp_path):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1
    )
    try:
        assert (get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()) == (0, 1)
        with tp(1, 2):
            assert get_tensor_model_parallel_rank() == 1
    finally:
        torch.distributed.destroy_process_group()


# q, k, v


@settings(deadline=None)
@given(
    size=st.sampled_from([1, 2, 4, 8]),
    kv_heads=st.sampled_from([1, 2, 4, 8]),
    groups=st.sampled_from([1, 2, 8]),
    head_dim=st.integers(1, 3),
    rest=st.sampled_from([(), (3,)]),
    fused=st.booleans(),
)
def test_qkv_parts_are_whole_heads_in_order(size, kv_heads, groups, head_dim, rest, fused):
    heads = max(kv_heads * groups, size)
    q, k, v = numbered(heads * head_dim, *rest), -numbered(kv_heads * head_dim, *rest), None
    v = k - 1000
    loader = QKVLoader(heads, kv_heads, head_dim)
    rows_q, rows_kv = heads * head_dim // size, max(1, kv_heads // size) * head_dim
    got = {"q": [], "k": [], "v": []}
    for rank in range(size):
        param = unset(rows_q + 2 * rows_kv, *rest)
        with tp(rank, size):
            if fused:
                loader(param, torch.cat((q, k, v)), None)
            else:
                for shard_id, weight in (("v", v), ("q", q), ("k", k)):
                    loader(param, weight, shard_id)
        for shard_id, part in zip("qkv", param.data.split((rows_q, rows_kv, rows_kv)), strict=True):
            got[shard_id].append(part)
    copies = max(1, size // kv_heads)
    assert torch.equal(torch.cat(got["q"]), q)
    for shard_id, whole in (("k", k), ("v", v)):
        assert torch.equal(torch.cat(got[shard_id][::copies]), whole)
        for rank, part in enumerate(got[shard_id]):
            assert torch.equal(part, got[shard_id][rank // copies * copies])


def test_two_kv_heads_on_eight_ranks():
    """C26: four ranks have the same one."""
    k = numbered(4, 3)
    for rank in range(8):
        param = unset(2 + 2 * 2, 3)
        with tp(rank, 8):
            QKVLoader(8, 2, 2)(param, k, "k")
        assert torch.equal(param[2:4], k[:2] if rank < 4 else k[2:])
        assert param[:2].isnan().all()
        assert param[4:].isnan().all()


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "numbers"),
    [
        (4, 2, 6, "num_heads 4 .*6 equal parts .rank 1 of 6"),
        (12, 4, 6, "num_kv_heads 4 .*6 ranks .rank 1"),
        (12, 6, 4, "num_kv_heads 6 .*4 equal parts"),
    ],
)
def test_half_heads_are_refused_with_the_numbers(heads, kv_heads, size, numbers):
    """C26: also where only the key heads don't divide."""
    param = unset(8, 3)
    with tp(1, size), pytest.raises(ValueError, match=numbers):
        QKVLoader(heads, kv_heads, 2)(param, numbered(kv_heads * 2, 3), "k")
    assert param.isnan().all()


def test_qkv_refuses_other_shapes_and_ids():
    loader = QKVLoader(4, 2, 2)
    with pytest.raises(ShapeMismatchError):
        loader(unset(16, 3), numbered(6, 3), "k")
    with pytest.raises(ShapeMismatchError):
        loader(unset(16, 3), numbered(8, 1), "q")
    with pytest.raises(ShapeMismatchError, match="doesn't hold"):
        loader(unset(15, 3), numbered(8, 3), "q")
    with pytest.raises(ValueError, match="shard id 'x'"):
        loader(unset(16, 3), numbered(8, 3), "x")
    with pytest.raises(ValueError, match="head_dim"):
        QKVLoader(4, 2, 0)


# gate and up


@settings(deadline=None)
@given(
    size=st.integers(1, 4),
    parts=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    rest=st.sampled_from([(), (3,)]),
    fused=st.booleans(),
)
def test_merged_columns_are_each_cut_by_themselves(size, parts, rest, fused):
    sizes = [part * size for part in parts]
    whole = numbered(sum(sizes), *rest)
    loader = MergedColumnLoader(sizes)
    got = []
    for rank in range(size):
        param = unset(sum(parts), *rest)
        with tp(rank, size):
            if fused:
                loader(param, whole)
            else:
                for index, weight in enumerate(whole.split(sizes)):
                    loader(param, weight, index)
        got.append(param.data.split(parts))
    again = torch.cat([torch.cat(pieces) for pieces in zip(*got, strict=True)])
    assert torch.equal(again, whole)


def test_merged_columns_refuse_what_does_not_fit():
    loader = MergedColumnLoader((4, 6))
    with tp(1, 4), pytest.raises(ValueError, match=r"sizes\[1\] = 6 .*4 equal parts .rank 1 of 4"):
        loader(unset(2, 3), numbered(4, 3), 0)
    with pytest.raises(ShapeMismatchError):
        loader(unset(10, 3), numbered(6, 3), 0)
    with pytest.raises(ValueError, match="shard id 2"):
        loader(unset(10, 3), numbered(6, 3), 2)
    with pytest.raises(ValueError, match="empty"):
        MergedColumnLoader(())


# vocabulary


@settings(deadline=None)
@given(size=st.sampled_from([1, 2, 4]), rows=st.integers(1, 70), rest=st.sampled_from([(), (2,)]))
def test_vocabulary_parts_make_the_padded_whole(size, rows, rest):
    loader = VocabLoader(rows, 16)
    whole, parts = numbered(rows, *rest), []
    for rank in range(size):
        param = unset(loader.num_padded // size, *rest)
        with tp(rank, size):
            loader(param, whole)
            first = param.data.clone()
            param.data.fill_(NAN)
            loader(param, whole)
        assert torch.equal(param, first)
        parts.append(param.data)
    again = torch.cat(parts)
    assert len(again) % 16 == 0
    assert torch.equal(again[:rows], whole)
    assert not again[rows:].any()


def test_vocabulary_padded_to_a_size_or_a_multiple():
    assert VocabLoader(10, 16).num_padded == 16
    assert VocabLoader(10, 4).num_padded == 12
    assert VocabLoader(12, 4).num_padded == 12


def test_vocabulary_refuses_what_does_not_fit():
    with tp(2, 3), pytest.raises(ValueError, match=r"padded vocabulary 16 .*3 equal parts .rank 2"):
        VocabLoader(10, 16)(unset(5, 2), numbered(10, 2))
    with pytest.raises(ShapeMismatchError):
        VocabLoader(10, 16)(unset(16, 2), numbered(16, 2))
    with pytest.raises(ShapeMismatchError):
        VocabLoader(10, 16)(unset(10, 2), numbered(10, 2))


# experts


@settings(deadline=None)
@given(
    experts=st.integers(1, 6),
    ep_size=st.sampled_from([1, 2, 3]),
    moe_tp=st.sampled_from([1, 2]),
    placement=st.sampled_from(["linear", "round_robin"]),
    transposed=st.booleans(),
    interleaved=st.booleans(),
    form=st.sampled_from(["one by one", "w1 and w3", "gate and up in one"]),
    bias=st.booleans(),
    inner_and_pad=st.tuples(st.integers(1, 5), st.integers(0, 2)) | st.just((4, None)),
)
def test_experts_parts_make_the_whole(
    experts, ep_size, moe_tp, placement, transposed, interleaved, form, bias, inner_and_pad
):
    """w13 and w2 of all ranks, put together again, are the checkpoint's tensors; padding is zero."""
    hidden, (inner, pad) = 3, inner_and_pad
    each = -(-inner // moe_tp)
    part = each + (pad or 0)
    gate, up = numbered(experts, inner, hidden), -numbered(experts, inner, hidden)
    down = numbered(experts, hidden, inner) + 1000
    if bias:
        gate, up, down = gate[..., 0], up[..., 0], down[..., 0]
    rest, turn = gate.shape[2:], transposed and not bias
    for_checkpoint = (lambda weight: weight.mT.contiguous()) if turn else (lambda weight: weight)
    both = torch.stack((gate, up), dim=2).flatten(1, 2) if interleaved else torch.cat((gate, up), dim=1)
    seen = torch.zeros(experts, dtype=torch.int)
    for rank in range(ep_size * moe_tp):
        with ParallelContext.of_rank(rank, tp_size=ep_size * moe_tp, ep_size=ep_size) as context:
            num_local, expert_map = determine_expert_map(ep_size, context.ep_rank, experts, placement)
            w13 = unset(num_local, 2 * part, *rest)
            w2 = unset(num_local, hidden) if bias else unset(num_local, hidden, part)
            loader = ExpertLoader(
                experts, expert_map, transposed, interleaved, None if pad is None else inner
            )
            shards = [(w13, "w1", gate), (w13, "w3", up), (w2, "w2", down)]
            if form == "gate and up in one":
                shards = [(w13, "w1", both), (w2, "w2", down)]
            for param, shard_id, weight in shards:
                if form == "one by one":
                    for expert in range(experts):
                        here = expert_map is None or expert_map[expert] >= 0
                        mine = for_checkpoint(weight[expert])
                        assert loader(param, mine, "experts.w", shard_id=shard_id, expert_id=expert) == here
                else:
                    loader(param, for_checkpoint(weight), "experts.w", shard_id, None)
        places = list(range(experts)) if expert_map is None else expert_map.tolist()
        cut = slice(context.moe_tp_rank * each, (context.moe_tp_rank + 1) * each)
        padded = range(len(range(inner)[cut]), part)
        for expert, place in enumerate(places):
            if place < 0:
                continue
            seen[expert] += 1
            got_gate, got_up = (
                w13[place].unflatten(0, (-1, 2) if interleaved else (2, -1)).unbind(1 if interleaved else 0)
            )
            for got, wanted in [(got_gate, gate), (got_up, up)]:
                assert torch.equal(got[: padded.start], wanted[expert, cut])
                assert not got[padded.start :].any()
            if bias:
                assert torch.equal(w2[place], down[expert])
            else:
                assert torch.equal(w2[place][:, : padded.start], down[expert][:, cut])
                assert not w2[place][:, padded.start :].any()
    assert (seen == moe_tp).all()


def test_all_experts_in_one_are_cut_by_expert_first():
    """C17."""
    down, w2 = numbered(8, 4, 6), unset(2, 4, 6)
    with ParallelContext(tp_rank=3, tp_size=4, ep_size=4):
        ExpertLoader(8)(w2, down, "experts.w2_weight", "w2", None)
    assert torch.equal(w2, down[6:])


def test_alternating_gate_and_up_stay_so():
    tagged = numbered(1, 8, 1)
    w13 = unset(1, 4, 1)
    with tp(1, 2):
        ExpertLoader(1, interleaved=True)(w13, tagged, "experts.w13_weight", "w1", None)
    assert w13.flatten().tolist() == [5, 6, 7, 8]


def test_alternating_gate_and_up_are_padded_behind():
    """C25: taken apart again they are gates, zeros, ups, zeros."""
    tagged = numbered(1, 8, 1)
    loader = ExpertLoader(1, interleaved=True, intermediate_size=4)
    w13 = unset(1, 8, 1)
    with tp(1, 2):
        loader(w13, tagged, "experts.w13_weight", "w1", None)
    assert w13.flatten().tolist() == [5, 6, 7, 8, 0, 0, 0, 0]
    assert w13[:, ::2].flatten().tolist() == [5, 7, 0, 0]
    assert w13[:, 1::2].flatten().tolist() == [6, 8, 0, 0]


@pytest.mark.parametrize("coded", [torch.float8_e8m0fnu, torch.float4_e2m1fn_x2, torch.uint8], ids=str)
def test_padding_of_coded_experts_is_zero_bytes(coded):
    """The smallest scale, or two fp4 zeros; neither becomes infinite."""
    loader = ExpertLoader(1, interleaved=True, intermediate_size=2)
    raw = torch.arange(100, 108, dtype=torch.uint8).view(1, 2, 4)
    w13 = torch.full((1, 8, 4), 255, dtype=torch.uint8).view(coded)
    w2 = torch.full((1, 2, 3), 255, dtype=torch.uint8).view(coded)
    loader(w13, raw, "experts.w13_scale", "w1", None)
    loader(w13, raw + 50, "experts.w13_scale", "w3", None)
    loader(w2, raw[:, :, :2], "experts.w2_scale", "w2", None)
    gate, up = w13.view(torch.uint8).unflatten(1, (-1, 2)).unbind(2)
    assert torch.equal(gate[:, :2], raw)
    assert torch.equal(up[:, :2], raw + 50)
    assert not gate[:, 2:].any()
    assert not up[:, 2:].any()
    assert w2.view(torch.uint8).tolist() == [[[100, 101, 0], [104, 105, 0]]]


def test_padded_experts_that_have_no_room_are_refused():
    loader, w13 = ExpertLoader(1, intermediate_size=5), unset(1, 4, 3)
    with tp(1, 2), pytest.raises(ShapeMismatchError, match=r"no room .* 5 \(rank 1 of 2"):
        loader(w13, numbered(1, 10, 3), "experts.w13_weight", "w1", None)
    with pytest.raises(ShapeMismatchError):
        loader(unset(1, 12, 3), numbered(1, 12, 3), "experts.w13_weight", "w1", None)
    with pytest.raises(ValueError, match="intermediate_size must be at least 1, got 0"):
        ExpertLoader(1, intermediate_size=0)
    assert w13.isnan().all()


def test_without_a_map_a_parameter_with_room_takes_all_experts():
    w2 = unset(4, 3, 2)
    with ParallelContext(tp_rank=1, tp_size=2, ep_size=2):
        ExpertLoader(4)(w2, numbered(4, 3, 2), "experts.w2_weight", "w2", None)
    assert torch.equal(w2, numbered(4, 3, 2))


def test_experts_refuse_what_does_not_fit():
    loader, w13, w2 = ExpertLoader(2), unset(2, 8, 3), unset(2, 3, 4)
    with pytest.raises(ValueError, match=r"experts.w2_weight: expert 2 is outside 0..1"):
        loader(w2, numbered(3, 4), "experts.w2_weight", "w2", 2)
    with pytest.raises(ValueError, match="shard id 'w4'"):
        loader(w2, numbered(3, 4), "experts.w2_weight", "w4", 0)
    for weight, shard_id, expert_id in [
        (numbered(4, 3), "w2", 0),
        (numbered(3, 4, 3), "w1", None),
        (numbered(2, 5, 3), "w1", None),
        (numbered(8, 3), "w3", 0),
        (numbered(4, 1), "w1", 0),
        (numbered(4), "w1", 0),
        (numbered(3), "w2", 0),
    ]:
        param = w2 if shard_id == "w2" else w13
        with pytest.raises(ShapeMismatchError, match=r"experts\.w"):
            loader(param, weight, "experts.w", shard_id, expert_id)
    with tp(1, 2), pytest.raises(ShapeMismatchError, match="rank 1 of 2"):
        loader(w2, numbered(2, 3, 4), "experts.w2_weight", "w2", None)
    with pytest.raises(ShapeMismatchError, match="rank's experts"):
        ExpertLoader(2, [0, -1])(w2, numbered(3, 4), "experts.w2_weight", "w2", 0)
    with pytest.raises(ValueError, match="3 entries for 2 experts"):
        ExpertLoader(2, [0, 1, -1])
    with pytest.raises(ValueError, match=r"several experts into one place: \[0, 1\]"):
        ExpertLoader(6, [0, 0, 1, 1, -1, -1])
    assert w13.isnan().all()
    assert w2.isnan().all()


def test_a_lazy_weight_is_named_in_messages():
    """Lazy weights know their checkpoint name; anything with the same attribute does here."""

    class Named(torch.Tensor):
        source = SimpleNamespace(name="model.layers.0.mlp.gate_proj.weight")

    weight = numbered(4, 3).as_subclass(Named)
    with pytest.raises(ShapeMismatchError, match=r"model\.layers\.0\.mlp\.gate_proj\.weight: "):
        default_weight_loader(unset(2, 3), weight)
    with tp(0, 3), pytest.raises(ValueError, match=r"model\.layers\.0\.mlp\.gate_proj\.weight: sizes"):
        MergedColumnLoader((4, 4))(unset(2, 3), weight, 0)
