"""Part files: what is there is known after every break, and nothing else is believed to be."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raywl.errors import CapacityError, SourceError
from raywl.sources.parts import PartFile, Spans, sweep

SIZE = 100


@st.composite
def writes(draw):
    """Spans of a file of SIZE bytes."""
    edges = st.integers(0, SIZE)
    return [tuple(sorted(pair)) for pair in draw(st.lists(st.tuples(edges, edges), max_size=12))]


@given(writes())
def test_spans_are_a_set(spans):
    """Present and missing tile the whole; what is added counts once."""
    kept, there = Spans(), set()
    for start, end in spans:
        fresh = set(range(start, end)) - there
        assert kept.add(start, end) == len(fresh)
        there |= fresh
    assert kept.total == len(there)
    missing = kept.missing(0, SIZE)
    tiles = sorted([*kept, *missing])
    assert [start for start, _ in tiles] + [SIZE] == [0, *(end for _, end in tiles)]
    assert {i for start, end in missing for i in range(start, end)} == set(range(SIZE)) - there
    assert all(a[1] < b[0] for a, b in zip(list(kept), list(kept)[1:], strict=False))


DATA = bytes(range(SIZE))
LAW = settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@LAW
@given(writes(), st.integers(0, 400))
def test_what_is_left_is_what_was_written(tmp_path, spans, torn_at):
    """After a break, a torn journal included: never more than was written, and all of it if it is whole."""
    for path in tmp_path.iterdir():
        path.unlink()
    target = str(tmp_path / "blob")
    part = PartFile.open(target, SIZE)
    there = Spans()
    for start, end in spans:
        assert part.write(start, DATA[start:end]) == there.add(start, end)
    assert part.missing() == there.missing(0, SIZE)
    part.close()
    journals = list(tmp_path.glob("*.journal"))
    assert bool(journals) == bool(there.total)
    whole = True
    for journal in journals:
        raw = journal.read_bytes()
        whole = torn_at >= len(raw)
        journal.write_bytes(raw[:torn_at])
    again = PartFile.open(target, SIZE)
    if whole:
        assert again.missing() == there.missing(0, SIZE)
    for start, end in Spans(again.missing()).missing(0, SIZE):
        assert again.read(start, end) == DATA[start:end]
        assert not there.missing(start, end)
    for start, end in again.missing():
        again.write(start, DATA[start:end])
    again.finish()
    assert Path(target).read_bytes() == DATA
    assert os.listdir(tmp_path) == ["blob"] or whole is False
    sweep(str(tmp_path))


def test_nothing_half_written_gets_the_name(tmp_path):
    target = tmp_path / "blob"
    part = PartFile.open(str(target), SIZE)
    part.write(0, DATA[:50])
    with pytest.raises(ValueError, match="1 spans are missing"):
        part.finish()
    part.write(50, DATA[50:])

    def refuse(path):
        assert Path(path).read_bytes() == DATA
        raise SourceError("x", "wrong bytes")

    with pytest.raises(SourceError, match="wrong bytes"):
        part.finish(refuse)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(SourceError):
        part.write(0, DATA)


@pytest.mark.parametrize(("start", "data"), [(-1, b"ab"), (99, b"ab"), (101, b"")])
def test_writes_stay_inside(tmp_path, start, data):
    part = PartFile.open(str(tmp_path / "blob"), SIZE)
    with pytest.raises(ValueError, match="don't lie in a file of 100"):
        part.write(start, data)
    with pytest.raises(ValueError, match="aren't all there"):
        part.read(0, 1)
    part.discard()


def test_an_empty_file(tmp_path):
    part = PartFile.open(str(tmp_path / "blob"), 0)
    assert part.missing() == []
    part.finish()
    assert (tmp_path / "blob").read_bytes() == b""
    assert os.listdir(tmp_path) == ["blob"]


def test_two_writers_have_files_of_their_own(tmp_path):
    """C59: of one process or of several; what is alive is never taken over, whoever finishes last wins."""
    target = str(tmp_path / "blob")
    first, second = PartFile.open(target, SIZE), PartFile.open(target, SIZE)
    first.write(0, DATA[:60])
    assert second.missing() == [(0, SIZE)]
    second.write(0, b"x" * SIZE)
    second.discard()
    first.write(60, DATA[60:])
    first.finish()
    assert Path(target).read_bytes() == DATA


WRITE = """
import signal, sys
from raywl.sources.parts import PartFile
part = PartFile.open(sys.argv[1], 100)
part.write(10, bytes(range(10, 60)))
print("written", flush=True)
signal.pause()
"""


def test_what_a_killed_process_left_is_taken_over_by_one(tmp_path):
    target = str(tmp_path / "blob")
    process = subprocess.Popen([sys.executable, "-c", WRITE, target], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "written\n"
    alive = PartFile.open(target, SIZE)
    assert alive.missing() == [(0, SIZE)]
    process.send_signal(signal.SIGKILL)
    # Dead, but not buried: nobody has asked for its status.
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    first, second = PartFile.open(target, SIZE), PartFile.open(target, SIZE)
    assert first.missing() == [(0, 10), (60, SIZE)]
    assert second.missing() == [(0, SIZE)]
    assert first.read(10, 60) == DATA[10:60]
    for part in (alive, first, second):
        part.discard()
    process.wait(30)
    process.stdout.close()
    assert list(tmp_path.iterdir()) == []


def journal_of(part, **facts):
    """Rewrites whose a closed part file is."""
    path = Path(part.path + ".journal")
    head, *rest = path.read_text().splitlines()
    path.write_text("\n".join([json.dumps({**json.loads(head), **facts}), *rest, ""]))
    return path


def left(tmp_path, **facts):
    """A part file of which bytes 0 to 40 were synced, and 40 to 60 were not."""
    part = PartFile.open(str(tmp_path / "blob"), SIZE)
    part.write(0, DATA[:40])
    part._sync()
    part.write(40, DATA[40:60])
    part.close()
    return journal_of(part, **facts)


def test_another_machines_is_left_alone_until_it_is_old(tmp_path):
    """And then only what was synced counts: the rest may have been in its memory alone."""
    journal = left(tmp_path, host="other", boot="other")
    fresh = PartFile.open(str(tmp_path / "blob"), SIZE)
    assert fresh.missing() == [(0, SIZE)]
    fresh.discard()
    old = journal.stat().st_mtime - 3600
    os.utime(journal, (old, old))
    taken = PartFile.open(str(tmp_path / "blob"), SIZE)
    assert taken.missing() == [(40, SIZE)]
    taken.discard()


@pytest.mark.parametrize("journal", [None, b"", b"{}", b"{}\n", b"nonsense\n"])
def test_what_tells_nothing_is_removed_when_it_is_old(tmp_path, journal):
    """Of a writer that was killed while it made its files."""
    part = tmp_path / "blob.0123.incomplete"
    part.write_bytes(DATA)
    files = [part]
    if journal is not None:
        files.append(tmp_path / "blob.0123.incomplete.journal")
        files[1].write_bytes(journal)
    PartFile.open(str(tmp_path / "blob"), SIZE).discard()
    assert set(tmp_path.iterdir()) == set(files)
    for path in files:
        os.utime(path, (0, 0))
    mine = PartFile.open(str(tmp_path / "blob"), SIZE)
    assert mine.missing() == [(0, SIZE)]
    mine.discard()
    assert list(tmp_path.iterdir()) == []


def test_before_this_machine_was_started_anew(tmp_path):
    left(tmp_path, boot="before")
    taken = PartFile.open(str(tmp_path / "blob"), SIZE)
    assert taken.missing() == [(40, SIZE)]
    taken.discard()


def test_of_another_size_is_thrown_away(tmp_path):
    left(tmp_path, size=99)
    part = PartFile.open(str(tmp_path / "blob"), SIZE)
    assert part.missing() == [(0, SIZE)]
    part.discard()
    assert list(tmp_path.iterdir()) == []


def test_a_writer_that_comes_back_late_is_refused(tmp_path):
    """One that was paused for so long that another took its file over."""
    part = PartFile.open(str(tmp_path / "blob"), SIZE)
    part.write(0, DATA[:40])
    old = os.stat(part.path).st_mtime - 3600
    os.utime(journal_of(part, boot="other", host="other"), (old, old))
    taken = PartFile.open(str(tmp_path / "blob"), SIZE)
    with pytest.raises(SourceError, match="another process took this download over"):
        part.write(40, DATA[40:])
    part.close()
    taken.write(0, DATA)
    taken.finish()
    assert (tmp_path / "blob").read_bytes() == DATA


def test_what_is_swept(tmp_path):
    """What a killed process left of a file that is whole; nothing that may still be wanted."""
    kept = left(tmp_path)
    (tmp_path / "whole").write_bytes(DATA)
    process = subprocess.Popen(
        [sys.executable, "-c", WRITE, str(tmp_path / "whole")], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "written\n"
    sweep(str(tmp_path))
    assert len(list(tmp_path.glob("whole.*"))) == 2
    process.kill()
    process.wait(30)
    process.stdout.close()
    sweep(str(tmp_path))
    assert not list(tmp_path.glob("whole.*"))
    assert kept.exists()


def test_a_file_that_may_not_grow(tmp_path):
    """As good as a disk that is full: what there is stays, and the error has the numbers."""
    part = PartFile.open(str(tmp_path / "blob"), 1 << 20)
    part.write(0, b"x" * 1000)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(CapacityError, match="what was fetched is kept") as caught:
            part.write(1000, b"y" * 10_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert caught.value.needed == (1 << 20) - 1000
    part.close()
    again = PartFile.open(str(tmp_path / "blob"), 1 << 20)
    assert again.missing() == [(1000, 1 << 20)]
    assert again.read(0, 1000) == b"x" * 1000
    again.discard()


def test_a_folder_that_is_none(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(SourceError, match="can't be written"):
        PartFile.open(str(tmp_path / "file" / "blob"), SIZE)
