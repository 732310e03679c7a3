"""Which files of a listing are a checkpoint's weights, and which small ones belong to them."""

from __future__ import annotations

import fnmatch
import json
import posixpath
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

__all__ = [
    "FORMATS",
    "INDEX_NAME",
    "INDEX_NAMES",
    "SAFETENSORS",
    "TORCH",
    "TRAINING_FILES",
    "WEIGHT_SUFFIXES",
    "WeightFormat",
    "allowed_names",
    "as_patterns",
    "companions",
    "expected_header_bytes",
    "folder_names",
    "format_of",
    "index_name",
    "indexed_files",
    "is_leftover",
    "missing_numbered_files",
    "numbered_set",
    "own_files",
    "weight_files",
]


class WeightFormat(NamedTuple):
    """One kind of files that weights come in."""

    name: str
    index_name: str
    """The file that tells which tensors are in which file."""
    suffixes: tuple[str, ...]
    """What its files' names end in; where files of several are there, those of the first."""


SAFETENSORS = WeightFormat("safetensors", "model.safetensors.index.json", (".safetensors",))
TORCH = WeightFormat("torch", "pytorch_model.bin.index.json", (".bin", ".pt", ".pth"))
FORMATS = (SAFETENSORS, TORCH)
"""Where a folder has both, the first counts."""

INDEX_NAME = SAFETENSORS.index_name
INDEX_NAMES = tuple(format.index_name for format in FORMATS)
WEIGHT_SUFFIXES = tuple(suffix for format in FORMATS for suffix in format.suffixes)

TRAINING_FILES = ("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt")
"""What the names of files end in that trainers write beside the weights."""

_LEFTOVERS = (
    "optimizer*.bin",
    "optimizer*.pt",
    "*optim_states.pt",
    "random_states_*.pkl",
    "rng_state*.pth",
    "scaler*.pt",
    "scheduler*.bin",
    "scheduler*.pt",
    "trainer_state.json",
)

_MAX_LISTED = 1000
_HEADER_BYTES = 16 << 10
"""For metadata, and so that no time is lost with very short reads."""
_ENTRY_BYTES = 160
"""What a tensor takes in a header, beside its name, when it is long."""
_NUMBERED = re.compile(
    r"^(?P<stem>.+)-(?P<number>\d{5,})-of-(?P<total>\d{5,})\.(?P<suffix>safetensors|bin|pt|pth)$"
)
_COMPANIONS = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "*.spm", "tokenizer.*")
_NEVER = (".safetensors", ".bin", ".pt", ".pth", ".py")


def as_patterns(patterns: str | Sequence[str] | None) -> tuple[str, ...]:
    """One pattern, several or none, as a tuple."""
    return (patterns,) if isinstance(patterns, str) else tuple(patterns or ())


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
        Exactly the index's files, else the folder's own of the format that counts. Patterns that mean none
        of the index's files (`consolidated*`) are for the folder's own, too.
    """
    chosen = allowed_names(sorted(indexed or ()), allow_patterns)
    return chosen or own_files(names, format_of(names, allow_patterns), allow_patterns)


def allowed_names(names: Iterable[str], allow_patterns: Sequence[str]) -> list[str]:
    """Those of `names` that one of the patterns matches; all where there are no patterns."""
    return [
        name
        for name in names
        if not allow_patterns or any(fnmatch.fnmatchcase(name, pattern) for pattern in allow_patterns)
    ]


def format_of(names: Collection[str], allow_patterns: Sequence[str] = ()) -> WeightFormat:
    """The format of a folder's weights.

    Args:
        names: What the folder holds.
        allow_patterns: Patterns that only files of the other format match make that one count.

    Returns:
        The first one that there are files or an index of; the first of all where there are none.
    """
    found = []
    for format in FORMATS:
        if own_files(names, format, allow_patterns) or (format.index_name in names and not allow_patterns):
            return format
        # The index may name files of sub-folders, which the patterns may be for.
        found += [format] * (format.index_name in names)
    return (*found, FORMATS[0])[0]


def index_name(names: Collection[str], allow_patterns: Sequence[str] = ()) -> str | None:
    """The index that says which files hold the weights, if the folder has one."""
    name = format_of(names, allow_patterns).index_name
    return name if name in names else None


def expected_header_bytes(weight_map: Mapping[str, str]) -> dict[str, int]:
    """What the headers of safetensors files take at most, going by their index, unless they are odd."""
    found: dict[str, int] = {}
    for tensor, file in weight_map.items():
        found[file] = found.get(file, _HEADER_BYTES) + len(tensor.encode()) + _ENTRY_BYTES
    return found


def own_files(names: Iterable[str], format: WeightFormat, allow_patterns: Sequence[str] = ()) -> list[str]:
    """A folder's weight files of one format, where no index says which they are.

    Copies in another naming (`consolidated*.safetensors`) beside the others, other things (`tokenizer.bin`)
    beside `pytorch_model*.bin`, and what a trainer left are no weights. Patterns choose first: those that
    mean the copies alone get them.
    """
    named = allowed_names(names, allow_patterns)
    found = sorted(name for name in named if name.endswith(format.suffixes) and "/" not in name)
    if format is SAFETENSORS:
        return [name for name in found if not name.startswith("consolidated")] or found
    found = [name for name in found if not is_leftover(name)]
    for suffix in format.suffixes:
        if of_suffix := [name for name in found if name.endswith(suffix)]:
            return [name for name in of_suffix if name.startswith("pytorch_model")] or of_suffix
    return []


def is_leftover(name: str) -> bool:
    """Whether a file is a trainer's state, going by its name."""
    return name.endswith(TRAINING_FILES) or any(fnmatch.fnmatchcase(name, p) for p in _LEFTOVERS)


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
