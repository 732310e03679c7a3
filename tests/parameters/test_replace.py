"""`replace_parameter`: which memory a parameter has after it got new contents, and what stays on it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import Module, Parameter

from raywl.parameters import direct_reload, replace_parameter, storage_view

FP4, FP8, E8M0 = torch.float4_e2m1fn_x2, torch.float8_e4m3fn, torch.float8_e8m0fnu


def layer_with(tensor, **attributes):
    """A layer whose `weight` is a parameter over `tensor`."""
    layer = Module()
    layer.weight = Parameter(tensor, requires_grad=False)
    for name, value in attributes.items():
        setattr(layer.weight, name, value)
    return layer


def address(tensor):
    return tensor.untyped_storage().data_ptr()


def bits(tensor):
    """The elements' bytes, in the order of their indices."""
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor).view(-1).view(torch.uint8).tolist()


def random_bytes(*shape):
    return torch.randint(256, shape, dtype=torch.uint8)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int8, torch.bool, FP8, E8M0, FP4], ids=str
)
def test_a_tensor_like_the_old_one_is_copied_in(dtype):
    values = (random_bytes(4, 8) & 1).view(dtype)
    layer = layer_with(torch.zeros_like(values.view(torch.uint8)).view(dtype))
    old, pointer = layer.weight, layer.weight.data_ptr()
    replace_parameter(layer, "weight", values)
    assert layer.weight is old
    assert layer.weight.data_ptr() == pointer
    assert bits(layer.weight) == bits(values)
    assert address(values) != pointer


def test_a_transposed_parameter_keeps_its_strides():
    layer = layer_with(torch.zeros(3, 5).t())
    pointer = layer.weight.data_ptr()
    new = torch.arange(15.0).view(3, 5).t()
    replace_parameter(layer, "weight", new)
    assert layer.weight.data_ptr() == pointer
    assert layer.weight.stride() == (1, 5)
    assert torch.equal(layer.weight, new)


@pytest.mark.parametrize(
    "new",
    [
        torch.arange(6.0).view(2, 3),
        torch.arange(6.0).view(3, 2).t(),
        torch.arange(8.0).view(4, 2),
        torch.arange(4, dtype=torch.float64),
        torch.arange(32, dtype=torch.uint8).view(FP8),
        torch.arange(32, dtype=torch.uint8).view(FP4),
        torch.arange(3.0).expand(2, 3),
        torch.arange(8.0)[::2],
        torch.tensor(7.0),
        torch.empty(0, 4),
    ],
    ids=lambda t: f"{t.dtype}-{list(t.shape)}-{list(t.stride())}",
)
def test_what_fits_goes_into_the_old_bytes_under_a_new_view(new):
    layer = layer_with(torch.full((2, 4), -1.0))
    old, pointer, storage = layer.weight, layer.weight.data_ptr(), address(layer.weight)
    replace_parameter(layer, "weight", new)
    assert layer.weight is old
    assert (layer.weight.shape, layer.weight.stride(), layer.weight.dtype) == (
        new.shape,
        new.stride(),
        new.dtype,
    )
    assert bits(layer.weight) == bits(new)
    assert address(layer.weight) == storage
    if new.numel():
        assert layer.weight.data_ptr() == pointer


def test_a_conjugate_view_arrives_with_its_values():
    """Its storage holds the values that aren't conjugated."""
    layer = layer_with(torch.zeros(4, dtype=torch.complex64))
    pointer = layer.weight.data_ptr()
    replace_parameter(layer, "weight", torch.tensor([1 + 2j, 3 - 1j]).conj())
    assert layer.weight.data_ptr() == pointer
    assert layer.weight.tolist() == [1 - 2j, 3 + 1j]


def test_a_parameter_in_the_middle_of_a_storage_stays_within_its_bytes():
    """Two parameters share one storage: the neighbour's bytes are not the old one's to give."""
    both = torch.arange(8.0)
    layer = layer_with(both[2:6])
    neighbours = both[:2].clone(), both[6:].clone()
    replace_parameter(layer, "weight", torch.full((2, 2), 9.0))
    assert layer.weight.storage_offset() == 2
    assert address(layer.weight) == address(both)
    assert both[2:6].tolist() == [9.0] * 4
    replace_parameter(layer, "weight", torch.zeros(5))
    assert address(layer.weight) != address(both)
    assert torch.equal(both[:2], neighbours[0])
    assert torch.equal(both[6:], neighbours[1])


def test_a_parameter_with_gaps_is_no_room():
    """The bytes between its elements may be another's."""
    both = torch.arange(8.0)
    layer = layer_with(both[::2])
    replace_parameter(layer, "weight", torch.zeros(2, 2))
    assert address(layer.weight) != address(both)
    assert both.tolist() == list(range(8))


def test_an_unaligned_place_is_no_room():
    base = torch.zeros(33, dtype=torch.uint8)
    layer = layer_with(base[1:33])
    new = torch.ones(4, dtype=torch.float64)
    replace_parameter(layer, "weight", new)
    assert address(layer.weight) == address(new)
    assert not base.any()


def test_memory_that_starts_off_an_element_is_no_room():
    """The offset within the storage is a multiple, the address isn't."""
    raw = bytearray(72)
    base = torch.frombuffer(raw, dtype=torch.uint8)
    base = torch.frombuffer(memoryview(raw)[(1 - base.data_ptr()) % 8 :][:64], dtype=torch.uint8)
    assert base.data_ptr() % 8 == 1
    assert base.storage_offset() == 0
    layer = layer_with(base)
    new = torch.ones(4, dtype=torch.float64)
    replace_parameter(layer, "weight", new)
    assert address(layer.weight) == address(new)


@pytest.mark.parametrize("new", [torch.ones(3, 3), torch.ones(4, dtype=torch.float64)], ids=str)
def test_what_does_not_fit_is_rebound(new):
    layer = layer_with(torch.zeros(7))
    old = layer.weight
    replace_parameter(layer, "weight", new)
    assert layer.weight is old
    assert address(layer.weight) == address(new)


def test_a_view_of_the_old_storage_is_taken_as_it_is():
    layer = layer_with(torch.arange(6.0).view(2, 3))
    old, storage = layer.weight, address(layer.weight)
    replace_parameter(layer, "weight", layer.weight.data.t())
    assert layer.weight is old
    assert address(layer.weight) == storage
    assert layer.weight.tolist() == [[0, 3], [1, 4], [2, 5]]


def test_another_part_of_the_old_storage_is_taken_and_not_copied():
    """Both parts may be read by somebody: neither is written to."""
    base = torch.arange(8.0)
    layer = layer_with(base[:4])
    replace_parameter(layer, "weight", base[4:].view(2, 2))
    assert base.tolist() == list(range(8))
    assert layer.weight.data_ptr() == base[4:].data_ptr()


def test_a_neighbouring_view_of_the_same_storage_is_copied_whole():
    """Source and destination overlap by three elements."""
    base = torch.arange(6.0)
    layer = layer_with(base[:4])
    replace_parameter(layer, "weight", base[1:5])
    assert layer.weight.tolist() == [1, 2, 3, 4]
    assert address(layer.weight) == address(base)


def test_itself_changes_nothing():
    layer = layer_with(torch.arange(3.0), note="kept")
    old, pointer = layer.weight, layer.weight.data_ptr()
    replace_parameter(layer, "weight", layer.weight)
    assert layer.weight is old
    assert (layer.weight.data_ptr(), layer.weight.note) == (pointer, "kept")
    assert layer.weight.tolist() == [0, 1, 2]


def test_an_expanded_parameter_is_rebound():
    """It can't be written to element by element."""
    layer = layer_with(torch.zeros(1).expand(3))
    replace_parameter(layer, "weight", torch.full((1,), 7.0).expand(3))
    assert layer.weight.tolist() == [7, 7, 7]


def test_tied_parameters_stay_one_object():
    layer, other = layer_with(torch.zeros(4)), Module()
    other.tied = layer.weight
    for new in (torch.ones(4), torch.ones(2, 2), torch.ones(100)):
        replace_parameter(layer, "weight", new)
        assert other.tied is layer.weight
        assert torch.equal(other.tied, new)


def test_none_sets_none_and_keeps_the_name():
    layer = layer_with(torch.zeros(1))
    layer.plain = torch.zeros(1)
    for name in ("weight", "plain", "fresh"):
        replace_parameter(layer, name, None)
        assert getattr(layer, name) is None
    assert "weight" in layer._parameters
    replace_parameter(layer, "weight", torch.ones(2))
    assert layer.weight.tolist() == [1, 1]


def test_a_first_parameter_is_made():
    layer = Module()
    layer.bias = None
    values = torch.ones(2)
    for name in ("weight", "bias"):
        replace_parameter(layer, name, values)
        made = layer._parameters[name]
        assert isinstance(made, Parameter)
        assert not made.requires_grad
        assert address(made) == address(values)


def test_what_is_no_parameter_is_refused():
    layer = Module()
    layer.register_buffer("mean", torch.zeros(2))
    with pytest.raises(ValueError, match=r"Module\.mean is there and no parameter"):
        replace_parameter(layer, "mean", torch.ones(2))
    assert layer.mean.tolist() == [0, 0]


def test_meta_becomes_a_new_parameter_with_all_that_was_set_on_the_old_one():
    loader, other = object(), object()
    layer = layer_with(torch.empty(2, device="meta"), weight_loader=loader, output_dim=0)
    layer.second = layer.weight
    old = layer.weight
    new = torch.ones(3)
    new.weight_loader, new.scale = other, 2
    replace_parameter(layer, "weight", new)
    assert layer.weight is not old
    assert layer.second is layer.weight
    assert (layer.weight.weight_loader, layer.weight.output_dim, layer.weight.scale) == (loader, 0, 2)
    assert address(layer.weight) == address(new)


def test_meta_stays_meta_as_the_same_object():
    layer = layer_with(torch.empty(2, device="meta"))
    old = layer.weight
    for shape in ((2,), (4, 4)):
        replace_parameter(layer, "weight", torch.empty(shape, device="meta"))
        assert layer.weight is old
        assert tuple(old.shape) == shape


def test_memory_is_not_given_up_for_meta():
    layer = layer_with(torch.ones(2))
    with pytest.raises(ValueError, match=r"Module\.weight .* meta"):
        replace_parameter(layer, "weight", torch.empty(2, device="meta"))
    assert layer.weight.tolist() == [1, 1]


def test_a_source_of_requantization_gets_a_new_parameter():
    loader = object()
    layer = layer_with(torch.zeros(4), weight_loader=loader, requantization_source=True)
    old, new = layer.weight, torch.ones(4)
    replace_parameter(layer, "weight", new)
    assert layer.weight is not old
    assert old.tolist() == [0] * 4
    assert layer.weight.weight_loader is loader
    kept = layer.weight
    replace_parameter(layer, "weight", torch.full((4,), 2.0))
    assert layer.weight is kept


@pytest.mark.parametrize(
    "new", [torch.ones(4), torch.ones(2, 2), torch.ones(100)], ids=["copy", "view", "rebind"]
)
def test_attributes_go_over_and_loaders_stay(new):
    loader = object()
    layer = layer_with(torch.zeros(4), weight_loader=loader, packing="old", group=32)
    new = Parameter(new.clone(), requires_grad=False)
    new.weight_loader = new._weight_loader = new._ckpt = object()
    new.packing, new.packed = "new", True
    replace_parameter(layer, "weight", new)
    assert vars(layer.weight) == {"weight_loader": loader, "packing": "new", "group": 32, "packed": True}


def test_a_loader_is_not_taken_where_there_was_none():
    layer = Module()
    new = Parameter(torch.ones(1))
    new.weight_loader, new.note = object(), 1
    replace_parameter(layer, "weight", new)
    assert vars(layer.weight) == {"note": 1}


def test_integers_take_the_place_of_floats_that_required_grad():
    layer = Module()
    layer.weight = Parameter(torch.zeros(4))
    pointer = layer.weight.data_ptr()
    replace_parameter(layer, "weight", torch.arange(4, dtype=torch.int8))
    assert layer.weight.tolist() == [0, 1, 2, 3]
    assert layer.weight.data_ptr() == pointer
    assert not layer.weight.requires_grad


def test_a_direct_reload_uses_the_whole_old_storage():
    """bf16 weights that became fp8 in place, and come back as bf16."""
    layer = layer_with(torch.zeros(4, 4, dtype=torch.bfloat16))
    pointer = layer.weight.data_ptr()
    replace_parameter(layer, "weight", torch.zeros(4, 4, dtype=FP8))
    again = torch.rand(4, 4).bfloat16()
    with direct_reload():
        replace_parameter(layer, "weight", again)
    assert layer.weight.data_ptr() == pointer
    assert torch.equal(layer.weight, again)
    replace_parameter(layer, "weight", torch.zeros(4, 4, dtype=FP8))
    replace_parameter(layer, "weight", again)
    assert address(layer.weight) == address(again)


def test_a_direct_reload_of_a_view_may_start_at_the_storage():
    base = torch.zeros(8)
    layer = layer_with(base[6:8])
    with direct_reload():
        replace_parameter(layer, "weight", torch.ones(8))
        assert address(layer.weight) == address(base)
        assert base.tolist() == [1] * 8
        new = torch.ones(9)
        replace_parameter(layer, "weight", new)
    assert address(layer.weight) == address(new)


def test_reloads_keep_addresses_through_conversion():
    """Checkpoint format in, runtime format out, twice: both views lie at one address (C36)."""
    layer = layer_with(torch.zeros(6, 4))
    pointers = set()
    for value in (1.0, 2.0, 3.0):
        with direct_reload():
            replace_parameter(layer, "weight", torch.full((6, 4), value))
        pointers.add(layer.weight.data_ptr())
        replace_parameter(layer, "weight", torch.full((4, 6), value).half())
        pointers.add(layer.weight.data_ptr())
        assert layer.weight.unique().tolist() == [value]
    assert len(pointers) == 1


DTYPES = [torch.uint8, torch.float16, torch.float32, torch.float64, FP8, FP4]
shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)


@st.composite
def tensors(draw):
    """Slices, transposed or expanded, of random memory, at any offset."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(shapes)
    order = draw(st.permutations(range(len(shape))))
    gap, step = draw(st.integers(1, 2)), 1
    strides = [0] * len(shape)
    for dim in order:
        strides[dim] = step * (gap if draw(st.booleans()) else 1)
        step = strides[dim] * max(1, shape[dim])
    offset = draw(st.integers(0, 3))
    raw = torch.randint(256, ((offset + step + 4) * dtype.itemsize,), dtype=torch.uint8)
    return storage_view(raw.untyped_storage(), offset, shape, strides, dtype)


@settings(max_examples=300, deadline=None)
@given(old=tensors(), new=tensors(), direct=st.booleans())
def test_law_values_arrive_and_no_other_byte_of_the_old_storage_changes(old, new, direct):
    """Whatever the two are: the new bits are there, within the old span unless told otherwise."""
    layer = layer_with(old)
    parameter, before = layer.weight, bits(storage_bytes(old))
    want = bits(new)
    start, end = span(old)
    replace = lambda: replace_parameter(layer, "weight", new)  # noqa: E731
    if direct:
        with direct_reload():
            replace()
    else:
        replace()
    assert layer.weight is parameter
    assert (layer.weight.shape, layer.weight.dtype) == (new.shape, new.dtype)
    assert layer.weight.stride() == new.stride()
    assert bits(layer.weight) == want
    kept = address(layer.weight) == address(old)
    if not direct or not kept:
        after = bits(storage_bytes(old))
        assert after[:start] == before[:start]
        assert after[end:] == before[end:]
        if not kept:
            assert after == before


def storage_bytes(tensor):
    return storage_view(tensor.untyped_storage(), 0, (tensor.untyped_storage().nbytes(),), (1,), torch.uint8)


def span(tensor):
    first = tensor.storage_offset() * tensor.itemsize
    if not tensor.numel():
        return first, first
    last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first, first + (last + 1) * tensor.itemsize
