"""Transfers: tries, pauses, pace, and their limits. What goes over a network is tested with its servers."""

from __future__ import annotations

import email.utils
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raywl.errors import AuthError, SourceError
from raywl.sources.parts import PartFile
from raywl.sources.transfer import (
    Interrupted,
    Job,
    Limits,
    Stopped,
    again,
    fetch_range,
    joined,
    read_range,
    retry_after_s,
    run_jobs,
)

DATA = bytes(range(256)) * 40
FAST = Limits(retries=2)


def source(breaks=(), error=None, retry_after=0.0):
    """A file that breaks off at each of `breaks` once; notes where it was asked from."""
    left, asked = list(breaks), []

    def stream(start, end, stop):
        asked.append((start, end))
        while start < end:
            if left and start >= left[0]:
                left.pop(0)
                raise error or Interrupted(SourceError("x", "broke off"), retry_after)
            size = min(100, end - start, left[0] - start if left else end)
            yield DATA[start : start + size]
            start += size

    return stream, asked


def quick(monkeypatch):
    monkeypatch.setattr("raywl.sources.transfer._LONGEST_PAUSE_S", 0.01)


def test_it_goes_on_where_it_stopped(monkeypatch):
    """Any number of breaks, as long as something comes in between."""
    quick(monkeypatch)
    stream, asked = source([100, 250, 251, 900, 5000, 9999])
    assert read_range(stream, 0, len(DATA), FAST) == DATA
    assert [start for start, _ in asked] == [0, 100, 250, 251, 900, 5000, 9999]


def test_what_brings_nothing_ends(monkeypatch):
    quick(monkeypatch)
    stream, asked = source([100, 100, 100])
    with pytest.raises(SourceError, match="broke off"):
        read_range(stream, 0, 200, FAST)
    assert len(asked) == 3


def test_what_will_not_pass_is_not_tried_again():
    stream, asked = source([100], error=AuthError("x", "no"))
    with pytest.raises(AuthError):
        read_range(stream, 0, 200, FAST)
    assert len(asked) == 1
    refusal = AuthError("x", "no", status=403)
    assert Interrupted.if_transient(refusal) is refusal
    for status in (None, 408, 429, 500, 503):
        assert isinstance(Interrupted.if_transient(SourceError("x", "y", status=status)), Interrupted)
    assert isinstance(Interrupted.if_transient(SourceError("x", "y", status=400)), SourceError)


def test_a_source_is_given_its_time(monkeypatch):
    """`Retry-After`, up to two minutes; after that the error says more than a wait would."""
    quick(monkeypatch)
    stream, _ = source([100], retry_after=0.3)
    began_s = time.monotonic()
    read_range(stream, 0, 200, FAST)
    assert time.monotonic() - began_s >= 0.3
    stream, asked = source([100], retry_after=3600.0)
    with pytest.raises(SourceError):
        read_range(stream, 0, 200, FAST)
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        (None, None),
        ("", None),
        ("7", 7.0),
        ("soon", None),
        ("Sun, 06 Nov 1994 08:49:37 GMT", 0.0),
    ],
)
def test_headers_that_ask_for_time(header, seconds):
    assert retry_after_s(header) == seconds


def test_a_date_that_asks_for_time():
    assert 50 < retry_after_s(email.utils.formatdate(time.time() + 60, usegmt=True)) <= 60


def test_short_calls_are_tried_again_less_often(monkeypatch):
    quick(monkeypatch)
    calls = []

    def call():
        calls.append(1)
        raise Interrupted(SourceError("x", "no answer"))

    with pytest.raises(SourceError, match="no answer"):
        again(call, Limits(retries=10))
    assert len(calls) == 3


def test_a_wait_ends_when_it_is_stopped():
    stop = threading.Event()
    stream, _ = source([100], retry_after=60.0)
    threading.Timer(0.2, stop.set).start()
    began_s = time.monotonic()
    with pytest.raises(Stopped):
        fetch_range(stream, 0, 200, lambda *_: None, FAST, stop)
    assert time.monotonic() - began_s < 30


# Pace


def test_a_slow_pace():
    stream, _ = source()
    began_s = time.monotonic()
    assert read_range(stream, 0, 3000, Limits(max_bytes_per_s=10_000)) == DATA[:3000]
    assert time.monotonic() - began_s >= 0.29


def test_a_slow_disk(tmp_path, monkeypatch):
    """The slower one of source and disk decides."""
    monkeypatch.setenv("RAYWL_MAX_DISK_BYTES_PER_S", "20_000")
    jobs = [
        Job(lambda name=name: PartFile.open(str(tmp_path / name), 3000), source()[0]) for name in ("x", "y")
    ]
    began_s = time.monotonic()
    run_jobs(jobs, Limits(max_bytes_per_s=1e9))
    assert time.monotonic() - began_s >= 0.29
    assert (tmp_path / "y").read_bytes() == DATA[:3000]


# Limits


def test_limits_come_from_the_environment(monkeypatch):
    for name in ("STALL_S", "RETRIES", "MAX_BYTES_PER_S", "STREAMS"):
        monkeypatch.delenv(f"RAYWL_{name}", raising=False)
    assert Limits.of_environment() == Limits()
    monkeypatch.setenv("RAYWL_STALL_S", "2.5")
    monkeypatch.setenv("RAYWL_RETRIES", "0")
    monkeypatch.setenv("RAYWL_MAX_BYTES_PER_S", "1e6")
    monkeypatch.setenv("RAYWL_STREAMS", "3")
    assert Limits.of_environment() == Limits(2.5, 0, 1e6, 3)
    for text in ("-1", "fast", "nan", "inf"):
        monkeypatch.setenv("RAYWL_RETRIES", text)
        with pytest.raises(ValueError, match="RAYWL_RETRIES"):
            Limits.of_environment()


@given(st.lists(st.binary(max_size=700), max_size=20))
def test_pieces_are_joined(pieces):
    blocks = list(joined(pieces, 1000))
    assert b"".join(blocks) == b"".join(pieces)
    assert all(len(block) >= 1000 for block in blocks[:-1])


def test_what_came_before_a_break_is_handed_on():
    def broken():
        yield b"ab"
        yield b"cd"
        raise ConnectionResetError

    blocks = joined(broken(), 1000)
    assert next(blocks) == b"abcd"
    with pytest.raises(ConnectionResetError):
        next(blocks)


# Several files


def test_many_files_of_many_ranges(tmp_path, monkeypatch):
    """More than a process may open at a time would be; each byte once, each file checked and named once."""
    monkeypatch.setattr("raywl.sources.transfer._RANGE_BYTES", 1000)
    open_parts, most = set(), [0]
    done, counted = [], []
    asked = []

    def job(index):
        target = str(tmp_path / str(index))

        def make():
            part = PartFile.open(target, len(DATA))
            open_parts.add(index)
            most[0] = max(most[0], len(open_parts))
            return part

        stream, spans = source()
        asked.append(spans)

        def finished():
            open_parts.discard(index)
            done.append(index)

        return Job(make, stream, done=finished, ranged=index != 5)

    jobs = [job(index) for index in range(40)]
    assert run_jobs(jobs, Limits(streams=4), counted.append) == 40 * len(DATA) == sum(counted)
    assert sorted(done) == list(range(40))
    assert most[0] <= 8
    assert [Path(tmp_path, str(index)).read_bytes() for index in range(40)] == [DATA] * 40
    for index, spans in enumerate(asked):
        assert sorted(spans) == (
            [(0, len(DATA))]
            if index == 5
            else [(i, min(i + 1000, len(DATA))) for i in range(0, len(DATA), 1000)]
        )
    assert {path.name for path in tmp_path.iterdir()} == {str(index) for index in range(40)}


def test_no_files(tmp_path):
    assert run_jobs([], FAST) == 0


def test_one_that_fails_stops_all_and_keeps_what_came(tmp_path, monkeypatch):
    monkeypatch.setattr("raywl.sources.transfer._RANGE_BYTES", 1000)
    good, _ = source()
    bad, _ = source([4500], error=AuthError("x", "no"))

    def job(name, stream):
        return Job(lambda: PartFile.open(str(tmp_path / name), len(DATA)), stream)

    with pytest.raises(AuthError):
        run_jobs([job("bad", bad), job("good", good)], Limits(streams=1))
    assert not (tmp_path / "bad").exists()
    again = PartFile.open(str(tmp_path / "bad"), len(DATA))
    assert again.missing() == [(4500, len(DATA))]
    again.discard()


def test_it_can_be_stopped(tmp_path):
    stop, started = threading.Event(), threading.Event()

    def endless(start, end, stop):
        yield DATA[:10]
        started.set()
        stop.wait(60)

    job = Job(lambda: PartFile.open(str(tmp_path / "x"), len(DATA)), endless)
    threading.Thread(target=lambda: (started.wait(30), stop.set())).start()
    with pytest.raises(Stopped):
        run_jobs([job], FAST, stop=stop)
    again = PartFile.open(str(tmp_path / "x"), len(DATA))
    assert again.missing() == [(10, len(DATA))]
    again.discard()


def test_a_file_that_cant_be_made_is_an_error(tmp_path):
    def make():
        raise SourceError("x", "can't be written")

    with pytest.raises(SourceError, match="can't be written"):
        run_jobs([Job(make, source()[0])], FAST)
