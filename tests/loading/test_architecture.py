"""A reload refuses what fits a live model only because it holds more, or other codes."""

from __future__ import annotations

import warnings

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import raywl
from raywl.errors import CheckpointError, MissingWeightsError

ONES = torch.ones(8, 8)


@pytest.fixture
def live(tmp_path):
    """A loaded model, and a way to write other checkpoints."""
    save_file({"weight": ONES}, tmp_path / "old.safetensors")
    model = nn.Linear(8, 8, bias=False, device="meta")
    raywl.load_into(model, tmp_path / "old.safetensors")

    def write(tensors):
        save_file(tensors, tmp_path / "new.safetensors")
        return tmp_path / "new.safetensors"

    return model, write


@pytest.mark.parametrize(
    ("tensors", "error", "message"),
    [
        (
            {"weight": ONES * 3, "layers.2.weight": ONES},
            MissingWeightsError,
            "another architecture.*layers.2",
        ),
        ({"weight": ONES.to(torch.float8_e4m3fn)}, CheckpointError, "is F8_E4M3, but .* from F32"),
        ({"weight": torch.ones(8, 8, dtype=torch.uint8)}, CheckpointError, "is U8, but .* from F32"),
        (
            {"weight": ONES.to(torch.float8_e4m3fn), "weight_scale": torch.ones(1)},
            MissingWeightsError,
            "weight_scale",
        ),
    ],
    ids=["deeper", "fp8", "codes", "fp8 with scale"],
)
def test_another_architecture(live, tensors, error, message):
    """The old weights stay, bit for bit; a load that is asked to be lenient still takes it."""
    model, write = live
    path = write(tensors)
    with pytest.raises(error, match=message) as caught:
        raywl.reload_into(model, path)
    assert not caught.value.partly_loaded
    assert torch.equal(model.weight, ONES)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        raywl.reload_into(model, path, strict=False)
    assert not torch.equal(model.weight, ONES) or tensors["weight"].to(torch.float32).equal(ONES)


def test_numbers_of_another_width_are_the_same_architecture(live):
    """bf16 into a model that was loaded from fp32 is a conversion."""
    model, write = live
    raywl.reload_into(model, write({"weight": (ONES * 2).bfloat16()}))
    assert torch.equal(model.weight, ONES * 2)


def test_what_the_last_checkpoint_had_as_well(tmp_path):
    """Tensors that the model never had a place for are no news."""
    save_file({"weight": ONES, "extra": ONES.clone()}, tmp_path / "a.safetensors")
    save_file({"weight": ONES * 2, "extra": ONES.clone()}, tmp_path / "b.safetensors")
    model = nn.Linear(8, 8, bias=False)
    with pytest.warns(UserWarning, match="no place"):
        raywl.load_into(model, tmp_path / "a.safetensors")
    with pytest.warns(UserWarning, match="no place"):
        raywl.reload_into(model, tmp_path / "b.safetensors")
    assert torch.equal(model.weight, ONES * 2)
    other = nn.Linear(8, 8, bias=False)
    with pytest.raises(MissingWeightsError, match="another architecture"):
        raywl.reload_into(other, tmp_path / "b.safetensors")
