"""Single safetensors files that lie, each with the error that must name what is wrong.

`python -m tests.hostile.files FOLDER` writes them all, to try another reader on them.
"""

from __future__ import annotations

import json
import struct
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raywl.errors import CheckpointError, CorruptFileError


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8), **more: Any) -> dict[str, Any]:
    """One tensor of a header; two floats at the start of the data by default."""
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets, **more}


def build(header: Any, data: bytes = b"", *, length: int | None = None) -> bytes:
    """A file's bytes.

    Args:
        header: Bytes or text as they are, or values to be written as JSON.
        data: What follows the header.
        length: The header's length as the file states it; the true one by default.
    """
    if not isinstance(header, bytes | str):
        header = json.dumps(header)
    raw = header if isinstance(header, bytes) else header.encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def header_text(*pairs: tuple[str, Any]) -> str:
    """JSON of an object that may have a key twice."""
    return "{" + ", ".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in pairs) + "}"


@dataclass(frozen=True)
class HostileFile:
    """One file that must be refused."""

    name: str
    content: bytes
    says: tuple[str, ...]
    """What the message must contain, besides the file's path."""
    tensor: str | None = None
    """The tensor that the error must name."""
    error: type[CheckpointError] = CorruptFileError
    stricter: str | None = None
    """Why raywl refuses a file that the safetensors library opens; `None` where it refuses it too."""


EIGHT = bytes(8)
_DEEP = 100_000
_HUGE = 1 << 63

FILES: tuple[HostileFile, ...] = (
    HostileFile("empty", b"", ("0 bytes", "at least 8")),
    HostileFile("seven-bytes", b"\1" * 7, ("7 bytes", "at least 8")),
    HostileFile("only-a-length", struct.pack("<Q", 200), ("byte 208", "8 bytes")),
    HostileFile("header-length-0", build("{}", length=0), ("empty",)),
    HostileFile("header-cut", build({"a": entry()}, EIGHT)[:30], ("30 bytes", "incomplete")),
    HostileFile("header-too-long-for-file", build({"a": entry()}, EIGHT, length=5000), ("byte 5008",)),
    HostileFile(
        "header-over-100-MB", build("{}", length=100_000_001), ("100000001 bytes", "limit of 100000000")
    ),
    HostileFile("header-length-2-to-the-64", build("{}", length=(1 << 64) - 1), (str((1 << 64) - 1),)),
    HostileFile("header-length-too-short", build({"a": entry()}, EIGHT, length=20), ("not JSON",)),
    HostileFile("header-length-too-long", build({"a": entry()}, EIGHT, length=69), ("header",)),
    HostileFile("random-bytes", bytes(range(7, 200)), ("header",)),
    HostileFile("a-zip-archive", b"PK\3\4" + bytes(500), ("header",)),
    HostileFile("a-pointer-to-large-file-storage", b"version https://git-lfs", ("git-lfs pointer",)),
    HostileFile("header-of-zeros", build(bytes(64)), ("starts with",)),
    HostileFile("header-is-a-list", build([]), ("starts with",)),
    HostileFile("header-is-null", build("null"), ("starts with",)),
    HostileFile("header-not-JSON", build("{'a': 1}"), ("not JSON",)),
    HostileFile("header-with-trailing-comma", build('{"__metadata__": {},}'), ("not JSON",)),
    HostileFile("header-then-more", build("{} {}"), ("not JSON",)),
    HostileFile("header-then-NUL", build("{}\0\0\0\0\0\0"), ("not JSON",)),
    HostileFile("byte-order-mark", build(b"\xef\xbb\xbf{}"), ("starts with",)),
    HostileFile("control-character-in-name", build('{"a\nb": 1}'), ("not JSON",)),
    HostileFile("not-UTF-8", build(b'{"\xff\xfe": 1}'), ("UTF-8", "byte 10")),
    HostileFile("UTF-8-of-a-surrogate", build(b'{"\xed\xa0\x80": 1}'), ("UTF-8",)),
    HostileFile(
        "lone-surrogate-in-name",
        build('{"\\ud800": ' + json.dumps(entry()) + "}", EIGHT),
        ("Unicode",),
    ),
    HostileFile("lone-surrogate-in-metadata", build('{"__metadata__": {"k": "\\uDFFF"}}'), ("Unicode",)),
    HostileFile("deep-objects", build('{"a":' * _DEEP + "1" + "}" * _DEEP), ("nested",)),
    HostileFile("deep-lists", build('{"a":' + "[" * _DEEP + "]" * _DEEP + "}"), ("nested",)),
    HostileFile("NaN", build('{"a": {"dtype": "F32", "shape": [NaN], "data_offsets": [0, 8]}}'), ("NaN",)),
    HostileFile(
        "same-name-twice",
        build(header_text(("a", entry()), ("a", entry())), EIGHT),
        ("twice",),
        tensor="a",
        stricter="the library takes the last of two entries by one name",
    ),
    HostileFile(
        "same-field-twice",
        build('{"a": {"dtype": "F32", "dtype": "I32", "shape": [2], "data_offsets": [0, 8]}}', EIGHT),
        ("'dtype'", "twice"),
    ),
    HostileFile(
        "metadata-twice", build('{"__metadata__": {}, "__metadata__": {}}'), ("__metadata__", "twice")
    ),
    HostileFile("metadata-of-integers", build({"__metadata__": {"k": 1}}), ("__metadata__", "'k'", "1")),
    HostileFile("metadata-of-null", build({"__metadata__": {"k": None}}), ("__metadata__", "'k'")),
    HostileFile("metadata-of-objects", build({"__metadata__": {"k": {"a": "b"}}}), ("__metadata__",)),
    HostileFile("metadata-is-a-list", build({"__metadata__": ["k"]}), ("__metadata__", "list")),
    HostileFile("metadata-is-text", build({"__metadata__": "k"}), ("__metadata__", "str")),
    HostileFile("tensor-is-null", build({"a": None}), ("needs dtype",), tensor="a"),
    HostileFile("tensor-is-a-number", build({"a": 3}), ("needs dtype",), tensor="a"),
    HostileFile(
        "tensor-is-a-list",
        build({"a": ["F32", [2], [0, 8]]}, EIGHT),
        ("needs dtype",),
        tensor="a",
        stricter="the library's parser takes the fields of an entry as a list, which the format doesn't have",
    ),
    HostileFile("no-dtype", build({"a": {"shape": [2], "data_offsets": [0, 8]}}, EIGHT), ("needs",), "a"),
    HostileFile("no-shape", build({"a": {"dtype": "F32", "data_offsets": [0, 8]}}, EIGHT), ("needs",), "a"),
    HostileFile("no-offsets", build({"a": {"dtype": "F32", "shape": [2]}}, EIGHT), ("needs",), "a"),
    HostileFile("dtype-unknown", build({"a": entry("F33")}, EIGHT), ("'F33'",), "a"),
    HostileFile("dtype-in-small-letters", build({"a": entry("f32")}, EIGHT), ("'f32'",), "a"),
    HostileFile("dtype-null", build({"a": entry(None)}, EIGHT), ("None",), "a"),
    HostileFile("dtype-a-list", build({"a": entry(["F32"])}, EIGHT), ("['F32']",), "a"),
    HostileFile(
        "dtype-F6-E2M3",
        build({"a": entry("F6_E2M3", [4], [0, 3])}, bytes(3)),
        ("F6_E2M3", "no torch type"),
        tensor="a",
        error=CheckpointError,
        stricter="the library opens it and fails when the tensor is asked for",
    ),
    HostileFile(
        "dtype-F6-E3M2-of-two",
        build({"b": entry("F6_E3M2", [4], [3, 6]), "a": entry("F6_E3M2", [4], [0, 3])}, bytes(6)),
        ("F6_E3M2", "no torch type", "nor", "b"),
        tensor="a",
        error=CheckpointError,
        stricter="the library opens it and fails when the tensor is asked for",
    ),
    HostileFile("F4-half-a-byte", build({"a": entry("F4", [3], [0, 2])}, bytes(2)), ("whole bytes",), "a"),
    HostileFile("F4-without-dims", build({"a": entry("F4", [], [0, 1])}, bytes(1)), ("whole bytes",), "a"),
    HostileFile(
        "F4-rows-of-odd-length",
        build({"a": entry("F4", [2, 3], [0, 3])}, bytes(3)),
        ("whole bytes",),
        tensor="a",
        stricter="two elements of different rows in one byte: torch has no tensor for it",
    ),
    HostileFile("shape-null", build({"a": entry(shape=None)}, EIGHT), ("shape None",), "a"),
    HostileFile("shape-a-number", build({"a": entry(shape=2)}, EIGHT), ("shape 2",), "a"),
    HostileFile("shape-negative", build({"a": entry(shape=[-2])}, EIGHT), ("-2",), "a"),
    HostileFile("shape-two-negatives", build({"a": entry(shape=[-1, -2])}, EIGHT), ("-1",), "a"),
    HostileFile("shape-float", build({"a": entry(shape=[2.0])}, EIGHT), ("2.0",), "a"),
    HostileFile("shape-bool", build({"a": entry(shape=[True, 2])}, EIGHT), ("True",), "a"),
    HostileFile("shape-text", build({"a": entry(shape=["2"])}, EIGHT), ("'2'",), "a"),
    HostileFile(
        "shape-minus-0", build('{"a": {"dtype": "F32", "shape": [-0], "data_offsets": [0, 0]}}'), ("-0",)
    ),
    HostileFile("shape-too-large", build({"a": entry(shape=[3])}, EIGHT), ("12 bytes", "span 8"), "a"),
    HostileFile("shape-too-small", build({"a": entry(shape=[1])}, EIGHT), ("4 bytes", "span 8"), "a"),
    HostileFile("shape-2-to-the-62", build({"a": entry(shape=[1 << 62])}, EIGHT), ("span 8",), "a"),
    HostileFile("shape-wraps-to-8-bytes", build({"a": entry(shape=[_HUGE, 2, 1])}, EIGHT), ("shape",), "a"),
    HostileFile(
        "shape-overflows-then-0",
        build({"a": entry(shape=[1 << 40, 1 << 40, 0], offsets=[0, 0])}),
        ("shape",),
        "a",
    ),
    HostileFile(
        "shape-0-then-overflows",
        build({"a": entry(shape=[0, 1 << 40, 1 << 40], offsets=[0, 0])}),
        ("shape",),
        tensor="a",
        stricter="no tensor has such strides",
    ),
    HostileFile(
        "65-dims",
        build({"a": entry(shape=[1] * 64 + [2])}, EIGHT),
        ("64",),
        tensor="a",
        stricter="torch works on at most 64 dims",
    ),
    HostileFile("offsets-null", build({"a": entry(offsets=None)}, EIGHT), ("data_offsets None",), "a"),
    HostileFile("offsets-one", build({"a": entry(offsets=[0])}, EIGHT), ("data_offsets [0]",), "a"),
    HostileFile("offsets-three", build({"a": entry(offsets=[0, 8, 8])}, EIGHT), ("[0, 8, 8]",), "a"),
    HostileFile("offsets-negative", build({"a": entry(offsets=[-8, 0])}, EIGHT), ("-8",), "a"),
    HostileFile("offsets-float", build({"a": entry(offsets=[0, 8.0])}, EIGHT), ("8.0",), "a"),
    HostileFile("offsets-bool", build({"a": entry("U8", [1], [False, True])}, b"x"), ("True",), "a"),
    HostileFile("offsets-text", build({"a": entry(offsets=["0", "8"])}, EIGHT), ("'0'",), "a"),
    HostileFile("offsets-backwards", build({"a": entry(offsets=[8, 0])}, EIGHT), ("span -8",), "a"),
    HostileFile(
        "offsets-past-the-end", build({"a": entry(offsets=[8, 16])}, EIGHT), ("hole", "expected"), "a"
    ),
    HostileFile(
        "offsets-huge", build({"a": entry(offsets=[(1 << 64) - 8, 1 << 64])}, EIGHT), ("data_offsets",), "a"
    ),
    HostileFile(
        "overlap",
        build({"a": entry(), "b": entry(offsets=[4, 12])}, bytes(12)),
        ("overlaps 'a'",),
        tensor="b",
    ),
    HostileFile(
        "two-tensors-in-one-place", build({"a": entry(), "b": entry()}, EIGHT), ("overlaps 'a'",), "b"
    ),
    HostileFile(
        "hole", build({"a": entry(), "b": entry(offsets=[12, 20])}, bytes(20)), ("hole after 'a'",), "b"
    ),
    HostileFile("hole-at-the-start", build({"a": entry(offsets=[4, 12])}, bytes(12)), ("hole",), "a"),
    HostileFile("truncated", build({"a": entry()}, bytes(5)), ("short by 3 bytes", "incomplete")),
    HostileFile("no-data", build({"a": entry()}), ("short by 8 bytes",)),
    HostileFile("over-long", build({"a": entry()}, bytes(11)), ("longer by 3 bytes",)),
    HostileFile("data-without-tensors", build({}, b"x"), ("longer by 1 bytes",)),
)
"""Every one must be refused with its file's name."""

VALID: dict[str, bytes] = {
    "no-tensors": build({}),
    "metadata-null": build({"__metadata__": None, "a": entry()}, EIGHT),
    "metadata-empty": build({"__metadata__": {}, "a": entry()}, EIGHT),
    "metadata-of-text": build({"__metadata__": {"format": "pt", "": "x"}, "a": entry()}, EIGHT),
    "padded-header": build(json.dumps({"a": entry()}) + "   \n\t", EIGHT),
    "zero-dims": build({"a": entry(shape=[], offsets=[0, 4])}, bytes(4)),
    "empty-tensors": build(
        {"a": entry(shape=[0], offsets=[0, 0]), "b": entry(), "c": entry(shape=[3, 0], offsets=[8, 8])}, EIGHT
    ),
    "written-out-of-order": build({"b": entry(offsets=[8, 16]), "a": entry()}, bytes(16)),
    "odd-names": build(
        {"": entry(), "../x\0": entry(offsets=[8, 16]), "ü\n💡": entry(offsets=[16, 24])}, bytes(24)
    ),
    "unknown-field": build({"a": entry(more={"x": [1.5, None]})}, EIGHT),
    "F4": build({"a": entry("F4", [3, 4], [0, 6])}, bytes(6)),
}
"""Odd files that are right, and must be opened."""


def write(case: HostileFile, folder: Path) -> Path:
    """Writes a case; returns the file's path."""
    path = folder / f"{case.name}.safetensors"
    path.write_bytes(case.content)
    return path


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.mkdir(parents=True, exist_ok=True)
    for hostile in FILES:
        print(write(hostile, target))
