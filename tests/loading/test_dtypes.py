"""Every dtype that the format and torch share, into every other: as torch converts, or refused at once."""

from __future__ import annotations

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import raywl
from raywl.checkpoint.dtypes import TORCH_NAMES
from raywl.errors import CheckpointError

from .conftest import Model

ALL = {name: getattr(torch, torch_name) for name, torch_name in TORCH_NAMES.items()}
CODED = {torch.float8_e8m0fnu, torch.float4_e2m1fn_x2}


def values(dtype, shape=(4, 6)):
    """Values that differ, valid in a dtype."""
    count = torch.Size(shape).numel()
    if dtype in CODED:
        return (torch.arange(count, dtype=torch.uint8) + 100).view(dtype).view(shape)
    numbers = torch.arange(count).reshape(shape)
    if dtype == torch.bool:
        return numbers % 3 == 0
    if dtype == torch.complex64:
        return torch.complex(numbers.float(), -numbers.float())
    return numbers.to(dtype)


def raw(tensor):
    """The bytes, to compare what has no arithmetic."""
    if tensor.dtype == torch.bool:
        return tensor.int()
    size = tensor.dtype.itemsize
    whole = torch.empty(
        tensor.shape, dtype={1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
    )
    return whole.copy_(tensor.detach().view(whole.dtype))


def as_torch_converts(tensor, into):
    """What a copy gives; `None` where torch has none. Bytes that only encode are copied as bytes."""
    dtypes = {tensor.dtype, into.dtype}
    if dtypes & CODED and dtypes <= {*CODED, torch.uint8}:
        return raw(tensor).view(into.dtype)
    try:
        return into.clone().copy_(tensor)
    except (RuntimeError, NotImplementedError):
        return None


def test_the_list_is_all_that_torch_has():
    assert len(ALL) == 20


@pytest.mark.parametrize("name", ALL)
def test_a_dtype_arrives_as_the_library_reads_it(tmp_path, name):
    """Whole, cut along both dims, through a loader, and one by one."""
    dtype = ALL[name]
    save_file({"w": values(dtype)}, tmp_path / "model.safetensors")
    checkpoint = raywl.open_checkpoint(tmp_path)
    assert checkpoint.tensors["w"].dtype == name
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        expected = file.get_tensor("w")
    assert torch.equal(raw(expected), raw(values(dtype)))
    ((_, read),) = checkpoint.iter_weights()
    assert read.dtype == dtype
    assert torch.equal(raw(read), raw(expected))
    for dim in (0, 1):
        for rank in (0, 1):
            size = [4, 6]
            size[dim] //= 2
            context = raywl.ParallelContext(tp_rank=rank, tp_size=2)
            model = Model({"w": torch.empty(size, dtype=dtype, device="meta")})
            raywl.load_into(model, checkpoint, parallel=context, shards={"w": raywl.Shard(dim)})
            assert torch.equal(raw(model.w), raw(expected).chunk(2, dim)[rank])

    def load(model, weights):
        for _, w in weights:
            model.w.t().copy_(w[1:3].t())

    model = Model({"w": torch.empty(2, 6, dtype=dtype, device="meta")}, load)
    raywl.load_into(model, checkpoint)
    assert torch.equal(raw(model.w), raw(expected)[1:3])


@pytest.mark.parametrize("source", ALL)
def test_conversions_are_torchs_or_are_refused_before_anything_is_read(tmp_path, source):
    save_file({"w": values(ALL[source])}, tmp_path / "model.safetensors")
    for target in ALL.values():
        # Made from bytes: not every dtype can be filled.
        before = torch.zeros(24 * target.itemsize, dtype=torch.uint8).view(target).view(4, 6)
        model = Model({"w": before.clone()})
        twice = torch.zeros(48 * target.itemsize, dtype=torch.uint8).view(target).view(8, 6)
        strided = Model({"w": twice[::2]})
        expected = as_torch_converts(values(ALL[source]), before)
        error = None
        try:
            raywl.load_into(model, tmp_path)
        except CheckpointError as caught:
            error = caught
        if error is not None:
            assert not error.partly_loaded, (source, target)
            assert "w" in str(error)
            assert str(target) in str(error)
            assert torch.equal(raw(model.w), raw(before))
            if expected is not None:
                # Refused though torch would: a value would lose its meaning.
                assert not torch.can_cast(ALL[source], target), (source, target)
            continue
        assert expected is not None, (source, target)
        assert torch.equal(raw(model.w), raw(expected)), (source, target)
        raywl.load_into(strided, tmp_path)
        assert torch.equal(raw(strided.w), raw(expected)), (source, target)


@pytest.mark.parametrize("source", ALL)
def test_a_loader_gets_torchs_conversions_or_torchs_error(tmp_path, source):
    """`param.copy_(weight)` in a loader: as with a tensor in memory."""
    save_file({"w": values(ALL[source])}, tmp_path / "model.safetensors")

    def load(model, weights):
        for _, w in weights:
            model.w.copy_(w)

    for target in ALL.values():
        before = torch.zeros(24 * target.itemsize, dtype=torch.uint8).view(target).view(4, 6)
        model, eager = Model({"w": before.clone()}, load), Model({"w": before.clone()}, load)
        try:
            with torch.no_grad():
                eager.load_weights([("w", values(ALL[source]))])
        except (RuntimeError, NotImplementedError):
            with pytest.raises((RuntimeError, NotImplementedError, CheckpointError)) as caught:
                raywl.load_into(model, tmp_path)
            assert not getattr(caught.value, "partly_loaded", False), (source, target)
            assert torch.equal(raw(model.w), raw(before))
            continue
        raywl.load_into(model, tmp_path)
        assert torch.equal(raw(model.w), raw(eager.w)), (source, target)
