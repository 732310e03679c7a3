"""`load_into` through weight loaders: lazy and eager agree, and only what is kept is read."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from parallel_decoder import DecoderConfig, load_arguments, logits_of, make_model
from safetensors.torch import save_file

import raywl
from raywl import ParallelContext
from raywl.loaders import (
    ExpertLoader,
    MergedColumnLoader,
    QKVLoader,
    VocabLoader,
    composed_weight_loader,
    default_weight_loader,
    row_parallel_weight_loader,
    sharded_weight_loader,
)
from raywl.plan.reads import SLACK_BYTES

from .conftest import SIZES, TOKENS, bytes_read_of

LAYOUTS = [
    {"tp_size": 1},
    {"tp_size": 2},
    {"tp_size": 4},
    {"tp_size": 2, "ep_size": 2},
    {"tp_size": 4, "ep_size": 2},
    {"tp_size": 4, "ep_size": 4},
    {"tp_size": 2, "dp_size": 2, "ep_size": 2},
]

CASES = {
    # loader, this rank's shape, checkpoint tensors and what else their loader is called with; tp 2, rank 1
    "default": (default_weight_loader, (6, 5), [((6, 5), ())]),
    "one element": (default_weight_loader, (1, 1), [((), ())]),
    "rows": (row_parallel_weight_loader, (6, 5), [((12, 5), ())]),
    "columns": (sharded_weight_loader(-1), (6, 5), [((6, 10), ())]),
    "composed": (composed_weight_loader(sharded_weight_loader(0), torch.exp), (3, 5), [((6, 5), ())]),
    "qkv": (QKVLoader(4, 2, 3), (12, 5), [((12, 5), ("q",)), ((6, 5), ("k",)), ((6, 5), ("v",))]),
    "qkv in one": (QKVLoader(4, 2, 3), (12, 5), [((24, 5), ())]),
    "gate and up": (MergedColumnLoader((4, 8)), (6, 5), [((4, 5), (0,)), ((8, 5), (1,))]),
    "vocabulary": (VocabLoader(13, 8), (8, 5), [((13, 5), ())]),
    "vocabulary, all padding": (VocabLoader(4, 16), (8, 5), [((4, 5), ())]),
}
EXPERT_CASES = {
    "experts": ({}, [((6, 5), "w1", 2), ((6, 5), "w3", 2), ((6, 5), "w1", 3), ((6, 5), "w3", 3)]),
    "experts in one": ({}, [((4, 12, 5), "w1", None)]),
    "experts in one, alternating": ({"interleaved": True}, [((4, 12, 5), "w1", None)]),
    "experts in one, transposed": ({"transposed": True}, [((4, 5, 12), "w1", None)]),
    "experts in one, padded": (
        {"interleaved": True, "intermediate_size": 6},
        [((4, 12, 5), "w1", None)],
    ),
    "experts, padded": (
        {"intermediate_size": 6},
        [((6, 5), "w1", 2), ((6, 5), "w3", 2), ((6, 5), "w1", 3), ((6, 5), "w3", 3)],
    ),
}


class Holder(torch.nn.Module):
    """One parameter, and a `load_weights` that calls its loader as a case says."""

    def __init__(self, loader, shape, calls):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full(shape, math.nan), requires_grad=False)
        self.loader, self.calls = loader, calls

    def load_weights(self, weights):
        for name, weight in weights:
            args, kwargs = self.calls[name]
            self.loader(self.weight, weight, *args, **kwargs)


def both_ways(folder, loader, shape, parts, context):
    """Loads by reading lazily, and from tensors in memory; returns both parameters and the report."""
    weights, calls = {}, {}
    for index, (part_shape, args, kwargs) in enumerate(parts):
        weights[f"part{index}"] = torch.randn(part_shape)
        calls[f"part{index}"] = (args, kwargs)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    lazy, eager = Holder(loader, shape, calls), Holder(loader, shape, calls)
    report = raywl.load_into(lazy, folder, parallel=context)
    with context:
        eager.load_weights(weights.items())
    return lazy.weight, eager.weight, report


@pytest.mark.parametrize("case", CASES)
def test_lazy_and_eager_agree(tmp_path, case):
    loader, shape, parts = CASES[case]
    parts = [(part_shape, args, {}) for part_shape, args in parts]
    lazy, eager, report = both_ways(tmp_path, loader, shape, parts, ParallelContext(tp_rank=1, tp_size=2))
    assert torch.equal(lazy, eager)
    assert not lazy.isnan().any()
    if "vocabulary" not in case:
        assert report.bytes_loaded == lazy.numel() * 4


@pytest.mark.parametrize("moe_tp", [1, 2])
@pytest.mark.parametrize("case", EXPERT_CASES)
def test_lazy_and_eager_agree_on_experts(tmp_path, case, moe_tp):
    options, parts = EXPERT_CASES[case]
    parts = [(s, ("experts.w13_weight",), {"shard_id": w, "expert_id": e}) for s, w, e in parts]
    context = ParallelContext.of_rank(2 * moe_tp - 1, tp_size=2 * moe_tp, ep_size=2)
    loader = ExpertLoader(4, [-1, -1, 0, 1], **options)
    rows = 12 // moe_tp
    room = rows + 4 * ("intermediate_size" in options)
    lazy, eager, report = both_ways(tmp_path, loader, (2, room, 5), parts, context)
    assert torch.equal(lazy, eager)
    assert not lazy.isnan().any()
    assert report.bytes_loaded == 2 * rows * 5 * 4
    assert (lazy == 0).sum() == 2 * (room - rows) * 5


@pytest.mark.parametrize("coded", [torch.float8_e8m0fnu, torch.float4_e2m1fn_x2], ids=str)
@pytest.mark.parametrize("into_bytes", [True, False])
def test_byte_coded_weights_are_read_as_bits(tmp_path, coded, into_bytes):
    raw = torch.arange(256).to(torch.uint8).view(4, 64)
    save_file({"scale": raw.view(coded) if into_bytes else raw}, tmp_path / "model.safetensors")
    model = torch.nn.Module()
    param = torch.zeros(4, 64, dtype=torch.uint8).view(torch.uint8 if into_bytes else coded)[:2]
    model.scale = torch.nn.Parameter(param, requires_grad=False)
    model.scale.weight_loader = sharded_weight_loader(0)
    raywl.load_into(model, tmp_path, parallel=ParallelContext(tp_rank=1, tp_size=2))
    assert torch.equal(model.scale.view(torch.uint8), raw[2:])


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(size=st.integers(1, 4), part=st.lists(st.integers(0, 5), min_size=1, max_size=3), data=st.data())
def test_every_byte_is_kept_by_one_rank(tmp_path, size, part, data):
    """What all ranks keep of a tensor cut by its loader is the tensor, for any shape and axis."""
    axis = data.draw(st.integers(-len(part), len(part) - 1))
    whole = list(part)
    whole[axis] *= size
    weight = torch.randn(whole)
    save_file({"weight": weight}, tmp_path / "model.safetensors")
    kept, parts = 0, []
    for rank in range(size):
        model = torch.nn.Module()
        model.weight = torch.nn.Parameter(torch.empty(part, device="meta"))
        model.weight.weight_loader = sharded_weight_loader(axis)
        report = raywl.load_into(model, tmp_path, parallel=ParallelContext(tp_rank=rank, tp_size=size))
        kept += report.bytes_loaded
        parts.append(model.weight.data)
    assert kept == weight.nbytes
    assert torch.equal(torch.cat(parts, axis), weight)


def contexts(layout):
    world = layout["tp_size"] * layout.get("dp_size", 1)
    return [ParallelContext.of_rank(rank, **layout) for rank in range(world)]


def share_of(name, context):
    """Which part of a tensor a rank keeps, worked out from its name alone."""
    if name.endswith("experts.down_proj_bias"):
        return 1 / context.ep_size
    if name.endswith(("experts.gate_up_proj", "experts.gate_up_proj_bias", "experts.down_proj")):
        return 1 / context.ep_size / context.moe_tp_size
    if ".experts." in name:
        expert = int(name.split(".experts.")[1].split(".")[0])
        here = expert * context.ep_size // 4 == context.ep_rank
        return here / context.moe_tp_size
    if name in ("model.embed_tokens.weight", "lm_head.weight"):
        rows = 1024 // context.tp_size
        start = context.tp_rank * rows
        return (min(start + rows, 1000) - start) / 1000
    if ".k_proj" in name or ".v_proj" in name:
        return 1 / min(context.tp_size, SIZES["num_key_value_heads"])
    if (
        name.endswith(("o_proj.bias", "down_proj.bias"))
        or "norm" in name
        or "moe.gate" in name
        or "router" in name
    ):
        return 1
    return 1 / context.tp_size


@pytest.mark.parametrize(
    ("kind", "layout"),
    [("llama", layout) for layout in LAYOUTS[:3]]
    + [("llama-tied", LAYOUTS[2])]
    + [("mixtral", layout) for layout in LAYOUTS]
    + [("gpt-oss", layout) for layout in (*LAYOUTS[1:2], *LAYOUTS[3:5], *LAYOUTS[6:])],
    ids=str,
)
def test_a_rank_reads_what_it_keeps(written, kind, layout):
    folder = written(kind).folder
    checkpoint = raywl.open_checkpoint(folder)
    config = DecoderConfig.from_folder(folder)
    for context in contexts(layout):
        model = make_model(config)(context)
        report = raywl.load_into(model, checkpoint, parallel=context, **load_arguments(config))
        wanted = {
            name: round(entry.nbytes * share_of(name, context)) for name, entry in checkpoint.tensors.items()
        }
        assert report.bytes_loaded == sum(wanted.values())
        assert set(report.loaded) == {name for name, nbytes in wanted.items() if nbytes}
        assert report.unexpected == []
        assert set(report.skipped) == {name for name, nbytes in wanted.items() if not nbytes}

        read = bytes_read_of(report, checkpoint)
        for name, nbytes in wanted.items():
            whole = checkpoint.tensors[name].nbytes
            cut_by_columns = name.endswith(("o_proj.weight", "down_proj.weight", ".w2.weight"))
            if name.endswith(".gate_up_proj"):
                cut_by_columns = context.moe_tp_size > 1
            cut_by_columns |= name.endswith("_proj_bias")  # parts of little more than a page
            if nbytes and (cut_by_columns or whole <= SLACK_BYTES):
                # A lone rank reads the rows that its columns lie in, and over gaps of less than a page.
                assert nbytes <= read[name] <= whole
            else:
                assert read[name] == nbytes, name
        assert report.bytes_read == sum(read.values())


@pytest.mark.parametrize("kind", ["llama", "llama-tied", "mistral", "qwen2", "qwen3", "mixtral", "gpt-oss"])
def test_a_lone_rank_computes_what_transformers_does(written, kind):
    checkpoint = written(kind)
    config = DecoderConfig.from_folder(checkpoint.folder)
    model = make_model(config)(ParallelContext())
    raywl.load_into(model, checkpoint.folder, **load_arguments(config))
    assert (logits_of(model, TOKENS) - checkpoint.logits).abs().max() <= 1e-4
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    assert tied == (kind == "llama-tied")


def test_padding_is_written_on_every_load(written):
    checkpoint = written("gpt-oss")
    config = DecoderConfig.from_folder(checkpoint.folder)
    config = dataclasses.replace(config, pad_heads_to=6, pad_experts_to=320)
    model = make_model(config)(ParallelContext())
    raywl.load_into(model, checkpoint.folder, **load_arguments(config))
    first = {name: (param.data_ptr(), param.clone()) for name, param in model.named_parameters()}
    for param in model.parameters():
        param.data.fill_(math.nan)
    raywl.load_into(model, checkpoint.folder, **load_arguments(config))
    for name, param in model.named_parameters():
        address, values = first[name]
        assert param.data_ptr() == address
        assert torch.equal(param, values), name
    assert model.model.layers[0].self_attn.sinks[4:].tolist() == [-math.inf, -math.inf]
