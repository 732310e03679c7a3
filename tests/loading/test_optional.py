"""C102: modules that a checkpoint may lack, when it was asked so: all of them or nothing."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import raywl
from raywl.errors import MissingWeightsError
from raywl.remap.mapper import WeightsMapper

VISUAL = ("visual.patch", "visual.blocks.0.weight")
OTHERS = ("visual_proj_lm", "language_model.weight")


class Tower(nn.Module):
    """Images, text, and a projection whose name begins like the tower's."""

    def __init__(self, device="cpu"):
        super().__init__()
        with torch.device(device):
            self.visual = nn.Module()
            self.visual.patch = nn.Parameter(torch.zeros(2))
            self.visual.blocks = nn.ModuleList([nn.Linear(2, 3, bias=False)])
            self.visual.register_buffer("cache", torch.zeros(2), persistent=False)
            self.visual_proj_lm = nn.Parameter(torch.zeros(4))
            self.language_model = nn.Linear(2, 2, bias=False)


class Own(Tower):
    def load_weights(self, weights):
        params = dict(self.named_parameters())
        for name, weight in weights:
            params[name].data.copy_(weight)


def save(folder, *names):
    folder.mkdir()
    whole = Tower().state_dict()
    save_file({name: torch.ones_like(whole[name]) for name in names}, folder / "model.safetensors")
    return folder


@pytest.fixture
def text(tmp_path):
    return save(tmp_path / "text", *OTHERS)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("make", [Tower, Own])
@pytest.mark.parametrize("optional", [["visual"], "visual.", ("visual",)])
def test_a_text_only_checkpoint(text, device, make, optional):
    """Unset weights are an error, unless they are a whole tower's that was asked off; it is said, once."""
    model = make("cpu")
    if device == "meta":
        model = make("meta")
        model.visual.cache = None
    with pytest.raises(MissingWeightsError, match=r"visual\.patch"):
        raywl.load_into(model, text)
    report = raywl.load_into(model, text, optional=optional, strict="exact", device="cpu")
    assert report.missing == []
    assert [note for note in report.notes if "visual" in note] == [
        f"visual: the checkpoint has nothing of it, {2 + (device == 'cpu')} weights stay as they are"
    ]
    assert model.language_model.weight.eq(1).all()
    assert model.visual_proj_lm.eq(1).all()
    assert model.visual.patch.device.type == device
    assert device == "meta" or not model.visual.patch.any()


@pytest.mark.parametrize("make", [Tower, Own])
@pytest.mark.parametrize("part", VISUAL)
def test_a_tower_that_is_there_in_part(tmp_path, make, part):
    """What was lost of it isn't what was asked off."""
    folder = save(tmp_path / "part", *OTHERS, part)
    lost = next(name for name in VISUAL if name != part)
    with pytest.raises(MissingWeightsError, match=lost):
        raywl.load_into(make(), folder, optional=["visual"])


@pytest.mark.parametrize("make", [Tower, Own])
def test_a_tower_that_is_there_is_loaded(tmp_path, make):
    model = make()
    raywl.load_into(model, save(tmp_path / "whole", *OTHERS, *VISUAL), optional=["visual"], strict="exact")
    assert model.visual.patch.eq(1).all()


def test_a_module_beside_it_is_not_meant(tmp_path):
    """`visual` is not `visual_proj_lm`, neither lacking nor there."""
    folder = save(tmp_path / "one", "language_model.weight")
    with pytest.raises(MissingWeightsError, match=r"1 parameters .*visual_proj_lm"):
        raywl.load_into(Tower(), folder, optional=["visual"])


def test_encoders_alone(tmp_path):
    """The other way round: the language model's tensors are dropped, and it is asked off."""
    folder = save(tmp_path / "whole", *OTHERS, *VISUAL)
    model = Tower("meta")
    model.visual.cache = None
    report = raywl.load_into(
        model,
        folder,
        mapper=WeightsMapper(orig_to_new_prefix={"language_model.": None}),
        optional=["language_model"],
        strict="exact",
        device="cpu",
    )
    assert report.skipped == {"language_model.weight": "dropped by the mapper"}
    assert model.language_model.weight.is_meta
    assert model.visual.patch.eq(1).all()
    assert model.visual_proj_lm.eq(1).all()


def test_a_reload_of_a_model_without_its_tower(text, tmp_path):
    model = Tower("meta")
    model.visual.cache = None
    raywl.load_into(model, text, optional=["visual"], device="cpu")
    with pytest.raises(ValueError, match=r"visual\.patch is on meta"):
        raywl.reload_into(model, text)
    raywl.reload_into(model, text, optional=["visual"])
    assert model.visual.patch.is_meta
    with pytest.raises(ValueError, match="is on meta"):
        raywl.reload_into(model, save(tmp_path / "whole", *OTHERS, *VISUAL), optional=["visual"])


def test_a_module_that_the_model_has_not_got(text):
    with pytest.raises(ValueError, match="no weights in a module 'vision'"):
        raywl.load_into(Tower(), text, optional=["vision"])


def test_a_tied_weight_that_is_used_elsewhere_is_not_optional(tmp_path):
    model = Tower()
    model.visual.shared = model.visual_proj_lm
    with pytest.raises(MissingWeightsError, match="visual_proj_lm"):
        raywl.load_into(model, save(tmp_path / "one", "language_model.weight"), optional=["visual"])
