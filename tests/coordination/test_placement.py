"""Whether a group fits, with the numbers, and which rank goes where."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from raywl.coordination import rank_order, shortfall


def test_too_little_in_all():
    """The numbers are of the whole cluster."""
    lack = shortfall([{"CPU": 2.0}, {"CPU": 1.0}], {"CPU": 1.0}, 4)
    assert lack is not None
    assert (lack.resource, lack.needed, lack.available) == ("CPU", 4.0, 3.0)


def test_a_resource_that_no_node_has():
    """GPUs asked of a cluster without any."""
    lack = shortfall([{"CPU": 8.0}], {"CPU": 1.0, "GPU": 0.5}, 2)
    assert lack is not None
    assert (lack.resource, lack.needed, lack.available) == ("GPU", 1.0, 0.0)


def test_enough_in_all_but_on_no_single_node():
    """A rank can't be cut over two nodes."""
    lack = shortfall([{"CPU": 3.0}, {"CPU": 3.0}], {"CPU": 2.0}, 3)
    assert lack is not None
    assert (lack.needed, lack.available) == (6.0, 4.0)
    assert "room for 2 of 3" in lack.reason


def test_it_fits_exactly():
    """Fractions add up without an error of rounding."""
    assert shortfall([{"CPU": 1.0, "GPU": 1.0}], {"CPU": 0.1, "GPU": 0.1}, 10) is None
    assert shortfall([{"CPU": 2.0}, {"CPU": 2.0}], {"CPU": 1.0}, 4) is None


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=24))
def test_neighbours_share_nodes(places):
    """Every place is used once, and each node's ranks are one run."""
    order = rank_order(places)
    assert sorted(order) == list(range(len(places)))
    nodes = [places[i] for i in order]
    assert sum(a != b for a, b in pairwise(nodes)) == len(set(places)) - 1
