"""The parts that staging on a node is made of: what to ask next, room in the store, files in chunks."""

from __future__ import annotations

import os
import threading
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raywl.actors.chunk_queue import ChunkQueue
from raywl.actors.chunk_window import Meter, Offers, Window
from raywl.actors.markers import FolderMarker
from raywl.actors.stage_driver import chunk_bytes_for
from raywl.actors.stage_work import window_of
from raywl.actors.staged_files import DiskFailed, StagedFiles
from raywl.coordination import NOBODY, ChunkTable, Route
from raywl.errors import CheckpointError, SourceError
from raywl.sources import StorePin

ME = 9


def queue_of(num_slots: int, *routes: Route) -> ChunkQueue:
    queue = ChunkQueue(num_slots)
    queue.me = ME
    for route in routes:
        queue.add(route)
    return queue


def test_lowest_first_of_providers_in_turn():
    queue = queue_of(6, *(Route(chunk, chunk % 2) for chunk in (5, 4, 3, 2, 1, 0)))
    asked = [queue.next(0.0) for _ in range(6)]
    assert sorted(asked) == [(chunk, chunk % 2) for chunk in range(6)]
    assert [chunk for chunk, provider in asked if provider == 0] == [0, 2, 4]
    assert queue.next(0.0) is None


def test_what_others_wait_for_comes_first_and_has_a_slot():
    """Two nodes that pass chunks on for each other can't fill all their slots with waiting."""
    queue = queue_of(2, Route(0, 1, relay=2), Route(1, 1, relay=2), Route(2, 1, relay=ME))
    assert queue.next(0.0) == (2, 1)
    queue.again(2, 0.0, 5.0)
    queue.add(Route(3, 4, relay=ME))
    assert queue.next(0.0) == (3, 4)
    assert queue.next(0.0) == (0, 2)
    # A duty that waits for its pause leaves the slots to others.
    queue.done(3)
    assert queue.next(0.0) == (1, 2)


def test_a_slot_is_kept_for_a_duty_whose_provider_is_busy():
    queue = queue_of(4, *(Route(chunk, 1, relay=ME) for chunk in range(4)), Route(7, 2), Route(8, 3))
    # Two questions to one node are enough, and the last slot isn't given away.
    assert [queue.next(0.0) for _ in range(4)] == [(0, 1), (1, 1), (7, 2), None]
    queue.done(0)
    assert queue.next(0.0) == (2, 1)


def test_asked_again_after_a_pause():
    queue = queue_of(2, Route(0, 1))
    assert queue.next(1.0) == (0, 1)
    assert queue.again(0, 2.0, 0.5) == 1.0
    assert queue.next(2.2) is None
    assert queue.wait_s(2.2, 9.0) == pytest.approx(0.3)
    assert queue.next(2.5) == (0, 1)
    assert queue.again(0, 4.0, 0.5) == 3.0
    queue.told(0)
    assert queue.next(5.0) == (0, 1)
    assert queue.again(0, 5.5, 0.0) == 0.5


def test_another_route():
    """A question under way goes on; the next one is asked of the other node, and counts anew."""
    queue = queue_of(2, Route(0, 1))
    assert queue.next(0.0) == (0, 1)
    queue.add(Route(0, 2))
    assert queue.next(0.0) is None
    assert queue.again(0, 3.0, 0.0) == 0.0
    assert queue.next(3.0) == (0, 2)
    queue.add(Route(0, ME))
    queue.done(0)
    assert len(queue) == 0
    assert queue.next(9.0) is None


def test_what_is_here_is_not_asked_for():
    queue = queue_of(4, *(Route(chunk, 1) for chunk in range(4)))
    queue.drop_all(0b1010)
    assert [queue.next(0.0), queue.next(0.0), queue.next(0.0)] == [(0, 1), (2, 1), None]


@settings(max_examples=100, deadline=None)
@given(
    routes=st.lists(st.tuples(st.integers(0, 7), st.integers(0, 2), st.sampled_from([NOBODY, 1, ME]))),
    answers=st.lists(st.booleans(), min_size=5),
    slots=st.integers(1, 4),
)
def test_every_chunk_comes_once(routes, answers, slots):
    """Whatever the routes and answers: never two questions for a chunk, and in the end all have come."""
    queue = queue_of(slots)
    wanted = set()
    for chunk, source, relay in routes:
        queue.add(Route(chunk, source, NOBODY if relay == source else relay))
        wanted.add(chunk)
    now_s, came, asked = 0.0, [], {}
    for step in range(300):
        now_s += 0.1
        while (question := queue.next(now_s)) is not None:
            chunk, provider = question
            assert chunk not in asked
            assert provider not in (NOBODY, ME)
            asked[chunk] = provider
            assert len(asked) <= slots
        for chunk in list(asked):
            del asked[chunk]
            if step < len(answers) and not answers[step]:
                queue.again(chunk, now_s, 0.1)
            else:
                queue.done(chunk)
                came.append(chunk)
    assert sorted(came) == sorted(wanted)


class Clock:
    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s


def test_a_window_counts_what_was_just_freed():
    """The store keeps it for a second."""
    clock = Clock()
    window = Window(100, clock)
    assert window.take(60)
    assert not window.take(60)
    window.free(60)
    assert not window.take(60)
    assert window.take(40)
    clock.now_s = 0.99
    assert not window.take(60)
    clock.now_s = 1.01
    assert window.take(60)
    assert window.peak_bytes == 100


def test_a_piece_that_is_larger_than_the_window():
    """It goes alone, or nothing would ever."""
    window = Window(10, Clock())
    assert window.take(50)
    assert not window.take(1)


def test_a_window_waits():
    window = Window(10)
    assert window.take(10)
    threading.Timer(0.1, window.free, [10]).start()
    assert not window.take(10, 0.3)
    assert window.take(10, 5.0)


def test_rates_are_of_the_busy_time():
    clock = Clock()
    meter = Meter(10.0, 2, clock)
    for start_s in (0.0, 100.0, 200.0, 300.0):
        clock.now_s = start_s
        meter.begin()
        clock.now_s += 2.0
        meter.end(20)
    assert meter.bytes_per_s == pytest.approx(10.0)
    assert meter.total_bytes == 80


def test_rates_of_pieces_that_end_together():
    """Two that were under way at the same time: the time between their ends tells nothing."""
    clock = Clock()
    meter = Meter(10.0, 1, clock)
    meter.begin()
    meter.begin()
    clock.now_s = 4.0
    meter.end(20)
    clock.now_s = 4.001
    meter.end(20)
    assert meter.bytes_per_s == pytest.approx(10.0, rel=0.01)
    for end_s in range(8, 60, 4):
        meter.begin()
        clock.now_s = end_s
        meter.end(8)
    assert meter.bytes_per_s == pytest.approx(2.0, rel=0.01)


def test_a_chunk_is_put_once_for_all_that_ask():
    clock = Clock()
    window, meter, put = Window(100, clock), Meter(10.0, 1, clock), []
    offers = Offers(window, meter, 5.0, clock)

    def make():
        put.append(1)
        return object()

    first = offers.offer("a", "n1", 60, make)
    assert offers.offer("a", "n2", 60, make) is first
    assert len(put) == 1
    assert offers.offer("b", "n1", 60, make) is None
    offers.done("a", "n1")
    offers.done("a", "n1")
    clock.now_s = 2.0
    assert offers.offer("b", "n1", 60, make) is None
    offers.done("a", "n2")
    clock.now_s = 4.0
    assert offers.offer("b", "n1", 60, make) is not None
    assert meter.total_bytes == 120
    # Nobody says thanks: it is dropped, and counts as sent to nobody.
    clock.now_s = 20.0
    offers.drop_old()
    clock.now_s = 22.0
    assert offers.offer("c", "n1", 60, make) is not None
    assert meter.total_bytes == 120


def test_a_put_that_fails():
    clock = Clock()
    offers = Offers(Window(100, clock), Meter(10.0, 1, clock), 5.0, clock)

    def fail():
        raise SourceError("x", "can't be read")

    with pytest.raises(SourceError):
        offers.offer("a", "n1", 60, fail)
    # Its room is free, a second later.
    clock.now_s = 2.0
    assert offers.offer("a", "n1", 60, lambda: "ref") == "ref"
    offers.drop_all()


def test_sizes(monkeypatch):
    """1 GiB or a fifth of the store; chunks of which some fit."""
    monkeypatch.delenv("RAYWL_STAGE_WINDOW_BYTES", raising=False)
    assert window_of(100 << 30) == 1 << 30
    assert window_of(1 << 30) == (1 << 30) // 5
    monkeypatch.setenv("RAYWL_STAGE_WINDOW_BYTES", "12345678")
    assert window_of(1 << 30) == 12345678
    assert chunk_bytes_for(1 << 30) == 8 << 20
    assert chunk_bytes_for(40 << 20) == 4 << 20
    assert chunk_bytes_for(0) == 64 << 10


def test_marks(tmp_path):
    """Two nodes see each other's in one folder, and not in the copy of it; nothing is left."""
    one, two = FolderMarker(str(tmp_path), "r", "n1"), FolderMarker(str(tmp_path), "r", "n2")
    one.make()
    assert one.others() == ()
    two.make()
    assert (one.others(), two.others()) == (("n2",), ("n1",))
    assert FolderMarker(str(tmp_path), "later", "n3").others() == ()
    one.remove()
    two.remove()
    assert not list(tmp_path.rglob("*stage-*"))
    FolderMarker("/proc/none", "r", "n").make()


# Files, from a store in this process's memory.


def contents(count: int) -> dict[str, bytes]:
    return {f"f{n:03d}.safetensors": bytes([n % 251]) * (1000 + n) for n in range(count)}


@pytest.fixture
def opened(tmp_path):
    """Makes a source of some files, and what stages them; a second call for the same files starts anew."""
    import fsspec

    store = fsspec.filesystem("memory")
    folder = f"/stage-{os.urandom(4).hex()}"

    def make(files: dict[str, bytes], chunk_bytes: int = 300) -> StagedFiles:
        for name, data in files.items():
            if not store.exists(f"{folder}/{name}"):
                store.pipe_file(f"{folder}/{name}", data)
        pin, _ = StorePin.find(f"memory:/{folder}")
        # Without ETags the look itself is the version.
        pin = replace(pin, cache_dir=str(tmp_path), nonce="same")
        return StagedFiles(pin.open(), ChunkTable(tuple((n, len(d)) for n, d in files.items()), chunk_bytes))

    yield make
    store.rm(folder, recursive=True)


def test_files_by_chunks(opened, tmp_path):
    """Fetched and received ones together make the files; more of them than may be open at once."""
    files = {**contents(50), "empty.json": b""}
    staged = opened(files)
    assert staged.look() == 0
    stop = threading.Event()
    came = 0
    for chunk in range(staged.table.num_chunks):
        if chunk % 2:
            came += staged.fetch(chunk, stop)
        else:
            index, start, end = staged.table.span(chunk)
            staged.write(chunk, memoryview(list(files.values())[index][start:end]))
        index, start, end = staged.table.span(chunk)
        assert staged.read(chunk) == list(files.values())[index][start:end]
    assert came == sum(staged.table.size(chunk) for chunk in range(1, staged.table.num_chunks, 2))
    for index in range(len(files)):
        staged.finish(index)
        staged.finish(index)
    assert staged.whole_again()
    for name, data in files.items():
        with open(staged.source.path(name), "rb") as file:
            assert file.read() == data
    assert staged.read(0) == next(iter(files.values()))[:300]
    staged.close()
    assert not list(tmp_path.rglob("*.incomplete*"))


def test_what_is_left_is_found_again(opened):
    """Whole files by their names, parts by their journals; to the chunk, not beyond."""
    files = contents(3)
    staged = opened(files)
    stop = threading.Event()
    for chunk in (0, 1, 2, 3, 5):
        staged.fetch(chunk, stop)
    staged.finish(0)
    staged.close()
    again = opened(files)
    assert again.look() == 0b101111
    assert again.fetch(5, stop) == 0
    again.close()


def test_a_part_of_a_chunk_is_no_chunk(opened):
    staged = opened(contents(1))
    with staged._part(0) as part:
        part.write(10, b"x" * 300)
    staged.close()
    assert opened(contents(1)).look() == 0


def test_another_process_was_faster(opened):
    """The content is there when it is to be finished: what came here is thrown away."""
    files = contents(1)
    staged = opened(files)
    for chunk in range(staged.table.num_chunks):
        staged.fetch(chunk, threading.Event())
    staged.source.fetch(files)
    staged.finish(0)
    staged.close()
    with open(staged.source.path("f000.safetensors"), "rb") as file:
        assert file.read() == files["f000.safetensors"]


def test_a_chunk_is_read_while_its_file_is_checked(opened, monkeypatch):
    """Hashing takes its time, and others wait for the chunk meanwhile."""
    staged = opened(contents(1))
    for chunk in range(staged.table.num_chunks):
        staged.fetch(chunk, threading.Event())
    checking, go_on = threading.Event(), threading.Event()

    def check(file, path):
        checking.set()
        assert go_on.wait(20)

    monkeypatch.setattr(type(staged.source), "check", lambda self, file, path: check(file, path))
    thread = threading.Thread(target=staged.finish, args=(0,))
    thread.start()
    assert checking.wait(20)
    assert staged.read(1) == contents(1)["f000.safetensors"][300:600]
    go_on.set()
    thread.join(20)
    assert staged.read(1) == contents(1)["f000.safetensors"][300:600]


def test_wrong_bytes_get_no_name(opened, monkeypatch):
    """They are thrown away, so that the next try doesn't find them."""
    staged = opened(contents(1))
    for chunk in range(staged.table.num_chunks):
        staged.fetch(chunk, threading.Event())

    def wrong(self, file, path):
        raise self.wrong(file.name, "its hash differs")

    monkeypatch.setattr(type(staged.source), "check", wrong)
    with pytest.raises(SourceError, match="its hash differs"):
        staged.finish(0)
    assert not staged.source.has("f000.safetensors")
    staged.close()
    monkeypatch.undo()
    assert opened(contents(1)).look() == 0


def test_wrong_calls(opened, tmp_path):
    staged = opened(contents(1))
    with pytest.raises(ValueError, match="has 300 bytes, not 2"):
        staged.write(0, memoryview(b"xx"))
    with pytest.raises(CheckpointError, match="expected 5 bytes"):
        StagedFiles(staged.source, ChunkTable((("f000.safetensors", 5),), 300))
    with pytest.raises(CheckpointError, match="isn't there"):
        StagedFiles(staged.source, ChunkTable((("none", 5),), 300))
    staged.close()
    with pytest.raises(SourceError, match="was ended"):
        staged.write(0, memoryview(b"x" * 300))


def test_a_disk_that_can_not_be_written(opened, tmp_path):
    """Told from a source that fails: another node's try would be no help to this one."""
    staged = opened(contents(1))
    (tmp_path / "stores").write_text("in the way")
    with pytest.raises(DiskFailed):
        staged.fetch(0, threading.Event())
