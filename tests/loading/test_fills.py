"""Constants that loaders put into parameters: a part of the plan, in the right order, and no surprise."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import nn

import raywl
from raywl.loading.planning import plan_model

from .conftest import Model, filled
from .test_order import A, B, by_hand

FILLS = {
    "zero_": lambda p: p.zero_(),
    "fill_": lambda p: p.fill_(3),
    "fill_ by keyword": lambda p: p.fill_(value=2.5),
    "of a part": lambda p: p[1:, 2].fill_(-1),
    "of a transposed part": lambda p: p.data.t()[1].fill_(True),
    "item": lambda p: p.__setitem__((0, slice(1, 3)), 7),
    "one element": lambda p: p.__setitem__((2, -1), math.inf),
    "all": lambda p: p.__setitem__(..., float("-inf")),
    "no number": lambda p: p.fill_(math.nan),
    "function": lambda p: torch.fill_(p.data, 4),
    "init.zeros_": lambda p: nn.init.zeros_(p),
    "init.ones_": lambda p: nn.init.ones_(p),
    "init.constant_": lambda p: nn.init.constant_(p, 0.5),
    "through a view of bytes": lambda p: p.data.view(torch.uint8)[1].zero_(),
    "nothing": lambda p: p[:0].zero_(),
    "twice": lambda p: (p.fill_(1), p[0].fill_(2)),
    "expanded": lambda p: p[:1, :1].expand(3, 4).fill_(6),
}


def equal(one, other):
    """Bit by bit."""
    return torch.equal(one.detach().view(torch.uint8), other.detach().view(torch.uint8))


@pytest.mark.parametrize("case", FILLS)
@pytest.mark.parametrize("when", ["before", "after", "instead"])
def test_a_plan_with_fills_is_used_again(write, tmp_path, case, when):
    """Saved and loaded, without running the loader: the same model, bit by bit."""

    def load(model, weights):
        loaded = dict(weights)
        if when == "before":
            FILLS[case](model.p)
            model.p[0].copy_(loaded["a"][0])
        elif when == "after":
            model.p[:, 3].copy_(loaded["a"][:, 3])
            FILLS[case](model.p[:, :3] if case not in ("through a view of bytes", "expanded") else model.r)
        else:
            FILLS[case](model.p)
        model.q.copy_(loaded["b"])

    tensors = {"p": filled(3, 4), "q": filled(3, 4), "r": filled(3, 4)}
    weights = {"a": A, "b": B}
    expected = by_hand(load, tensors, weights)
    model = Model({name: tensor.clone() for name, tensor in tensors.items()}, load)
    folder = write(weights)
    report = raywl.load_into(model, folder, strict=False)
    again = Model({name: tensor.clone() for name, tensor in tensors.items()})
    assert report.plan.unplanned == ()
    report.plan.save(tmp_path / "plan.json")
    replayed = raywl.load_into(again, folder, plan=raywl.LoadPlan.load(tmp_path / "plan.json"), strict=False)
    assert replayed.missing == report.missing
    for name, parameter in expected.named_parameters():
        assert equal(model.get_parameter(name), parameter), name
        assert equal(again.get_parameter(name), parameter), name


def test_fills_are_shown_and_kept(write, tmp_path):
    def load(model, weights):
        model.p[:2].copy_(next(w for _, w in weights)[:2])
        model.p[2].fill_(-math.inf)

    report = raywl.load_into(Model({"p": filled(3, 4)}, load), write({"a": A}))
    (fill,) = report.plan.fills
    assert (fill.target, fill.dst_start, fill.shape, fill.value) == ("p", 32, (4,), -math.inf)
    assert "p <- -inf [4] (constant)" in report.plan.explain()
    assert report.plan.summary()["num_fills"] == 1
    report.plan.save(tmp_path / "plan.json")
    assert raywl.LoadPlan.load(tmp_path / "plan.json") == report.plan


def test_padding_counts_as_set(write):
    """A parameter that is copied to in part and filled for the rest is complete."""

    def load(model, weights):
        model.p[2:].zero_()
        model.p[:2].copy_(next(w for _, w in weights)[:2])

    report = raywl.load_into(Model({"p": filled(3, 4)}, load), write({"a": A}), strict="exact")
    assert not report.partial
    assert not report.missing


def test_what_is_read_after_a_fill_is_the_constant(write):
    def load(model, weights):
        loaded = dict(weights)
        model.p.fill_(2)
        assert model.p.sum().item() == 24
        model.p[0].copy_(loaded["a"][0])
        model.p[1].fill_(5)
        assert model.p[1:].sum().item() == 28
        assert model.p[0, 3].item() == 3
        model.q.zero_()
        model.q.add_(model.p)

    tensors = {"p": filled(3, 4), "q": filled(3, 4)}
    expected = by_hand(load, tensors, {"a": A})
    model = Model({name: tensor.clone() for name, tensor in tensors.items()}, load)
    report = raywl.load_into(model, write({"a": A}), strict=False)
    assert torch.equal(model.p, expected.p)
    assert torch.equal(model.q, expected.q)
    assert report.plan.unplanned


def test_a_fill_over_a_copy_comes_after_it(write):
    """The plan alone has copies last, so it says that it can't be used again."""

    def load(model, weights):
        model.p.copy_(next(w for _, w in weights))
        model.p[1].fill_(9)

    model = Model({"p": filled(3, 4)}, load)
    report = raywl.load_into(model, write({"a": A}))
    assert (model.p[1] == 9).all()
    assert torch.equal(model.p[0], A[0])
    assert report.plan.unplanned


def test_a_number_that_does_not_fit_is_refused_where_it_is_given(write):
    def load(model, weights):
        with pytest.raises(RuntimeError, match="without overflow"):
            model.p.data.fill_(300)
        model.p.copy_(next(w for _, w in weights))

    model = Model({"p": torch.zeros(4, dtype=torch.uint8)}, load)
    raywl.load_into(model, write({"a": torch.arange(4, dtype=torch.uint8)}))
    assert model.p.tolist() == [0, 1, 2, 3]


def test_other_writes_are_still_surprises(write):
    """A tensor's value, or one for each element, may be another the next time."""
    for change in (
        lambda p: p.fill_(torch.tensor(2.0)),
        lambda p: p.__setitem__(p > 0, 1),
        lambda p: p.__setitem__(0, torch.ones(4)),
        lambda p: nn.init.normal_(p),
    ):

        def load(model, weights, change=change):
            change(model.q)
            model.p.copy_(next(w for _, w in weights))

        model = Model({"p": filled(3, 4), "q": filled(3, 4)}, load)
        report = raywl.load_into(model, write({"a": A}), strict=False)
        assert report.plan.unplanned


def test_nothing_is_filled_when_the_load_is_refused(write):
    """The model is as it was: fills are made after everything that can be checked was."""

    def load(model, weights):
        model.p.fill_(0)
        for _, w in weights:
            model.p[:1].copy_(w[:1])

    model = Model({"p": filled(3, 4), "never": filled(2)}, load)
    with pytest.raises(raywl.errors.MissingWeightsError) as caught:
        raywl.load_into(model, write({"a": A}))
    assert not caught.value.partly_loaded
    assert torch.equal(model.p, filled(3, 4))


def test_planning_alone_fills_nothing(write):
    def load(model, weights):
        model.p.fill_(0)
        model.p[:1].copy_(next(w for _, w in weights)[:1])

    model = Model({"p": filled(3, 4)}, load)
    report = plan_model(model, raywl.open_checkpoint(write({"a": A})), raywl.ParallelContext())
    assert len(report.plan.fills) == 1
    assert torch.equal(model.p, filled(3, 4))


def test_a_reload_fills_too(write):
    """The check before it fills neither stand-ins nor live memory."""

    def load(model, weights):
        model.p[2].fill_(0)
        model.p[:2].copy_(next(w for _, w in weights)[:2])

    folder = write({"a": A})
    model = Model({"p": filled(3, 4)}, load)
    raywl.load_into(model, folder)
    with torch.no_grad():
        model.p.fill_(1)
    address = model.p.data_ptr()
    raywl.reload_into(model, folder)
    assert model.p.data_ptr() == address
    assert torch.equal(model.p[:2], A[:2])
    assert not model.p[2].any()


@pytest.mark.parametrize(("at", "value"), [(1, 1000), (3, [10**6]), (4, "nonsense"), (2, [9])])
def test_a_damaged_plan_is_refused(write, tmp_path, at, value):
    """No constant may leave its parameter."""

    def load(model, weights):
        model.p[2].fill_(0)
        model.p[:2].copy_(next(w for _, w in weights)[:2])

    folder = write({"a": A})
    raywl.load_into(Model({"p": filled(3, 4)}, load), folder).plan.save(tmp_path / "plan.json")
    body = json.loads((tmp_path / "plan.json").read_text())
    body["fills"][0][at] = value
    (tmp_path / "plan.json").write_text(json.dumps(body))
    model = Model({"p": filled(3, 4)})
    with pytest.raises(ValueError, match="damaged"):
        raywl.load_into(model, folder, plan=raywl.LoadPlan.load(tmp_path / "plan.json"))
    assert torch.equal(model.p, filled(3, 4))


@pytest.mark.parametrize("row", [["float", "x"], ["str", "1"], [], ["bool", "maybe"], ["int", "0x"]])
def test_a_plan_with_a_constant_that_is_none_is_refused(write, tmp_path, row):
    def load(model, weights):
        model.p[2].fill_(0)
        model.p[:2].copy_(next(w for _, w in weights)[:2])

    folder = write({"a": A})
    raywl.load_into(Model({"p": filled(3, 4)}, load), folder).plan.save(tmp_path / "plan.json")
    body = json.loads((tmp_path / "plan.json").read_text())
    body["fills"][0][-1] = row
    (tmp_path / "plan.json").write_text(json.dumps(body))
    with pytest.raises(raywl.errors.CheckpointError, match="not a saved plan"):
        raywl.LoadPlan.load(tmp_path / "plan.json")
