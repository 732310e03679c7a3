"""Weights through fastsafetensors, the real one, on the CPU; GPU-direct reads with a stand-in for them."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
import weakref
from typing import Any

import fastsafetensors
import pytest
import torch
from safetensors.torch import save_file

from raywl.checkpoint.dtypes import TORCH_NAMES
from raywl.errors import CheckpointError, CorruptFileError
from raywl.iterators.fastsafe import READABLE
from raywl.weight_utils import fastsafetensors_weights_iterator, safetensors_weights_iterator
from tests.iterators import scenarios
from tests.iterators.many_dtypes import write_all, write_dtype
from tests.iterators.ranks import run_ranks
from tests.iterators.scenarios import row

Loader = fastsafetensors.SafeTensorsFileLoader


def numbered(folder, count: int) -> list[str]:
    paths = []
    for number in range(count):
        paths.append(str(folder / f"model-{number:05}.safetensors"))
        save_file({f"b.{number}": torch.full((2, 3), number), f"a.{number}": torch.ones(5)}, paths[-1])
    return paths


def names(paths: list[str]) -> list[str]:
    return [name for name, _ in fastsafetensors_weights_iterator(paths, False)]


def test_what_it_reads_is_what_raywl_reads(tmp_path):
    """Every dtype, 0-dim, empty, one-element and unaligned tensors, in the same order."""
    paths = write_all(tmp_path)
    with pytest.warns(UserWarning, match="can't read"):
        got = list(fastsafetensors_weights_iterator(paths[::-1], False))
    assert [row(*pair) for pair in got] == [row(*pair) for pair in safetensors_weights_iterator(paths, False)]
    assert not [name for name, tensor in got if tensor.data_ptr() % tensor.element_size()]


@pytest.mark.parametrize("dtype", TORCH_NAMES)
def test_dtypes_that_the_library_reads(tmp_path, dtype):
    """The list is right for the library that is installed: no dtype is kept from it, and none is misread."""
    path = write_dtype(tmp_path, dtype)
    loader = Loader(fastsafetensors.SingleGroup(), "cpu", nogds=True)
    try:
        loader.add_filenames({0: [path]})
        with contextlib.closing(loader.copy_files_to_device()) as buffer:
            got = [row(name, buffer.get_tensor(name)) for name in sorted(loader.get_keys())]
    except ValueError:
        got = []
    loader.close()
    assert (got == [row(*pair) for pair in safetensors_weights_iterator([path], False)]) == (
        dtype in READABLE
    )


def test_a_dtype_that_it_cannot_read_goes_to_raywls_reader(tmp_path):
    """Seen from the header beforehand, for whole files, with one warning."""
    paths = [write_dtype(tmp_path, dtype, prefix=dtype) for dtype in ("F32", "C64", "F8_E4M3FNUZ")]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        got = [row(*pair) for pair in fastsafetensors_weights_iterator(paths, False)]
    (warning,) = caught
    assert "fastsafetensors can't read C64, F8_E4M3FNUZ" in str(warning.message)
    assert sorted(got) == sorted(row(*pair) for pair in safetensors_weights_iterator(paths, False))


def test_without_the_library_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "fastsafetensors", None)
    with pytest.raises(ImportError, match=r"raywl\[fastsafetensors\]"):
        fastsafetensors_weights_iterator(numbered(tmp_path, 1), False)


def test_one_path_is_no_list():
    with pytest.raises(TypeError, match="list of paths"):
        fastsafetensors_weights_iterator("model.safetensors", False)


def test_one_file_is_held_at_a_time(tmp_path, monkeypatch):
    """The next file isn't begun while tensors of the one before are given out, and those are let go of."""
    begun, closed, held = [], [], []
    add, close = Loader.add_filenames, Loader.close
    monkeypatch.setattr(
        Loader, "add_filenames", lambda self, files: (begun.append(files), add(self, files))[1]
    )
    monkeypatch.setattr(Loader, "close", lambda self: (closed.append(1), close(self))[1])
    for number, (_, tensor) in enumerate(fastsafetensors_weights_iterator(numbered(tmp_path, 3), False)):
        assert len(begun) == number // 2 + 1
        assert [ref() for ref in held] == [None] * number
        held.append(weakref.ref(tensor))
        del tensor
    assert closed
    iterator = fastsafetensors_weights_iterator(numbered(tmp_path, 3), False)
    next(iterator)
    closed.clear()
    iterator.close()
    assert closed
    assert fastsafetensors.live_allocation_bytes() == 0


def test_a_tensor_that_is_kept_keeps_only_itself(tmp_path):
    """All tensors of a file are views of one buffer, which one of them would keep."""
    path = str(tmp_path / "model.safetensors")
    save_file({"large": torch.zeros(1 << 20), "small": torch.ones(4)}, path)
    kept = [tensor for name, tensor in fastsafetensors_weights_iterator([path], False) if name == "small"]
    assert kept[0].tolist() == [1.0] * 4
    assert fastsafetensors.live_allocation_bytes() == 0


def test_damage_is_found_before_anything_is_read(tmp_path):
    """The library takes trailing bytes for padding."""
    paths = numbered(tmp_path, 2)
    with open(paths[1], "ab") as file:
        file.write(b"more")
    with pytest.raises(CorruptFileError, match="longer by 4") as caught:
        next(fastsafetensors_weights_iterator(paths, False))
    assert caught.value.path == paths[1]


def test_a_file_that_changes_meanwhile_is_an_error(tmp_path):
    paths = numbered(tmp_path, 2)
    iterator = fastsafetensors_weights_iterator(paths, False)
    assert [next(iterator)[0], next(iterator)[0]] == ["a.0", "b.0"]
    os.truncate(paths[1], os.path.getsize(paths[1]) - 4)
    with pytest.raises(CheckpointError) as caught:
        next(iterator)
    assert caught.value.path == paths[1]


def test_names_in_several_files_come_once(tmp_path):
    paths = numbered(tmp_path, 2)
    save_file({"a.0": torch.ones(5), "c": torch.ones(1)}, tmp_path / "z.safetensors")
    with pytest.warns(UserWarning, match="taken from the first"):
        assert names([*paths, str(tmp_path / "z.safetensors")]) == ["a.0", "b.0", "a.1", "b.1", "c"]


def test_nothing_to_read(tmp_path):
    save_file({}, tmp_path / "model.safetensors")
    assert names([]) == names([str(tmp_path / "model.safetensors")]) == []


def test_progress_counts_bytes(tmp_path):
    told: list[tuple[int, int, str]] = []
    list(fastsafetensors_weights_iterator(numbered(tmp_path, 2), lambda *step: told.append(step)))
    assert told[-1] == (136, 136, "read")


# GPU-direct: the library with its GPU taken away, so that all but the device is real.


class OnACard(Loader):
    """The library's loader, which reads to the CPU instead, and fails with GPU-direct reads as it is told."""

    made: list[tuple[str, bool]]
    fails: str

    @classmethod
    def take_the_place(cls) -> None:
        """Begins anew. The library looks for its GPU's driver once, which is before there seems to be one."""
        Loader(fastsafetensors.SingleGroup(), "cpu", nogds=True).close()
        cls.made, cls.fails = [], ""

    def __init__(self, group: Any, device: str, nogds: bool) -> None:
        type(self).made.append((device, nogds))
        self.direct, self.num_files = not nogds, 0
        if self.direct and self.fails == "at the start":
            raise RuntimeError("gds isn't there")
        super().__init__(group, "cpu", nogds=True)

    def copy_files_to_device(self) -> Any:
        self.num_files += 1
        if self.direct and self.fails == f"file {self.num_files}":
            raise RuntimeError("cuFileRead has failed")
        return super().copy_files_to_device()


@pytest.fixture
def card(monkeypatch):
    """A machine with a GPU, as far as the iterator sees."""
    OnACard.take_the_place()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(fastsafetensors, "SafeTensorsFileLoader", OnACard)
    return OnACard


def test_on_a_gpu_reads_are_direct(tmp_path, card):
    assert names(numbered(tmp_path, 2)) == ["a.0", "b.0", "a.1", "b.1"]
    assert card.made == [("cuda:3", False)]


@pytest.mark.parametrize("when", ["at the start", "file 1"])
def test_direct_reads_that_fail_at_first_are_given_up(tmp_path, card, when):
    """Nothing was given out yet: everything is read without them, which is said once."""
    card.fails = when
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert names(numbered(tmp_path, 3)) == ["a.0", "b.0", "a.1", "b.1", "a.2", "b.2"]
    (warning,) = caught
    assert "GPU-direct reads don't work here" in str(warning.message)
    assert card.made == [("cuda:3", False), ("cuda:3", True)]


def test_direct_reads_that_fail_later_are_an_error(tmp_path, card):
    """What was given out can't be taken back."""
    card.fails = "file 2"
    paths = numbered(tmp_path, 3)
    iterator = fastsafetensors_weights_iterator(paths, False)
    assert [next(iterator)[0], next(iterator)[0]] == ["a.0", "b.0"]
    with pytest.raises(CheckpointError, match="cuFileRead has failed") as caught:
        next(iterator)
    assert caught.value.path == paths[1]
    assert card.made == [("cuda:3", False)]


def test_out_of_memory_is_no_reason_to_read_again(tmp_path, card, monkeypatch):
    """It goes up as it is: neither the file nor the way it is read is to blame."""

    def full(self: Any) -> Any:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(OnACard, "copy_files_to_device", full)
    with pytest.raises(torch.OutOfMemoryError, match="no memory"):
        names(numbered(tmp_path, 1))
    assert card.made == [("cuda:3", False)]


def test_without_a_gpu_reads_are_not_direct(tmp_path, card, monkeypatch):
    """The library's own look for a GPU's driver isn't begun."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert names(numbered(tmp_path, 1)) == ["a.0", "b.0"]
    assert card.made == [("cpu", True)]


def test_several_ranks_never_read_directly(tmp_path):
    """GPU-direct reads would touch the other ranks' GPUs; each rank reads for itself, and needs no other."""
    ranks = run_ranks(scenarios.fastsafe, 2, numbered(tmp_path, 2))
    for rank in ranks:
        assert not rank.error
    assert ranks[1].value == (["a.0", "b.0", "a.1", "b.1"], [("cuda:0", True)])
    assert ranks[0].value == ([], [])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu(tmp_path):
    """The same tensors, on the GPU, whether or not reads are direct there."""
    paths = write_all(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got = dict(fastsafetensors_weights_iterator(paths, False))
    assert {tensor.device.type for tensor in got.values()} == {"cuda"}
    expected = [row(*pair) for pair in safetensors_weights_iterator(paths, False)]
    assert [row(name, tensor.cpu()) for name, tensor in got.items()] == expected
