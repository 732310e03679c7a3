"""Lazy weights behave as the tensors that they stand for, for random chains of views."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import raywl
from raywl.loading.lazy import LazyWeight

from .conftest import Model, on_network

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.uint8, torch.int16, torch.float8_e4m3fn,
          torch.bool, torch.complex64]  # fmt: skip
law = settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])


def values(shape, dtype, seed=0):
    """Different bytes everywhere, and none that is no number."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(0, 100, shape, generator=generator)
    if dtype == torch.complex64:
        return torch.complex(numbers.float(), numbers.float() + 0.5)
    return numbers.to(dtype) if dtype != torch.bool else numbers % 2 == 0


@st.composite
def slices(draw, size):
    start = draw(st.integers(-size - 1, size + 1) | st.none())
    stop = draw(st.integers(-size - 1, size + 1) | st.none())
    return slice(start, stop, draw(st.sampled_from([None, 1, 1, 2, 3])))


@st.composite
def indexes(draw, shape):
    """A basic index: numbers, slices with steps, `...` and `None`."""
    items, seen_ellipsis = [], False
    dims = list(shape)
    while dims:
        kind = draw(st.sampled_from(["slice", "slice", "int", "none", "ellipsis", "stop"]))
        if kind == "stop":
            break
        if kind == "none":
            if len(items) > 4:
                break
            items.append(None)
            continue
        if kind == "ellipsis":
            if not seen_ellipsis:
                items.append(...)
                seen_ellipsis = True
                dims = dims[len(dims) // 2 :]
            break
        size = dims.pop(0)
        if kind == "int" and size and not seen_ellipsis:
            items.append(draw(st.integers(-size, size - 1)))
        else:
            items.append(draw(slices(size)))
    return tuple(items) if len(items) != 1 or draw(st.booleans()) else items[0]


def _factors(number, draw):
    parts = []
    while number > 1 and len(parts) < 3:
        options = [d for d in range(1, number + 1) if number % d == 0]
        parts.append(draw(st.sampled_from(options)))
        number //= parts[-1]
    return [*parts, number]


def _dims(draw, tensor):
    return draw(st.integers(-tensor.dim(), tensor.dim() - 1))


def _names(tensor):
    """The operations that a tensor like this one has."""
    names = ["index", "unsqueeze", "contiguous", "detach", "data", "to_same", "squeeze", "view_as", "permute",
             "reshape", "flatten", "to", "clone"]  # fmt: skip
    if tensor.dim() == 2:
        names += ["t", "T", "mT"]
    if tensor.dtype == torch.complex64:
        names += ["conj", "real", "imag", "mH", "adjoint"] if tensor.dim() == 2 else ["conj", "real", "imag"]
    if tensor.dtype.itemsize > 1 and tensor.dim() and tensor.stride(-1) == 1 and not tensor.is_conj():
        names.append("view_dtype")
    if tensor.dim():
        names += ["narrow", "transpose", "movedim", "squeeze_dim", "chunk", "split", "tensor_split"]
        if tensor.numel():
            names += ["unflatten", "select", "unbind", "split_sizes"]
        if tensor.shape[0] == 1:
            names.append("expand")
    return names


@st.composite
def operations(draw, tensor):
    """A function that makes a view (or a few more things loaders do) of a tensor like this one."""
    name = draw(st.sampled_from(_names(tensor)))
    args = ()
    if name == "index":
        args = (draw(indexes(tensor.shape)),)
    elif name == "unsqueeze":
        args = (draw(st.integers(-tensor.dim() - 1, tensor.dim())),)
    elif name == "permute":
        args = tuple(draw(st.permutations(range(tensor.dim()))))
    elif name == "reshape":
        args = tuple(_factors(tensor.numel(), draw)) if tensor.numel() else (0, 3)
    elif name == "to":
        args = (draw(st.sampled_from([torch.float32, torch.float64])),)
    elif name == "view_dtype":
        args = (draw(st.sampled_from([torch.uint8, torch.int16])),)
    elif name == "expand":
        args = (3, *tensor.shape[1:])
    elif name in ("squeeze_dim", "unbind"):
        args = (_dims(draw, tensor),)
    elif name in ("transpose", "movedim"):
        args = (_dims(draw, tensor), _dims(draw, tensor))
    elif name in ("chunk", "tensor_split"):
        args = (draw(st.integers(1, 4)), _dims(draw, tensor))
    elif name in ("narrow", "split", "unflatten", "select", "split_sizes"):
        dim = _dims(draw, tensor)
        size = tensor.shape[dim]
        start = draw(st.integers(0, size))
        args = {
            "narrow": lambda: (dim, start, draw(st.integers(0, size - start))),
            "split": lambda: (draw(st.integers(1, max(1, size))), dim),
            "unflatten": lambda: (dim, tuple(_factors(size, draw))),
            "select": lambda: (dim, min(start, size - 1)),
            "split_sizes": lambda: (start, size - start, dim),
        }[name]()
    return name, args, draw(st.integers(0, 3))


def apply(tensor, operation):
    name, args, which = operation
    if name == "index":
        return tensor[args[0]]
    if name in ("data", "mT", "T", "mH", "real", "imag"):
        return getattr(tensor, name)
    if name == "view_as":
        return tensor.view_as(tensor)
    if name == "to_same":
        return tensor.to(tensor.dtype)
    if name == "view_dtype":
        return tensor.view(args[0])
    if name == "squeeze_dim":
        return tensor.squeeze(*args)
    if name == "split_sizes":
        parts = tensor.split(list(args[:2]), dim=args[2])
        return parts[which % len(parts)]
    result = getattr(tensor, name)(*args)
    if isinstance(result, tuple | list):
        return result[which % len(result)]
    return result


@st.composite
def destinations(draw, shape, dtype):
    """Memory of a parameter, and a function from it to a view of `shape`."""
    kind = draw(st.sampled_from(["plain", "plain", "strided", "transposed", "interleaved", "inside"]))
    if kind == "transposed" and len(shape) >= 2:
        return (*shape[:-2], shape[-1], shape[-2]), lambda p: p.transpose(-1, -2), dtype
    if kind == "interleaved" and shape:
        first = draw(st.integers(0, 1))
        return (2 * shape[0] + first, *shape[1:]), lambda p: p[first::2][: shape[0]], dtype
    if kind == "strided" and shape:
        return (*shape[:-1], shape[-1] * 3), lambda p: p[..., 1::3], dtype
    if kind == "inside":
        sizes = tuple(size + 2 for size in shape)
        return sizes, lambda p: p[tuple(slice(1, 1 + size) for size in shape)], dtype
    return shape, lambda p: p, dtype


@pytest.mark.filterwarnings("ignore:1 tensors")
@law
@given(
    st.lists(st.integers(0, 6), max_size=4).map(tuple),
    st.sampled_from(DTYPES),
    st.integers(0, 3),
    st.data(),
)
def test_chains_of_views_are_those_of_the_tensor(tmp_path, shape, dtype, before, data):
    """Shapes, strides, values; and what a parameter holds after a copy."""
    whole = values(shape, dtype)
    # Something before it, so that elements may lie at any byte.
    save_file({"a": torch.zeros(before, dtype=torch.uint8), "w": whole}, tmp_path / "model.safetensors")
    chain, eager = [], whole.clone()
    for _ in range(data.draw(st.integers(0, 5))):
        operation = data.draw(operations(eager))
        try:
            eager = apply(eager, operation)
        except (RuntimeError, NotImplementedError, TypeError):
            continue
        chain.append(operation)
    wide = [eager.dtype]
    if eager.dtype not in (torch.complex64, torch.bool, torch.uint8, torch.int16):
        wide += [torch.float32, torch.bfloat16]
    place, view_of, wanted = data.draw(destinations(tuple(eager.shape), data.draw(st.sampled_from(wide))))
    by = data.draw(st.sampled_from(["copy_", "setitem", "foreach", "add_", "values"]))
    start = values(place, torch.uint8, seed=1).to(wanted)

    def load(model, weights):
        lazy = dict(weights)["w"]
        for operation in chain:
            lazy = apply(lazy, operation)
        assert lazy.shape == eager.shape
        assert lazy.dtype == eager.dtype
        if not isinstance(lazy, LazyWeight):
            assert type(lazy) is torch.Tensor
        elif lazy.numel() > 1:
            assert lazy.stride() == eager.stride()
        put(model.p, lazy)

    def put(parameter, tensor):
        view = view_of(parameter.data)
        if by == "copy_":
            view.copy_(tensor)
        elif by == "setitem":
            view[...] = tensor
        elif by == "foreach":
            torch._foreach_copy_([view], [tensor])
        elif by == "add_" and wanted in (torch.float32, torch.float64) and "float8" not in str(tensor.dtype):
            view.add_(tensor)
        else:
            view.copy_(tensor.clone())

    expected = Model({"p": start.clone()})
    with torch.no_grad():
        put(expected.p, eager)
    model = Model({"p": start.clone()}, load)
    with pytest.MonkeyPatch.context() as patch:
        if data.draw(st.booleans()):
            on_network(tmp_path, patch)
        if data.draw(st.booleans()):
            for limit in ("WINDOW_BYTES", "GAP_BYTES", "SHARED_BYTES"):
                patch.setattr(f"raywl.plan.reads.{limit}", data.draw(st.integers(1, 64)))
        report = raywl.load_into(model, tmp_path, strict=False)
    same = model.p.data.view(torch.uint8) if wanted.itemsize == 1 else model.p.data
    other = expected.p.data.view(torch.uint8) if wanted.itemsize == 1 else expected.p.data
    assert torch.equal(same, other), (chain, by)
    assert report.bytes_read <= 6 * max(whole.nbytes, 1) + 4096 * (len(chain) + 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_views_alone_read_nothing_before_the_end(tmp_path, dtype):
    """All that loaders use to choose a part stays lazy: only the part is read, in one go."""
    whole = values((8, 12), dtype)
    save_file({"w": whole}, tmp_path / "model.safetensors")
    part = whole[2:4]

    def load(model, weights):
        w = dict(weights)["w"]
        w = w.narrow(0, 0, 6).chunk(3, 0)[1].split(2)[0].tensor_split(1)[0]
        w = w.unsqueeze(0).squeeze(0)[...].reshape(4, 6).view(2, 12).flatten().unflatten(0, (2, 12))
        w = w.t().transpose(0, 1).permute(1, 0).movedim(0, 1).contiguous().detach().to(dtype).data
        w = w.unbind(0)
        assert [type(row) for row in w] == [LazyWeight, LazyWeight]
        for row, place in zip(w, model.p, strict=True):
            place.copy_(row)

    model = Model({"p": torch.zeros(2, 12, dtype=dtype)}, load)
    report = raywl.load_into(model, tmp_path)
    assert torch.equal(model.p.view(torch.uint8), part.view(torch.uint8))
    assert report.bytes_read == part.nbytes
    assert report.plan.unplanned == ()
