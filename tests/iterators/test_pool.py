"""Files read ahead by threads: order, bounds, failures, and the end."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raywl.iterators.pool import FilePool, Stopped

WAIT_S = 30.0


@settings(max_examples=30, deadline=None)
@given(num_items=st.integers(0, 20), max_workers=st.integers(1, 6), late=st.randoms(use_true_random=False))
def test_law_order_and_bound(num_items, max_workers, late):
    """Results are in order, and no more than `max_workers + 1` items are begun and not done with."""
    lock, begun, done_with, most = threading.Lock(), 0, 0, 0

    def read(item, check_stop):
        nonlocal begun, most
        with lock:
            begun += 1
            most = max(most, begun - done_with)
        return item * item

    with FilePool(read, range(num_items), max_workers) as pool:
        for item in range(num_items):
            assert pool.take() == item * item
            with lock:
                done_with = item
            pool.begin_next()
    assert begun == num_items
    assert most <= max_workers + 1


def test_what_reading_raises_comes_in_its_turn():
    def read(item, check_stop):
        if item == 2:
            raise KeyError("two")
        return item

    with FilePool(read, range(5), 4) as pool:
        assert [pool.take(), pool.take()] == [0, 1]
        with pytest.raises(KeyError, match="two"):
            pool.take()


def test_closing_ends_what_is_under_way():
    """Threads end at their next check; what waits isn't begun."""
    started, begun = threading.Barrier(3), []

    def read(item, check_stop):
        begun.append(item)
        started.wait(WAIT_S)
        while True:
            check_stop()

    pool = FilePool(read, range(10), 2)
    started.wait(WAIT_S)
    pool.begin_next()
    pool.close()
    assert sorted(begun) == [0, 1]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("raywl-files")]


def test_a_stop_is_an_error_of_the_pools_own():
    """Nobody takes it for what reading raised."""
    seen = []

    def read(item, check_stop):
        go.wait(WAIT_S)
        try:
            check_stop()
        except Stopped as error:
            seen.append(error)
            raise

    go = threading.Event()
    with FilePool(read, [0], 1) as pool:
        pool._stop.set()
        go.set()
    assert len(seen) == 1
