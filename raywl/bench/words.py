"""The words that the command line takes for what can be measured; light, since every command knows them."""

from __future__ import annotations

__all__ = ["LAYOUTS", "PEERS"]

PEERS = ("load_file", "runai", "fastsafetensors", "tensorizer", "accelerate", "transformers", "dcp")
"""Other ways to load a checkpoint."""

LAYOUTS = {
    "model": "a Llama's shapes in bf16, in two files",
    "small": "tensors of 4 KiB",
    "huge": "one tensor",
    "files": "a thousand files of one tensor each",
    "header": "ten thousand tensors, for the time that opening takes",
    "experts": "sixty-four experts in each layer",
}
"""Layouts that can be made, and what they are."""
