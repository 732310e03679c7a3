"""Hugging Face models made from their config alone compute what `from_pretrained` models do."""

from __future__ import annotations

import pytest
import torch

import raywl
from raywl.errors import MissingWeightsError

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MODELS = {
    "llama": ("LlamaConfig", {}),
    "llama, tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3, tied": ("Qwen3Config", {"head_dim": 8, "tie_word_embeddings": True}),
    "mistral": ("MistralConfig", {}),
    "gemma2": ("Gemma2Config", {"head_dim": 8}),
    "phi3": ("Phi3Config", {}),
    "gpt-oss": ("GptOssConfig", {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2}),
}
TOKENS = torch.tensor([[1, 5, 9, 40, 77, 3]])


def logits_of(model):
    with torch.no_grad():
        return model.eval()(TOKENS).logits


@pytest.mark.parametrize("kind", MODELS)
def test_logits_are_those_of_from_pretrained(tmp_path, kind):
    """On the CPU and on meta, from a checkpoint of several shards, bit for bit."""
    name, more = MODELS[kind]
    config = getattr(transformers, name)(**SIZES, **more)
    torch.manual_seed(3)
    saved = transformers.AutoModelForCausalLM.from_config(config)
    saved.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(raywl.open_checkpoint(tmp_path).files) > 1
    expected = logits_of(transformers.AutoModelForCausalLM.from_pretrained(tmp_path))
    assert torch.equal(expected, logits_of(saved))
    for device in ("cpu", "meta"):
        with torch.device(device):
            model = transformers.AutoModelForCausalLM.from_config(config)
        report = raywl.load_into(model, tmp_path, strict="exact")
        assert report.missing == report.unexpected == []
        assert torch.equal(logits_of(model), expected), device
        tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
        assert tied == config.tie_word_embeddings


@pytest.mark.parametrize("tied", [False, True])
def test_a_base_models_checkpoint(tmp_path, tied):
    """Names without the prefix find their places; the head is missing unless it is tied."""
    config = transformers.LlamaConfig(**SIZES, tie_word_embeddings=tied)
    base = transformers.AutoModel.from_config(config)
    base.save_pretrained(tmp_path)
    assert all(not name.startswith("model.") for name in raywl.open_checkpoint(tmp_path).tensors)
    model = transformers.AutoModelForCausalLM.from_config(config)
    if not tied:
        with pytest.raises(MissingWeightsError) as caught:
            raywl.load_into(model, tmp_path)
        assert caught.value.names == ("lm_head.weight",)
    report = raywl.load_into(model, tmp_path, strict=tied)
    assert report.missing == ([] if tied else ["lm_head.weight"])
    assert torch.equal(model.model.embed_tokens.weight, base.embed_tokens.weight)


def test_a_causal_models_checkpoint_into_the_base_model(tmp_path):
    config = transformers.LlamaConfig(**SIZES)
    causal = transformers.AutoModelForCausalLM.from_config(config)
    causal.save_pretrained(tmp_path)
    model = transformers.AutoModel.from_config(config)
    with pytest.warns(UserWarning, match=r"lm_head\.weight"):
        report = raywl.load_into(model, tmp_path)
    assert report.unexpected == ["lm_head.weight"]
    assert torch.equal(model.norm.weight, causal.model.norm.weight)
