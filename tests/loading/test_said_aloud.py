"""Nothing that a user would want to know passes in silence."""

from __future__ import annotations

import os
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import raywl
from raywl.errors import CorruptFileError, MissingWeightsError

A = torch.arange(32.0).reshape(8, 4)


def one(shape=(8, 4), value=-1.0, device=None):
    model = nn.Module()
    model.w = nn.Parameter(torch.full(shape, value, device=device))
    return model


def half(param, weight):
    param.data[:2].copy_(weight[:2])


@pytest.mark.parametrize("strict", [True, "exact", False])
def test_a_parameter_that_had_memory_and_is_set_in_part(write, strict):
    """Padding is allowed by default, but said; `exact` allows none."""
    model = one()
    model.w.weight_loader = half
    folder = write({"w": A})
    if strict == "exact":
        with pytest.raises(MissingWeightsError, match=r"w \(32 of 128 bytes are set"):
            raywl.load_into(model, folder, strict=strict)
        assert bool((model.w == -1).all())
    elif strict:
        with pytest.warns(UserWarning, match="set only in part: w"):
            report = raywl.load_into(model, folder, strict=strict)
        assert list(report.partial) == ["w"]
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert list(raywl.load_into(model, folder, strict=strict).partial) == ["w"]


def test_shards_that_cut_nothing(write):
    """A typo leaves a parameter whole on every rank."""
    context = raywl.ParallelContext(tp_size=2)
    with pytest.warns(UserWarning, match="match no parameter that they could cut: ww, z"):
        report = raywl.load_into(
            one(), write({"w": A}), parallel=context, shards={"ww": raywl.Shard(0), "z*": raywl.Shard(1)}
        )
    assert report.unused_shards == ["ww", "z*"]
    stage = raywl.ParallelContext(pp_size=2)
    with warnings.catch_warnings():
        # Other stages may have what this one hasn't.
        warnings.simplefilter("error")
        report = raywl.load_into(one(), write({"w": A}), parallel=stage, shards={"ww": raywl.Shard(0)})
    assert report.unused_shards == ["ww"]


def test_tp_plan_entries_that_match_nothing(write):
    """Plans speak of more than a model has (`lm_head`), so it is a note."""
    report = raywl.load_into(one(), write({"w": A}), tp_plan={"other": "colwise", "w": "replicate"})
    assert "tp_plan entries that match no parameter: other" in report.notes


def test_a_file_replaced_by_one_with_the_same_header(write, tmp_path):
    """It isn't the checkpoint that was opened, though nothing in its header says so."""
    folder = write({"w": A})
    checkpoint = raywl.open_checkpoint(folder)
    path = checkpoint.path(checkpoint.files[0].name)
    with open(path, "rb") as file:
        body = bytearray(file.read())
    body[-1] ^= 1
    with open(path + ".new", "wb") as file:
        file.write(body)
    os.replace(path + ".new", path)
    model = one()
    with pytest.raises(CorruptFileError, match="replaced since it was opened"):
        raywl.load_into(model, checkpoint)
    assert bool((model.w == -1).all())
    with pytest.raises(CorruptFileError, match="replaced since it was opened"):
        list(checkpoint.iter_weights())
    assert raywl.load_into(model, folder).loaded == ["w"]


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.positions = nn.Module()
        self.positions.register_buffer("ids", torch.arange(4), persistent=False)

    def _init_weights(self, module):
        if hasattr(module, "ids"):
            module.ids.copy_(torch.arange(4))


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.empty(8, 4))
        self.inner = Inner()

    def _init_weights(self, module):
        """Knows nothing of what is inside of the inner model."""


def test_a_buffer_that_only_an_inner_model_can_make(write):
    """The initialiser of the nearest model around it is asked first."""
    with torch.device("meta"):
        model = Outer()
    raywl.load_into(model, write({"w": A}))
    assert model.inner.positions.ids.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("value", [2.0, True, "2", None], ids=repr)
def test_sizes_are_whole_numbers(value):
    """Any integer type is one; nothing else is."""
    with pytest.raises(ValueError, match="tp_size must be a whole number"):
        raywl.ParallelContext(tp_size=value)
    with pytest.raises(ValueError, match="tp_size must be a whole number"):
        raywl.ParallelContext.of_rank(0, tp_size=value)


def test_numpy_sizes_become_ints():
    """They would fail much later: in JSON, or in Ray's metrics."""
    context = raywl.ParallelContext(tp_rank=np.int64(1), tp_size=np.int32(2))
    assert {type(value) for value in context.to_dict().values()} == {int}
    assert raywl.ParallelContext.of_rank(np.int64(3), tp_size=np.int64(2), dp_size=2).dp_rank == 1


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"parallel": (0, 2)}, TypeError, "parallel must be a ParallelContext, not tuple"),
        ({"mapper": {"a": "b"}}, TypeError, "mapper must have map_name"),
        ({"stacked": [("a", "b")]}, ValueError, "stacked has rows of 3 values"),
        ({"expert_mapping": [("a", "b", 0)]}, ValueError, "expert_mapping has rows of 4 values"),
        ({"device": "meta"}, ValueError, "can't be meta"),
        ({"shards": ["w"]}, TypeError, "shards must be a mapping of name patterns, not list"),
        ({"shards": {1: raywl.Shard(0)}}, TypeError, "shards has names and patterns as keys, not 1"),
        ({"tp_plan": "auto"}, TypeError, "tp_plan must be a mapping of name patterns, not str"),
        ({"plan": "w.json"}, TypeError, "plan must be a LoadPlan, not str"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_arguments_of_a_wrong_kind(write, arguments, error, message):
    """They are named as arguments, before anything is opened for them."""
    with pytest.raises(error, match=message):
        raywl.load_into(one(), write({"w": A}), **arguments)


def test_a_model_that_is_none(write):
    """A dict of tensors isn't a module."""
    with pytest.raises(TypeError, match="model must be a Module, not dict"):
        raywl.load_into({"w": A}, write({"w": A}))


def test_a_missing_weight_names_the_file_that_was_given(write):
    """Several checkpoints may lie in the folder."""
    folder = write({"v": A})
    path = folder / "model-00001-of-00001.safetensors"
    with (
        pytest.warns(UserWarning, match="no place"),
        pytest.raises(MissingWeightsError, match=r"model-00001-of-00001\.safetensors"),
    ):
        raywl.load_into(one(), path)


def test_plans_are_equal_when_all_of_them_is(write, tmp_path):
    """A saved one is the one that was saved."""
    plan = raywl.load_into(one(), write({"w": A})).plan
    plan.save(tmp_path / "plan.json")
    again = raywl.LoadPlan.load(tmp_path / "plan.json")
    assert again == plan
    assert hash(again) == hash(plan)
    with pytest.raises(raywl.errors.NotFoundError, match="no such plan"):
        raywl.LoadPlan.load(tmp_path / "none.json")
