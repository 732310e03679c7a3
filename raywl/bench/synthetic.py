"""Checkpoints of a given size to measure with: the shapes of a Llama, or layouts that are hard in one way."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from raywl.bench.words import LAYOUTS

if TYPE_CHECKING:
    import torch

__all__ = ["make_checkpoint", "make_layout"]

_SMALL_BYTES = 4 << 10
_NUM_FILES = 1000
_NUM_IN_HEADER = 10_000
_NUM_EXPERTS = 64

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
            "tie_word_embeddings": True,
        },
    )
    return total


def make_layout(folder: str | os.PathLike[str], layout: str, num_bytes: int) -> int:
    """Writes a checkpoint of one of `LAYOUTS`.

    Args:
        folder: Made if it isn't there.
        layout: Which.
        num_bytes: Wanted bytes of tensors, about.

    Returns:
        Bytes of tensors.

    Raises:
        ValueError: An unknown layout.
        OSError: The folder can't be written to, or is full.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"unknown layout {layout!r}: expected one of {', '.join(LAYOUTS)}")
    if layout == "model":
        return make_checkpoint(folder, num_bytes)
    from safetensors.torch import save_file

    os.makedirs(folder, exist_ok=True)
    total = 0
    weight_map: dict[str, str] = {}
    files = list(_files_of(layout, num_bytes))
    for number, sizes in enumerate(files, 1):
        file = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        tensors = {name: _bits(size, number) for name, size in sizes.items()}
        save_file(tensors, os.path.join(folder, file), {"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
        total += sum(tensor.nbytes for tensor in tensors.values())
    body = {"metadata": {"total_size": total}, "weight_map": weight_map}
    _write_json(folder, "model.safetensors.index.json", body)
    return total


def _files_of(layout: str, num_bytes: int) -> Iterator[dict[str, int]]:
    """The bytes of each tensor, file by file."""
    if layout == "huge":
        yield {"weight": num_bytes}
    elif layout == "files":
        for number in range(_NUM_FILES):
            yield {f"layers.{number}.weight": max(2, num_bytes // _NUM_FILES)}
    elif layout == "header":
        names = [f"layers.{number}.weight" for number in range(_NUM_IN_HEADER)]
        yield dict.fromkeys(names, max(2, num_bytes // _NUM_IN_HEADER))
    elif layout == "small":
        count = max(1, num_bytes // _SMALL_BYTES)
        yield {f"layers.{number // 100}.part.{number % 100}.weight": _SMALL_BYTES for number in range(count)}
    else:
        each = max(8, num_bytes // (_NUM_EXPERTS * 4 + 1))
        for layer in range(4):
            experts = [f"layers.{layer}.mlp.experts.{number}.w1.weight" for number in range(_NUM_EXPERTS)]
            yield {f"layers.{layer}.mlp.gate.weight": each // 4} | dict.fromkeys(experts, each)


def _bits(num_bytes: int, seed: int) -> torch.Tensor:
    """Random bits as bf16: every misplaced byte shows."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    raw = torch.empty(max(1, num_bytes // 2), dtype=torch.int16)
    return raw.random_(-(1 << 15), 1 << 15, generator=generator).view(torch.bfloat16)


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
