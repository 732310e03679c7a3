"""Checkpoints of a given size to measure with: random bf16 values in the shapes of a Llama."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator

__all__ = ["make_checkpoint"]

_VOCAB = 8192


def make_checkpoint(folder: str | os.PathLike[str], num_bytes: int, *, num_files: int = 2) -> int:
    """Writes `config.json`, an index and `num_files` safetensors files.

    Args:
        folder: Made if it isn't there.
        num_bytes: Wanted bytes of tensors; layers are whole, so that there may be a few more.
        num_files: Files to spread the tensors over.

    Returns:
        Bytes of tensors.

    Raises:
        OSError: The folder can't be written to, or is full.
    """
    import torch
    from safetensors.torch import save_file

    os.makedirs(folder, exist_ok=True)
    width = 2048 if num_bytes >= 512 << 20 else 512 if num_bytes >= 32 << 20 else 64
    shapes = dict(_shapes(width, num_bytes))
    num_layers = sum(name.endswith("q_proj.weight") for name in shapes)
    per_file = -(-len(shapes) // num_files)
    generator = torch.Generator().manual_seed(0)
    weight_map, total = {}, 0
    names = list(shapes)
    for number in range(num_files):
        file = f"model-{number + 1:05d}-of-{num_files:05d}.safetensors"
        tensors = {}
        for name in names[number * per_file : (number + 1) * per_file]:
            # Random bits, so that every misplaced byte shows; drawn as int16, which is fast.
            bits = torch.empty(shapes[name], dtype=torch.int16).random_(
                -(1 << 15), 1 << 15, generator=generator
            )
            tensors[name] = bits.view(torch.bfloat16)
            weight_map[name] = file
            total += bits.nbytes
        save_file(tensors, os.path.join(folder, file), {"format": "pt"})
    _write_json(
        folder, "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map}
    )
    _write_json(
        folder,
        "config.json",
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": width,
            "intermediate_size": width * 11 // 4,
            "num_hidden_layers": num_layers,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "vocab_size": _VOCAB,
        },
    )
    return total


def _shapes(width: int, num_bytes: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    inner = width * 11 // 4
    layer = {
        "self_attn.q_proj": (width, width),
        "self_attn.k_proj": (width // 4, width),
        "self_attn.v_proj": (width // 4, width),
        "self_attn.o_proj": (width, width),
        "mlp.gate_proj": (inner, width),
        "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
        "input_layernorm": (width,),
        "post_attention_layernorm": (width,),
    }
    left = num_bytes // 2
    yield "model.embed_tokens.weight", (_VOCAB, width)
    yield "model.norm.weight", (width,)
    left -= (_VOCAB + 1) * width
    number = 0
    while left > 0 or number == 0:
        for name, shape in layer.items():
            yield f"model.layers.{number}.{name}.weight", shape
            left -= shape[0] * (shape[1] if len(shape) > 1 else 1)
        number += 1


def _write_json(folder: str | os.PathLike[str], name: str, value: object) -> None:
    with open(os.path.join(folder, name), "w") as file:
        json.dump(value, file)
