"""What is missing, unexpected or skipped is named; plans are used again only for what they were made for."""

from __future__ import annotations

import json
import struct
import warnings

import pytest
import torch

import raywl
from raywl import ParallelContext, Replicate, Shard
from raywl.errors import CheckpointError, MissingWeightsError, ShapeMismatchError
from raywl.loaders import sharded_weight_loader
from raywl.plan import LoadPlan

from .conftest import Model, filled

A = torch.arange(48, dtype=torch.float32).reshape(8, 6)


def test_strict_is_the_default_and_names_everything_at_once(write):
    model = Model({"a": filled(8, 6), "b": filled(1), "c": filled(1)})
    with pytest.raises(MissingWeightsError) as caught, pytest.warns(UserWarning, match="x") as warned:
        raywl.load_into(model, write({"a": A, "x": A + 1, "y": A + 2}))
    assert caught.value.names == ("b", "c")
    assert len(warned) == 1
    assert not caught.value.partly_loaded
    assert torch.equal(model.a, filled(8, 6))


def test_not_strict_reports_both(write):
    model = Model({"a": filled(8, 6), "b": filled(1)})
    with pytest.warns(UserWarning, match="1 tensors") as warned:
        report = raywl.load_into(model, write({"a": A, "x": A + 1}), strict=False)
    assert len(warned) == 1
    assert (report.missing, report.unexpected, report.loaded) == (["b"], ["x"], ["a"])
    assert torch.equal(model.a, A)


def test_exact_refuses_what_has_no_place(write):
    model = Model({"a": filled(8, 6)})
    with pytest.raises(MissingWeightsError, match="x") as caught:
        raywl.load_into(model, write({"a": A, "x": A + 1}), strict="exact")
    assert not caught.value.partly_loaded
    assert torch.equal(model.a, filled(8, 6))


def test_wrong_words_are_refused_with_the_list(write):
    folder = write({"a": A})
    with pytest.raises(ValueError, match=r"(?s)'quick'.*auto.*buffered"):
        raywl.load_into(Model({"a": A * 0}), folder, strategy="quick")
    with pytest.raises(ValueError, match="'quick'"):
        raywl.open_checkpoint(folder).iter_weights(strategy="quick")
    with pytest.raises(ValueError, match="'yes'"):
        raywl.load_into(Model({"a": A * 0}), folder, strict="yes")
    with pytest.raises(CheckpointError, match=r"'aa'.*1 tensors"):
        raywl.open_checkpoint(folder).iter_weights(names=["aa"])
    with pytest.raises(ValueError, match="subfolder"):
        raywl.load_into(Model({"a": A * 0}), raywl.open_checkpoint(folder), subfolder="x")


def test_a_stage_skips_what_other_stages_have(write):
    context = ParallelContext.of_rank(1, pp_size=2)
    model = Model({"a": filled(8, 6)})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = raywl.load_into(model, write({"a": A, "b": A + 1}), parallel=context)
    assert report.skipped == {"b": "no place on stage 1 of 2"}
    assert report.unexpected == []


def test_a_mapper_renames_and_drops(write):
    class Mapper:
        def map_name(self, name):
            return None if name.startswith("drop") else name.removeprefix("old.")

    model = Model({"a": filled(8, 6)})
    report = raywl.load_into(model, write({"old.a": A, "drop.b": A + 1}), mapper=Mapper())
    assert report.skipped == {"drop.b": "dropped by the mapper"}
    assert report.loaded == ["old.a"]


def narrow_loader(param, weight, shard_id=None):
    rank = raywl.types.current_context().tp_rank
    param.data.copy_(weight.narrow(0, rank * param.shape[0], param.shape[0]))


@pytest.mark.parametrize("dim", [0, 1])
def test_every_way_to_cut_gives_the_same(write, dim):
    """A loader, `shards`, and a slice of the tensor that the library reads."""
    folder = write({"w": A})
    for rank in range(2):
        context = ParallelContext(tp_rank=rank, tp_size=2)
        expected = A.chunk(2, dim)[rank]
        by_loader = Model({"w": torch.empty_like(expected)})
        by_loader.w.weight_loader = sharded_weight_loader(dim)
        by_shards = Model({"w": torch.empty(8, 6, device="meta")})
        first = raywl.load_into(by_loader, folder, parallel=context)
        second = raywl.load_into(by_shards, folder, parallel=context, shards={"w*": Shard(dim)})
        declared = raywl.open_checkpoint(folder).plan(context, {"w": Shard(dim)})
        assert torch.equal(by_loader.w, expected)
        assert torch.equal(by_shards.w, expected)
        assert first.plan.reads == second.plan.reads == declared.reads
        assert first.bytes_read == second.bytes_read == declared.nbytes
        assert first.bytes_loaded == second.bytes_loaded == declared.nbytes_kept == expected.nbytes


def test_stacked_parts_and_the_one_that_is_missing(write):
    rows = [("qkv", "q", 0), ("qkv", "k", 1), ("qkv", "v", 2)]

    def loader(param, weight, shard_id):
        param.data[8 * shard_id : 8 * shard_id + 8].copy_(weight)

    parts = {"q": A, "k": A + 1, "v": A + 2}
    model = Model({"qkv": filled(24, 6)})
    model.qkv.weight_loader = loader
    report = raywl.load_into(model, write(parts), stacked=rows)
    assert torch.equal(model.qkv, torch.cat(list(parts.values())))
    assert report.partial == {}
    for left_out in parts:
        for device in ("cpu", "meta"):
            model = Model({"qkv": filled(24, 6).to(device)})
            model.qkv.weight_loader = loader
            rest = {name: part for name, part in parts.items() if name != left_out}
            with pytest.raises(MissingWeightsError, match=f"qkv.*no {left_out}"):
                raywl.load_into(model, write(rest), stacked=rows)


def test_an_experts_rank_reads_its_own(write):
    mapping = [(f"experts.w{s}", f"experts.{e}.w{s}.weight", e, f"w{s}") for e in range(8) for s in (1, 2)]
    weights = {
        f"experts.{e}.w{s}.weight": torch.full((64, 64), float(10 * e + s)) for e in range(8) for s in (1, 2)
    }

    def loader(param, weight, name, *, shard_id, expert_id):
        context = raywl.types.current_context()
        local = expert_id - context.ep_rank * 4
        if 0 <= local < 4:
            param.data[local].copy_(weight)

    class Experts(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = Model({"w1": torch.empty(4, 64, 64), "w2": torch.empty(4, 64, 64)})
            for p in self.parameters():
                p.weight_loader = loader

    folder = write(weights)
    for rank in range(2):
        context = ParallelContext.of_rank(rank, tp_size=2, ep_size=2)
        model = Experts()
        report = raywl.load_into(model, folder, parallel=context, expert_mapping=mapping)
        assert report.bytes_read <= 1.02 * report.bytes_loaded
        assert len(report.skipped) == 8
        assert set(report.skipped.values()) == {"another rank's expert"}
        assert [row[0, 0].item() for row in model.experts.w1] == [
            10 * e + 1 for e in range(4 * rank, 4 * rank + 4)
        ]


@pytest.mark.parametrize("prefix", ["", "model."])
def test_a_tp_plan_with_and_without_prefix(write, prefix):
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([torch.nn.Linear(6, 8)])})

    weights = {"model.layers.0.weight": A, "model.layers.0.bias": A[:, 0].contiguous()}
    folder = write(weights)
    context = ParallelContext(tp_rank=1, tp_size=2)
    for style, weight, bias in (("colwise", A[4:], A[4:, 0]), ("rowwise", A[:, 3:], A[:, 0])):
        with torch.device("meta"):
            net = Net()
        raywl.load_into(net, folder, parallel=context, tp_plan={f"{prefix}layers.*": style})
        assert torch.equal(net.model.layers[0].weight, weight)
        assert torch.equal(net.model.layers[0].bias, bias)
    with pytest.raises(ValueError, match=r"(?s)sideways.*supported are colwise"):
        raywl.load_into(Net(), folder, parallel=context, tp_plan={"layers.*": "sideways"})
    with torch.device("meta"):
        net = Net()
    with pytest.raises(ValueError, match=r"dim 0 of .*8 is not a multiple of 3"):
        raywl.load_into(net, folder, parallel=ParallelContext(tp_size=3), tp_plan={"layers.*": "colwise"})
    assert net.model.layers[0].weight.is_meta
    with pytest.raises(ShapeMismatchError, match=r"rank 1 of 2 keeps .4.* of .8"):
        raywl.load_into(Net(), folder, parallel=context, tp_plan={"layers.*": "colwise"})


def test_a_models_own_loader_says_what_it_loaded(write):
    """By names, or judged by what it wrote."""

    def returns(model, weights):
        loaded = set()
        for name, w in weights:
            if name != "x":
                model.get_parameter(name).copy_(w)
                loaded.add(name)
        return loaded

    def returns_nothing(model, weights):
        returns(model, weights)

    def says_more_than_it_wrote(model, weights):
        return {*returns(model, weights), "c"}

    folder = write({"a": A, "x": A + 1})
    for load in (returns, returns_nothing):
        with pytest.warns(UserWarning, match="1 tensors .*: x"):
            report = raywl.load_into(Model({"a": A * 0}, load), folder)
        assert (report.loaded, report.unexpected) == (["a"], ["x"])
        with pytest.raises(MissingWeightsError, match="c"), pytest.warns(UserWarning, match="x"):
            raywl.load_into(Model({"a": A * 0, "c": A * 0}, load), folder)
    with torch.device("meta"):
        model = Model({"a": torch.empty(8, 6), "c": torch.empty(8, 6)}, says_more_than_it_wrote)
    with pytest.raises(MissingWeightsError, match="c"), pytest.warns(UserWarning, match="x"):
        raywl.load_into(model, folder)


def test_a_saved_plan_is_used_for_what_it_was_made_for(write, tmp_path):
    folder = write({"w": A, "x": A + 1})
    context = ParallelContext(tp_rank=1, tp_size=2)
    shards = {"*": Shard(1)}

    def model(**changes):
        return Model({"w": torch.zeros(8, 3), "x": torch.zeros(8, 3), **changes})

    report = raywl.load_into(model(), folder, parallel=context, shards=shards)
    report.plan.save(tmp_path / "plan.json")
    plan = LoadPlan.load(tmp_path / "plan.json")
    assert plan.reads == report.plan.reads
    assert (plan.copies, plan.targets, plan.identity) == (
        report.plan.copies,
        report.plan.targets,
        report.identity,
    )
    again = model()
    assert raywl.load_into(again, folder, parallel=context, plan=plan).bytes_read == report.bytes_read
    assert torch.equal(again.w, A[:, 3:])
    meta = Model({"w": torch.zeros(8, 3, device="meta"), "x": torch.zeros(8, 3, device="meta")})
    raywl.load_into(meta, folder, parallel=context, plan=plan)
    assert torch.equal(meta.x, A[:, 3:] + 1)
    whole = Model({"w": torch.zeros(8, 6, device="meta"), "x": torch.zeros(8, 3)})
    raywl.load_into(whole, folder, parallel=context, plan=plan)
    assert torch.equal(whole.w, A[:, 3:])
    for other in (ParallelContext(tp_rank=0, tp_size=2), ParallelContext()):
        with pytest.raises(ValueError, match=r"another rank.*tp_"):
            raywl.load_into(model(), folder, parallel=other, plan=plan)
    for wrong in (
        model(w=torch.zeros(8, 4)),
        model(w=torch.zeros(8, 3).double()),
        model(w=torch.zeros(3, 8).t()),
        model(w=torch.zeros(8, 4, device="meta")),
        Model({"x": torch.zeros(8, 3)}),
    ):
        with pytest.raises(ValueError, match="another model"):
            raywl.load_into(wrong, folder, parallel=context, plan=plan)
    spoilt = model()
    far = plan.copies[0]._replace(dst_start=1 << 20)
    bad = LoadPlan(plan.identity, plan.context, plan.files, (far, *plan.copies[1:]), plan.targets)
    with pytest.raises(ValueError, match="plan"):
        raywl.load_into(spoilt, folder, parallel=context, plan=bad)
    assert not spoilt.w.any()
    other = write({"w": A, "y": A + 1})
    with pytest.raises(ValueError, match="checkpoint"):
        raywl.load_into(model(), other, parallel=context, plan=plan)
    (tmp_path / "plan.json").write_text("{}")
    with pytest.raises(CheckpointError, match="not a saved plan"):
        LoadPlan.load(tmp_path / "plan.json")


def test_patterns_and_tied_specs(write):
    folder = write({"a": A})
    model = Model({"a": torch.empty(8, 6, device="meta")})
    context = ParallelContext(tp_rank=1, tp_size=2)
    raywl.load_into(model, folder, parallel=context, shards={"a": Replicate(), "*": Shard(0)})
    assert model.a.shape == (8, 6)


def test_more_small_neighbours_than_one_read_may_have(write):
    """Every second one of thousands is wanted: gaps count among a read's buffers."""
    weights = {f"w{i:05}": torch.full((2,), float(i)) for i in range(4000)}
    folder = write(weights)
    wanted = {name: torch.zeros(2) for name in list(weights)[::2]}
    model = Model(wanted)
    with pytest.warns(UserWarning, match="2000 tensors"):
        raywl.load_into(model, folder)
    assert all(torch.equal(p, weights[name]) for name, p in model.named_parameters())


def test_a_tensor_larger_than_memory_is_cut(tmp_path):
    """A sparse file of 256 GiB: only the rows that are kept are mapped to memory or read."""

    rows = 1 << 24
    header = {"w": {"dtype": "F32", "shape": [rows, 4096], "data_offsets": [0, rows * 16384]}}
    text = json.dumps(header).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    try:
        with open(path, "r+b") as file:
            file.truncate(8 + len(text) + rows * 16384)
            file.seek(8 + len(text) + 16384 * (rows - 1))
            file.write(b"\x00\x00\x80\x3f")
    except OSError:
        pytest.skip("this file system has no files of that size")

    def load(model, weights):
        for _, w in weights:
            model.w.copy_(w[-2:])

    model = Model({"w": filled(2, 4096)}, load)
    report = raywl.load_into(model, tmp_path)
    assert model.w.sum() == 1
    assert report.bytes_read == 32768
