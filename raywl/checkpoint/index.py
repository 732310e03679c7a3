"""Which files hold a checkpoint's weights: indexes, name patterns, and their checks."""

from __future__ import annotations

import hashlib
import posixpath
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from raywl.checkpoint.strict_json import parse_json
from raywl.errors import CheckpointError, CorruptFileError, MissingFileError
from raywl.sources.selection import (
    INDEX_NAME,
    SAFETENSORS,
    WeightFormat,
    allowed_names,
    missing_numbered_files,
    numbered_set,
    own_files,
)

__all__ = [
    "INDEX_NAME",
    "Index",
    "check_member_name",
    "check_present",
    "choose_files",
    "missing_numbered_files",
    "natural_sort_key",
    "numbered_set",
    "parse_index",
]

_DIGITS = re.compile(r"(\d+)")
_MAX_DIGITS = 255


class Index(NamedTuple):
    """What an index says."""

    weight_map: dict[str, str]
    """Tensor name to file name inside the folder."""
    total_size: int | None
    """Bytes of all tensors, as its writer counted them."""
    sha256: str
    """Of the index file's bytes, in hex."""
    name: str = INDEX_NAME
    """Of the index file."""


def natural_sort_key(path: str) -> tuple[tuple[int, int | str], ...]:
    """Orders by base name, with runs of digits as numbers: `model-2` before `model-10`."""
    parts = _DIGITS.split(posixpath.basename(path))
    return tuple((0, int(part)) if _is_number(part) else (1, part) for part in parts)


def _is_number(part: str) -> bool:
    # Python refuses to read numbers of thousands of digits, and no file that is there has one.
    return part.isdecimal() and len(part) <= _MAX_DIGITS


def check_member_name(name: Any, path: str) -> str:
    """A file's name inside a checkpoint folder, normalised.

    Raises:
        CheckpointError: It isn't a string, is absolute, or climbs out of the folder.
    """
    if not isinstance(name, str) or not name or "\0" in name:
        raise CheckpointError(path, None, f"file name {name!r} is not a path inside the folder")
    normal = posixpath.normpath(name)
    if posixpath.isabs(name) or normal == ".." or normal.startswith("../") or normal == ".":
        raise CheckpointError(path, None, f"file name {name!r} leads outside the folder")
    return normal


def parse_index(raw: bytes, path: str) -> Index:
    """Parses and checks an index file.

    Raises:
        CorruptFileError: It is not JSON, has a name twice, or has no `weight_map` object.
        CheckpointError: An entry leads outside the folder.
    """
    index = parse_json(raw, path, "index")
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict):
        raise CorruptFileError(path, None, "index has no weight_map object")
    normal: dict[str, str] = {}
    for file in weight_map.values():
        # A map names each file thousands of times.
        if not isinstance(file, str) or file not in normal:
            normal[file] = check_member_name(file, path)
    return Index(
        {name: normal[file] for name, file in weight_map.items()},
        _total_size(index.get("metadata")),
        hashlib.sha256(raw).hexdigest(),
        posixpath.basename(path),
    )


def _total_size(metadata: Any) -> int | None:
    size = metadata.get("total_size") if isinstance(metadata, dict) else None
    # Some writers count in floats.
    if isinstance(size, float) and size.is_integer():
        size = int(size)
    return size if type(size) is int else None


def choose_files(
    names: Iterable[str],
    weight_map: dict[str, str] | None,
    format: WeightFormat = SAFETENSORS,
    allow_patterns: Sequence[str] = (),
) -> list[str]:
    """The weight files of a folder, in natural order.

    An index with entries decides alone, unless patterns mean none of its files. Without one, the folder's
    own of the format.
    """
    indexed = allowed_names(set((weight_map or {}).values()), allow_patterns)
    files = indexed or own_files(names, format, allow_patterns)
    return sorted(files, key=lambda name: (natural_sort_key(name), name))


def check_present(
    folder: str, wanted: Sequence[str], present: Iterable[str], hint: str = "incomplete download?"
) -> None:
    """Raises `MissingFileError` naming each of `wanted` that isn't in `present`.

    Args:
        folder: How messages name the folder.
        wanted: Names.
        present: Names.
        hint: What may be the cause.
    """
    there = set(present)
    missing = [name for name in wanted if name not in there]
    if missing:
        raise MissingFileError(
            folder, missing, f"{len(missing)} of {len(wanted)} weight files are absent ({hint})"
        )
