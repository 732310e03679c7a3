"""What is prefetched, in which order, by whom, and when it stops."""

import logging
import os
import subprocess
import sys
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raywl.node import prefetch as module
from raywl.node.mounts import NETWORK_FILE_SYSTEMS
from raywl.node.page_cache import drop, resident_bytes
from raywl.node.prefetch import (
    Covered,
    FilePrefetch,
    checkpoints_size_bytes,
    local_rank_and_size,
    prefetch,
    prefetch_all_checkpoints,
    prefetch_checkpoint,
    should_prefetch,
)
from raywl.types import ParallelContext

WAIT_S = 30


@pytest.fixture
def files(tmp_path):
    found = {}
    for i in range(6):
        path = tmp_path / f"model-{i}"
        path.write_bytes(os.urandom(1000 + i))
        found[path.name] = str(path)
    return found


@pytest.fixture
def reads(monkeypatch):
    """The file and bytes of each read, as they happen."""
    done = []
    preadv = os.preadv

    def watched(fd, buffers, offset, *flags):
        num_bytes = preadv(fd, buffers, offset, *flags)
        if num_bytes:
            done.append((os.path.basename(os.readlink(f"/proc/self/fd/{fd}")), offset, offset + num_bytes))
        return num_bytes

    monkeypatch.setattr(os, "preadv", watched)
    return done


@pytest.fixture
def no_ranks(monkeypatch):
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def test_ranges_are_read_in_order_and_each_byte_once(files, reads):
    ranges = [("model-1", 500, 600), ("model-0", 0, 250), ("model-1", 450, 700), ("model-0", 100, 250)]
    result = prefetch(ranges, files, num_threads=1, block_bytes=100)
    assert reads == [
        ("model-1", 500, 600),
        ("model-0", 0, 100),
        ("model-0", 100, 200),
        ("model-0", 200, 250),
        ("model-1", 450, 500),
        ("model-1", 600, 700),
    ]
    assert (result.bytes_read, result.failed, result.stopped) == (500, {}, False)


def test_many_threads_read_the_same_bytes(files, reads):
    ranges = [(name, 0, 1000) for name in files] * 2
    result = prefetch(ranges, files, num_threads=4, block_bytes=64)
    assert sorted(reads) == sorted(
        (name, at, min(at + 64, 1000)) for name in files for at in range(0, 1000, 64)
    )
    assert result.bytes_read == 6000


def test_the_bytes_are_in_the_page_cache_afterwards(tmp_path):
    path = str(tmp_path / "large")
    with open(path, "wb") as out:
        out.write(os.urandom(3 << 20))
    drop(path)
    if resident_bytes(path):
        pytest.skip("this file system lies in memory")
    prefetch([("f", 0, 3 << 20)], {"f": path}, num_threads=2, block_bytes=1 << 20)
    assert resident_bytes(path) == 3 << 20
    drop(path)
    prefetch_checkpoint(path, 1 << 20)
    assert resident_bytes(path) == 3 << 20


def test_ranges_are_taken_as_they_are_needed(files):
    """An endless order, stopped from inside."""
    stop, taken = threading.Event(), []

    def endless():
        at = 0
        while True:
            taken.append(at)
            yield "model-0", at % 900, at % 900 + 7
            at += 7

    result = prefetch(
        endless(),
        files,
        num_threads=2,
        block_bytes=7,
        stop=stop,
        on_read=lambda _: len(taken) > 20 and stop.set(),
    )
    assert result.stopped
    assert len(taken) < 200


def test_a_stop_that_is_set_reads_nothing(files, reads):
    stop = threading.Event()
    stop.set()
    result = prefetch([("model-0", 0, 10)], files, stop=stop)
    assert (result.bytes_read, result.stopped, reads) == (0, True, [])
    assert not prefetch([], files, stop=stop).stopped


def test_a_file_that_fails_is_told_and_the_others_go_on(files, tmp_path, caplog):
    files["gone"] = str(tmp_path / "gone")
    files["folder"] = str(tmp_path)
    ranges = [
        ("gone", 0, 10),
        ("gone", 10, 20),
        ("folder", 0, 10),
        ("model-0", 0, 2000),
        ("model-1", 0, 1001),
    ]
    result = prefetch(ranges, files, num_threads=1, block_bytes=10)
    assert result.bytes_read == 1000 + 1001
    assert result.failed == {
        "gone": "No such file or directory",
        "folder": "Is a directory",
        "model-0": "ends at byte 1000, before byte 1010",
    }
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 3
    assert files["gone"] in caplog.text


def test_errors_of_the_caller_are_raised_and_all_threads_end(files):
    before = set(threading.enumerate())
    with pytest.raises(KeyError, match="unknown"):
        prefetch([("model-0", 0, 10), ("unknown", 0, 10)], files, num_threads=3)

    def fail(num_bytes):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        prefetch([(name, 0, 1000) for name in files], files, num_threads=3, on_read=fail)

    def broken():
        yield "model-0", 0, 10
        raise RuntimeError("the plan")

    with pytest.raises(RuntimeError, match="the plan"):
        prefetch(broken(), files, num_threads=3)
    assert not set(threading.enumerate()) - before


@pytest.mark.parametrize(("num_threads", "block_bytes"), [(0, 1), (-1, 1), (1, 0), (1, -5)])
def test_counts_below_one_are_refused(files, num_threads, block_bytes):
    with pytest.raises(ValueError, match="at least 1"):
        prefetch([], files, num_threads=num_threads, block_bytes=block_bytes)
    with pytest.raises(ValueError, match="at least 1"):
        prefetch_all_checkpoints([], num_threads, block_bytes)
    if num_threads == 1:
        with pytest.raises(ValueError, match="at least 1"):
            prefetch_checkpoint(files["model-0"], block_bytes)


ranges_of_two_files = st.lists(
    st.tuples(st.sampled_from("ab"), st.integers(0, 30), st.integers(0, 30)), max_size=20
)


@settings(deadline=None)
@given(ranges_of_two_files)
def test_law_covered_gives_each_byte_once_in_the_order_first_asked(ranges):
    covered, seen, given_out = Covered(), {}, []
    for file, start, end in ranges:
        parts = covered.add(file, start, end)
        assert all(start <= part.start < part.end <= end for part in parts)
        given_out += [(file, at) for part in parts for at in range(part.start, part.end)]
        seen.update(dict.fromkeys((file, at) for at in range(start, end)))
    assert given_out == list(seen)


def test_covered_joins_what_touches():
    covered = Covered()
    for at in range(0, 1000, 10):
        assert covered.add("a", at, at + 10) == [("a", at, at + 10)]
    assert covered.add("a", 0, 1000) == []
    assert covered._ends == {"a": ([0], [1000])}


@pytest.mark.parametrize("name", [name.replace("*", "x") for name in NETWORK_FILE_SYSTEMS])
def test_a_network_file_system_is_prefetched_up_to_90_percent(name):
    """C50: 90 B of 100 B fit, one more doesn't, and both sizes are told."""
    assert should_prefetch(name, 90, 100).on
    decision = should_prefetch(name, 95, 100)
    assert (decision.on, decision.warn) == (False, True)
    assert "95 B" in decision.reason
    assert "100 B" in decision.reason
    assert name in decision.reason


@pytest.mark.parametrize("name", ["ext4", "tmpfs", "overlay", ""])
def test_other_file_systems_are_not(name):
    decision = should_prefetch(name, 1, 100)
    assert (decision.on, decision.warn) == (False, False)
    assert decision.reason


def test_who_asks_gets_what_he_asks_for():
    """Over 90 % it is done all the same, with a warning that has both sizes."""
    asked = should_prefetch("ext4", 95, 100, asked=True)
    assert (asked.on, asked.warn) == (True, True)
    assert "95 B" in asked.reason
    assert "100 B" in asked.reason
    assert should_prefetch("ext4", 5, 100, asked=True).warn is False
    assert should_prefetch("nfs", 5, 100, asked=False).on is False


def test_exactly_90_percent_of_large_numbers():
    """Floats would round."""
    available = 10**18 + 10
    assert should_prefetch("nfs", available // 10 * 9, available).on
    assert not should_prefetch("nfs", available // 10 * 9 + 1, available).on


def test_sizes(files):
    assert checkpoints_size_bytes([]) == 0
    assert checkpoints_size_bytes(files.values()) == 6015
    with pytest.raises(FileNotFoundError):
        checkpoints_size_bytes([*files.values(), "/absent"])


def test_local_ranks(monkeypatch, no_ranks):
    assert local_rank_and_size() == (0, 1)
    monkeypatch.setenv("LOCAL_RANK", "2")
    assert local_rank_and_size() == (0, 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert local_rank_and_size() == (2, 4)
    with ParallelContext(tp_rank=5, tp_size=8, local_rank=1, local_size=2):
        assert local_rank_and_size() == (1, 2)
    for rank in ("4", "-1", "two"):
        monkeypatch.setenv("LOCAL_RANK", rank)
        assert local_rank_and_size() == (0, 1)


@pytest.mark.parametrize("by_context", [True, False])
def test_the_ranks_of_a_node_read_each_file_once_together(files, reads, monkeypatch, no_ranks, by_context):
    """Global ranks 4 to 7 of 8, on the second node: cut by those, half of the files would stay cold (C50)."""
    for local_rank in range(4):
        context = ParallelContext(tp_rank=4 + local_rank, tp_size=8, local_rank=local_rank, local_size=4)
        if by_context:
            with context:
                running = prefetch_all_checkpoints(list(files.values()), 2, 1 << 20)
        else:
            monkeypatch.setenv("LOCAL_RANK", str(local_rank))
            monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
            running = prefetch_all_checkpoints(list(files.values()), 2, 1 << 20)
        assert running.join(WAIT_S)
    assert sorted(reads) == [(name, 0, 1000 + i) for i, name in enumerate(files)]


def test_progress_is_logged_at_each_tenth(files, caplog, no_ranks):
    caplog.set_level(logging.INFO, module.__name__)
    assert prefetch_all_checkpoints(list(files.values()), 3, 10).join(WAIT_S)
    lines = [record.getMessage() for record in caplog.records]
    assert [line.split()[1] for line in lines] == [str(percent) for percent in range(10, 101, 10)]


def test_absent_and_empty_files_are_no_failure(files, tmp_path, caplog, no_ranks):
    (tmp_path / "empty").touch()
    running = prefetch_all_checkpoints([str(tmp_path / "gone"), str(tmp_path / "empty"), *files.values()])
    assert running.join(WAIT_S)
    assert running.result.bytes_read == 6015
    assert "gone" in caplog.text


@pytest.fixture
def slow_file(tmp_path):
    """A pipe: its reader waits until this end writes."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    return str(path)


def test_closing_ends_the_threads(files, monkeypatch, no_ranks):
    """Each read waits for the test; after the close none begins."""
    started, go_on, num_reads = threading.Event(), threading.Event(), []
    preadv = os.preadv

    def held(*args):
        num_reads.append(1)
        started.set()
        assert go_on.wait(WAIT_S)
        return preadv(*args)

    monkeypatch.setattr(os, "preadv", held)
    with prefetch_all_checkpoints(list(files.values()), 1, 10) as running:
        assert started.wait(WAIT_S)
        assert running.is_running
        assert running.join(0.0) is False
    go_on.set()
    assert running.join(WAIT_S)
    assert running.result.stopped
    assert len(num_reads) == 1


def test_a_process_ends_while_a_prefetch_hangs(slow_file):
    """The threads are daemons: a file system that doesn't answer can't keep a process from ending."""
    code = f"""
from raywl.node.prefetch import FilePrefetch
import os
os.path.getsize = lambda path: 100
FilePrefetch([{slow_file!r}], 2, 10)
print("end")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "end\n"


def test_the_files_of_a_prefetch_are_those_of_its_start(files):
    """The list is the caller's, who may change it."""
    paths = list(files.values())
    running = FilePrefetch(paths, 1, 100)
    paths.clear()
    assert running.join(WAIT_S)
    assert running.result.bytes_read == 6015
