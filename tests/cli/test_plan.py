"""`raywl plan`: bytes asked and kept, by rank and file."""

from __future__ import annotations

import json
import os

import pytest
import torch

from raywl import LoadPlan, ParallelContext, Shard, load_into, open_checkpoint
from raywl.bench.synthetic import make_checkpoint
from raywl.empty_model import build_empty_model, describe_parameters


def test_without_a_plan_every_rank_keeps_everything(raywl, checkpoint):
    found = raywl("plan", checkpoint, "--tp", "2", "--json").json
    assert [rank["nbytes_kept"] for rank in found["ranks"]] == [332, 332]
    assert found["nbytes_kept"] == 664
    assert "whole on every rank" in found["notes"][0]


def test_a_tp_plan_cuts(raywl, checkpoint, tmp_path):
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"layers.*.q_proj": "colwise", "layers.*.o_proj": "rowwise"}))
    done = raywl("plan", checkpoint, "--tp", "2", "--tp-plan", plan, "--json")
    found = done.json
    assert [rank["nbytes_kept"] for rank in found["ranks"]] == [172, 172]
    assert sum(rank["nbytes_by_file"]["model-00002-of-00002.safetensors"] for rank in found["ranks"]) == 64
    assert str(plan) in found["notes"][0]
    assert done.stderr == ""


def test_in_words(raywl, checkpoint):
    done = raywl("plan", checkpoint, "--tp", "2")
    assert done.code == 0
    for shown in ("2 ranks ask for", "keep 664 B", "model-00001-of-00002.safetensors", "note: one empty"):
        assert shown in done.stdout


def test_the_plan_of_the_config_class_is_taken(raywl, tmp_path):
    """A Llama's config.json: `transformers` knows how its layers are cut."""
    pytest.importorskip("transformers")
    total = make_checkpoint(tmp_path / "llama", 1 << 20)
    found = raywl("plan", tmp_path / "llama", "--tp", "2", "--json").json
    assert "'llama'" in found["notes"][0]
    assert total < found["nbytes_kept"] < 2 * total


def test_a_model_decides_what_is_read(raywl, checkpoint, tmp_path):
    """Half of one tensor, by the parameter's own loader; what has no place is named."""
    (tmp_path / "model.py").write_text(
        "import torch\n"
        "def take_half(param, weight):\n"
        "    param.copy_(weight.narrow(0, param.tp_rank * 4, 4))\n"
        "def make(context):\n"
        "    model = torch.nn.Module()\n"
        "    layer = torch.nn.Linear(4, 4, bias=False, device='meta')\n"
        "    layer.weight.weight_loader, layer.weight.tp_rank = take_half, context.tp_rank\n"
        "    model.layers = torch.nn.ModuleList([torch.nn.ModuleDict({'q_proj': layer})])\n"
        "    return model\n"
    )
    found = raywl("plan", checkpoint, "--tp", "2", "--model", "model:make", "--json").json
    assert [rank["nbytes"] for rank in found["ranks"]] == [64, 64]
    assert [rank["nbytes_kept"] for rank in found["ranks"]] == [64, 64]
    assert any("layers.1.q_proj.weight" in note for note in found["notes"])


def test_plans_are_saved_and_shown(raywl, checkpoint, tmp_path):
    """One file for each rank, which `load_into` takes; shown with every copy, and as one JSON object."""
    styles = tmp_path / "styles.json"
    styles.write_text(json.dumps({"layers.*.q_proj": "colwise", "layers.*.o_proj": "rowwise"}))
    words = ("plan", checkpoint, "--tp", "2", "--tp-plan", styles, "--save", "new/plans")
    done = raywl(*words, "--json")
    assert done.code == 0, done.stderr
    assert done.json["saved"] == ["new/plans/rank-0.json", "new/plans/rank-1.json"]
    assert "saved: new/plans/rank-1.json" in raywl(*words).stdout
    assert sorted(os.listdir(tmp_path / "new" / "plans")) == ["rank-0.json", "rank-1.json"]

    shown = raywl("plan", "--show", "new/plans/rank-1.json")
    assert shown.code == 0, shown.stderr
    assert "rank 1 of 2" in shown.stdout
    assert "layers.1.q_proj.weight <- layers.1.q_proj.weight [4, 4] at byte 152 (direct)" in shown.stdout
    found = raywl("plan", "--show", "new/plans/rank-1.json", "--json").json
    assert found["identity"] == done.json["identity"]
    assert (found["rank"], found["nbytes_kept"]) == (1, 172)
    assert found["targets"]["layers.0.o_proj.weight"] == {
        "dtype": "float32", "shape": [4, 4], "strides": [4, 1]
    }  # fmt: skip

    context = ParallelContext(tp_rank=1, tp_size=2)
    cuts = {"layers.0.q_proj.weight": 0, "layers.0.o_proj.weight": 1, "layers.1.q_proj.weight": 0}
    shards = {name: Shard(dim) for name, dim in cuts.items()}
    model, by_plan = (
        build_empty_model(describe_parameters(open_checkpoint(checkpoint)), shards, context) for _ in "ab"
    )
    load_into(model, checkpoint, parallel=context, shards=shards)
    load_into(by_plan, checkpoint, parallel=context, plan=LoadPlan.load(tmp_path / "new/plans/rank-1.json"))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, by_plan._parameters[name]), name


@pytest.mark.parametrize("what", ["absent", "garbage", "another format", "a folder"])
def test_what_is_no_plan_is_damaged(raywl, tmp_path, what):
    """Exit code 3, with the file."""
    path = tmp_path / "plan.json"
    if what == "garbage":
        path.write_text("[1")
    elif what == "another format":
        path.write_text('{"raywl_plan": 2}')
    elif what == "a folder":
        path.mkdir()
    done = raywl("plan", "--show", path, "--json")
    assert done.code == 3, done.stderr
    assert str(path) in done.error["message"]
    words = {"absent": "no such plan", "garbage": "not a saved plan", "another format": "plan of format 2"}
    assert words.get(what, "can't be read") in done.error["message"]


def test_misuse(raywl, checkpoint, tmp_path):
    """Exit code 2: before the checkpoint is opened."""
    (tmp_path / "file").touch()
    for words, told in (
        ([], "give REF"),
        ([checkpoint, "--show", "plan.json"], "takes neither REF"),
        (["--show", "plan.json", "--save", "plans"], "takes neither REF"),
        (["absent", "--save", "file"], "--save file: File exists"),
        (["absent", "--save", "file/below"], "--save file/below: Not a directory"),
    ):
        done = raywl("plan", *words, "--json")
        assert done.code == 2, done.stderr
        assert told in done.error["message"]


def test_a_plan_that_cant_be_used_says_so(raywl, checkpoint, tmp_path):
    """Its model's loader computes, which no plan repeats."""
    (tmp_path / "model.py").write_text(
        "import torch\n"
        "def compute(param, weight):\n"
        "    param.data.copy_(weight * 2)\n"
        "def make(context):\n"
        "    model = torch.nn.Module()\n"
        "    layer = torch.nn.Linear(4, 8, bias=False, device='meta')\n"
        "    layer.weight.weight_loader = compute\n"
        "    model.layers = torch.nn.ModuleList([torch.nn.ModuleDict({'q_proj': layer})])\n"
        "    return model\n"
    )
    found = raywl("plan", checkpoint, "--model", "model:make", "--save", "plans", "--json").json
    assert any("load_into won't take this plan" in note for note in found["notes"])
    assert found["ranks"][0]["unplanned"]
