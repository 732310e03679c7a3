"""What loaders do to weights before they copy them stays lazy: views, other dtypes, other layouts."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

import raywl
from raywl.errors import CorruptFileError
from raywl.loading.lazy import LazyWeight, UnmappedWeight
from raywl.loading.lazy_sources import without_detours

from .conftest import Model, filled, mappings, on_network

pytestmark = pytest.mark.usefixtures("mapped_or_not")

W = (torch.arange(48, dtype=torch.float32) * 1.001).reshape(4, 12)
VIEWS = {
    # name: view, elements of it
    "narrow": (lambda w: w.narrow(0, 1, 2), 24),
    "slice": (lambda w: w[1:3], 24),
    "slice with a step": (lambda w: w[::2], 24),
    "slice with an ellipsis": (lambda w: w[..., 2:5], 12),
    "slice of everything": (lambda w: w[:, None, 1::3], 16),
    "int": (lambda w: w[2], 12),
    "ints": (lambda w: w[2, 3], 1),
    "view": (lambda w: w.view(2, 24)[1], 24),
    "reshape": (lambda w: w.reshape(-1, 6)[0], 6),
    "flatten": (lambda w: w.flatten()[3:9], 6),
    "unflatten": (lambda w: w.unflatten(1, (3, 4))[:, 1], 16),
    "t": (lambda w: w.t()[1:3], 8),
    "T": (lambda w: w.T[0], 4),
    "transpose": (lambda w: w.transpose(0, 1)[5], 4),
    "permute": (lambda w: w.permute(1, 0)[:2], 8),
    "movedim": (lambda w: w.movedim(0, 1)[:2], 8),
    "squeeze": (lambda w: w[:1].squeeze(0), 12),
    "unsqueeze": (lambda w: w.unsqueeze(1)[0], 12),
    "chunk": (lambda w: w.chunk(2, 1)[1], 24),
    "split": (lambda w: w.split([1, 3])[1], 36),
    "tensor_split": (lambda w: w.tensor_split(3, dim=1)[2], 16),
    "unbind": (lambda w: w.unbind(1)[4], 4),
    "contiguous": (lambda w: w[:2].contiguous(), 24),
    "detach": (lambda w: w[:2].detach(), 24),
    "data": (lambda w: w.data[0], 12),
    "to": (lambda w: w[:2].to(torch.bfloat16), 24),
    "to by keywords": (lambda w: w[1].to(dtype=torch.float64, copy=True), 12),
    "to like another": (lambda w: w[1].to(torch.zeros(1, dtype=torch.float16)), 12),
    "type": (lambda w: w[1].type(torch.float64), 12),
    "half": (lambda w: w[:, 1].half(), 4),
    "bfloat16": (lambda w: w[:, 1:3].bfloat16(), 8),
    "double": (lambda w: w.double()[1], 12),
    "int()": (lambda w: w[1].int(), 12),
    "view of a dtype": (lambda w: w[1].view(torch.int16)[2:4], 1),
    "transposed and made contiguous": (lambda w: w.t().contiguous(), 48),
    "a part of it": (lambda w: w.t().contiguous()[2:4], 8),
    "flattened after that": (lambda w: w.t().contiguous().view(-1)[4:12], 8),
    "blocks after that": (lambda w: w.t().contiguous().view(3, 4, 2, 2)[:, :, 1], 24),
    "reshaped without a view": (lambda w: w.t().reshape(-1)[8:16], 8),
    "flattened without a view": (lambda w: w.t().flatten()[:8], 8),
    "converted, cut and converted": (lambda w: w.t().to(torch.float64)[3:5].contiguous().float(), 8),
    "heads interleaved": (lambda w: w.view(2, 2, 12).transpose(0, 1).reshape(4, 12)[2:], 24),
    "channels last": (lambda w: w.view(1, 3, 4, 4).contiguous(memory_format=torch.channels_last)[:, 1], 16),
}


@pytest.mark.parametrize("case", VIEWS)
def test_it_stays_lazy(write, case):
    """One copy of a plan, which reads no more than it must; shape, strides, dtype and values are right."""
    view, num_elements = VIEWS[case]
    expected = view(W.clone())
    kinds = []

    def load(model, weights):
        for _, w in weights:
            got = view(w)
            kinds.append((type(got), got.shape, got.dtype, got.stride(), got.device))
            model.p.copy_(got)

    model = Model({"p": torch.zeros_like(expected)}, load)
    report = raywl.load_into(model, write({"w": W}))
    assert issubclass(kinds[0][0], LazyWeight)
    assert kinds[0][1:] == (expected.shape, expected.dtype, expected.stride(), expected.device)
    assert torch.equal(model.p, expected)
    assert report.plan.unplanned == ()
    assert len(report.plan.copies) == 1
    assert report.bytes_loaded == num_elements * 4
    assert report.bytes_read == report.plan.nbytes <= W.nbytes


@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32])
@pytest.mark.parametrize("between", [torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn])
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_roundings_are_those_of_each_step(write, source, between, wanted):
    """A value that goes by way of a narrow dtype is rounded there, also when it is copied into a wide one."""
    weight = (torch.randn(64, generator=torch.Generator().manual_seed(0)) * 30).to(source)
    weight[0], weight[1] = float("nan"), 0.1
    expected = weight.to(between).to(wanted)

    def load(model, weights):
        for _, w in weights:
            model.p.copy_(w.to(between))

    model = Model({"p": torch.zeros(64, dtype=wanted)}, load)
    report = raywl.load_into(model, write({"w": weight}))
    assert torch.equal(model.p.view(torch.uint8), expected.view(torch.uint8))
    assert report.plan.unplanned == ()
    assert report.bytes_read == weight.nbytes


def test_long_ways_are_made_at_once(write):
    """A plan's copy has one dtype in between; more are made by torch, one after the other."""

    def way(w):
        return w.to(torch.bfloat16).to(torch.float16).to(torch.float8_e4m3fn)

    def load(model, weights):
        for _, w in weights:
            model.p.copy_(way(w))

    model = Model({"p": filled(4, 12)}, load)
    report = raywl.load_into(model, write({"w": W}))
    assert torch.equal(model.p, way(W).float())
    assert report.plan.unplanned
    assert report.bytes_read == W.nbytes


def test_steps_that_lose_nothing_are_left_out():
    assert without_detours(("bfloat16", "float32", "float16")) == ("bfloat16", "float16")
    assert without_detours(("bfloat16", "float32", "float64", "int8")) == ("bfloat16", "int8")
    assert without_detours(("float32", "bfloat16", "float32")) == ("float32", "bfloat16", "float32")
    # What is no number may come back as another such.
    assert without_detours(("bfloat16", "float32", "bfloat16")) == ("bfloat16", "float32", "bfloat16")
    assert without_detours(("float16", "float32", "bfloat16")) == ("float16", "float32", "bfloat16")
    assert without_detours(("int8", "int8")) == ("int8",)


def test_a_conversion_is_other_memory(write):
    """Writing to it changes neither the weight nor other conversions of it, and the other way round."""

    def load(model, weights):
        for _, w in weights:
            first, second = w.double(), w.double()
            part = first[1:]
            first.mul_(2)
            w[0].zero_()
            model.first.copy_(first)
            model.part.copy_(part)
            model.second.copy_(second)
            model.weight.copy_(w)

    tensors = {name: filled(4, 12) for name in ("first", "second", "weight")}
    model = Model({**tensors, "part": filled(3, 12)}, load)
    raywl.load_into(model, write({"w": W}))
    assert torch.equal(model.first, W * 2)
    assert torch.equal(model.part, W[1:] * 2)
    assert torch.equal(model.second, W)
    assert torch.equal(model.weight[1:], W[1:])
    assert not model.weight[0].any()


def test_a_weight_that_was_written_to_is_converted_as_it_is(write):
    def load(model, weights):
        for _, w in weights:
            w.add_(1)
            model.p.copy_(w.to(torch.bfloat16).t().contiguous())

    model = Model({"p": filled(12, 4)}, load)
    raywl.load_into(model, write({"w": W}))
    assert torch.equal(model.p, (W + 1).to(torch.bfloat16).t().float())


def test_a_saved_plan_has_conversions(write, tmp_path):
    """Replayed without loaders, with the same roundings."""

    def load(model, weights):
        for _, w in weights:
            model.p.copy_(w.to(torch.bfloat16).t().contiguous().view(-1)[8:24].view(2, 8))

    folder = write({"w": W})
    first = Model({"p": filled(2, 8)}, load)
    plan = raywl.load_into(first, folder).plan
    plan.save(tmp_path / "plan.json")
    again = raywl.LoadPlan.load(tmp_path / "plan.json")
    assert again == plan
    assert "float32 to bfloat16 to float32" in plan.explain()
    model = Model({"p": filled(2, 8)}, lambda *_: pytest.fail("the loader ran"))
    raywl.load_into(model, folder, plan=again)
    assert torch.equal(model.p, first.p)
    assert torch.equal(model.p, W.to(torch.bfloat16).float().t().reshape(-1)[8:24].view(2, 8))


@pytest.mark.filterwarnings("ignore:Casting complex")
def test_complex_numbers_lose_their_imaginary_part(write):
    weight = torch.complex(W, W + 1)

    def load(model, weights):
        for _, w in weights:
            model.p.copy_(w.to(torch.float32))
            model.q.copy_(w.t().contiguous())

    model = Model({"p": filled(4, 12), "q": torch.zeros(12, 4, dtype=torch.complex64)}, load)
    raywl.load_into(model, write({"w": weight}))
    assert torch.equal(model.p, W)
    assert torch.equal(model.q, weight.t())


def test_errors_are_torchs(write):
    for wrong in (lambda w: w.to("nonsense"), lambda w: w.type(3), lambda w: w.contiguous(memory_format=1)):

        def load(model, weights, wrong=wrong):
            for _, w in weights:
                wrong(w)

        with pytest.raises((RuntimeError, TypeError)) as eager:
            wrong(W.clone())
        with pytest.raises(eager.type):
            raywl.load_into(Model({"p": filled(1)}, load), write({"w": W}), strict=False)


# Weights without memory: what torch does with them when nobody asks Python.


def converted(model, weights):
    """A conversion in any case, and the weight itself where files aren't mapped."""
    return next(w for _, w in weights).t().contiguous()


USES = {
    "arithmetic": lambda w: w + 1,
    "reduction": lambda w: w.max().view(1),
    "views": lambda w: w[1:3].t() * 1,
    "copy": lambda w: torch.zeros(12, 4).copy_(w),
    "converted again": lambda w: w.to(torch.float64),
    "stacked": lambda w: torch.stack([w, w]),
    "in place": lambda w: w.mul_(3),
}


@pytest.mark.parametrize("case", USES)
def test_code_that_passes_python_by_gets_the_values(write, case):
    """As a C++ extension does: torch's own functions with everything of Python's switched off."""
    got = []

    def load(model, weights):
        w = converted(model, weights)
        assert type(w) is UnmappedWeight
        with torch._C.DisableTorchFunction():
            got.append(torch.clone(USES[case](w)))

    raywl.load_into(Model({"p": filled(1)}, load), write({"w": W}), strict=False)
    assert torch.equal(torch.Tensor(got[0]).as_subclass(torch.Tensor), USES[case](W.t().contiguous()).float())


def test_an_address_is_an_error_or_that_of_the_values(write):
    """Never that of memory that isn't there."""

    def load(model, weights):
        w = converted(model, weights)
        with torch._C.DisableTorchFunction(), pytest.raises(RuntimeError, match="data pointer"):
            w.data_ptr()
        array = w.numpy()
        array[0] = 7
        model.p.copy_(w)

    model = Model({"p": filled(12, 4)}, load)
    raywl.load_into(model, write({"w": W}), strict=False)
    assert torch.equal(model.p[1:], W.t()[1:])
    assert (model.p[0] == 7).all()


def test_a_parameter_that_another_thread_lets_stand_for_a_weight(write):
    """Nobody is asked then; the parameter is read at the end."""

    def load(model, weights):
        loaded = dict(weights)

        def assign():
            model.p.data = loaded["a"].to(torch.float64)
            model.q.data = loaded["b"][1:]
            model.r = nn.Parameter(loaded["b"].t().contiguous())

        thread = threading.Thread(target=assign)
        thread.start()
        thread.join()

    model = Model({"p": filled(4, 12), "q": filled(3, 12), "r": filled(12, 4)}, load)
    raywl.load_into(model, write({"a": W, "b": W + 1}), strict=False)
    assert torch.equal(model.p, W.double())
    assert torch.equal(model.q, W[1:] + 1)
    assert torch.equal(model.r, W.t() + 1)
    for parameter in model.parameters():
        assert parameter.data_ptr() > 1 << 20
        assert not isinstance(parameter, LazyWeight)
        parameter.data.mul_(2)
    assert not mappings()


def test_nothing_is_mapped_on_a_network_file_system(write, tmp_path, monkeypatch):
    """Neither while loaders run nor while they use what they were given."""
    on_network(tmp_path, monkeypatch)
    seen = []

    def load(model, weights):
        for _, w in weights:
            seen.append(mappings())
            assert type(w) is UnmappedWeight
            model.p.copy_(w)
            w.sum()
            seen.append(mappings())

    raywl.load_into(Model({"p": filled(4, 12)}, load), write({"w": W}))
    assert seen == [[], []]


@pytest.mark.parametrize("use", [torch.sum, lambda w: w.t().contiguous().max(), lambda w: w.numpy().sum()])
def test_a_file_that_was_cut_is_an_error_also_for_uses(write, use):
    """Whatever asks for values gets them by `preadv`, and so an error, never a signal."""
    folder = write({"w": torch.zeros(1 << 16)})

    def load(model, weights):
        for _, w in weights:
            with open(folder / "model-00001-of-00001.safetensors", "r+b") as file:
                file.truncate(4096)
            use(w.view(256, 256))

    with pytest.raises(CorruptFileError, match="ends at byte 4096"):
        raywl.load_into(Model({"p": filled(1)}, load), folder, strict=False)
