"""`raywl plan`: bytes asked and kept, by rank and file."""

from __future__ import annotations

import json

import pytest

from raywl.bench.synthetic import make_checkpoint


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
