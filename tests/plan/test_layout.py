"""A view of a tensor that was laid out anew is found in the file, element by element."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raywl.plan.layout import Layout, Located


def positions(located: Located) -> list[int]:
    """Bytes of all elements, in the order of the view."""
    found = [located.start]
    for dims in located.dims:
        for size, stride in dims:
            found = [byte + index * stride for byte in found for index in range(size)]
    return found


@st.composite
def views(draw, tensor: torch.Tensor) -> torch.Tensor:
    """Some chain of views of a tensor."""
    for _ in range(draw(st.integers(0, 4))):
        if not tensor.numel():
            break
        kind = draw(st.sampled_from(["permute", "slice", "flatten", "unflatten", "select", "expand"]))
        if kind == "permute":
            tensor = tensor.permute(draw(st.permutations(range(tensor.dim()))))
        elif kind == "slice" and tensor.dim():
            dim = draw(st.integers(0, tensor.dim() - 1))
            start = draw(st.integers(0, tensor.shape[dim] - 1))
            stop = draw(st.integers(start + 1, tensor.shape[dim]))
            index = [slice(None)] * tensor.dim()
            index[dim] = slice(start, stop, draw(st.integers(1, 3)))
            tensor = tensor[tuple(index)]
        elif kind == "flatten":
            try:
                tensor = tensor.view(-1)
            except RuntimeError:
                continue
        elif kind == "unflatten" and tensor.dim():
            dim = draw(st.integers(0, tensor.dim() - 1))
            parts = [d for d in range(1, tensor.shape[dim] + 1) if tensor.shape[dim] % d == 0]
            tensor = tensor.unflatten(dim, (draw(st.sampled_from(parts)), -1))
        elif kind == "select" and tensor.dim():
            dim = draw(st.integers(0, tensor.dim() - 1))
            tensor = tensor.select(dim, draw(st.integers(0, tensor.shape[dim] - 1)))
        elif kind == "expand":
            tensor = tensor.unsqueeze(0).expand(2, *tensor.shape)
    return tensor


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_a_view_is_where_its_elements_are(data):
    """For views of views that were made contiguous: each element lies where the layout says."""
    shape = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    whole = torch.arange(torch.tensor(shape).prod().item()).view(shape)
    origin = data.draw(views(whole))
    new = origin.contiguous() if data.draw(st.booleans()) else origin.clone()
    view = data.draw(views(new))
    if not view.numel():
        return
    base = Located(
        100 + 8 * origin.storage_offset(),
        tuple(((size, 8 * stride),) for size, stride in zip(origin.shape, origin.stride(), strict=True)),
    )
    if new.stride() != origin.stride() and not new.is_contiguous():
        return
    located = Layout(base, new.stride()).locate(view.storage_offset(), view.shape, view.stride())
    if located is None:
        return
    assert [len(dims) > 0 for dims in located.dims] == [True] * view.dim()
    assert positions(located) == [100 + 8 * value for value in view.flatten().tolist()]


def test_what_loaders_do_is_found():
    """The transposed weight, flattened and cut; blocks taken out of it; heads interleaved."""
    whole = torch.arange(24).view(4, 6)
    base = Located(0, (((6, 8),), ((4, 48),)))
    new = whole.t().contiguous()
    layout = Layout(base, new.stride())
    for view in (
        new,
        new.view(-1),
        new.view(-1)[4:20],
        new.view(3, 8),
        new.view(3, 2, 4)[:, 1],
        new[1::2, ::2],
        new.view(6, 2, 2).transpose(1, 2),
        new.view(-1)[3],
    ):
        located = layout.locate(view.storage_offset(), view.shape, view.stride())
        assert located is not None
        assert positions(located) == [8 * value for value in view.flatten().tolist()]


def test_what_is_irregular_is_not_found():
    new = torch.arange(24).view(4, 6).t().contiguous()
    layout = Layout(Located(0, (((6, 8),), ((4, 48),))), new.stride())
    for view in (new.view(-1)[1:7], new.view(-1)[::3], new.view(-1)[2:].as_strided((3,), (5,))):
        assert layout.locate(view.storage_offset(), view.shape, view.stride()) is None


def test_dims_keep_their_sizes():
    """The parts of each dim multiply up to it."""
    new = torch.arange(60).view(3, 4, 5).permute(2, 0, 1).contiguous()
    layout = Layout(Located(0, (((5, 1),), ((3, 20),), ((4, 5),))), new.stride())
    for shape in ((60,), (5, 12), (15, 4), (5, 3, 4), (1, 60)):
        view = new.view(shape)
        located = layout.locate(0, view.shape, view.stride())
        assert located is not None
        sizes = [list(itertools.accumulate((n for n, _ in dims), int.__mul__))[-1] for dims in located.dims]
        assert tuple(sizes) == shape
