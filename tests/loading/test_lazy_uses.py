"""Uses of a lazy weight other than copying it: each is right, and what it reads is counted."""

from __future__ import annotations

import copy
import io
import json
import pickle

import numpy as np
import pytest
import torch
from torch import nn

import raywl
from raywl.loading.lazy import LazyWeight

from .conftest import Model, filled, mappings

pytestmark = pytest.mark.usefixtures("mapped_or_not")

W = torch.arange(24, dtype=torch.float32).reshape(4, 6) + 1
READS = {
    # name: use, bytes that it needs
    "max": (lambda w: w.max(), 96),
    "max of a row": (lambda w: w[1].max(), 24),
    "item": (lambda w: w[2, 3].item(), 4),
    "float": (lambda w: float(w[0, 0]), 4),
    "int": (lambda w: int(w[0, 0]), 4),
    "bool": (lambda w: bool(w[0, 0]), 4),
    "index": (lambda w: [10, 20][int(w[0, 0]) - 1], 4),
    "tolist": (lambda w: w.tolist(), 96),
    "cat": (lambda w: torch.cat([w, w[1:]]), 96 + 72),
    "stack": (lambda w: torch.stack([w[0], w[2]]), 48),
    "iterate": (lambda w: [row.sum().item() for row in w], 96),
    "contains": (lambda w: 5.0 in w, 96),
    "sum of a part": (lambda w: w.narrow(0, 1, 2).sum(), 48),
    "other dtype": (lambda w: w[:1].to(torch.bfloat16) + 0, 24),
    "part of another dtype": (lambda w: w.double()[:1].sum(), 24),
    "item of another dtype": (lambda w: w.t().contiguous()[2, 3].item(), 4),
    "irregular part of another layout": (lambda w: w.t().contiguous().view(-1)[1:9].sum(), 96),
    "clone": (lambda w: w[:1].clone(), 24),
    "added": (lambda w: 1 + w[0], 24),
    "matmul": (lambda w: w @ w.t(), 192),
    "where": (lambda w: torch.where(w > 3, w, 0), 192),
    "isnan": (lambda w: torch.isnan(w).any(), 96),
    "equal": (lambda w: torch.equal(w, W), 96),
    "allclose": (lambda w: torch.allclose(w, W), 96),
    "empty_like": (lambda w: torch.zeros_like(w), 96),
    "mask": (lambda w: w[w > 3], 192),
    "rows": (lambda w: w[[0, 2]], 96),
    "gather": (lambda w: w.index_select(0, torch.tensor([1])), 96),
    "deepcopy": (lambda w: copy.deepcopy(w[0]), 24),
    "copy": (lambda w: copy.copy(w[0]), 24),
    "pickle": (lambda w: pickle.loads(pickle.dumps(w[0])), 24),
    "numpy": (lambda w: w[0].numpy(), 96),
    "asarray": (lambda w: np.asarray(w), 96),
    "format": (lambda w: f"{w[0, 0]:.1f}", 4),
    "einsum": (lambda w: torch.einsum("ij->j", w), 96),
    "functional": (lambda w: nn.functional.pad(w, (0, 1)), 96),
    "linear": (lambda w: nn.functional.linear(torch.ones(2, 6), w), 96),
    "split into a sum": (lambda w: sum(part.sum() for part in w.split(2)), 96),
    "minimum and place": (lambda w: torch.max(w, dim=1).indices, 96),
    "reversed": (lambda w: w.flip(0), 96),
    "repeat": (lambda w: w[0].repeat(2), 24),
    "dlpack": (lambda w: torch.from_dlpack(w), 96),
    "dlpack to numpy": (lambda w: np.from_dlpack(w), 96),
    "cdist": (lambda w: torch.cdist(w, w), 192),
    "torch.tensor": (lambda w: torch.tensor(w.tolist()), 96),
    "untyped_storage": (lambda w: bytes(w.untyped_storage())[:4], 96),
    "keywords": (lambda w: torch.chunk(input=w, chunks=2)[0] + 0, 192),
}


def run(write, use, weight=W):
    """What a use gives inside a loader, and the report."""
    got = []

    def load(model, weights):
        for _, w in weights:
            got.append(use(w))

    report = raywl.load_into(Model({"p": filled(1)}, load), write({"w": weight}), strict=False)
    return got[0], report


def as_plain(value):
    return value.tolist() if isinstance(value, torch.Tensor | np.ndarray) else value


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("case", READS)
def test_a_use_sees_the_values_and_is_counted(write, case):
    use, nbytes = READS[case]
    got, report = run(write, use)
    assert as_plain(got) == as_plain(use(W.clone()))
    if isinstance(got, torch.Tensor):
        assert type(got) is torch.Tensor
    assert report.bytes_read <= nbytes
    assert report.loaded == ["w"]
    if case not in ("empty_like",):
        assert report.bytes_read >= min(nbytes, 4)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "use",
    [
        lambda w: (w.shape, w.dtype, w.numel(), w.dim(), w.size(0), w.stride(), w.device, w.ndim, len(w)),
        lambda w: (w.is_contiguous(), w.t().is_contiguous(), w.element_size(), w.nbytes, w.itemsize),
        lambda w: (w.is_floating_point(), w.requires_grad, w.is_meta, w.layout, w.is_sparse, w.is_cuda),
        lambda w: (isinstance(w, torch.Tensor), torch.is_tensor(w), w.is_leaf, w.grad),
        lambda w: (torch.numel(w), torch.is_floating_point(w), w.get_device(), w.storage_offset()),
        lambda w: (hash(w) == hash(w), w.is_complex(), w.is_signed(), w.nelement()),
    ],
)  # fmt: skip
def test_facts_read_nothing(write, use):
    got, report = run(write, use)
    assert got == use(W.clone())
    assert report.bytes_read == 0


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_its_text_names_it_and_reads_nothing(write):
    got, report = run(write, lambda w: (repr(w), str(w[0])))
    assert got[0] == "LazyWeight('w', shape=[4, 6], dtype=torch.float32)"
    assert "shape=[6]" in got[1]
    assert report.bytes_read == 0


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_it_saves_as_a_plain_tensor(write):
    def use(w):
        file = io.BytesIO()
        torch.save({"w": w[1:]}, file)
        file.seek(0)
        return torch.load(file)["w"]

    got, _ = run(write, use)
    assert torch.equal(got, W[1:])
    assert type(got) is torch.Tensor


IN_PLACE = {
    "add_": lambda w: w.add_(1),
    "augmented": lambda w: w.__iadd__(1),
    "item": lambda w: w.__setitem__(0, 5.0),
    "of a view": lambda w: w[1:].mul_(3),
    "of a transposed view": lambda w: w.t()[0].zero_(),
    "fill": lambda w: w[:, 1].fill_(9),
    "copy_": lambda w: w[0].copy_(torch.ones(6)),
    "copy of itself": lambda w: w[0].copy_(w[1]),
    "swap": lambda w: w[[0, 1]].copy_(w[[1, 0]]),
    "out": lambda w: torch.add(w[0], 1, out=w[1]),
    "numpy": lambda w: w[0].numpy().__setitem__(slice(2), 8),
    "clamp": lambda w: w.clamp_(max=5),
    "masked": lambda w: w.masked_fill_(w > 7, 0),
    "init": lambda w: nn.init.constant_(w[0], 3),
    "foreach": lambda w: torch._foreach_copy_([w[0]], [torch.zeros(6)]),
    "through data": lambda w: w.data.mul_(2),
    "through detach": lambda w: w.detach().mul_(2),
    "through contiguous": lambda w: w.contiguous().mul_(2),
    "through to": lambda w: w.to(torch.float32).mul_(2),
    "through dlpack": lambda w: torch.from_dlpack(w).mul_(2),
    "through reshape": lambda w: w.reshape(-1)[3:5].zero_(),
}


@pytest.mark.parametrize("case", IN_PLACE)
def test_writing_to_a_weight_changes_that_weight(write, case):
    """Views taken before and after see it; the file doesn't."""
    change = IN_PLACE[case]

    def load(model, weights):
        for _, w in weights:
            model.before.copy_(w)
            view = w[1:]
            change(w)
            model.after.copy_(w)
            model.view.copy_(view)

    tensors = {"before": filled(4, 6), "after": filled(4, 6), "view": filled(3, 6)}
    folder = write({"w": W})
    model = Model(tensors, load)
    raywl.load_into(model, folder)
    changed = W.clone()
    change(changed)
    assert torch.equal(model.before, W)
    assert torch.equal(model.after, changed)
    assert torch.equal(model.view, changed[1:])
    again = Model({"w": filled(4, 6)})
    raywl.load_into(again, folder)
    assert torch.equal(again.w, W)


class Kept(nn.Module):
    """Loads in ways that put the weight itself into the model."""

    def __init__(self, how):
        super().__init__()
        self.inner = nn.Linear(6, 4, bias=False)
        self.register_buffer("scale", filled(6))
        self.how = how

    def load_weights(self, weights):
        return self.how(self, dict(weights))


def by_data(model, weights):
    model.inner.weight.data = weights["inner.weight"]
    model.scale.data = weights["scale"]


def by_parameter(model, weights):
    model.inner.weight = nn.Parameter(weights["inner.weight"], requires_grad=False)
    model.scale = weights["scale"]


def by_parameter_of_a_view(model, weights):
    model.inner.weight = nn.Parameter(weights["inner.weight"][:])
    model.register_buffer("scale", weights["scale"].view(6))


def by_state_dict(model, weights):
    model.load_state_dict(weights)


def by_assigned_state_dict(model, weights):
    model.load_state_dict(weights, assign=True)


def by_registry(model, weights):
    model.inner._parameters["weight"] = nn.Parameter(weights["inner.weight"])
    model._buffers["scale"] = weights["scale"]


@pytest.mark.parametrize("meta", [False, True], ids=["on CPU", "on meta"])
@pytest.mark.parametrize(
    "how",
    [by_data, by_parameter, by_parameter_of_a_view, by_state_dict, by_assigned_state_dict, by_registry],
    ids=lambda how: how.__name__,
)
def test_weights_put_into_the_model_become_plain_tensors(write, how, meta):
    weights = {"inner.weight": W.clone(), "scale": W[0].clone()}
    with torch.device("meta" if meta else "cpu"):
        model = Kept(how)
    folder = write(weights)
    raywl.load_into(model, folder)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, weights[name]), name
    for tensor in (*model.parameters(), *model.buffers()):
        assert not isinstance(tensor, LazyWeight)
        assert not isinstance(tensor.data, LazyWeight)
    assert type(model.inner.weight) is nn.Parameter
    assert mappings() == []
    model.inner(torch.ones(1, 6)).sum()


def test_the_report_is_plain(write):
    report = raywl.load_into(Model({"w": W * 0}), write({"w": W}))
    assert json.loads(json.dumps(report.to_dict()))["loaded"] == ["w"]
