"""Checkpoints that transformers itself wrote, and the example's package."""

from __future__ import annotations

import itertools
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

TOKENS = [[1, 5, 999, 33, 998, 2, 3, 4, 5, 6], [7, 7, 8, 256, 255, 63, 512, 0, 1, 2]]
SIZES = {
    "vocab_size": 1000,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    # Wide enough that a wrong weight shows in the logits.
    "initializer_range": 0.2,
}


@dataclass(frozen=True)
class Written:
    """A checkpoint, and what transformers computes from it."""

    folder: str
    logits: torch.Tensor
    """Of `TOKENS`."""
    greedy: list[int]
    """`TOKENS[0]` and five tokens more."""


def bytes_read_of(report, checkpoint) -> dict[str, int]:
    """How many bytes of each tensor a rank read, by its plan."""
    read = dict.fromkeys(checkpoint.tensors, 0)
    for piece, (name, entry) in itertools.product(report.plan.reads, checkpoint.tensors.items()):
        if piece.file == entry.file:
            read[name] += max(0, min(piece.end, entry.end) - max(piece.start, entry.start))
    return read


@pytest.fixture(scope="session")
def written(tmp_path_factory):
    """`written(kind)` is the checkpoint of that kind, made once."""
    transformers = pytest.importorskip("transformers")
    kinds = {
        "llama": (transformers.LlamaConfig, {}),
        "llama-tied": (
            transformers.LlamaConfig,
            {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
        ),
        "mixtral": (transformers.MixtralConfig, {"num_local_experts": 4, "sliding_window": 6}),
        "mistral": (transformers.MistralConfig, {"sliding_window": 6}),
        "qwen2": (
            transformers.Qwen2Config,
            {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
        ),
        "qwen3": (transformers.Qwen3Config, {"head_dim": 48}),
        "gpt-oss": (
            transformers.GptOssConfig,
            {
                "num_local_experts": 4,
                "num_experts_per_tok": 2,
                "head_dim": 32,
                "sliding_window": 6,
                "max_position_embeddings": 32 * 4096,
                # Low enough that values are clamped.
                "swiglu_limit": 1.5,
            },
        ),
    }
    made: dict[str, Written] = {}

    def write(kind: str) -> Written:
        if kind not in made:
            config_class, more = kinds[kind]
            config = config_class(**{**SIZES, **more})
            config.eos_token_id = None
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(sum(map(ord, kind)))
                model = transformers.AutoModelForCausalLM.from_config(config).eval()
                # Norms and biases start at 1 and 0: nothing would show that they were mixed up.
                for name, param in model.named_parameters():
                    if name.endswith(("norm.weight", "bias", "sinks")):
                        torch.nn.init.normal_(param, mean=1.0, std=0.3)
            folder = tmp_path_factory.mktemp(kind)
            model.save_pretrained(folder, max_shard_size="600KB")
            assert len(list(folder.glob("*.safetensors"))) > 2
            tokens = list(TOKENS[0])
            with torch.no_grad():
                logits = model(torch.tensor(TOKENS)).logits
                for _ in range(5):
                    tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
            made[kind] = Written(str(folder), logits, tokens)
        return made[kind]

    return write
