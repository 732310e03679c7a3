"""Pending copies know their overlaps, and what is set of a memory is counted byte by byte."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from raywl.plan.copies import may_overlap, normalise
from raywl.plan.pending import Pending, covered_bytes, merge_runs, runs_of, writes_once

from .strategies import copies, offsets

law = settings(deadline=None, max_examples=100)


def written(copy):
    """Destination bytes of a copy, one by one."""
    return [
        copy.dst_start + offset + byte
        for offset in offsets(copy.shape, copy.dst_strides)
        for byte in range(copy.itemsize)
    ]


@law
@given(
    st.lists(copies(max_dims=3), max_size=8), copies(max_dims=3), st.lists(st.integers(0, 300), min_size=9)
)
def test_pending_copies_overlap_as_each_of_them_does(rows, further, starts):
    rows = [normalise(c._replace(dst_start=8 * s)) for c, s in zip(rows, starts, strict=False)]
    further = normalise(further._replace(dst_start=8 * starts[-1]))
    pending = Pending()
    for copy in rows:
        pending.add(copy)
    assert len(pending) == len(rows)
    assert pending.may_overlap(further) == any(may_overlap(further, copy) for copy in rows)
    assert pending.take() == rows
    assert len(pending) == 0
    assert not pending.may_overlap(further)


@law
@given(copies())
def test_runs_are_the_bytes_that_a_copy_writes(copy):
    for form in (copy, normalise(copy)):
        runs = merge_runs(runs_of(form))
        assert {b for start, end in runs for b in range(start, end)} == set(written(copy))
        assert all(a[1] < b[0] for a, b in zip(runs, runs[1:]))  # noqa: B905, RUF007


@law
@given(st.lists(copies(max_dims=2), max_size=4), copies(max_dims=2))
def test_covered_bytes_are_counted_once(rows, wanted):
    merged = merge_runs(run for copy in rows for run in runs_of(copy))
    have = {b for copy in rows for b in written(copy)}
    assert covered_bytes(runs_of(wanted), merged) == len(have & set(written(wanted)))


@law
@given(copies(), st.integers(0, 3))
def test_a_copy_that_repeats_a_place_is_never_taken_for_one_that_does_not(copy, squeeze):
    strides = tuple(stride // (1 << squeeze) // 8 * 8 for stride in copy.dst_strides)
    squeezed = copy._replace(dst_strides=strides)
    if writes_once(squeezed):
        assert len(set(written(squeezed))) == len(written(squeezed))
    assert writes_once(normalise(copy))
