"""Laws of the header parser, held against the safetensors library on files made at random."""

import json
import math
import sys

import pytest
import safetensors
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from raywl.checkpoint.dtypes import DTYPE_BITS, TORCH_NAMES
from raywl.checkpoint.header import read_header
from raywl.errors import CheckpointError, CorruptFileError
from tests.hostile.files import FILES, VALID, build

STRICTER = (
    "is in the header twice",
    "needs dtype, shape and data_offsets, has [",
    "has no torch type",
    "does not fill whole bytes",
    "is too large for a tensor",
    "is not a list of at most 64 sizes",
    "header starts with",
)
"""Why raywl may refuse what the library opens. `tests.hostile.files` has each but the last as a case.

The last: the format says that a header starts with `{`; the library takes blanks before it.
"""


def ours(raw: bytes):
    """Name, dtype, shape and span of each tensor in order of the file, or the error."""
    try:
        header = read_header(lambda start, end: raw[start:end], len(raw), path="p", file="f")
    except CheckpointError as error:
        return error
    found = sorted(header.tensors.items(), key=lambda item: (item[1].start, item[1].end))
    return [(name, entry.dtype, list(entry.shape), entry.nbytes) for name, entry in found]


def theirs(raw: bytes, path):
    """The same from the library; `None` where it refuses."""
    path.write_bytes(raw)
    try:
        with safe_open(path, "np") as file:
            found = []
            for name in file.offset_keys():
                part = file.get_slice(name)
                dtype, shape = part.get_dtype(), part.get_shape()
                found.append((name, dtype, shape, math.prod(shape) * DTYPE_BITS[dtype] // 8))
            return found
    except (safetensors.SafetensorError, OSError):
        return None


def check_same(raw: bytes, path) -> None:
    mine, other = ours(raw), theirs(raw, path)
    if isinstance(mine, CheckpointError):
        assert other is None or any(reason in str(mine) for reason in STRICTER), (mine, other)
    else:
        assert other is not None, f"refused by the library, accepted here: {mine}"
        # Empty tensors may share an offset; their order among themselves is free.
        assert sorted(mine) == sorted(other)
        assert [row for row in mine if row[3]] == [row for row in other if row[3]]


@st.composite
def valid_tensors(draw):
    """A header's tensors that tile their data, in any order, and the data's size."""
    rows, end = [], 0
    for name in draw(st.lists(st.text(max_size=6), max_size=5, unique=True)):
        if name == "__metadata__":
            continue
        dtype = draw(st.sampled_from(sorted(TORCH_NAMES)))
        shape = draw(st.lists(st.integers(0, 5), max_size=3))
        if dtype == "F4":
            shape = [*shape, 2 * draw(st.integers(0, 3))]
        nbytes = math.prod(shape) * DTYPE_BITS[dtype] // 8
        rows.append((name, {"dtype": dtype, "shape": shape, "data_offsets": [end, end + nbytes]}))
        end += nbytes
    return draw(st.permutations(rows)), end


metadata = st.one_of(
    st.none(), st.just({}), st.dictionaries(st.text(max_size=4), st.text(max_size=4), max_size=3)
)
a_law = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@a_law
@given(made=valid_tensors(), meta=metadata, padding=st.sampled_from(["", " ", "\n\t  "]))
def test_valid_files_are_read_alike(made, meta, padding, tmp_path):
    """Every file that keeps the format's rules is accepted, with the library's names, shapes and order."""
    rows, size = made
    text = json.dumps({"__metadata__": meta, **dict(rows)}) + padding
    raw = build(text, bytes(size))
    assert not isinstance(ours(raw), CheckpointError)
    check_same(raw, tmp_path / "f")


odd_values = st.sampled_from(
    [
        None,
        True,
        False,
        -1,
        0,
        1,
        2,
        1.0,
        1e999,
        "",
        "F32",
        "F6_E2M3",
        [],
        [0],
        [0, 0],
        {},
        1 << 63,
        1 << 64,
        -(1 << 70),
    ]
) | st.integers(0, 40)


@a_law
@given(made=valid_tensors(), data=st.data())
def test_lying_headers_are_refused_alike(made, data, tmp_path):
    """A value changed anywhere in the header: accepted or refused as by the library."""
    rows, size = made
    header = dict(rows)
    if header:
        name = data.draw(st.sampled_from(sorted(header)))
        info = dict(header[name])
        kind = data.draw(st.sampled_from(["dtype", "shape", "data_offsets", "drop", "add", "item", "whole"]))
        if kind == "drop":
            del info[data.draw(st.sampled_from(sorted(info)))]
        elif kind == "add":
            info["more"] = data.draw(odd_values)
        elif kind == "item":
            place = list(info[data.draw(st.sampled_from(["shape", "data_offsets"]))])
            if place:
                place[data.draw(st.integers(0, len(place) - 1))] = data.draw(odd_values)
                info["shape" if len(place) != 2 else "data_offsets"] = place
        elif kind != "whole":
            info[kind] = data.draw(odd_values)
        header[name] = data.draw(odd_values) if kind == "whole" else info
    size = max(0, size + data.draw(st.sampled_from([0, 0, 0, -1, 1])))
    check_same(build(header, bytes(size)), tmp_path / "f")


@a_law
@given(
    made=valid_tensors(),
    edits=st.lists(
        st.tuples(
            st.integers(0, 400),
            st.sampled_from(["put", "cut", "add"]),
            st.sampled_from(b'{}[]",:-.0129eEtfn\\u \n\0\x80\xff'),
        ),
        min_size=1,
        max_size=3,
    ),
    meta=metadata,
    keep_length=st.booleans(),
)
def test_damaged_bytes_are_refused_alike(made, edits, meta, keep_length, tmp_path):
    """Bytes of the header put, cut or added: the library's answer, and nothing else is raised."""
    rows, size = made
    header = bytearray(json.dumps({"__metadata__": meta, **dict(rows)}).encode())
    before = len(header)
    for place, kind, value in edits:
        at = place % max(1, len(header))
        if kind == "add":
            header.insert(at, value)
        elif header:
            if kind == "put":
                header[at] = value
            else:
                del header[at]
    raw = build(bytes(header), bytes(size), length=before if keep_length else None)
    check_same(raw, tmp_path / "f")


@a_law
@given(raw=st.binary(max_size=64))
@example(raw=FILES[0].content)
@example(raw=b" " + VALID["no-tensors"])
def test_any_bytes(raw, tmp_path):
    """Whatever the bytes, the answer is the library's, and an error is a `CorruptFileError`."""
    check_same(raw, tmp_path / "f")
    assert not isinstance(ours(raw), CheckpointError) or type(ours(raw)) is CorruptFileError


def test_the_data_is_never_read():
    """Only header bytes are asked for, in at most two reads; a file of 40 TB costs nothing."""
    asked = []
    header = build(
        {
            f"t{i}": {"dtype": "U8", "shape": [1 << 40], "data_offsets": [i << 40, i + 1 << 40]}
            for i in range(40)
        }
    )
    size = len(header) + (40 << 40)

    def read(start: int, end: int) -> bytes:
        asked.append((start, end))
        return header[start:end]

    found = read_header(read, size, path="p", file="f")
    assert len(found.tensors) == 40
    assert max(entry.end for entry in found.tensors.values()) == size
    assert len(asked) <= 2


def many_tensors(count: int) -> bytes:
    rows = {
        f"model.layers.{i // 10}.mlp.experts.{i % 10}.down_proj.weight": {
            "dtype": "BF16",
            "shape": [2, 3],
            "data_offsets": [12 * i, 12 * i + 12],
        }
        for i in range(count)
    }
    return build(rows)


def test_work_grows_with_the_number_of_tensors():
    """Ten times the tensors take about ten times the steps: none looks at all pairs."""

    def steps(count: int) -> int:
        raw, taken = many_tensors(count), 0

        def trace(frame, event, arg):
            nonlocal taken
            taken += event == "line"
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            found = read_header(lambda a, b: raw[a:b], len(raw) + 12 * count, path="p", file="f")
        finally:
            sys.settrace(before)
        assert len(found.tensors) == count
        return taken

    few, many = steps(300), steps(3_000)
    assert few > 300
    # Looking at all pairs would be a hundred times as many.
    assert many < 12 * few, (few, many)


@pytest.mark.parametrize("num_bytes", [0, 7])
def test_a_read_that_comes_short(num_bytes):
    """A file that shrinks while it's opened is an error of that file."""
    raw = VALID["written-out-of-order"]
    with pytest.raises(CorruptFileError, match="could be read"):
        read_header(lambda start, end: raw[start:end][:num_bytes], len(raw), path="p", file="f")
