"""Places that overlap in any way are found by their bytes, in few steps however many they are."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raywl.plan.places import Places

law = settings(deadline=None, max_examples=200)


@st.composite
def rows(draw):
    """Ranges among 24 bytes, most of them the whole, parts of it, or equal to one another."""
    made = []
    for index in range(draw(st.integers(1, 10))):
        start = draw(st.integers(0, 23))
        made.append((start, draw(st.integers(start + 1, 24)), f"{index}"))
    return made


@law
@given(rows(), st.integers(0, 23), st.integers(1, 24))
def test_places_are_found_as_if_all_were_looked_at(rows, start, length):
    """In the order given, which is that of precedence."""
    end = start + length
    places = Places(rows)
    assert places.names == tuple(name for _, _, name in rows)
    assert places.holding(start, end) == [n for first, last, n in rows if first <= start and end <= last]
    assert places.meeting(start, end) == [n for first, last, n in rows if first < end and start < last]


class Counted(int):
    """A number that counts how often it is compared."""

    compared = 0

    def __lt__(self, other):
        Counted.compared += 1
        return int(self) < int(other)

    def __le__(self, other):
        Counted.compared += 1
        return int(self) <= int(other)

    def __gt__(self, other):
        Counted.compared += 1
        return int(self) > int(other)


@pytest.mark.parametrize("order", ["in order", "backwards"])
@pytest.mark.parametrize("whole", [False, True], ids=["parts", "parts and the whole"])
def test_steps_grow_with_the_logarithm(order, whole):
    """Of 2 ** 13 parts of a buffer one is found in some 13 steps, and all are put in their places in few."""
    num = 1 << 13
    made = [(Counted(8 * i), Counted(8 * i + 8), f"{i}") for i in range(num)]
    if order == "backwards":
        made.reverse()
    if whole:
        made.insert(0, (Counted(0), Counted(8 * num), "whole"))
    Counted.compared = 0
    places = Places(made)
    assert 0 < Counted.compared <= 8 * 14 * num
    Counted.compared = 0
    for start, end, name in made[-1 << 10 :]:
        assert places.holding(int(start), int(end)) == ["whole"] * whole + [name]
        assert places.meeting(int(start), int(end)) == ["whole"] * whole + [name]
    assert 0 < Counted.compared <= (1 << 10) * 3 * 15 * (1 + whole)
