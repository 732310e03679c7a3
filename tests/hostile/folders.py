"""Checkpoint folders whose files, index and links contradict each other.

`python -m tests.hostile.folders FOLDER` writes them all, to try another reader on them.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raywl.errors import CheckpointError, CorruptFileError, MissingFileError
from tests.hostile.files import build, entry
from tests.hostile.pickles import GOOD as SAVED

INDEX = "model.safetensors.index.json"
TORCH_INDEX = "pytorch_model.bin.index.json"
ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@dataclass(frozen=True)
class Link:
    """A symbolic link to `target`."""

    target: str


def tensors(*names: str) -> bytes:
    """A file of two floats under each of the names; each tensor's bytes are its place in the list."""
    header = {name: entry(offsets=[8 * i, 8 * i + 8]) for i, name in enumerate(names)}
    return build(header, b"".join(bytes([i]) * 8 for i in range(len(names))))


def index(weight_map: Any) -> bytes:
    """An index file."""
    return json.dumps({"metadata": {"total_size": 16}, "weight_map": weight_map}).encode()


@dataclass(frozen=True)
class HostileFolder:
    """One folder that must be refused."""

    name: str
    files: Mapping[str, bytes | Link | None]
    """What is in the folder; `None` is a folder."""
    says: tuple[str, ...]
    """What the message must contain."""
    tensor: str | None = None
    """The tensor that the error must name."""
    error: type[CheckpointError] = CheckpointError


def _outside(name: str, file: str) -> HostileFolder:
    return HostileFolder(
        name, {INDEX: index({"a": file}), ONE: tensors("a")}, (INDEX, repr(file), "leads outside")
    )


def _damaged(name: str, raw: bytes, *says: str) -> HostileFolder:
    return HostileFolder(name, {INDEX: raw, ONE: tensors("a")}, (INDEX, *says), error=CorruptFileError)


FOLDERS: tuple[HostileFolder, ...] = (
    _outside("index-absolute", "/etc/passwd"),
    _outside("index-climbs", "../outside.safetensors"),
    _outside("index-climbs-later", "sub/../../outside.safetensors"),
    _outside("index-climbs-by-dots", "./.././outside.safetensors"),
    _outside("index-names-the-folder", "."),
    _outside("index-names-its-parent", ".."),
    HostileFolder("index-names-nothing", {INDEX: index({"a": ""}), ONE: tensors("a")}, (INDEX, "''")),
    HostileFolder("index-names-NUL", {INDEX: index({"a": "x\0y"}), ONE: tensors("a")}, (INDEX, "x")),
    HostileFolder("index-names-an-int", {INDEX: index({"a": 1}), ONE: tensors("a")}, (INDEX, "1")),
    HostileFolder("index-names-null", {INDEX: index({"a": None}), ONE: tensors("a")}, (INDEX, "None")),
    HostileFolder("index-names-a-list", {INDEX: index({"a": [ONE]}), ONE: tensors("a")}, (INDEX, ONE)),
    _damaged("index-empty-file", b"", "not JSON"),
    _damaged("index-not-JSON", b"{'weight_map': {}}", "not JSON"),
    _damaged("index-cut", index({"a": ONE})[:-9], "not JSON"),
    _damaged("index-not-UTF-8", b'{"weight_map": {"\xff": "x"}}', "not UTF-8"),
    _damaged("index-nested", b'{"a":' * 100_000, "nested"),
    _damaged("index-a-list", b"[]", "no weight_map"),
    _damaged("index-null", b"null", "no weight_map"),
    _damaged("index-without-map", b'{"metadata": {}}', "no weight_map"),
    _damaged("index-map-null", index(None), "no weight_map"),
    _damaged("index-map-a-list", index([ONE]), "no weight_map"),
    HostileFolder(
        "index-same-name-twice",
        {INDEX: b'{"weight_map": {"a": "%s", "a": "%s"}}' % (ONE.encode(), TWO.encode()), ONE: tensors("a")},
        (INDEX, "index twice"),
        tensor="a",
        error=CorruptFileError,
    ),
    HostileFolder(
        "index-is-a-dangling-link",
        {INDEX: Link("../../blobs/gone"), ONE: tensors("a")},
        (INDEX, "incomplete"),
        error=MissingFileError,
    ),
    HostileFolder(
        "shard-absent",
        {INDEX: index({"a": ONE, "b": TWO}), ONE: tensors("a")},
        (TWO, "1 of 2", "incomplete"),
        error=MissingFileError,
    ),
    HostileFolder(
        "shard-a-dangling-link",
        {INDEX: index({"a": ONE, "b": TWO}), ONE: tensors("a"), TWO: Link("../blobs/gone")},
        (TWO, "incomplete"),
        error=MissingFileError,
    ),
    HostileFolder(
        "shard-a-link-to-itself",
        {INDEX: index({"a": ONE, "b": TWO}), ONE: tensors("a"), TWO: Link(TWO)},
        (TWO, "incomplete"),
        error=MissingFileError,
    ),
    HostileFolder(
        "shard-a-folder",
        {INDEX: index({"a": ONE, "b": TWO}), ONE: tensors("a"), TWO: None},
        (TWO, "absent"),
        error=MissingFileError,
    ),
    HostileFolder(
        "shard-below-a-file",
        {INDEX: index({"a": f"{ONE}/x.safetensors"}), ONE: tensors("a")},
        (f"{ONE}/x.safetensors", "absent"),
        error=MissingFileError,
    ),
    HostileFolder(
        "all-shards-absent",
        {INDEX: index({"a": ONE, "b": TWO})},
        (ONE, TWO, "2 of 2"),
        error=MissingFileError,
    ),
    HostileFolder(
        "shard-empty",
        {INDEX: index({"a": ONE, "b": TWO}), ONE: tensors("a"), TWO: b""},
        (TWO, "0 bytes"),
        error=CorruptFileError,
    ),
    HostileFolder(
        "tensor-not-in-its-file",
        {INDEX: index({"a": ONE, "b": TWO}), ONE: tensors("a"), TWO: tensors("c")},
        (TWO, "index"),
        tensor="b",
    ),
    HostileFolder(
        "tensor-in-the-other-file",
        {INDEX: index({"a": TWO, "b": TWO, "c": ONE}), ONE: tensors("a", "c"), TWO: tensors("b")},
        (TWO, "index"),
        tensor="a",
    ),
    HostileFolder(
        "unindexed-tensor-twice",
        {INDEX: index({"a": ONE, "b": TWO}), ONE: tensors("a", "x"), TWO: tensors("b", "x")},
        (ONE, TWO, "two files"),
        tensor="x",
    ),
    HostileFolder(
        "tensor-in-two-files",
        {"x.safetensors": tensors("a", "b"), "y.safetensors": tensors("b")},
        ("x.safetensors", "y.safetensors", "no index"),
        tensor="b",
    ),
    HostileFolder(
        "numbered-set-incomplete",
        {"model-00001-of-00003.safetensors": tensors("a"), "model-00003-of-00003.safetensors": tensors("b")},
        ("model-00002-of-00003.safetensors", "1 file", "incomplete"),
        error=MissingFileError,
    ),
    HostileFolder(
        "numbered-set-without-its-last",
        {ONE: tensors("a")},
        (TWO, "incomplete"),
        error=MissingFileError,
    ),
    HostileFolder(
        "numbered-sets-mixed",
        {ONE: tensors("a"), TWO: tensors("b"), "model-00001-of-00003.safetensors": tensors("c")},
        ("model-00002-of-00003.safetensors", "model-00003-of-00003.safetensors"),
        error=MissingFileError,
    ),
    HostileFolder(
        "numbered-set-of-99999999",
        {"model-00001-of-99999999.safetensors": tensors("a")},
        ("99999998 files", "model-00002-of-99999999.safetensors"),
        error=MissingFileError,
    ),
    HostileFolder(
        "empty-map-and-numbered-set-incomplete",
        {INDEX: index({}), ONE: tensors("a")},
        (TWO, "incomplete"),
        error=MissingFileError,
    ),
    HostileFolder("nothing", {}, ("no weights here", "0 files")),
    HostileFolder("only-a-config", {"config.json": b"{}"}, ("no weights here", "1 file")),
    HostileFolder("only-other-formats", {"model.gguf": b"x"}, ("no weights here", "model.gguf")),
    HostileFolder(
        "only-what-a-trainer-left",
        {"optimizer.pt": b"x", "training_args.bin": b"x", "rng_state.pth": b"x"},
        ("no weights here", "a trainer's state", "optimizer.pt", "rng_state.pth"),
    ),
    HostileFolder(
        "torch-index-climbs",
        {TORCH_INDEX: index({"a": "../outside.bin"}), "pytorch_model.bin": SAVED},
        (TORCH_INDEX, "'../outside.bin'", "leads outside"),
    ),
    HostileFolder(
        "torch-index-damaged",
        {TORCH_INDEX: b"{", "pytorch_model.bin": SAVED},
        (TORCH_INDEX, "not JSON"),
        error=CorruptFileError,
    ),
    HostileFolder(
        "torch-file-absent",
        {TORCH_INDEX: index({"a": "one.bin", "b": "two.bin"}), "one.bin": SAVED},
        ("two.bin", "incomplete download"),
        error=MissingFileError,
    ),
    HostileFolder(
        "torch-set-incomplete",
        {"pytorch_model-00001-of-00002.bin": SAVED},
        ("pytorch_model-00002-of-00002.bin", "incomplete download"),
        error=MissingFileError,
    ),
    HostileFolder(
        "torch-tensor-in-no-file",
        {TORCH_INDEX: index({"a": "one.bin", "z": "one.bin"}), "one.bin": SAVED},
        ("one.bin", "but it isn't"),
        "z",
    ),
    HostileFolder(
        "torch-tensor-in-two-files",
        {"one.bin": SAVED, "two.bin": SAVED},
        ("one.bin and two.bin", "no index says"),
        "a",
    ),
    HostileFolder(
        "no-pickle", {"pytorch_model.bin": b"x"}, ("pytorch_model.bin", "torch.save"), error=CorruptFileError
    ),
    HostileFolder("only-in-a-sub-folder", {"original/model.safetensors": tensors("a")}, ("no weights here",)),
    HostileFolder("only-an-empty-map", {INDEX: index({})}, ("no weights here",)),
)
"""Every one must be refused."""

GOOD: dict[str, tuple[Mapping[str, bytes | Link | None], dict[str, str]]] = {
    "one-file": ({"model.safetensors": tensors("a")}, {"a": "model.safetensors"}),
    "empty-map": ({INDEX: index({}), "model.safetensors": tensors("a")}, {"a": "model.safetensors"}),
    "no-tensors-at-all": ({"model.safetensors": build({})}, {}),
    "index-in-other-spellings": (
        {INDEX: index({"a": f"./{ONE}", "b": f"sub/../{TWO}"}), ONE: tensors("a"), TWO: tensors("b")},
        {"a": ONE, "b": TWO},
    ),
    "index-into-a-sub-folder": (
        {INDEX: index({"a": f"sub/{ONE}"}), f"sub/{ONE}": tensors("a")},
        {"a": f"sub/{ONE}"},
    ),
    "index-alone-decides": (
        {
            INDEX: index({"a": ONE, "b": TWO}),
            ONE: tensors("a"),
            TWO: tensors("b"),
            "consolidated.safetensors": tensors("other"),
            "adapter.safetensors": tensors("a"),
            "model-00001-of-00009.safetensors": b"damaged",
        },
        {"a": ONE, "b": TWO},
    ),
    "index-says-which-of-two": (
        {INDEX: index({"a": TWO, "b": ONE}), ONE: tensors("a", "b"), TWO: tensors("a")},
        {"a": TWO, "b": ONE},
    ),
    "consolidated-beside-others": (
        {"consolidated.safetensors": tensors("layers.0"), "model.safetensors": tensors("model.layers.0")},
        {"model.layers.0": "model.safetensors"},
    ),
    "consolidated-set-beside-others": (
        {
            "consolidated-00001-of-00002.safetensors": tensors("layers.0"),
            "model.safetensors": tensors("model.layers.0"),
        },
        {"model.layers.0": "model.safetensors"},
    ),
    "consolidated-alone": (
        {"consolidated.safetensors": tensors("layers.0")},
        {"layers.0": "consolidated.safetensors"},
    ),
    "sub-folders-left-alone": (
        {"model.safetensors": tensors("a"), "original/model.safetensors": b"x", "metal/model.bin": b"x"},
        {"a": "model.safetensors"},
    ),
    "numbered-from-0": (
        {"model-00000-of-00002.safetensors": tensors("a"), "model-00001-of-00002.safetensors": tensors("b")},
        {"a": "model-00000-of-00002.safetensors", "b": "model-00001-of-00002.safetensors"},
    ),
    "a-link-out-of-the-folder": (
        {INDEX: index({"a": ONE}), ONE: Link("blobs/1"), "blobs/1": tensors("a")},
        {"a": ONE},
    ),
    "beside-pickles": (
        {"model.safetensors": tensors("a"), "pytorch_model.bin": b"x", "optimizer.pt": b"x"},
        {"a": "model.safetensors"},
    ),
}
"""Odd folders that are right, with each tensor's file."""


def write(files: Mapping[str, bytes | Link | None], folder: Path) -> Path:
    """Writes a folder's files; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if content is None:
            path.mkdir()
        elif isinstance(content, Link):
            os.symlink(content.target, path)
        else:
            path.write_bytes(content)
    return folder


if __name__ == "__main__":
    for hostile in FOLDERS:
        print(write(hostile.files, Path(sys.argv[1]) / hostile.name))
