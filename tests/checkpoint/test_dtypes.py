"""Every dtype that the safetensors format and torch share, written by the library and found by raywl."""

import pytest
import safetensors.torch
import torch
from safetensors import safe_open

import raywl
from raywl.checkpoint import Manifest
from raywl.checkpoint.dtypes import DTYPE_BITS, TORCH_NAMES, nbytes_of, torch_dtype, torch_shape
from raywl.sources import resolve
from tests.hostile.files import build

SHAPES = [(4, 6), (0, 4), (3, 0), (8,), (1, 1, 2)]


def bits(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of running bytes, whatever the dtype."""
    width = torch.empty((), dtype=dtype).element_size()
    count = torch.Size(shape).numel() * width
    raw = torch.arange(count, dtype=torch.int64).remainder(251).to(torch.uint8)
    if dtype == torch.bool:
        raw = raw % 2
    return raw.view(dtype).reshape(shape)


def raw_bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist())


@pytest.mark.parametrize("dtype", sorted(TORCH_NAMES))
def test_written_by_the_library(dtype, tmp_path):
    """Dtype, shape and place are those that the library wrote."""
    given = {f"t{i}": bits(shape, torch_dtype(dtype)) for i, shape in enumerate(SHAPES)}
    if dtype != "F4":
        given["scalar"] = bits((), torch_dtype(dtype))
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file(given, path)
    raw = path.read_bytes()
    tensors = Manifest.read(resolve(path)).tensors
    assert set(tensors) == set(given)
    for name, tensor in given.items():
        found = tensors[name]
        assert found.dtype == dtype
        assert torch_shape(dtype, found.shape) == tuple(tensor.shape)
        assert found.nbytes == nbytes_of(dtype, found.shape) == tensor.numel() * tensor.element_size()
        assert raw[found.start : found.end] == raw_bytes(tensor)


@pytest.mark.parametrize("strategy", [None, "buffered"])
@pytest.mark.parametrize("dtype", sorted(TORCH_NAMES))
def test_read_by_raywl(dtype, strategy, tmp_path):
    """Iterating and loading give the library's dtype, shape and bits."""
    shapes = SHAPES if dtype == "F4" else [*SHAPES, ()]
    given = {f"t{i}": bits(shape, torch_dtype(dtype)) for i, shape in enumerate(shapes)}
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file(given, path)
    module = torch.nn.Module()
    for name, tensor in given.items():
        module.register_buffer(name, torch.empty_like(tensor))
    raywl.load_into(module, path, strategy=strategy)
    for name, tensor in raywl.open_checkpoint(path).iter_weights(strategy=strategy):
        for found in (tensor, module.get_buffer(name)):
            assert found.dtype == given[name].dtype
            assert found.shape == given[name].shape
            assert raw_bytes(found) == raw_bytes(given[name])


@pytest.mark.parametrize("dtype", sorted(TORCH_NAMES))
def test_read_by_the_library(dtype, tmp_path):
    """A file made by hand gives the library's tensor the dtype and shape that raywl tells."""
    shape = (4, 6)
    nbytes = nbytes_of(dtype, shape)
    path = tmp_path / "model.safetensors"
    path.write_bytes(
        build({"a": {"dtype": dtype, "shape": shape, "data_offsets": [0, nbytes]}}, bytes(nbytes))
    )
    found = Manifest.read(resolve(path)).tensors["a"]
    with safe_open(path, "pt") as file:
        tensor = file.get_tensor("a")
    assert tensor.dtype == torch_dtype(dtype)
    assert tuple(tensor.shape) == torch_shape(dtype, found.shape)


def test_no_dtype_is_forgotten():
    """What the format has and torch has a type for is in the table; F6 is what torch lacks."""
    assert set(DTYPE_BITS) - set(TORCH_NAMES) == {"F6_E2M3", "F6_E3M2"}
    for name, width in DTYPE_BITS.items():
        if name in TORCH_NAMES and name != "F4":
            assert torch_dtype(name).itemsize * 8 == width


@pytest.mark.parametrize(
    ("shape", "expected"), [((), None), ((1,), None), ((2,), 1), ((0,), 0), ((3, 3), None)]
)
def test_half_bytes(shape, expected):
    assert nbytes_of("F4", shape) == expected
