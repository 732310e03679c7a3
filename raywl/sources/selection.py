"""Which files of a listing are a checkpoint's weights, and which small ones belong to them."""

from __future__ import annotations

import fnmatch
import json
import posixpath
import re
from collections.abc import Collection, Iterable, Sequence
from itertools import islice

__all__ = [
    "INDEX_NAME",
    "TRAINING_FILES",
    "companions",
    "folder_names",
    "indexed_files",
    "missing_numbered_files",
    "numbered_set",
    "weight_files",
]

INDEX_NAME = "model.safetensors.index.json"

TRAINING_FILES = ("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt")
"""What the names of files end in that trainers write beside the weights."""

_MAX_LISTED = 1000
_NUMBERED = re.compile(
    r"^(?P<stem>.+)-(?P<number>\d{5,})-of-(?P<total>\d{5,})\.(?P<suffix>safetensors|bin|pt|pth)$"
)
_COMPANIONS = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "*.spm", "tokenizer.*")
_NEVER = (".safetensors", ".bin", ".pt", ".pth", ".py")


def folder_names(listing: Iterable[str], subfolder: str | None) -> list[str]:
    """Names of a listing that are in `subfolder` or below it, as seen from there; all without one.

    Names that would lead out of the folder are left out.
    """
    prefix = f"{posixpath.normpath(subfolder)}/" if subfolder else ""
    inside = (name[len(prefix) :] for name in listing if name.startswith(prefix))
    return [
        name for name in inside if name and not {"", ".", ".."} & set(name.split("/")) and "\\" not in name
    ]


def indexed_files(raw: bytes) -> set[str] | None:
    """The files that an index names; `None` if it is damaged, which reading the checkpoint then reports."""
    try:
        weight_map = json.loads(raw)["weight_map"]
        return {posixpath.normpath(name) for name in weight_map.values()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def weight_files(
    names: Collection[str], indexed: Collection[str] | None, allow_patterns: Sequence[str] = ()
) -> list[str]:
    """The weight files to fetch.

    Args:
        names: What the folder holds.
        indexed: The files that its index names, whether they are there or not; `None` without an index.
        allow_patterns: Only files that match one of these; all when empty.

    Returns:
        Exactly the index's files, else the folder's own safetensors files, without copies in another naming
        (`consolidated*`) where there are others.
    """
    if indexed:
        chosen = sorted(indexed)
    else:
        found = sorted(name for name in names if name.endswith(".safetensors") and "/" not in name)
        chosen = [name for name in found if not name.startswith("consolidated")] or found
    if allow_patterns:
        chosen = [name for name in chosen if any(fnmatch.fnmatchcase(name, p) for p in allow_patterns)]
    return chosen


def companions(names: Iterable[str]) -> list[str]:
    """Configs, tokenizers and other small files beside the weights; never code."""
    return sorted(
        name
        for name in names
        if "/" not in name
        and not name.endswith(_NEVER)
        and any(fnmatch.fnmatchcase(name, pattern) for pattern in _COMPANIONS)
    )


def numbered_set(name: str) -> tuple[str, str, str] | None:
    """Stem, total and suffix of a numbered file's name: the same for all files of a set."""
    found = _NUMBERED.match(name)
    return (found["stem"], found["total"], found["suffix"]) if found else None


def missing_numbered_files(files: Sequence[str]) -> tuple[int, list[str]]:
    """What numbered sets (`model-00001-of-00003.safetensors`) among `files` lack.

    Returns:
        How many files are missing, and the names of the first ones, since a name can claim any number.
    """
    present: dict[tuple[str, str, int, str], set[int]] = {}
    for found in filter(None, map(_NUMBERED.match, files)):
        key = found["stem"], found["total"], len(found["number"]), found["suffix"]
        present.setdefault(key, set()).add(int(found["number"]))
    num_missing, names = 0, []
    for (stem, total, width, suffix), numbers in sorted(present.items()):
        first = 0 if 0 in numbers else 1
        wanted = range(first, int(total) + first)
        num_missing += len(wanted) - sum(number in wanted for number in numbers)
        absent = (number for number in wanted if number not in numbers)
        names += [f"{stem}-{number:0{width}d}-of-{total}.{suffix}" for number in islice(absent, _MAX_LISTED)]
    return num_missing, names
