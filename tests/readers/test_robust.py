"""What happens to reads under way: every strategy carries on or names file and byte, and mixes no bytes."""

from __future__ import annotations

import os
import re
import shutil
import signal
import threading

import pytest
import torch
from safetensors.torch import load_file

import raywl
from raywl.errors import CheckpointError, CorruptFileError
from raywl.readers import ways
from raywl.readers.memory import ByteView

from .conftest import reader_threads
from .test_strategies import FILE, Loads, every, folder, made  # noqa: F401 (fixtures)

ALIGNED = 4096


def bytes_of(tensor):
    return tensor.view(-1).view(torch.uint8)


@every
def test_short_reads(made, strategy, monkeypatch):  # noqa: F811
    """The system may give fewer bytes than asked for; past the page cache, whole blocks of them."""
    real, calls = os.preadv, []

    def short(fd, buffers, offset):
        first = next(buffer for buffer in buffers if buffer.nbytes)
        calls.append(offset)
        count = min(first.nbytes, ALIGNED * (1 + len(calls) % 7))
        if len(calls) % 2 and count % ALIGNED == 0 and strategy != "direct":
            count -= len(calls) % 5
        return real(fd, [first[:count]], offset)

    monkeypatch.setattr(os, "preadv", short)
    model = Loads()
    raywl.load_into(model, made, strategy=strategy)
    found = dict(raywl.open_checkpoint(made).iter_weights(strategy=strategy))
    monkeypatch.undo()
    assert len(calls) > (100 if strategy != "mmap" else -1)
    model.check()
    for name, tensor in load_file(made / FILE).items():
        assert torch.equal(bytes_of(found[name]), bytes_of(tensor)), name


@every
def test_interrupted_reads_are_made_again(made, fuse, strategy):  # noqa: F811
    """A file system that answers two of three reads with EINTR: from opening to the last byte."""
    shutil.copy(made / FILE, fuse.behind)
    fuse.fail(eintr={FILE: 3})
    model = Loads()
    raywl.load_into(model, fuse.path, strategy=strategy)
    model.check()
    assert len(fuse.reads()) > 10


class UnderFire:
    """Calls of the system, during which their threads get one signal after the other."""

    def __init__(self):
        self.calls = self.signals = 0
        self._told = threading.Condition()
        self._idents, self._stop = {}, False
        self._thread = threading.Thread(target=self._fire, name="fire")

    def wrap(self, real):
        def call(*args):
            me = threading.get_ident()
            with self._told:
                self._idents[me] = 0
                # Begins once the first signal was sent, so that others come meanwhile.
                assert self._told.wait_for(lambda: self._idents[me], timeout=30)
            try:
                return real(*args)
            finally:
                with self._told:
                    self.calls += 1
                    self.signals += self._idents.pop(me)

        return call

    def _fire(self):
        while not self._stop:
            with self._told:
                for ident in self._idents:
                    signal.pthread_kill(ident, signal.SIGUSR1)
                    self._idents[ident] += 1
                self._told.notify_all()

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *exc):
        self._stop = True
        self._thread.join()


@every
def test_signals_while_reading(made, strategy, monkeypatch):  # noqa: F811
    """They run their handler, in the main thread as ever, and change nothing."""
    handled = []
    before = signal.signal(signal.SIGUSR1, lambda *_: handled.append(1))
    try:
        with UnderFire() as fire:
            monkeypatch.setattr(os, "preadv", fire.wrap(os.preadv))
            monkeypatch.setattr(ways._Mapping, "_advise", fire.wrap(ways._Mapping._advise))
            model = Loads()
            raywl.load_into(model, made, strategy=strategy)
    finally:
        signal.signal(signal.SIGUSR1, before)
    model.check()
    assert fire.signals >= fire.calls > 3
    assert handled


def replace(path):
    """By other values of the same size."""
    new = bytearray(path.read_bytes())
    new[-(4 << 20) :] = bytes(4 << 20)
    path.with_suffix(".new").write_bytes(new)
    os.replace(path.with_suffix(".new"), path)


def overwrite(path):
    with open(path, "r+b") as file:
        file.seek(-(4 << 20), os.SEEK_END)
        file.write(bytes(4 << 20))


def cut(path):
    os.truncate(path, os.path.getsize(path) // 2)


def remove(path):
    path.unlink()


CHANGES = pytest.mark.parametrize("change", [replace, overwrite, cut, remove], ids=lambda c: c.__name__)


@every
@CHANGES
def test_a_file_that_changes_under_way(folder, strategy, change, monkeypatch):  # noqa: F811
    """After the first read: an error that names the file, and the model is partly loaded by its own word."""
    monkeypatch.setattr("raywl.plan.reads.WINDOW_BYTES", 1 << 20)
    checkpoint, calls = raywl.open_checkpoint(folder), []

    def progress(done, total, phase):
        calls.append(done)
        if len(calls) == 3:
            change(folder / FILE)

    with pytest.raises(CheckpointError, match=re.escape(str(folder / FILE))) as caught:
        raywl.load_into(Loads(), checkpoint, strategy=strategy, progress=progress)
    assert 0 < calls[2] < checkpoint.nbytes
    assert caught.value.partly_loaded
    words = r"ends at byte \d+, \d+ bytes before" if change is cut else "changed while it was read"
    assert re.search(words, str(caught.value))
    assert isinstance(caught.value, CorruptFileError) == (change is cut)
    assert not reader_threads()


@every
@CHANGES
def test_a_file_that_changes_while_it_is_iterated(folder, strategy, change):  # noqa: F811
    """What was given out before the error is the old file's, unless that was written to."""
    old = load_file(folder / FILE)
    old = {name: tensor.clone() for name, tensor in old.items()}
    weights = raywl.open_checkpoint(folder).iter_weights(strategy=strategy)
    given = [next(weights)]
    change(folder / FILE)
    with pytest.raises(CheckpointError, match=re.escape(str(folder / FILE))):
        given.extend(weights)
    if change is not overwrite:
        for name, tensor in given:
            assert torch.equal(bytes_of(tensor), bytes_of(old[name])), name
    assert not reader_threads()


def test_many_threads_ask_for_a_view_at_once(monkeypatch):
    """Whoever comes while others make it gets it whole; each waits until all have begun."""
    num_threads = 4
    tensor = torch.arange(5000, dtype=torch.int32)
    view, begun, found = ByteView(tensor), threading.Barrier(num_threads, timeout=30), []
    real = torch.Tensor.set_

    def slow(*args):
        begun.wait()
        return real(*args)

    monkeypatch.setattr(torch.Tensor, "set_", slow)
    threads = [threading.Thread(target=lambda: found.append(view.raw.numel())) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [tensor.nbytes] * num_threads
