"""`PageWarmer`: order, and each byte once."""

from __future__ import annotations

import os

from hypothesis import given
from hypothesis import strategies as st

from raywl.actors.warming import PageWarmer
from raywl.node.prefetch import FileRange
from tests.cluster.conftest import eventually

SIZE = 4096
RANGES = st.lists(
    st.tuples(st.sampled_from(["a", "b"]), st.integers(0, SIZE), st.integers(0, SIZE)).map(
        lambda row: FileRange(row[0], min(row[1:]), max(row[1:]))
    ),
    max_size=12,
)


@given(ranks=st.lists(RANGES, min_size=1, max_size=4))
def test_what_is_read_is_the_union_of_what_ranks_ask_for(tmp_path_factory, ranks):
    """However ranges overlap, within a rank and between ranks, every byte of them is read once."""
    folder = tmp_path_factory.getbasetemp()
    paths = {name: str(folder / name) for name in ("a", "b")}
    for path in paths.values():
        if not os.path.exists(path):
            with open(path, "wb") as file:
                file.write(bytes(SIZE))
    warmer = PageWarmer(num_threads=2)
    for ranges in ranks:
        warmer.add(paths, ranges)
    union = {(row.file, at) for ranges in ranks for row in ranges for at in range(row.start, row.end)}
    eventually(lambda: warmer.status()["read_bytes"] == len(union), 30, "all are read")
    assert warmer.status()["asked_bytes"] == sum(r.end - r.start for ranges in ranks for r in ranges)


def test_stopped_before_it_began(tmp_path):
    """A warmer that was stopped takes nothing any more."""
    path = tmp_path / "a"
    path.write_bytes(bytes(SIZE))
    warmer = PageWarmer()
    warmer.stop()
    warmer.add({"a": str(path)}, [FileRange("a", 0, SIZE)])
    assert warmer.status() == {"asked_bytes": 0, "read_bytes": 0}
