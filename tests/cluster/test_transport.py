"""Values in bytes: they come back as they were, whatever Ray itself would do with tensors."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

from raywl.actors.transport import to_bytes


def codes(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.uint8).view(dtype).reshape(shape)


TENSORS = {
    "e4m3": codes(2, 3, dtype=torch.float8_e4m3fn),
    "e8m0, turned": codes(2, 3, dtype=torch.float8_e8m0fnu).t(),
    "fp4": codes(2, 3, dtype=torch.float4_e2m1fn_x2),
    "fp8, 0-d": codes(1, dtype=torch.float8_e5m2)[0],
    "fp8, empty": torch.zeros(0, 3, dtype=torch.float8_e4m3fn),
    "bf16": torch.arange(6).bfloat16(),
    "bf16, 0-d": torch.tensor(2.0, dtype=torch.bfloat16),
    "uint16": torch.arange(6).to(torch.uint16),
    "uint64": torch.arange(6).to(torch.uint64)[::2],
    "bool": torch.tensor([True, False]),
    "turned": torch.arange(6.0).reshape(2, 3).t(),
    "empty": torch.zeros(0, 3),
    "conjugate": torch.complex(torch.arange(3.0), torch.ones(3)).conj(),
    "meta": torch.empty(2, 3, device="meta"),
    "parameter": torch.nn.Parameter(torch.ones(2)),
    "with a gradient": torch.ones(2, requires_grad=True),
}


@pytest.fixture(params=[False, True], ids=["plain", "zero copy"])
def rays_own_way(request, monkeypatch) -> None:
    """How Ray pickles tensors, with `RAY_ENABLE_ZERO_COPY_TORCH_TENSORS=1` as well: it registers this."""
    if request.param:
        utils = pytest.importorskip("ray._private.tensor_serialization_utils")
        from ray.cloudpickle import CloudPickler

        monkeypatch.setitem(CloudPickler.dispatch, torch.Tensor, utils.zero_copy_tensors_reducer)


def back(value: Any) -> Any:
    return pickle.loads(to_bytes(value))


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_come_back_as_they_were(name, rays_own_way):
    """C89: class, dtype, shape, gradient and bits, of every dtype and in every form."""
    tensor = TENSORS[name]
    found = back([{"x": tensor}])[0]["x"]
    assert (type(found), found.dtype, found.shape) == (type(tensor), tensor.dtype, tensor.shape)
    assert (found.requires_grad, found.device) == (tensor.requires_grad, tensor.device)
    if not tensor.is_meta:
        one, other = (t.detach().resolve_conj().contiguous().reshape(-1) for t in (found, tensor))
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
