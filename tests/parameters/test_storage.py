"""Views over storages, and copies that touch what they read."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raywl.parameters import copy_weight_, storage, storage_view


def test_a_view_is_over_the_storage_itself():
    base = torch.arange(12, dtype=torch.int32)
    view = storage_view(base.untyped_storage(), 2, (2, 3), (5, 1), torch.int32)
    assert view.tolist() == [[2, 3, 4], [7, 8, 9]]
    view[0, 0] = 99
    assert base[2] == 99
    assert view.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()


@pytest.mark.parametrize("dtype", [torch.float8_e8m0fnu, torch.float4_e2m1fn_x2, torch.float64], ids=str)
def test_the_offset_counts_elements_of_the_view(dtype):
    raw = torch.arange(32, dtype=torch.uint8)
    view = storage_view(raw.untyped_storage(), 1, (2,), (1,), dtype)
    size = dtype.itemsize
    assert view.data_ptr() == raw.data_ptr() + size
    assert view.view(torch.uint8).tolist() == list(range(size, 3 * size))


def test_empty_and_meta_views():
    assert storage_view(torch.UntypedStorage(0), 0, (0, 3), (3, 1), torch.float32).shape == (0, 3)
    meta = torch.empty(4, device="meta").untyped_storage()
    view = storage_view(meta, 1, (3,), (1,), torch.float32)
    assert view.is_meta
    with pytest.raises(ValueError, match="need 20 bytes, the storage has 16"):
        storage_view(meta, 1, (4,), (1,), torch.float32)


@pytest.mark.parametrize(
    ("offset", "shape", "stride", "message"),
    [
        (0, (5,), (1,), "need 20 bytes, the storage has 16"),
        (4, (1,), (1,), "need 20 bytes"),
        (5, (0,), (1,), "need 20 bytes"),
        (0, (2, 2), (3, 1), "need 20 bytes"),
        (-1, (1,), (1,), "can't be negative"),
        (3, (2,), (-1,), "can't be negative"),
        (0, (-1,), (1,), "can't be negative"),
        (0, (2, 2), (1,), "has 2 dims"),
    ],
)
def test_what_lies_outside_is_refused_and_the_storage_does_not_grow(offset, shape, stride, message):
    """`set_` by itself makes a storage larger for a view that doesn't fit."""
    base = torch.zeros(4)
    with pytest.raises(ValueError, match=message):
        storage_view(base.untyped_storage(), offset, shape, stride, torch.float32)
    assert base.untyped_storage().nbytes() == 16


@settings(max_examples=200, deadline=None)
@given(
    num_bytes=st.integers(0, 40),
    offset=st.integers(0, 6),
    dims=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 5)), max_size=3),
    dtype=st.sampled_from([torch.uint8, torch.int16, torch.float32]),
)
def test_law_accepted_exactly_when_every_element_lies_inside(num_bytes, offset, dims, dtype):
    shape, stride = tuple(length for length, _ in dims), tuple(step for _, step in dims)
    indices = (
        torch.cartesian_prod(*map(torch.arange, shape)).view(-1, len(shape)) if dims else torch.zeros(1, 0)
    )
    places = [offset + sum(int(i) * s for i, s in zip(row, stride, strict=True)) for row in indices]
    needed = (max(places) + 1 if places else offset) * dtype.itemsize
    owner = torch.UntypedStorage(num_bytes)
    if needed <= num_bytes:
        view = storage_view(owner, offset, shape, stride, dtype)
        assert (tuple(view.shape), view.stride(), view.storage_offset()) == (shape, stride, offset)
    else:
        with pytest.raises(ValueError, match=f"need {needed} bytes"):
            storage_view(owner, offset, shape, stride, dtype)
    assert owner.nbytes() == num_bytes


def test_copy_converts_and_spreads_as_torch_does():
    dst = torch.zeros(2, 3, dtype=torch.bfloat16)
    copy_weight_(dst, torch.tensor([1.0, 2.0, 3.0]))
    assert dst.tolist() == [[1, 2, 3], [1, 2, 3]]


class OnAGpu:
    """Stands where a tensor on a GPU would; there is none here, nor an integrated one anywhere near."""

    device, dtype = torch.device("cuda", 0), torch.float32

    def __init__(self):
        self.copied = []

    def copy_(self, src):
        self.copied.append(src)


@pytest.mark.parametrize("is_integrated", [True, False])
def test_only_an_integrated_gpu_has_the_source_touched(monkeypatch, is_integrated):
    touched = []
    monkeypatch.setattr(storage, "touch_pages", touched.append)
    properties = type("Properties", (), {"is_integrated": is_integrated})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    whole = torch.zeros(4, 4)
    untouched = [whole.t(), whole.half(), torch.zeros(1), torch.empty(0), torch.empty(4, device="meta")]
    dst = OnAGpu()
    for src in [whole, *untouched]:
        copy_weight_(dst, src)
    assert touched == ([whole] if is_integrated else [])
    assert len(dst.copied) == 6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float4_e2m1fn_x2, torch.bool], ids=str)
def test_touching_reads_every_page_and_changes_none(dtype):
    raw = torch.randint(2, (40960,), dtype=torch.uint8)
    before = raw.clone()
    storage.touch_pages(raw.view(dtype)[1:])
    assert torch.equal(raw, before)
