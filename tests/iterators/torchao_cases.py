"""The `"torchao"` strategy; run by `test_torchao.py`, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torchao
from safetensors.torch import save_file
from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
from torchao.quantization import Float8Tensor, Float8WeightOnlyConfig, quantize_

from raywl import weight_utils
from raywl.errors import CheckpointError, CorruptFileError


def iterate(paths, **options):
    return weight_utils.safetensors_weights_iterator(paths, False, "torchao", **options)


def quantised() -> dict[str, torch.Tensor]:
    """A state dict with tensors of a class of torchao's."""
    torch.manual_seed(0)
    names = ["dense", "experts.0", "experts.1", "weight_2"]
    model = torch.nn.ModuleDict()
    for name in names[:1] + names[3:]:
        model[name] = torch.nn.Linear(32, 16, dtype=torch.bfloat16)
    model["experts"] = torch.nn.ModuleList(torch.nn.Linear(16, 16, dtype=torch.bfloat16) for _ in range(2))
    quantize_(model, Float8WeightOnlyConfig(version=2))
    state = model.state_dict()
    assert sum(type(tensor) is Float8Tensor for tensor in state.values()) == 4
    return state


def save(
    folder: Path, parts: list[list[str]] | None = None, metadata: dict[str, str] | None = None
) -> list[str]:
    """Writes the flattened state; `parts` has the names of each file's pieces, all in one by default."""
    flat, described = flatten_tensor_state_dict(quantised())
    paths = []
    for number, names in enumerate(parts or [list(flat)], 1):
        path = folder / f"model-{number}.safetensors"
        save_file({name: flat[name].contiguous() for name in names}, path, metadata=metadata or described)
        paths.append(str(path))
    return paths


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if type(one) is not type(other) or one.dtype != other.dtype or one.shape != other.shape:
        return False
    if type(one) is torch.Tensor:
        return torch.equal(one, other)
    parts = zip((one.qdata, one.scale), (other.qdata, other.scale), strict=True)
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in parts)


def check(given: dict[str, torch.Tensor], leaving_out: tuple[str, ...] = ()) -> None:
    expected = {name: tensor for name, tensor in quantised().items() if name not in leaving_out}
    assert sorted(given) == sorted(expected)
    assert all(same(given[name], tensor) for name, tensor in expected.items())


def test_one_file(tmp_path):
    """By name, plain tensors among them."""
    given = list(iterate(save(tmp_path)))
    assert [name for name, _ in given] == sorted(quantised())
    check(dict(given))


@pytest.mark.parametrize("apart", [1, 2, 3])
def test_pieces_in_several_files(apart, tmp_path):
    """MUST DIFFER: they are carried to the file of the last one; none is lost."""
    names = sorted(flatten_tensor_state_dict(quantised())[0])
    parts = [names[i::apart] for i in range(apart)]
    given = list(iterate(save(tmp_path, parts)[::-1]))
    check(dict(given))
    assert len(given) == len(quantised())


def test_metadata_of_each_files_own_tensors(tmp_path):
    """As when each file is flattened by itself."""
    state = quantised()
    paths = []
    for number, names in enumerate((sorted(state)[:3], sorted(state)[3:])):
        flat, described = flatten_tensor_state_dict({name: state[name] for name in names})
        paths.append(str(tmp_path / f"m-{number}.safetensors"))
        save_file({name: tensor.contiguous() for name, tensor in flat.items()}, paths[-1], metadata=described)
    check(dict(iterate(paths)))


def test_pieces_left_over(tmp_path):
    """MUST DIFFER: an error before anything is given out, with the tensor and what is missing."""
    names = sorted(flatten_tensor_state_dict(quantised())[0])
    paths = save(tmp_path, [[name for name in names if name != "weight_2._weight_scale"]])
    with pytest.raises(CheckpointError, match=r"weight_2\._weight_scale.*left over") as caught:
        next(iterate(paths))
    assert (caught.value.path, caught.value.tensor) == (paths[0], "weight_2.weight")


@pytest.mark.parametrize("extra", ["dense._weight_zero", "other._weight_qdata", "stray"])
def test_pieces_that_belong_to_nothing(extra, tmp_path):
    flat, described = flatten_tensor_state_dict(quantised())
    path = tmp_path / "m.safetensors"
    save_file(
        {name: tensor.contiguous() for name, tensor in flat.items()} | {extra: torch.ones(1)},
        path,
        metadata=described,
    )
    with pytest.raises(CheckpointError, match="belongs to no tensor") as caught:
        next(iterate([str(path)]))
    assert (caught.value.path, caught.value.tensor) == (str(path), extra)


def test_names_that_begin_alike(tmp_path):
    """`a.weight` and `a.weight_2`: the pieces of one look like pieces of the other."""
    tensor = quantised()["dense.weight"]
    state = {"a.weight": tensor, "a.weight_2": tensor, "plain": torch.ones(3)}
    flat, described = flatten_tensor_state_dict({k: v for k, v in state.items() if k != "plain"})
    path = tmp_path / "m.safetensors"
    described["tensor_names"] = json.dumps(list(state))
    described["plain"] = json.dumps({"_type": "Tensor"})
    save_file(
        {k: v.contiguous() for k, v in flat.items()} | {"plain": state["plain"]}, path, metadata=described
    )
    given = dict(iterate([str(path)]))
    assert list(given) == ["a.weight", "a.weight_2", "plain"]
    assert all(same(given[name], state[name]) for name in state)


def test_files_that_torchao_has_not_made_are_plain(tmp_path):
    """Beside others, and alone."""
    paths = save(tmp_path)
    plain = tmp_path / "z.safetensors"
    save_file({"x.weight": torch.ones(3)}, plain)
    given = dict(iterate([*paths, str(plain)]))
    assert torch.equal(given.pop("x.weight"), torch.ones(3))
    check(given)
    assert dict(iterate([str(plain)])).keys() == {"x.weight"}


def test_experts(tmp_path):
    """Told by the name of the whole tensor; and their pieces aren't read."""
    seen = []
    paths = save(tmp_path)
    given = dict(
        weight_utils.safetensors_weights_iterator(
            paths, lambda *args: seen.append(args), "torchao", iter([1])
        )
    )
    check(given, leaving_out=("experts.0.weight",))
    everything = sum(t.numel() * t.itemsize for t in flatten_tensor_state_dict(quantised())[0].values())
    piece = quantised()["experts.0.weight"]
    left_out = piece.qdata.numel() + piece.scale.numel() * piece.scale.itemsize
    assert seen[-1] == (everything - left_out, everything - left_out, "read")


def test_described_but_in_none_of_the_files(tmp_path):
    """A part of a checkpoint may be read, and it is said what it lacks."""
    names = sorted(flatten_tensor_state_dict(quantised())[0])
    paths = save(tmp_path, [[name for name in names if not name.startswith("dense")]])
    with pytest.warns(UserWarning, match="2 tensors.*dense.weight"):
        check(dict(iterate(paths)), leaving_out=("dense.weight", "dense.bias"))


@pytest.mark.parametrize(
    ("key", "value", "error"),
    [
        ("tensor_names", "{", CorruptFileError),
        ("tensor_names", "3", CorruptFileError),
        ("tensor_names", '["dense.weight", "nowhere"]', CorruptFileError),
        ("dense.weight", "[]", CorruptFileError),
        ("dense.weight", '{"_type": "Float8Tensor"}', CorruptFileError),
        (
            "dense.weight",
            '{"_type": "os.system", "_data": {}, "_tensor_data_names": ["qdata", "scale"]}',
            CheckpointError,
        ),
        (
            "dense.weight",
            '{"_type": "Float8Tensor", "_data": {"x": 1}, "_tensor_data_names": ["qdata", "scale"]}',
            CheckpointError,
        ),
    ],
)
def test_damaged_metadata(key, value, error, tmp_path):
    """The file is named, and the tensor where there is one."""
    _, described = flatten_tensor_state_dict(quantised())
    paths = save(tmp_path, metadata=described | {key: value})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(error) as caught:
            list(iterate(paths))
    assert caught.value.path == paths[0]
    assert type(caught.value) is error
    assert key == "tensor_names" or caught.value.tensor == "dense.weight"


def test_descriptions_that_differ(tmp_path):
    state = quantised()
    paths = []
    for number, name in enumerate(("dense.weight", "experts.0.weight")):
        flat, described = flatten_tensor_state_dict({name: state[name]})
        described["tensor_names"] = json.dumps(["dense.weight"] if not number else ["dense.weight", name])
        described.setdefault("dense.weight", json.dumps({"_type": "Tensor"}))
        paths.append(str(tmp_path / f"m-{number}.safetensors"))
        save_file({k: v.contiguous() for k, v in flat.items()}, paths[-1], metadata=described)
    with pytest.raises(CheckpointError, match="another way") as caught:
        next(iterate(paths))
    assert all(path in str(caught.value) for path in paths)


@pytest.mark.parametrize("version", ["0.14.1", "0.9.0"])
def test_an_old_version(version, monkeypatch):
    """Said when the iterator is made."""
    monkeypatch.setattr(torchao, "__version__", version)
    with pytest.raises(ImportError, match=version):
        iterate([])


def test_without_the_library(tmp_path):
    """The extra is named; other strategies don't import it."""
    code = """
import sys
sys.modules["torchao"] = None
from raywl import weight_utils
list(weight_utils.safetensors_weights_iterator([], False))
try:
    weight_utils.safetensors_weights_iterator([], False, "torchao")
except ImportError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert "raywl[torchao]" in done.stdout
