"""The page cache is filled ahead of the reads on demand, and by itself on network file systems."""

from __future__ import annotations

import threading

import pytest
import torch
from safetensors.torch import save_file

import raywl
from raywl.node import page_cache
from raywl.readers import facts

from .conftest import mounted


class Two(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Parameter(torch.empty(512, 1024, device="meta"))
        self.b = torch.nn.Parameter(torch.empty(64, device="meta"))


@pytest.fixture
def folder(tmp_path):
    save_file({"a": torch.randn(512, 1024), "b": torch.randn(64)}, tmp_path / "model.safetensors")
    return tmp_path


def _resident(folder):
    return page_cache.resident_fraction(str(folder / "model.safetensors"))


def test_on_demand(folder):
    """`strategy="prefetch"` loads the same values, says so, and leaves no thread behind."""
    page_cache.drop(str(folder / "model.safetensors"))
    plain, warmed = Two(), Two()
    assert raywl.load_into(plain, folder, strategy="buffered").notes == []
    before = set(threading.enumerate())
    report = raywl.load_into(warmed, folder, strategy="prefetch")
    assert any("asked for" in note for note in report.notes)
    assert not set(threading.enumerate()) - before
    assert torch.equal(plain.a, warmed.a)
    assert _resident(folder) in (None, 1.0)


def test_iterator(folder):
    """The iterator takes the word too, and gives the same tensors."""
    checkpoint = raywl.open_checkpoint(folder)
    one, other = dict(checkpoint.iter_weights()), dict(checkpoint.iter_weights(strategy="prefetch"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_by_itself_on_a_network_file_system(folder, monkeypatch):
    """`auto` prefetches there when it fits into memory, and warns with both sizes when it doesn't."""
    mounted(folder, "nfs4", monkeypatch)
    report = raywl.load_into(Two(), folder)
    assert any("strategy prefetch: prefetch on nfs4" in note for note in report.notes)
    monkeypatch.setattr(facts, "available_ram_bytes", lambda: 1000)
    with pytest.warns(UserWarning, match="90 % of memory"):
        report = raywl.load_into(Two(), folder)
    assert any("no prefetch on nfs4" in note for note in report.notes)


def test_off_on_a_local_one(folder):
    """Nothing is done where reads are fast already."""
    (note,) = raywl.load_into(Two(), folder).notes
    assert note.startswith("strategy buffered: on ")
    assert "prefetch" not in note
