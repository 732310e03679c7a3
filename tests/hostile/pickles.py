"""Files that look like those of `torch.save` and lie, each with the error that must name what is wrong.

`python -m tests.hostile.pickles FOLDER` writes them all, to try another reader on them.
"""

from __future__ import annotations

import io
import pickle
import struct
import sys
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from raywl.errors import CheckpointError, CorruptFileError

EIGHT = bytes(range(8))
MAGIC = pickle.dumps(0x1950A86A20F9469CFC6C, 2)
SYSTEM = {"protocol_version": 1001, "little_endian": True, "type_sizes": {"short": 2, "int": 4, "long": 4}}


# Pickles, written by hand.


def text(value: str) -> bytes:
    raw = value.encode()
    return b"X" + struct.pack("<I", len(raw)) + raw


def number(value: int) -> bytes:
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    raw = pickle.encode_long(value)
    return b"\x8a" + bytes([len(raw)]) + raw


def numbers(values: object) -> bytes:
    """A tuple of numbers, or what is given as bytes as it stands."""
    if isinstance(values, bytes):
        return values
    assert isinstance(values, tuple)
    return b"(" + b"".join(map(number, values)) + b"t"


def storage(
    key: str = "0", size: int = 2, kind: str = "torch FloatStorage", *, more: bytes = b"", numel: bytes = b""
) -> bytes:
    """A persistent id."""
    module, name = kind.split(" ")
    size_raw = numel or number(size)
    return (
        b"("
        + text("storage")
        + f"c{module}\n{name}\n".encode()
        + text(key)
        + text("cpu")
        + size_raw
        + more
        + b"tQ"
    )


def tensor(
    of: bytes | None = None,
    offset: bytes | int = 0,
    shape: object = (2,),
    strides: object = (1,),
    function: str = "torch._utils _rebuild_tensor_v2",
    more: bytes = b"",
) -> bytes:
    """A call that makes a tensor."""
    module, name = function.split(" ")
    offset_raw = number(offset) if isinstance(offset, int) else offset
    body = (storage() if of is None else of) + offset_raw + numbers(shape) + numbers(strides)
    return f"c{module}\n{name}\n(".encode() + body + b"\x89}" + more + b"tR"


def state(**items: bytes) -> bytes:
    """A pickle of a dict."""
    body = b"".join(text(name) + value for name, value in items.items())
    return b"\x80\2}(" + body + b"u."


# Archives, written by Python's own library.


def archive(
    raw: bytes, records: Mapping[str, bytes] | None = None, *, prefix: str = "archive", **how: int
) -> bytes:
    """An archive with a pickle and storages."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", **how) as file:  # type: ignore[arg-type]
        file.writestr(f"{prefix}/data.pkl", raw)
        for name, content in ({"data/0": EIGHT} if records is None else records).items():
            file.writestr(f"{prefix}/{name}", content)
    return out.getvalue()


def legacy(raw: bytes, *, keys: object = ("0",), data: bytes | None = None, system: object = None) -> bytes:
    """A file as torch wrote them before version 1.6."""
    head = MAGIC + pickle.dumps(1001, 2) + pickle.dumps(SYSTEM if system is None else system, 2)
    body = struct.pack("<q", 2) + EIGHT if data is None else data
    return head + raw + pickle.dumps(list(keys) if isinstance(keys, tuple) else keys, 2) + body


def _changed(raw: bytes, old: bytes, new: bytes, count: int = -1) -> bytes:
    assert old in raw
    assert len(old) == len(new)
    return raw.replace(old, new, count)


def _calls(function: str, argument: bytes) -> bytes:
    """A pickle that calls a function of one argument when Python unpickles it."""
    module, name = function.rsplit(".", 1)
    return b"\x80\2" + f"c{module}\n{name}\n".encode() + argument + b"\x85R."


GOOD = archive(state(a=tensor()))
_DEEP = 100_000
_COMMAND = text("touch /tmp/raywl-was-here")


def _second_record_at_first() -> bytes:
    """Two records of the directory that lead to one place."""
    raw = archive(state(a=tensor(), b=tensor(storage("1"))), {"data/0": EIGHT, "data/1": EIGHT})
    with zipfile.ZipFile(io.BytesIO(raw)) as file:
        first, second = (file.getinfo(f"archive/data/{i}").header_offset for i in (0, 1))
        start = file.start_dir
    return raw[:start] + _changed(raw[start:], struct.pack("<I", second), struct.pack("<I", first), 1)


def _longer_in_the_directory() -> bytes:
    """A record that the directory makes reach into the next one."""
    raw = archive(
        state(a=tensor(shape=(100,), of=storage(size=100))), {"data/0": EIGHT, "data/1": bytes(600)}
    )
    with zipfile.ZipFile(io.BytesIO(raw)) as file:
        start = file.start_dir
    place = raw.index(struct.pack("<II", 8, 8), start)
    return raw[:place] + struct.pack("<II", 400, 400) + raw[place + 8 :]


def _another_name_in_front() -> bytes:
    raw = archive(state(a=tensor()))
    return _changed(raw, b"archive/data/0", b"archive/data/9", 1)


@dataclass(frozen=True)
class HostilePickle:
    """One file that must be refused."""

    name: str
    content: bytes
    says: tuple[str, ...]
    """What the message must contain, besides the file's path."""
    tensor: str | None = None
    """The tensor that the error must name."""
    error: type[CheckpointError] = CorruptFileError


def _code(name: str, raw: bytes, *says: str) -> HostilePickle:
    return HostilePickle(f"code-{name}", archive(raw), (*says, "never run"), error=CheckpointError)


def _bad(name: str, raw: bytes, *says: str) -> HostilePickle:
    return HostilePickle(f"pickle-{name}", archive(raw), says)


def _view(name: str, value: bytes, *says: str) -> HostilePickle:
    return HostilePickle(f"view-{name}", archive(state(a=value)), says, "a")


FILES: tuple[HostilePickle, ...] = (
    # Code.
    _code("os.system", _calls("os.system", _COMMAND), "'os.system'"),
    _code("posix.system", _calls("posix.system", _COMMAND), "'posix.system'"),
    _code("subprocess", _calls("subprocess.getoutput", _COMMAND), "'subprocess.getoutput'"),
    _code("eval", _calls("builtins.eval", text("1")), "'builtins.eval'"),
    _code("exec-of-Python-2", _calls("__builtin__.eval", text("1")), "'__builtin__.eval'"),
    _code("getattr", _calls("builtins.getattr", text("1")), "'builtins.getattr'"),
    _code("import", _calls("importlib.import_module", text("os")), "'importlib.import_module'"),
    _code("unpickle-inside", _calls("pickle.loads", text("x")), "'pickle.loads'"),
    _code("load-from-bytes", _calls("torch.storage._load_from_bytes", text("x")), "_load_from_bytes"),
    _code("torch.load", _calls("torch.load", text("/etc/passwd")), "'torch.load'"),
    _code("hub", _calls("torch.hub.load", text("x")), "'torch.hub.load'"),
    _code("runs-in-a-value", state(a=tensor(), b=_calls("os.system", _COMMAND)[2:-1]), "'os.system'"),
    _code("attribute-of-what-is-let-in", b"\x80\4\x8c\5torch\x8c\x0dSize.__init__\x93.", "Size.__init__"),
    _code("by-stack", b"\x80\4\x8c\2os\x8c\6system\x93" + text("true") + b"\x85R.", "'os.system'"),
    _code("by-INST", b"\x80\2(" + text("true") + b"ios\nsystem\n.", "'os.system'"),
    _code("line-break-in-a-name", b"\x80\4" + text("o\ns") + text("x") + b"\x93.", "'o\\ns.x'"),
    HostilePickle(
        "code-before-1.6",
        legacy(_calls("os.system", _COMMAND)),
        ("'os.system'", "never run"),
        error=CheckpointError,
    ),
    HostilePickle(
        "code-in-the-first-pickle",
        _calls("os.system", _COMMAND),
        ("'os.system'", "never run"),
        error=CheckpointError,
    ),
    # Pickles that aren't such.
    _bad("empty", b"", "is no pickle"),
    _bad("cut", state(a=tensor())[:-9], "is no pickle"),
    _bad("unknown-opcode", b"\x80\2\xff.", "is no pickle"),
    _bad("of-random-bytes", bytes(range(7, 250)), "pickle"),
    _bad("two-values", b"\x80\2}}.", "ends with 2 values"),
    _bad("no-value", b"\x80\2.", "ends with 0 values"),
    _bad("open-mark", b"\x80\2(}.", "ends with"),
    _bad("mark-without-mark", b"\x80\2t.", "no mark"),
    _bad("pop-of-nothing", b"\x80\2" + b"0.", "never put there"),
    _bad("memo-of-nothing", b"\x80\2h\7.", "never put there"),
    _bad("text-longer-than-the-file", b"\x80\2X\xff\xff\xff\x7fa.", "is no pickle"),
    _bad("text-of-8-EiB", b"\x80\4\x8d" + b"\xff" * 8 + b"a.", "is no pickle"),
    _bad("number-of-2-GiB", b"\x80\2\x8b\xff\xff\xff\x7fa.", "is no pickle"),
    _bad("number-of-1000-bytes", b"\x80\2\x8b" + struct.pack("<i", 1000) + bytes(1000) + b".", "LONG4"),
    _bad("calls-a-dict", b"\x80\2}" + b")R.", "calls dict"),
    _bad("calls-a-result", b"\x80\2ctorch\nSize\n)R)R.", "calls tuple"),
    _bad("calls-without-a-tuple", b"\x80\2ctorch\nSize\n}R.", "arguments"),
    _bad("calls-with-too-much", b"\x80\2ctorch\nSize\n" + b"(" + b"K\1" * 9 + b"tR.", "9 arguments"),
    _bad("attributes-of-a-builder", b"\x80\2ctorch\nSize\n}b.", "sets attributes of torch.Size"),
    _bad("attributes-of-a-dtype", b"\x80\2ctorch\nfloat32\n}b.", "sets attributes of DType"),
    _bad("appends-to-a-dict", b"\x80\2}K\1a.", "appends to dict"),
    _bad("items-of-a-list", b"\x80\2]K\1K\2s.", "items in list"),
    _bad("half-an-item", b"\x80\2}(K\1u.", "sets 1 halves"),
    _bad("a-dict-as-a-key", b"\x80\2}}K\1s.", "has dict as a key"),
    _bad("extension-registry", b"\x80\2\x82\1.", "EXT1"),
    _bad("buffer-from-outside", b"\x80\5\x97.", "NEXT_BUFFER"),
    _bad("an-object-of-keywords", b"\x80\4ctorch\nSize\n)}\x92.", "NEWOBJ_EX"),
    _bad("call-by-INST", b"\x80\2(itorch\nSize\n.", "INST"),
    _bad("persistent-text", b"\x80\2Pkey\n.", "PERSID"),
    _bad("persistent-number", b"\x80\2K\1Q.", "refers to what is no storage"),
    _bad("persistent-module", b"\x80\2" + text("module") + b"\x85Q.", "'module'"),
    _bad("persistent-of-two", b"\x80\2" + text("storage") + text("0") + b"\x86Q.", "by 2 values"),
    _bad(
        "keys-that-take-for-ever",
        b"\x80\2})" + b"2\x86" * 60 + b"K\1s.",
        "DUP",
    ),
    _bad("keys-that-nest", b"\x80\2})" + b"q\0h\0\x86" * 60 + b"K\1s.", "has tuple as a key"),
    # Views that their storages don't have.
    _view("past-the-end", tensor(shape=(3,)), "bytes 0 to 12", "storage of 8"),
    _view("offset-past-the-end", tensor(offset=1), "bytes 4 to 12"),
    _view("offset-negative", tensor(offset=-1), "offset -1"),
    _view("offset-huge", tensor(offset=1 << 62), "storage of 8"),
    _view("offset-text", tensor(offset=text("0")), "offset '0'"),
    _view("stride-negative", tensor(strides=(-1,)), "strides (-1,)"),
    _view("stride-huge", tensor(strides=(1 << 62,)), "storage of 8"),
    _view("shape-negative", tensor(shape=(-2,)), "shape (-2,)"),
    _view("shape-without-strides", tensor(shape=(2, 1)), "strides (1,)"),
    _view("shape-is-a-list", tensor(shape=b"](K\2e"), "shape [2]"),
    _view("shape-of-texts", tensor(shape=text("2") + b"\x85"), "shape ('2',)"),
    _view("shape-of-bools", tensor(shape=b"\x88\x85"), "shape (True,)"),
    _view("65-dims", tensor(shape=(1,) * 65, strides=(1,) * 65), "make no view"),
    _view("repeats-to-4-EiB", tensor(shape=(1 << 60, 2), strides=(0, 1)), "repeats its bytes", str(1 << 63)),
    _view("repeats-to-16-GiB", tensor(shape=(1 << 31, 2), strides=(0, 1)), "repeats its bytes"),
    _view("empty-and-huge", tensor(shape=(1 << 40, 1 << 40, 0), strides=(0, 0, 0)), "repeats its bytes"),
    _view("of-no-storage", tensor(of=b"N"), "no storage"),
    _view("of-a-tensor", tensor(of=tensor()), "no storage"),
    HostilePickle(
        "view-of-unknown-dtype",
        archive(state(a=tensor(storage(kind="torch QInt8Storage", size=8)))),
        ("is qint8",),
        "a",
        CheckpointError,
    ),
    HostilePickle(
        "view-without-dtype",
        archive(state(a=tensor(function="torch._utils _rebuild_tensor_v3", more=b"N"))),
        ("has no dtype",),
        "a",
        CheckpointError,
    ),
    HostilePickle(
        "name-with-half-a-surrogate-pair",
        archive(b"\x80\2}X\3\0\0\0\xed\xa0\x80" + tensor() + b"s."),
        ("Unicode",),
    ),
    # Storages that aren't what the pickle says.
    HostilePickle("storage-absent", archive(state(a=tensor()), {}), ("lacks", "data/0")),
    HostilePickle("storage-climbs-out", archive(state(a=tensor(storage("../../etc/passwd")))), ("lacks",)),
    HostilePickle("storage-absolute", archive(state(a=tensor(storage("/etc/passwd")))), ("lacks",)),
    HostilePickle(
        "storage-shorter", archive(state(a=tensor()), {"data/0": bytes(7)}), ("7 bytes", "expects 8")
    ),
    HostilePickle(
        "storage-longer", archive(state(a=tensor()), {"data/0": bytes(9)}), ("9 bytes", "expects 8")
    ),
    HostilePickle(
        "storage-of-two-sizes",
        archive(state(a=tensor(), b=tensor(storage(size=1), shape=(1,)))),
        ("two sizes or dtypes",),
    ),
    HostilePickle(
        "storage-of-two-dtypes",
        archive(state(a=tensor(), b=tensor(storage(kind="torch IntStorage")))),
        ("two sizes or dtypes",),
    ),
    _bad("storage-of-negative-size", state(a=tensor(storage(size=-1))), "without a class, key or size"),
    _bad("storage-of-2-to-the-70", state(a=tensor(storage(size=1 << 70))), "without a class, key or size"),
    _bad("storage-of-no-class", state(a=tensor(storage(kind="torch Size"))), "without a class, key or size"),
    # Archives.
    HostilePickle("zip-cut", GOOD[:-30], ("incomplete",)),
    HostilePickle("zip-of-4-bytes", GOOD[:4], ("incomplete",)),
    HostilePickle(
        "zip-with-bytes-in-front", b"PK\3\4" + bytes(26) + GOOD, ("before the archive's first record",)
    ),
    HostilePickle(
        "zip-without-a-pickle", archive(b"").replace(b"data.pkl", b"data.txt"), ("without archive/data.pkl",)
    ),
    HostilePickle(
        "zip-of-a-program",
        archive(state(a=tensor()), {"constants.pkl": b"", "code/a.py": b"", "data/0": EIGHT}),
        ("TorchScript",),
        error=CheckpointError,
    ),
    HostilePickle(
        "zip-big-endian",
        archive(state(a=tensor()), {"byteorder": b"big", "data/0": EIGHT}),
        ("b'big'", "little-endian"),
        error=CheckpointError,
    ),
    HostilePickle(
        "zip-of-unknown-byte-order",
        archive(state(a=tensor()), {"byteorder": b"x" * 99, "data/0": EIGHT}),
        ("byte order",),
        error=CheckpointError,
    ),
    HostilePickle(
        "zip-compressed",
        archive(state(a=tensor()), compression=zipfile.ZIP_DEFLATED),
        ("data.pkl", "compressed"),
    ),
    HostilePickle(
        "zip-bomb",
        archive(bytes(64 << 20), {}, compression=zipfile.ZIP_DEFLATED, compresslevel=9),
        ("data.pkl", "compressed"),
    ),
    HostilePickle("zip-damaged-pickle", GOOD.replace(b"\x80\2}(", b"\x80\3}("), ("data.pkl", "checksum")),
    HostilePickle("zip-two-records-in-one-place", _second_record_at_first(), ("data/",)),
    HostilePickle(
        "zip-record-reaches-into-the-next", _longer_in_the_directory(), ("data/0", "another one starts")
    ),
    HostilePickle("zip-two-names-for-a-record", _another_name_in_front(), ("another header",)),
    HostilePickle(
        "zip-size-in-the-directory-over-the-file",
        _changed(
            GOOD, struct.pack("<III", zlib.crc32(EIGHT), 8, 8), struct.pack("<III", 1, 1 << 30, 1 << 30)
        ),
        ("data/0",),
    ),
    # What torch wrote before version 1.6.
    HostilePickle("legacy-cut", legacy(state(a=tensor()))[:-3], ("short by 3 bytes", "incomplete")),
    HostilePickle("legacy-without-data", legacy(state(a=tensor()), data=b""), ("short by", "incomplete")),
    HostilePickle("legacy-over-long", legacy(state(a=tensor())) + b"xyz", ("longer by 3 bytes",)),
    HostilePickle(
        "legacy-other-size",
        legacy(state(a=tensor()), data=struct.pack("<q", 3) + bytes(12)),
        ("3 elements", "expects 2"),
    ),
    HostilePickle(
        "legacy-no-such-storage", legacy(state(a=tensor()), keys=("1",)), ("'1'", "which no tensor has")
    ),
    HostilePickle("legacy-storage-twice", legacy(state(a=tensor()), keys=("0", "0")), ("or twice",)),
    HostilePickle(
        "legacy-storage-without-bytes", legacy(state(a=tensor()), keys=(), data=b""), ("no bytes for",)
    ),
    HostilePickle("legacy-order-is-a-number", legacy(state(a=tensor()), keys=7), ("no list of names",)),
    HostilePickle(
        "legacy-big-endian",
        legacy(state(a=tensor()), system={**SYSTEM, "little_endian": False}),
        ("little-endian",),
        error=CheckpointError,
    ),
    HostilePickle(
        "legacy-other-version", MAGIC + pickle.dumps(7, 2) + bytes(20), ("version 7", "expected 1001")
    ),
    HostilePickle(
        "legacy-part-past-the-end",
        legacy(state(a=tensor(storage(more=text("v") + b"K\1K\2\x87")))),
        ("bytes 0 to 8 of a storage of 4",),
        "a",
    ),
    HostilePickle(
        "legacy-part-of-no-numbers",
        legacy(state(a=tensor(storage(more=b"K\1")))),
        ("part of a storage",),
    ),
    HostilePickle(
        "a-pickle-of-something-else",
        pickle.dumps({"a": [1.0]}, 2),
        ("torch.save didn't write",),
        error=CheckpointError,
    ),
    # Other files.
    HostilePickle("empty-file", b"", ("0 bytes",)),
    HostilePickle("a-page", b"<!DOCTYPE html>" + bytes(200), ("no file of torch.save",)),
    HostilePickle("a-safetensors-file", struct.pack("<Q", 2) + b"{}" + bytes(9), ("safetensors",)),
    HostilePickle("a-tar-archive", bytes(257) + b"ustar" + bytes(300), ("tar archive",)),
    HostilePickle("a-pointer", b"version https://git-lfs.github.com/spec/v1\n", ("git-lfs pointer",)),
)
"""Every one must be refused with its file's name."""


def write(case: HostilePickle, folder: Path) -> Path:
    """Writes a case; returns the file's path."""
    path = folder / f"{case.name}.bin"
    path.write_bytes(case.content)
    return path


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.mkdir(parents=True, exist_ok=True)
    for hostile in FILES:
        print(write(hostile, target))
