"""Files that lie are refused from their headers, by name, as the safetensors library refuses them."""

import pytest
import safetensors
import torch
from safetensors import safe_open

import raywl
from raywl.checkpoint import Manifest
from raywl.sources import resolve
from tests.hostile.files import FILES, VALID, HostileFile, write


@pytest.mark.parametrize("case", FILES, ids=lambda case: case.name)
def test_refused_by_name(case: HostileFile, tmp_path):
    """The error has the right class, names file and tensor, and says what is wrong."""
    path = write(case, tmp_path)
    with pytest.raises(case.error) as caught:
        Manifest.read(resolve(path))
    error = caught.value
    assert type(error) is case.error
    assert error.path == str(path)
    assert error.tensor == case.tensor or case.tensor is None
    for words in (str(path), *case.says):
        assert words in str(error)
    assert len(str(error)) < 1500


@pytest.mark.parametrize("case", FILES, ids=lambda case: case.name)
def test_the_library_agrees(case: HostileFile, tmp_path):
    """safetensors refuses the same files, but for those where raywl says why it is stricter."""
    path = write(case, tmp_path)
    if case.stricter is None:
        with pytest.raises((safetensors.SafetensorError, OSError)), safe_open(path, "pt"):
            pass
    else:
        with safe_open(path, "pt") as file:
            assert file.keys()


@pytest.mark.parametrize("name", VALID)
def test_odd_but_right(name, tmp_path):
    """What the format allows is opened, with the same names, dtypes and shapes as by the library."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(VALID[name])
    tensors = Manifest.read(resolve(path)).tensors
    with safe_open(path, "pt") as file:
        assert sorted(file.keys()) == sorted(tensors)
        for key in file.keys():  # noqa: SIM118
            part = file.get_slice(key)
            assert tensors[key].dtype == part.get_dtype()
            assert list(tensors[key].shape) == part.get_shape()
    assert "__metadata__" not in tensors


def test_nothing_is_read_out_of_a_hostile_file(tmp_path):
    """Neither the iterator nor a load gets to the first tensor; the model stays as it was."""
    model = torch.nn.Module()
    model.a = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    for case in FILES:
        path = write(case, tmp_path)
        with pytest.raises(case.error):
            raywl.open_checkpoint(path).iter_weights()
        with pytest.raises(case.error):
            raywl.load_into(model, path)
        assert model.a.tolist() == [1.0, 2.0]
