"""Weights through runai-model-streamer, the real one, in one process."""

from __future__ import annotations

import os
import sys
import tracemalloc
import warnings
import weakref
from typing import Any

import pytest
import torch
from runai_model_streamer import SafetensorsStreamer
from safetensors.torch import save_file

from raywl.checkpoint.dtypes import TORCH_NAMES
from raywl.errors import CapacityError, CheckpointError, CorruptFileError, MissingFileError
from raywl.iterators.runai import READABLE
from raywl.weight_utils import runai_safetensors_weights_iterator, safetensors_weights_iterator
from tests.iterators.many_dtypes import write_all, write_dtype
from tests.iterators.scenarios import row

LIMIT = "RUNAI_STREAMER_MEMORY_LIMIT"


class Spy:
    """What the library was asked for."""

    def __init__(self) -> None:
        self.files: list[str] = []
        self.devices: list[str] = []
        self.limits: list[str | None] = []
        self.ended = 0


@pytest.fixture
def spy(monkeypatch) -> Spy:
    """Notes what the library is asked for, and lets it do it."""
    spy = Spy()
    stream_files, leave = SafetensorsStreamer.stream_files, SafetensorsStreamer.__exit__

    def noted(self: Any, paths: list[str], *args: Any, **options: Any) -> None:
        spy.files += map(os.path.basename, paths)
        spy.devices.append(options["device"])
        spy.limits.append(os.environ.get(LIMIT))
        return stream_files(self, paths, *args, **options)

    def ended(self: Any, *error: Any) -> Any:
        spy.ended += 1
        return leave(self, *error)

    monkeypatch.setattr(SafetensorsStreamer, "stream_files", noted)
    monkeypatch.setattr(SafetensorsStreamer, "__exit__", ended)
    return spy


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for name in (LIMIT, *(p + n for p in ("RAYWL_", "VLLM_") for n in ("RUNAI_CPU_WEIGHT_FILES",))):
        monkeypatch.delenv(name, raising=False)


def save(folder, number: int, **tensors: torch.Tensor) -> str:
    path = folder / f"model-{number:05}.safetensors"
    save_file(tensors, path)
    return str(path)


def numbered(folder, count: int) -> list[str]:
    return [
        save(folder, number, **{f"b.{number}": torch.full((2, 3), number), f"a.{number}": torch.ones(number)})
        for number in range(count)
    ]


def test_what_it_reads_is_what_raywl_reads(tmp_path):
    """Every dtype, 0-dim, empty, one-element and unaligned tensors, in the same order."""
    paths = write_all(tmp_path)
    with pytest.warns(UserWarning, match="can't read"):
        got = [row(*pair) for pair in runai_safetensors_weights_iterator(paths[::-1], False)]
    assert got == [row(*pair) for pair in safetensors_weights_iterator(paths, False)]


@pytest.mark.parametrize("dtype", TORCH_NAMES)
def test_dtypes_that_the_library_reads(tmp_path, dtype):
    """The list is right for the library that is installed: no dtype is kept from it, and none is misread."""
    path = write_dtype(tmp_path, dtype)
    with SafetensorsStreamer() as streamer:
        try:
            streamer.stream_files([path])
            got = sorted((row(*pair) for pair in streamer.get_tensors()), key=lambda r: r[0])
        except ValueError:
            got = []
    assert (got == [row(*pair) for pair in safetensors_weights_iterator([path], False)]) == (
        dtype in READABLE
    )


def test_a_dtype_that_it_cannot_read_goes_to_raywls_reader(tmp_path, spy):
    """Seen from the header beforehand, for whole files, with one warning."""
    names = ("F8_E4M3FNUZ", "F8_E5M2FNUZ")
    paths = [
        write_dtype(tmp_path, "F32", prefix="f."),
        *(write_dtype(tmp_path, name, prefix=name) for name in names),
    ]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        got = [row(*pair) for pair in runai_safetensors_weights_iterator(paths, False)]
    (warning,) = caught
    assert "runai-model-streamer can't read F8_E4M3FNUZ, F8_E5M2FNUZ" in str(warning.message)
    assert all(path in str(warning.message) for path in paths[1:])
    assert spy.files == [os.path.basename(paths[0])]
    assert sorted(got) == sorted(row(*pair) for pair in safetensors_weights_iterator(paths, False))


def test_without_the_library_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "runai_model_streamer", None)
    with pytest.raises(ImportError, match=r"raywl\[runai\]"):
        runai_safetensors_weights_iterator(numbered(tmp_path, 1), False)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [(("model.safetensors", False), "list of paths"), (([], False, False, None, "name"), "must be callable")],
)
def test_arguments_of_another_kind_are_refused_at_once(arguments, says):
    with pytest.raises(TypeError, match=says):
        runai_safetensors_weights_iterator(*arguments)


def test_addresses_are_refused_with_what_takes_them():
    """The library could read them, but not what raywl reads beforehand."""
    with pytest.raises(
        ValueError, match=r"not addresses \(s3://bucket/model\.safetensors\): raywl\.load_into"
    ):
        runai_safetensors_weights_iterator(["s3://bucket/model.safetensors"], False)


def test_one_file_is_held_at_a_time(tmp_path, spy):
    """The next file isn't begun while tensors of the one before are given out, and those are let go of."""
    paths, held = numbered(tmp_path, 3), []
    for number, (_, tensor) in enumerate(runai_safetensors_weights_iterator(paths, False)):
        assert len(spy.files) == number // 2 + 1
        assert [ref() for ref in held] == [None] * number
        held.append(weakref.ref(tensor))
        del tensor
    assert (spy.ended, spy.devices) == (1, ["cpu"] * 3)


def test_a_tensor_that_is_kept_keeps_only_itself(tmp_path):
    """The library packs tensors into large buffers, each of which one small tensor would keep."""
    tensors = {f"{number:03}": torch.zeros(1 << 18) for number in range(32)}
    path = save(tmp_path, 1, **tensors, small=torch.ones(4))
    tracemalloc.start()
    try:
        kept = [t for name, t in runai_safetensors_weights_iterator([path], False) if name == "small"]
        held_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept[0].tolist() == [1.0] * 4
    assert held_bytes < 1 << 20


def test_one_large_tensor_is_not_copied(tmp_path):
    """A table takes its buffer whole: a copy would be a second table."""
    path = save(tmp_path, 1, table=torch.arange(1 << 20), small=torch.ones(4))
    tensors = dict(runai_safetensors_weights_iterator([path], False))
    # What the library made isn't torch's to resize.
    assert not tensors["table"].untyped_storage().resizable()
    assert tensors["small"].untyped_storage().resizable()


def test_closing_early_ends_the_library(tmp_path, spy):
    iterator = runai_safetensors_weights_iterator(numbered(tmp_path, 3), False)
    next(iterator)
    iterator.close()
    assert (len(spy.files), spy.ended) == (1, 1)


def test_files_for_the_cpu_come_last_under_their_own_limit(tmp_path, spy, monkeypatch):
    """BEHAVIOUR: read after the others, under a limit that is gone again when they are read."""
    paths = numbered(tmp_path, 4)
    monkeypatch.setenv("RAYWL_RUNAI_CPU_WEIGHT_FILES", "model-00001.safetensors, model-00000.safetensors")
    monkeypatch.setenv("RAYWL_RUNAI_CPU_MEMORY_LIMIT", "12345")
    monkeypatch.setenv(LIMIT, "54321")
    names = []
    for name, _ in runai_safetensors_weights_iterator(paths, False):
        names.append(name)
        assert os.environ[LIMIT] == "54321"
    assert names == ["a.2", "b.2", "a.3", "b.3", "a.0", "b.0", "a.1", "b.1"]
    assert spy.files == [f"model-{number:05}.safetensors" for number in (2, 3, 0, 1)]
    assert spy.limits == ["54321", "54321", "12345", "12345"]


@pytest.mark.parametrize(
    ("settings", "limits"),
    [
        ({"VLLM_RUNAI_CPU_WEIGHT_FILES": "model-00000.safetensors"}, [None, "-1"]),
        (
            {
                "VLLM_RUNAI_CPU_WEIGHT_FILES": "model-00000.safetensors",
                "VLLM_RUNAI_CPU_MEMORY_LIMIT": "999",
            },
            [None, "999"],
        ),
        (
            {
                "RAYWL_RUNAI_CPU_WEIGHT_FILES": "model-00000.safetensors",
                "VLLM_RUNAI_CPU_WEIGHT_FILES": "model-00001.safetensors",
            },
            [None, "-1"],
        ),
    ],
    ids=["vllm", "vllm-limit", "raywl-first"],
)
def test_both_spellings(tmp_path, spy, monkeypatch, settings, limits):
    """raywl's counts where both are there; by default the library may take what the file takes anyway."""
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    list(runai_safetensors_weights_iterator(numbered(tmp_path, 2), False))
    assert spy.files == ["model-00001.safetensors", "model-00000.safetensors"]
    assert spy.limits == limits
    assert LIMIT not in os.environ


def test_the_limit_is_restored_after_a_failure(tmp_path, spy, monkeypatch):
    (path,) = numbered(tmp_path, 1)
    monkeypatch.setenv("RAYWL_RUNAI_CPU_WEIGHT_FILES", os.path.basename(path))

    def fails(self: Any) -> Any:
        raise ValueError("no response")

    monkeypatch.setattr(SafetensorsStreamer, "get_tensors", fails)
    with pytest.raises(CheckpointError, match="can't read it: ValueError: no response") as caught:
        list(runai_safetensors_weights_iterator([path], False))
    assert caught.value.path == path
    assert spy.limits == ["-1"]
    assert LIMIT not in os.environ


def test_files_for_the_cpu_that_are_not_there_are_said(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_RUNAI_CPU_WEIGHT_FILES", "table.safetensors")
    with pytest.warns(UserWarning, match=r"VLLM_RUNAI_CPU_WEIGHT_FILES names files .* table\.safetensors"):
        assert len(list(runai_safetensors_weights_iterator(numbered(tmp_path, 2), False))) == 4


@pytest.mark.parametrize("which", ["RUNAI_STREAMER_MEMORY_LIMIT", "RAYWL_RUNAI_CPU_MEMORY_LIMIT"])
def test_a_limit_below_a_tensor_is_refused_before_anything_is_read(tmp_path, spy, monkeypatch, which):
    """With the numbers and the setting; the library itself would stop in the middle."""
    paths = [save(tmp_path, 0, a=torch.zeros(8)), save(tmp_path, 1, large=torch.zeros(1000))]
    if which.startswith("RAYWL"):
        monkeypatch.setenv("RAYWL_RUNAI_CPU_WEIGHT_FILES", "model-00001.safetensors")
    monkeypatch.setenv(which, "3999")
    with pytest.raises(CapacityError, match=which) as caught:
        next(runai_safetensors_weights_iterator(paths, False))
    assert (caught.value.needed, caught.value.available) == (4000, 3999)
    assert spy.files == []
    monkeypatch.setenv(which, "4000")
    assert len(list(runai_safetensors_weights_iterator(paths, False))) == 2


@pytest.mark.parametrize("value", ["much", "-2", ""])
def test_a_limit_that_is_no_number_is_refused(tmp_path, monkeypatch, value):
    monkeypatch.setenv(LIMIT, value)
    with pytest.raises(ValueError, match=f"{LIMIT} must be a number of bytes"):
        next(runai_safetensors_weights_iterator(numbered(tmp_path, 1), False))


def test_damage_is_found_before_anything_is_read(tmp_path, spy):
    paths = numbered(tmp_path, 3)
    os.truncate(paths[2], os.path.getsize(paths[2]) - 1)
    with pytest.raises(CorruptFileError, match="short by 1") as caught:
        next(runai_safetensors_weights_iterator(paths, False))
    assert caught.value.path == paths[2]
    assert spy.files == []
    with pytest.raises(MissingFileError, match="gone"):
        next(runai_safetensors_weights_iterator([*paths[:2], str(tmp_path / "gone.safetensors")], False))


@pytest.mark.parametrize("change", ["cut", "replaced"])
def test_a_file_that_changes_meanwhile_is_an_error(tmp_path, change):
    """It was planned with another header or size than what is read."""
    paths = numbered(tmp_path, 2)
    iterator = runai_safetensors_weights_iterator(paths, False)
    assert [next(iterator)[0], next(iterator)[0]] == ["a.0", "b.0"]
    if change == "cut":
        os.truncate(paths[1], os.path.getsize(paths[1]) - 4)
    else:
        save(tmp_path, 1, **{"a.1": torch.zeros(1), "c.1": torch.full((2, 3), 7)})
    with pytest.raises(CheckpointError) as caught:
        next(iterator)
    assert caught.value.path == paths[1]


def test_a_file_that_changes_while_the_library_reads_is_an_error(tmp_path, monkeypatch):
    """What was read may be mixed: nothing of it is given out."""
    (path,) = numbered(tmp_path, 1)
    real = SafetensorsStreamer.get_tensors

    def get_tensors(self: Any) -> Any:
        yield from real(self)
        with open(path, "r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"x")

    monkeypatch.setattr(SafetensorsStreamer, "get_tensors", get_tensors)
    with pytest.raises(CheckpointError, match="changed while it was read"):
        next(runai_safetensors_weights_iterator([path], False))


def test_what_the_library_leaves_out_is_an_error(tmp_path, monkeypatch):
    """No iterator gives less than it was asked for."""
    (path,) = numbered(tmp_path, 1)
    real = SafetensorsStreamer.get_tensors
    monkeypatch.setattr(SafetensorsStreamer, "get_tensors", lambda self: list(real(self))[1:])
    with pytest.raises(CheckpointError, match="gave nothing, the header says") as caught:
        list(runai_safetensors_weights_iterator([path], False))
    assert caught.value.path == path


def test_names_in_several_files_come_once(tmp_path):
    paths = [
        save(tmp_path, number, same=torch.ones(3), **{f"own.{number}": torch.ones(1)}) for number in (1, 2)
    ]
    with pytest.warns(UserWarning, match="taken from the first"):
        names = [name for name, _ in runai_safetensors_weights_iterator(paths, False)]
    assert names == ["own.1", "same", "own.2"]


def test_nothing_to_read():
    assert list(runai_safetensors_weights_iterator([], False)) == []


def test_a_file_without_tensors(tmp_path):
    paths = [save(tmp_path, 0), save(tmp_path, 1, a=torch.ones(1))]
    assert [name for name, _ in runai_safetensors_weights_iterator(paths, False)] == ["a"]


def test_progress_counts_bytes(tmp_path):
    """All bytes of tensors, up to the total."""
    told: list[tuple[int, int, str]] = []
    list(runai_safetensors_weights_iterator(numbered(tmp_path, 3), lambda *step: told.append(step)))
    total = sum(2 * 3 * 8 + 4 * number for number in range(3))
    assert told[-1] == (total, total, "read")
    assert [done for done, _, _ in told] == sorted(done for done, _, _ in told)


def test_groups_are_not_needed_where_there_are_none(tmp_path):
    """`is_distributed` in a lone process, with the default group and with none."""
    paths = numbered(tmp_path, 1)
    for options in ({}, {"process_group": None}, {"process_group": ...}):
        names = [n for n, _ in runai_safetensors_weights_iterator(paths, False, True, **options)]
        assert names == ["a.0", "b.0"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu(tmp_path, spy):
    """With `is_distributed` tensors come on the GPU, also in a lone process, and from raywl's reader."""
    paths = [write_dtype(tmp_path, dtype, prefix=dtype) for dtype in ("F32", "F8_E4M3FNUZ")]
    with pytest.warns(UserWarning, match="can't read F8_E4M3FNUZ"):
        got = dict(runai_safetensors_weights_iterator(paths, False, True))
    assert {tensor.device.type for tensor in got.values()} == {"cuda"}
    expected = [row(*pair) for pair in safetensors_weights_iterator(paths, False)]
    assert [row(name, tensor.cpu()) for name, tensor in got.items()] == expected
