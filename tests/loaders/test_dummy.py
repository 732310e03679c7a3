"""Dummy weights: which kind gets what, the same everywhere, in bounded memory."""

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import Parameter

from raywl.loaders import dummy
from raywl.loaders.dummy import initialize_dummy_weights, initialize_single_dummy_weight
from raywl.loaders.sinks import load_attention_sink, make_attention_sink
from raywl.types import ParallelContext

FP4, E8M0 = torch.float4_e2m1fn_x2, torch.float8_e8m0fnu
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
FLOATS_8 = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]
INF = float("inf")


def filled(dtype, shape, **options):
    tensor = torch.full((*shape, dtype.itemsize), 3, dtype=torch.uint8).view(dtype).squeeze(-1)
    initialize_single_dummy_weight(tensor, **options)
    return tensor


def raw(tensor):
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor).view(-1).view(torch.uint8).tolist()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_floats_are_uniform_around_zero(dtype):
    values = filled(dtype, (4000,)).double()
    assert values.abs().max() <= 1.001e-3
    assert values.min() < -0.9e-3
    assert values.max() > 0.9e-3
    assert abs(values.mean()) < 1e-4


@pytest.mark.parametrize("dtype", FLOATS_8, ids=str)
def test_8_bit_floats_are_uniform_up_to_one(dtype):
    """`uniform_` doesn't exist for them; +-1e-3 would all be rounded to zero."""
    values = filled(dtype, (4000,)).double()
    assert values.isfinite().all()
    assert values.min() < -0.9
    assert 0.9 < values.max() <= 1
    assert abs(values.mean()) < 0.1


def test_limits():
    assert filled(torch.float32, (100,), low=2.0, high=2.0).tolist() == [2.0] * 100
    values = filled(torch.float8_e4m3fn, (1000,), low=10.0, high=20.0).float()
    assert values.min() >= 10
    assert values.max() <= 20
    assert filled(torch.float32, (1000,), low=-1.0).max() <= 1e-3
    assert filled(torch.float32, (1000,), low=-1.0).min() < -0.9


@pytest.mark.parametrize(
    ("dtype", "low", "high"),
    [
        (torch.float32, 1.0, 0.0),
        (torch.float8_e4m3fn, 0.0, 449.0),
        (torch.float16, -1e9, None),
        (torch.float32, 0.5, None),
    ],
)
def test_limits_that_cannot_be_are_refused(dtype, low, high):
    with pytest.raises(ValueError, match="can't draw"):
        filled(dtype, (4,), low=low, high=high)


def test_meta_is_left_alone():
    weight = torch.empty(1 << 40, device="meta")
    weight.dummy_weight_value = 1
    initialize_single_dummy_weight(weight)
    assert weight.is_meta


@pytest.mark.parametrize(
    ("dtype", "value", "byte"),
    [
        (torch.uint8, 127, 127),
        (torch.int32, 0, 0),
        (torch.float8_e4m3fn, 1.0, 0x38),
        (E8M0, 1.0, 127),
        (FP4, 0x22, 0x22),
    ],
    ids=str,
)
def test_a_value_of_its_own_comes_before_the_kinds(dtype, value, byte):
    weight = Parameter(torch.zeros(3, dtype.itemsize, dtype=torch.uint8).view(dtype), requires_grad=False)
    weight.dummy_weight_value = value
    initialize_single_dummy_weight(weight, name="scale")
    assert set(raw(weight)) == {byte}


def test_exponent_bytes_are_one():
    assert filled(E8M0, (5,)).float().tolist() == [1.0] * 5
    assert filled(torch.uint8, (5,), name="l.weight_scale").tolist() == [127] * 5
    assert len(filled(torch.uint8, (500,), name="l.weight").unique()) > 100


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, FP4], ids=str)
def test_bytes_are_random(dtype):
    values = raw(filled(dtype, (5000,)))
    assert set(values) == set(range(256))


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64, torch.uint16], ids=str)
def test_other_integers_are_left_alone(dtype):
    assert set(raw(filled(dtype, (5,)))) == {3}
    flags = torch.tensor([True, False])
    initialize_single_dummy_weight(flags)
    assert flags.tolist() == [True, False]


def test_complex_numbers_are_drawn_in_both_parts():
    values = filled(torch.complex64, (1000,))
    assert 0.9e-3 < values.real.max() <= 1e-3
    assert 0.9e-3 < values.imag.max() <= 1e-3


@pytest.mark.parametrize("dtype", [*FLOATS, *FLOATS_8, torch.int8, FP4], ids=str)
def test_values_depend_on_seed_and_count_and_nothing_else(dtype):
    first = raw(filled(dtype, (6, 4)))
    torch.rand(3)
    assert raw(filled(dtype, (24,), name="other")) == first
    with ParallelContext(tp_rank=1, tp_size=2):
        assert raw(filled(dtype, (2, 3, 4))) == first
    assert raw(filled(dtype, (24,), seed=1)) != first


def test_nothing_is_drawn_from_the_global_generator():
    state = torch.get_rng_state()
    filled(torch.float32, (100,))
    filled(torch.uint8, (100,))
    assert torch.equal(torch.get_rng_state(), state)


@settings(max_examples=60, deadline=None)
@given(
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple),
    data=st.data(),
    chunk=st.integers(1, 40),
    dtype=st.sampled_from([torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.int8, FP4]),
)
def test_law_strides_and_chunks_do_not_matter(shape, data, chunk, dtype):
    """Elements are drawn in the order of their indices; the memory between them stays as it is."""
    order = data.draw(st.permutations(range(len(shape))))
    gap = data.draw(st.integers(1, 2))
    want = raw(filled(dtype, shape))
    size = gap * dtype.itemsize
    base = torch.full((*(shape[dim] for dim in order), size), 3, dtype=torch.uint8)
    strided = base.view(dtype)[..., 0].permute([order.index(dim) for dim in range(len(shape))])
    before = dummy._CHUNK_ELEMENTS
    dummy._CHUNK_ELEMENTS = chunk
    try:
        initialize_single_dummy_weight(strided)
    finally:
        dummy._CHUNK_ELEMENTS = before
    assert raw(strided) == want
    if gap == 2:
        assert set(base[..., dtype.itemsize :].flatten().tolist()) == {3}


def test_sinks_keep_their_padding():
    sink = make_attention_sink(6)
    initialize_single_dummy_weight(sink)
    assert sink.tolist() == [-INF] * 6
    load_attention_sink(sink, torch.ones(4))
    initialize_single_dummy_weight(sink)
    assert sink[4:].tolist() == [-INF] * 2
    assert torch.equal(sink[:4], filled(torch.float32, (6,))[:4])
    plain = Parameter(torch.full((3,), -INF), requires_grad=False)
    initialize_single_dummy_weight(plain)
    assert plain.isfinite().all()


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(4)
        self.one = torch.nn.Linear(4, 4)
        self.two = torch.nn.Linear(4, 4)
        self.two.weight = self.one.weight
        self.packed = Parameter(torch.zeros(300, dtype=torch.uint8), requires_grad=False)
        self.packed_scale = Parameter(torch.zeros(3, dtype=torch.uint8), requires_grad=False)
        self.register_buffer("derived", torch.full((3,), 5.0), persistent=False)
        self.table = Parameter(torch.zeros(2))
        self.table.dummy_weight_value = 4.0

    def get_extra_state(self):
        return "no tensor"

    def set_extra_state(self, state):
        pass


def test_a_model_is_filled_as_a_checkpoint_would():
    """Parameters and persistent buffers, ties, names and attributes."""
    model = Model()
    initialize_dummy_weights(model, object(), seed=5)
    want = filled(torch.float32, (16,), seed=5).view(4, 4)
    assert torch.equal(model.one.weight, want)
    assert model.two.weight is model.one.weight
    assert model.one.weight.requires_grad
    assert model.norm.running_mean.abs().max() <= 1e-3
    assert model.norm.num_batches_tracked == 0
    assert model.derived.tolist() == [5] * 3
    assert model.packed_scale.tolist() == [127] * 3
    assert len(model.packed.unique()) > 50
    assert model.table.tolist() == [4, 4]
    initialize_dummy_weights(model, low=2.0, high=2.0)
    assert model.one.weight.unique().tolist() == [2]


def test_a_distributed_tensor_is_filled_in_its_own_part():
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        weight = Parameter(distribute_tensor(torch.zeros(4, 2), init_device_mesh("cpu", (1,)), [Shard(0)]))
        initialize_single_dummy_weight(weight)
        assert torch.equal(weight.to_local().detach(), filled(torch.float32, (4, 2)))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("size_mib", "most_mib"), [(64, 64), pytest.param(1024, 128, marks=pytest.mark.slow)]
)
def test_scratch_is_bounded(size_mib, most_mib):
    """64 MiB of fp8 would take 128 MiB of fp16 at once (C34); a process of its own shows the peak."""
    code = f"""
import resource, torch
from raywl.loaders.dummy import initialize_single_dummy_weight as fill
def peak_bytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
whole = torch.ones({size_mib}, 1 << 20, dtype=torch.uint8)
halves = whole[:, ::2]
for weight in (whole.view(torch.float8_e4m3fn), halves.view(torch.float8_e4m3fn), halves):
    fill(weight[:1])
    before = peak_bytes()
    fill(weight)
    print(peak_bytes() - before)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert max(map(int, done.stdout.split())) < most_mib << 20
