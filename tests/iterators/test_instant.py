"""Weights through instanttensor, which needs an NVIDIA GPU: what it is asked for, with a stand-in for it."""

from __future__ import annotations

import shutil
import sys
import types
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file

from raywl.errors import CheckpointError, ClusterError
from raywl.iterators.instant import READABLE
from raywl.weight_utils import (
    instanttensor_weights_iterator,
    safetensors_weights_iterator,
    should_skip_weight,
)
from tests.iterators import scenarios
from tests.iterators.many_dtypes import write_all, write_dtype
from tests.iterators.ranks import run_ranks
from tests.iterators.scenarios import row

GPU = torch.cuda.is_available() and torch.version.cuda is not None


class Opened:
    """`instanttensor.safe_open`, with its rules, on the CPU."""

    calls: list[dict[str, Any]]

    def __init__(
        self,
        filename: list[str],
        framework: str,
        device: torch.device,
        process_group: Any = None,
        *,
        copy: bool = True,
        tensor_filter: list[str] | None = None,
        tensor_name_match_mode: str = "glob",
    ) -> None:
        if tensor_filter is not None and process_group is not None:
            raise ValueError("tensor_filter requires process_group=None")
        assert (framework, torch.device(device).type, copy) == ("pt", "cuda", True)
        assert tensor_filter is None or tensor_name_match_mode == "exact"
        self.calls.append({"files": filename, "group": process_group, "filter": tensor_filter})
        self.path, self.filter, self.group = filename[0], tensor_filter, process_group

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *error: Any) -> None: ...

    def tensors(self) -> Any:
        with safe_open(self.path, "pt") as file:
            if (file.metadata() or {}).get("format", "pt") != "pt":
                raise ValueError("only pytorch format")
            for name in file.offset_keys():
                if self.filter is None or name in self.filter:
                    tensor = file.get_tensor(name)
                    if self.group is not None:
                        # All ranks of a group are at the same tensor.
                        names: list[Any] = [None] * dist.get_world_size(self.group)
                        dist.all_gather_object(names, name, group=self.group)
                        assert set(names) == {name}
                    yield name, tensor


def put_in_place() -> type[Opened]:
    """An NVIDIA GPU and the library, as far as the iterator sees."""
    Opened.calls = []
    sys.modules["instanttensor"] = types.SimpleNamespace(safe_open=Opened)  # type: ignore[assignment]
    torch.cuda.is_available = lambda: True
    torch.cuda.current_device = lambda: 0
    torch.version.cuda = "13.0"
    return Opened


@pytest.fixture
def opened(monkeypatch):
    for place, name in (
        (torch.cuda, "is_available"),
        (torch.cuda, "current_device"),
        (torch.version, "cuda"),
    ):
        monkeypatch.setattr(place, name, getattr(place, name))
    monkeypatch.setitem(sys.modules, "instanttensor", types.SimpleNamespace())
    return put_in_place()


@pytest.fixture
def experts(tmp_path):
    """Two files, with four experts and what isn't an expert's."""
    paths = []
    for layer in range(2):
        tensors = {f"{layer}.experts.{at}.up.weight": torch.full((2,), at) for at in range(4)}
        tensors |= {f"{layer}.experts.{at}.up.weight_scale": torch.ones(1) for at in range(4)}
        paths.append(str(tmp_path / f"model-{layer}.safetensors"))
        save_file({**tensors, f"{layer}.norm.weight": torch.ones(3)}, paths[-1])
    return paths


def test_without_an_nvidia_gpu_it_is_a_value_error(tmp_path, opened, monkeypatch):
    """Also where there is another maker's GPU, and whether the library is there or not."""
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(ValueError, match="NVIDIA"):
        instanttensor_weights_iterator([], False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setitem(sys.modules, "instanttensor", None)
    with pytest.raises(ValueError, match="NVIDIA"):
        instanttensor_weights_iterator([], False)


def test_without_the_library_the_extra_is_named(opened, monkeypatch):
    monkeypatch.setitem(sys.modules, "instanttensor", None)
    with pytest.raises(ImportError, match=r"raywl\[instanttensor\]"):
        instanttensor_weights_iterator([], False)


def test_arguments_of_another_kind_are_refused_at_once(opened):
    with pytest.raises(TypeError, match="list of paths"):
        instanttensor_weights_iterator("model.safetensors", False)
    with pytest.raises(ValueError, match="an expert id must be a whole number"):
        instanttensor_weights_iterator([], False, [1.5])


def test_one_file_at_a_time_its_tensors_by_name(experts, opened):
    names = []
    for at, (name, _) in enumerate(instanttensor_weights_iterator(experts[::-1], False)):
        names.append(name)
        assert len(opened.calls) == at // 9 + 1
    assert names == [name for name, _ in safetensors_weights_iterator(experts, False)]
    assert [call["files"] for call in opened.calls] == [[path] for path in experts]
    assert [call["filter"] for call in opened.calls] == [None, None]


@pytest.mark.parametrize("ids", [{1, 3}, [1, 3], (i for i in (1, 3))], ids=["set", "list", "generator"])
def test_experts_that_are_not_local_are_not_read(experts, opened, ids):
    """By a filter of exact names; the scales of all experts stay."""
    got = [row(*pair) for pair in instanttensor_weights_iterator(experts, False, ids)]
    assert got == [row(*pair) for pair in safetensors_weights_iterator(experts, False, None, {1, 3})]
    for path, call in zip(experts, opened.calls, strict=True):
        names = [name for name, _ in safetensors_weights_iterator([path], False)]
        assert call["filter"] == [name for name in names if not should_skip_weight(name, {1, 3})]


def test_all_experts_need_no_filter(experts, opened):
    assert len(list(instanttensor_weights_iterator(experts, False, range(4)))) == 18
    assert [call["filter"] for call in opened.calls] == [None, None]


def test_a_file_with_nothing_wanted_is_not_opened(tmp_path, experts, opened):
    path = str(tmp_path / "a.safetensors")
    save_file({"a.experts.0.up.weight": torch.ones(1)}, path)
    list(instanttensor_weights_iterator([path, *experts], False, {1}))
    assert [call["files"] for call in opened.calls] == [[path] for path in experts]


def test_what_it_cannot_read_goes_to_raywls_reader(tmp_path, opened, monkeypatch):
    """A dtype, or files of another framework; seen from the header beforehand, with one warning."""
    monkeypatch.setattr(torch.Tensor, "to", lambda self, device: self)
    paths = write_all(tmp_path)
    paths.append(str(tmp_path / "z.safetensors"))
    save_file({"z": torch.ones(2)}, paths[-1], metadata={"format": "tf"})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        got = [row(*pair) for pair in instanttensor_weights_iterator(paths, False)]
    (warning,) = caught
    assert "instanttensor can't read F4" in str(warning.message)
    assert got == [row(*pair) for pair in safetensors_weights_iterator(paths, False)]
    own = [path for path in paths if [path] not in [call["files"] for call in opened.calls]]
    assert own == [write_dtype(tmp_path, "F4", prefix="F4."), paths[-1]]
    assert "F4" not in READABLE


def test_a_failure_of_the_library_names_the_file(experts, opened, monkeypatch):
    monkeypatch.setattr(opened, "tensors", lambda self: 1 / 0)
    with pytest.raises(CheckpointError, match="instanttensor can't read it: ZeroDivisionError") as caught:
        list(instanttensor_weights_iterator(experts, False))
    assert caught.value.path == experts[0]


def run(size, files, ids=None, at=None):
    return run_ranks(scenarios.instant, size, files, ids or {}, at or {})


def test_ranks_read_together(experts):
    """Through the default process group, where no rank leaves anything out."""
    for rank in run(2, {-1: experts}):
        assert not rank.error
        assert rank.value == ([name for name, _ in safetensors_weights_iterator(experts, False)], [True] * 2)


def test_ranks_with_experts_read_apart(experts):
    """Decided alike: a rank that has all experts, and one that names none, don't wait for the others."""
    for at, rank in enumerate(run(3, {-1: experts}, {0: [0, 1], 1: [0, 1, 2, 3]})):
        assert not rank.error
        ids = {0: {0, 1}, 1: {0, 1, 2, 3}}.get(at)
        names = [name for name, _ in safetensors_weights_iterator(experts, False, None, ids)]
        assert rank.value == (names, [False] * 2)


def test_ranks_without_experts_in_the_checkpoint_read_together(tmp_path):
    """Ids of experts alone are no reason to read apart."""
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    ranks = run(2, {-1: [str(tmp_path / "model.safetensors")]}, {0: [0], 1: [1]})
    assert [rank.value for rank in ranks] == [(["a"], [True])] * 2


def test_a_rank_that_fails_ends_those_that_read_together(experts, tmp_path):
    """It finds a file damaged, which the others have whole, before any of them begins with it."""
    (tmp_path / "own").mkdir()
    own = [shutil.copy(path, tmp_path / "own") for path in experts]
    ranks = run(3, {1: own, -1: experts}, at={(1, "0.norm.weight"): f"cut {own[1]}"})
    for rank in ranks:
        assert isinstance(rank.error, CheckpointError)
        assert rank.error.path == own[1]
    assert str(ranks[0].error).startswith("[rank 1 of the group] ")


@pytest.mark.parametrize("what", ["die", "stop"])
def test_a_rank_that_ends_early_ends_those_that_read_together(experts, what):
    ranks = run(3, {-1: experts}, at={(2, "0.norm.weight"): what})
    says = {"die": "has gone without a word", "stop": "[rank 2 of the group] stopped iterating"}[what]
    assert all(says in str(rank.error) for rank in ranks[:2])


def test_ranks_with_different_files_all_fail(experts):
    for rank in run(2, {0: experts, -1: experts[:1]}):
        assert isinstance(rank.error, ClusterError)
        assert "the ranks have different files" in str(rank.error)


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs an NVIDIA GPU")
class TestOnAGpu:
    """The real library."""

    @pytest.fixture(autouse=True)
    def library(self):
        pytest.importorskip("instanttensor")

    def test_what_it_reads_is_what_raywl_reads(self, tmp_path):
        paths = write_all(tmp_path)
        with pytest.warns(UserWarning, match="instanttensor can't read F4"):
            got = dict(instanttensor_weights_iterator(paths, False))
        assert {tensor.device.type for tensor in got.values()} == {"cuda"}
        expected = dict(safetensors_weights_iterator(paths, False))
        assert list(got) == list(expected)
        for name, tensor in expected.items():
            assert row(name, got[name].cpu()) == row(name, tensor)

    def test_experts_that_are_not_local_are_not_read(self, experts):
        got = [
            row(name, tensor.cpu()) for name, tensor in instanttensor_weights_iterator(experts, False, {2})
        ]
        assert got == [row(*pair) for pair in safetensors_weights_iterator(experts, False, None, {2})]
