"""What a process may read and write in a second."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

import raywl
from raywl.node.page_cache import resident_fraction
from raywl.node.prefetch import prefetch
from raywl.pace import Pace, disk_pace, peer_pace, shared_pace


@given(
    st.floats(1e3, 1e9),
    st.lists(st.tuples(st.floats(0, 5), st.integers(1, 10_000_000)), min_size=1, max_size=50),
)
def test_a_pace_is_kept(rate, steps):
    """Whatever threads take and when: when the last may go on, no more came than the rate allows."""
    now = [0.0]
    pace = Pace(rate, lambda: now[0])
    done = 0
    for gap_s, nbytes in steps:
        now[0] += gap_s
        delay_s = pace.delay_s(nbytes)
        done += nbytes
        assert now[0] + delay_s >= nbytes / rate * (1 - 1e-9)
        now[0] += delay_s
        assert done <= rate * now[0] * (1 + 1e-9)


def test_a_pace_is_shared_by_threads():
    """Who comes at the same moment waits for all before."""
    pace = Pace(1000.0, lambda: 5.0)
    assert [pace.delay_s(100) for _ in range(3)] == pytest.approx([0.1, 0.2, 0.3])


def test_each_kind_has_its_own(monkeypatch):
    """Two that happen to have the same rate don't slow each other; all users of one kind share it."""
    monkeypatch.setenv("RAYWL_MAX_DISK_BYTES_PER_S", "1e6")
    monkeypatch.setenv("RAYWL_MAX_PEER_BYTES_PER_S", "1e6")
    assert disk_pace() is disk_pace() is not peer_pace()
    assert shared_pace("source", 1e6) not in (None, disk_pace(), peer_pace())
    assert disk_pace(2) is disk_pace(2) is not disk_pace()


@pytest.mark.parametrize("name", ["RAYWL_MAX_DISK_BYTES_PER_S", "RAYWL_MAX_PEER_BYTES_PER_S"])
def test_the_environment(monkeypatch, name):
    ask = disk_pace if "DISK" in name else peer_pace
    for text in ("", "0"):
        monkeypatch.setenv(name, text)
        assert ask() is None
    for text in ("-1", "fast", "nan", "inf"):
        monkeypatch.setenv(name, text)
        with pytest.raises(ValueError, match=f"{name}='{text}' is not a number"):
            ask()


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (torch.nn.Parameter(torch.empty(25_000, dtype=torch.uint8), False) for _ in "ab")


@pytest.mark.parametrize("strategy", ["buffered", "direct", "mmap", "prefetch"])
def test_a_load_is_no_faster(tmp_path, monkeypatch, strategy):
    """Whichever way it reads; the ranks of a node have equal parts of it."""
    monkeypatch.setenv("RAYWL_MAX_DISK_BYTES_PER_S", "500_000")
    values = {name: torch.randint(0, 255, (25_000,), dtype=torch.uint8) for name in "ab"}
    save_file(values, tmp_path / "model.safetensors")
    model = Model()
    context = raywl.ParallelContext(dp_size=2, local_size=2)
    began_s = time.monotonic()
    raywl.load_into(model, tmp_path, strategy=strategy, parallel=context)
    assert time.monotonic() - began_s >= 0.19
    assert torch.equal(model.a, values["a"])
    assert torch.equal(model.b, values["b"])


def test_what_is_in_memory_is_not_waited_for(tmp_path, monkeypatch):
    """A disk that would take a day has nothing to do with it."""
    monkeypatch.setenv("RAYWL_MAX_DISK_BYTES_PER_S", "1")
    path = tmp_path / "file"
    path.write_bytes(bytes(100_000))
    if resident_fraction(str(path)) != 1.0:
        pytest.skip("this file system keeps what was written elsewhere than in the page cache")
    reading = threading.Thread(target=prefetch, args=([("x", 0, 100_000)], {"x": str(path)}), daemon=True)
    reading.start()
    reading.join(60)
    assert not reading.is_alive()
