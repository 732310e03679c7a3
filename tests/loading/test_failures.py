"""Files that change, end early or can't be read; loaders that fail: errors by name."""

from __future__ import annotations

import errno
import gc
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import raywl
from raywl.errors import CheckpointError, CorruptFileError, MissingFileError, ShapeMismatchError
from raywl.readers import files as files_module

from .conftest import Model, filled, mappings, open_fds, reader_threads

A = torch.arange(12, dtype=torch.float32).reshape(3, 4)
SHARD = "model-00002-of-00002.safetensors"


def copying(model, weights):
    for name, w in weights:
        model.get_parameter(name).copy_(w)


def snapshot(model):
    return {name: p.detach().clone() for name, p in model.named_parameters() if not p.is_meta}


def check_untouched(model, before):
    assert snapshot(model).keys() == before.keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in snapshot(model).items())


def truncate(path):
    os.truncate(path, path.stat().st_size - 4)


def extend(path):
    with open(path, "ab") as file:
        file.write(b"more")


def remove(path):
    path.unlink()


def replace_by_other_tensors(path):
    """Of the very same size, with another header."""
    size = path.stat().st_size
    save_file({"c": torch.zeros(3, 4)}, path)
    assert path.stat().st_size == size


def replace_by_a_folder(path):
    path.unlink()
    path.mkdir()


CHANGES = [
    (truncate, CorruptFileError), (extend, CorruptFileError), (remove, MissingFileError),
    (replace_by_other_tensors, CorruptFileError), (replace_by_a_folder, CheckpointError),
]  # fmt: skip


@pytest.mark.parametrize("load", [None, copying], ids=["declared", "by a loader"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(("change", "kind"), CHANGES, ids=lambda value: getattr(value, "__name__", value))
def test_a_file_that_changed_since_it_was_opened(write, load, device, change, kind):
    """Known before the first byte is written, with the file's name."""
    checkpoint = raywl.open_checkpoint(write({"a": A}, {"b": A}))
    change(Path(checkpoint.path(SHARD)))
    model = Model({"a": filled(3, 4).to(device), "b": filled(3, 4).to(device)}, load)
    before = snapshot(model)
    with pytest.raises(kind, match="model-00002-of-00002") as caught:
        raywl.load_into(model, checkpoint)
    assert not caught.value.partly_loaded
    check_untouched(model, before)
    with pytest.raises(kind):
        list(checkpoint.iter_weights())
    del caught
    gc.collect()
    assert open_fds() == set()
    assert reader_threads() == []


def big(folder):
    """A checkpoint of many reads, and a model for it."""
    names = [f"w{i:02}" for i in range(24)]
    save_file({name: torch.randn(256, 1024) for name in names}, folder / "model.safetensors")
    return {name: torch.zeros(256, 1024) for name in names}


class Disturbed:
    """Lets the world change after a number of real reads, by the reader's own call of the system."""

    def __init__(self, monkeypatch, after, act):
        self.left, self.act, self.real = after, act, os.preadv
        monkeypatch.setattr(files_module.os, "preadv", self)

    def __call__(self, fd, buffers, offset):
        self.left -= 1
        if self.left == 0:
            result = self.act(self, fd, buffers, offset)
            if result is not None:
                return result
        return self.real(fd, buffers, offset)


def during(path, what):
    def act(disturbed, fd, buffers, offset):
        what(path)

    return act


def overwrite(path):
    with open(path, "r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"\xff\xff\xff\xff")
    os.utime(path, ns=(1, 1))


def replace(path):
    other = path.with_suffix(".new")
    shutil.copy(path, other)
    os.replace(other, path)


def cut_short(path):
    os.truncate(path, 1 << 16)


@pytest.mark.parametrize("load", [None, copying], ids=["declared", "by a loader"])
@pytest.mark.parametrize("what", [cut_short, overwrite, replace, remove], ids=lambda what: what.__name__)
def test_a_file_that_changes_while_it_is_read(tmp_path, monkeypatch, what, load):
    monkeypatch.setattr("raywl.plan.reads.WINDOW_BYTES", 1 << 20)
    tensors = big(tmp_path)
    path = tmp_path / "model.safetensors"
    checkpoint = raywl.open_checkpoint(tmp_path)
    Disturbed(monkeypatch, 5, during(path, what))
    with pytest.raises(CheckpointError, match=r"model\.safetensors") as caught:
        raywl.load_into(Model(tensors, load), checkpoint)
    assert caught.value.partly_loaded
    assert "partly loaded" in str(caught.value)
    if what is cut_short:
        assert "ends at byte 65536" in str(caught.value) or "byte" in str(caught.value)
    assert reader_threads() == []


def test_short_reads_are_carried_on(tmp_path, monkeypatch):
    """The system may give fewer bytes than asked for, anywhere, also amid several destinations."""
    weights = {f"w{i}": torch.randn(3, 5 + i) for i in range(40)}
    save_file(weights, tmp_path / "model.safetensors")
    real = os.preadv

    def short(fd, buffers, offset):
        first = next(buffer for buffer in buffers if buffer.nbytes)
        return real(fd, [first[: 1 + offset % 7]], offset)

    monkeypatch.setattr(files_module.os, "preadv", short)
    model = Model({name: torch.zeros_like(tensor) for name, tensor in weights.items()})
    raywl.load_into(model, tmp_path)
    for name, tensor in weights.items():
        assert torch.equal(model.get_parameter(name), tensor)


@pytest.mark.parametrize("load", [None, copying], ids=["declared", "by a loader"])
def test_an_input_output_error_names_file_offset_and_cause(tmp_path, monkeypatch, load):
    monkeypatch.setattr("raywl.plan.reads.WINDOW_BYTES", 1 << 20)

    def fail(disturbed, fd, buffers, offset):
        disturbed.offset = offset
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    tensors = big(tmp_path)
    disturbed = Disturbed(monkeypatch, 7, fail)
    with pytest.raises(CheckpointError, match="Input/output error") as caught:
        raywl.load_into(Model(tensors, load), tmp_path)
    assert f"byte {disturbed.offset}" in str(caught.value)
    assert "model.safetensors" in str(caught.value)
    assert caught.value.partly_loaded
    assert isinstance(caught.value.__cause__, OSError)
    del caught
    gc.collect()
    assert open_fds() == set()
    assert mappings() == []
    assert reader_threads() == []


def test_values_read_early_from_a_file_that_ends_are_an_error_not_a_signal(tmp_path):
    """A loader looks at values of a file that was cut after its mapping was made."""
    tensors = big(tmp_path)
    path = tmp_path / "model.safetensors"

    def load(model, weights):
        for index, (_, w) in enumerate(weights):
            if index == 1:
                os.truncate(path, 4096)
                w.max()

    with pytest.raises(CorruptFileError, match="ends at byte"):
        raywl.load_into(Model(tensors, load), tmp_path)


class Upset(Exception):
    pass


def test_a_loader_that_fails_before_anything_is_read(write):
    def load(model, weights):
        for index, (name, w) in enumerate(weights):
            model.get_parameter(name).copy_(w)
            if index == 1:
                raise Upset("no")

    model = Model({"a": filled(3, 4), "b": filled(3, 4)}, load)
    before = snapshot(model)
    with pytest.raises(Upset) as caught:
        raywl.load_into(model, write({"a": A, "b": A + 1}))
    check_untouched(model, before)
    assert not any("partly loaded" in note for note in getattr(caught.value, "__notes__", []))


def test_a_loader_that_fails_after_it_wrote_says_so(write):
    def load(model, weights):
        for name, w in weights:
            model.get_parameter(name).copy_(w)
            model.a.max()
            raise Upset("no")

    model = Model({"a": filled(3, 4), "b": filled(3, 4)}, load)
    with pytest.raises(Upset) as caught:
        raywl.load_into(model, write({"a": A, "b": A + 1}))
    assert "raywl: the model is partly loaded" in caught.value.__notes__


def test_a_weight_loader_that_fails_is_named(write):
    def loader(param, weight):
        raise Upset("bad block size")

    model = Model({"a": filled(3, 4), "b": filled(3, 4)})
    model.b.weight_loader = loader
    before = snapshot(model)
    with pytest.raises(Upset) as caught:
        raywl.load_into(model, write({"a": A, "b": A + 1}))
    assert any("weight_loader of b failed on tensor 'b' [3, 4]" in note for note in caught.value.__notes__)
    check_untouched(model, before)


def test_a_model_on_meta_stays_there_when_nothing_was_read(write):
    model = Model({"a": filled(3, 4).to("meta"), "b": filled(3, 5).to("meta")})
    objects = dict(model.named_parameters())
    with pytest.raises(ShapeMismatchError):
        raywl.load_into(model, write({"a": A, "b": A + 1}))
    assert all(model.get_parameter(name) is p for name, p in objects.items())


def test_a_registered_tensor_is_taken_back_when_loading_fails(write):
    def load(model, weights):
        for name, w in weights:
            setattr(model, name, torch.nn.Parameter(w))
        raise Upset("late")

    model = Model({"a": filled(3, 4), "b": filled(3, 4)}, load)
    objects = dict(model.named_parameters())
    with pytest.raises(Upset):
        raywl.load_into(model, write({"a": A, "b": A + 1}))
    assert all(model.get_parameter(name) is p for name, p in objects.items())


def test_a_progress_callback_that_fails_stops_the_readers(tmp_path, monkeypatch):
    monkeypatch.setattr("raywl.plan.reads.WINDOW_BYTES", 1 << 20)
    tensors = big(tmp_path)
    calls = []

    def progress(done, total, phase):
        calls.append(done)
        if len(calls) == 3:
            raise Upset("enough")

    with pytest.raises(Upset):
        raywl.load_into(Model(tensors), tmp_path, progress=progress)
    assert len(calls) < 20
    assert reader_threads() == []


def test_progress_counts_up_to_the_whole(tmp_path, monkeypatch):
    monkeypatch.setattr("raywl.plan.reads.WINDOW_BYTES", 1 << 18)
    tensors = big(tmp_path)
    calls = []
    report = raywl.load_into(Model(tensors), tmp_path, progress=lambda *args: calls.append(args))
    assert calls[0] == (0, report.bytes_read, "read")
    assert calls[-1] == (report.bytes_read, report.bytes_read, "read")
    assert [done for done, _, _ in calls] == sorted(done for done, _, _ in calls)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read(write):
    checkpoint = raywl.open_checkpoint(write({"a": A}, {"b": A}))
    os.chmod(checkpoint.path(SHARD), 0)
    with pytest.raises(CheckpointError, match=r"model-00002.*Permission denied"):
        raywl.load_into(Model({"a": filled(3, 4), "b": filled(3, 4)}), checkpoint)


def test_many_files_with_few_descriptors(tmp_path):
    """More shards than a process may have open."""

    for index in range(120):
        name = f"model-{index + 1:05}-of-00120.safetensors"
        save_file({f"w{index}": torch.full((4,), float(index))}, tmp_path / name)
    script = f"""
import resource, torch, raywl
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        for i in range(120): self.register_parameter(f"w{{i}}", torch.nn.Parameter(torch.zeros(4)))
class Own(Model):
    def load_weights(self, weights):
        for name, w in weights: self.get_parameter(name).data.copy_(w)
for kind in (Model, Own):
    model = kind()
    raywl.load_into(model, {str(tmp_path)!r})
    assert all(p[0] == float(n[1:]) for n, p in model.named_parameters())
assert len(list(raywl.open_checkpoint({str(tmp_path)!r}).iter_weights())) == 120
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
