"""Which of a list of weight files are read: filters over lists that somebody else has made.

`Manifest` chooses by itself; these are for callers that hold a list of paths. Paths compare by location:
the folder with its links resolved, and the file's name. A file's own link is not followed, since in a hub's
cache two names may lead to one blob.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

from raywl.checkpoint.index import check_present, choose_files, parse_index
from raywl.checkpoint.manifest import FileEntry, read_one
from raywl.errors import MissingFileError, some_of
from raywl.sources.local import LocalSource
from raywl.sources.selection import TRAINING_FILES

__all__ = [
    "filter_duplicate_safetensors_files",
    "filter_files_not_needed_for_inference",
    "filter_mm_encoder_only_safetensors_files",
    "filter_safetensors_files_by_weight_name",
    "resolve_mm_encoder_only_lm_prefixes",
]

_log = logging.getLogger(__name__)

_HEADER_THREADS = 8

File = TypeVar("File", bound=str | os.PathLike[str])


class NameMapper(Protocol):
    """What turns a checkpoint's names into a model's; `raywl.remap.mapper.WeightsMapper` is one."""

    def map_name(self, name: str, /) -> str | None:
        """The model's name, or `None` for one that is dropped."""


class PrefixRules(Protocol):
    """What has rules for the beginnings of names; `raywl.remap.mapper.WeightsMapper` is one."""

    @property
    def orig_to_new_prefix(self) -> Mapping[str, str | None]:
        """Beginnings in the checkpoint, and what they become; `None` for names that are dropped."""


def filter_duplicate_safetensors_files(
    hf_weights_files: Iterable[File], hf_folder: str | os.PathLike[str], index_file: str
) -> list[File]:
    """Leaves out files that the folder's index doesn't name, such as copies in another naming.

    An index that names nothing counts as none. Files that it names and that are there, but not in the list,
    are named in a warning.

    Args:
        hf_weights_files: Paths, in any spelling.
        hf_folder: The folder that the index's entries start from.
        index_file: The index's name in the folder.

    Returns:
        The files that the index names, in the order given; without an index, all.

    Raises:
        MissingFileError: Files that the index names are absent, or are links that lead nowhere.
        CheckpointError: An entry of the index leads outside the folder.
        CorruptFileError: The index is damaged.
        SourceError: The index can't be read.
        TypeError: `hf_weights_files` is one path.
    """
    files = _as_files(hf_weights_files)
    weight_map = _read_weight_map(hf_folder, index_file)
    if not weight_map:
        return files
    named = choose_files((), weight_map)
    places = {_location(os.path.join(hf_folder, name)): name for name in named}
    present = [name for name in named if os.path.isfile(os.path.join(hf_folder, name))]
    check_present(os.fspath(hf_folder), named, present)
    kept = [(file, place) for file in files if (place := _location(file)) in places]
    given = {place for _, place in kept}
    if omitted := [name for place, name in places.items() if place not in given]:
        warnings.warn(
            f"{hf_folder}: {len(omitted)} of {len(named)} files that {index_file} names aren't among those "
            f"to read: {some_of(omitted)}",
            stacklevel=2,
        )
    return [file for file, _ in kept]


def filter_files_not_needed_for_inference(hf_weights_files: Iterable[File]) -> list[File]:
    """Leaves out what trainers write beside the weights, and logs which files those were.

    Args:
        hf_weights_files: Paths or names.

    Returns:
        Those that end in none of `training_args.bin`, `optimizer.bin`, `optimizer.pt`, `scheduler.pt` and
        `scaler.pt`, in the order given.

    Raises:
        TypeError: `hf_weights_files` is one path.
    """
    files = _as_files(hf_weights_files)
    if dropped := [name for name in map(os.fsdecode, files) if name.endswith(TRAINING_FILES)]:
        _log.info("left out, as they hold no weights but a trainer's state: %s", some_of(dropped))
    return [file for file in files if not os.fsdecode(file).endswith(TRAINING_FILES)]


def filter_safetensors_files_by_weight_name(
    hf_weights_files: Iterable[File], is_unused_weight: Callable[[str], bool]
) -> list[File]:
    """Leaves out files that hold nothing but unused weights, judged by their headers alone.

    Args:
        hf_weights_files: Paths of safetensors files.
        is_unused_weight: Tells for a tensor's name whether nobody needs it. Called in this thread.

    Returns:
        The files with at least one tensor that is used, in the order given; all files if there are none.

    Raises:
        MissingFileError: A file is absent.
        CheckpointError: A tensor has a dtype that torch has no type for.
        CorruptFileError: A header is damaged.
        SourceError: A file can't be read.
        TypeError: `hf_weights_files` is one path.
    """
    files = _as_files(hf_weights_files)
    with ThreadPoolExecutor(_HEADER_THREADS) as pool:
        names = list(pool.map(_tensor_names, files))
    kept = [
        file for file, tensors in zip(files, names, strict=True) if not all(map(is_unused_weight, tensors))
    ]
    return kept or files


def resolve_mm_encoder_only_lm_prefixes(
    language_model_names: Iterable[str] | str | None, *, weights_mapper: PrefixRules | None = None
) -> tuple[str, ...] | None:
    """The prefixes of a multi-modal model's language-model weights, if they can be told from the others.

    Args:
        language_model_names: Names of the modules that make up the language model.
        weights_mapper: What the checkpoint's names go through.

    Returns:
        Prefixes that end in `.`. `None` if there are no names; and, with a warning, if the weights of a
        prefix can't all be language-model ones, so that nothing may be left out by it: it is the whole
        model's, or the mapper takes other weights from it.
    """
    names = [name.removesuffix(".") for name in _as_names(language_model_names or ())]
    if not names:
        return None
    prefixes = tuple(dict.fromkeys(f"{name}." for name in names))
    if "" in names:
        warnings.warn("the language model is the whole model: no file is left out for it", stacklevel=2)
        return None
    rules = weights_mapper.orig_to_new_prefix if weights_mapper is not None else {}
    for old, new in rules.items():
        if new is not None and _is_below(old, prefixes) and not _is_below(new, prefixes):
            warnings.warn(
                f"language-model prefixes {prefixes} also hold other weights ({old!r} becomes {new!r}): "
                "no file is left out for them",
                stacklevel=2,
            )
            return None
    return prefixes


def filter_mm_encoder_only_safetensors_files(
    hf_weights_files: Iterable[File],
    hf_folder: str | os.PathLike[str],
    index_file: str,
    language_model_prefixes: Iterable[str] | str,
    *,
    weights_mapper: NameMapper | None = None,
) -> list[File]:
    """Leaves out files that hold language-model weights alone, by the index, for the encoders of a model.

    A weight whose name the mapper drops doesn't count as a language-model one. That no file is left is a
    warning.

    Args:
        hf_weights_files: Paths, in any spelling.
        hf_folder: The folder that the index's entries start from. An entry without a folder also stands for
            the one listed file of that name, if it isn't in `hf_folder` itself.
        index_file: The index's name in the folder.
        language_model_prefixes: As `resolve_mm_encoder_only_lm_prefixes` gives them; one without the `.` at
            its end is a module's name, too.
        weights_mapper: What the checkpoint's names go through before they are compared.

    Returns:
        The other files, and those that the index doesn't list, in the order given; without an index, all,
        with a warning.

    Raises:
        CheckpointError: An entry of the index leads outside the folder.
        CorruptFileError: The index is damaged.
        MissingFileError: The index is a link that leads nowhere.
        SourceError: The index can't be read.
        TypeError: `hf_weights_files` is one path.
    """
    files = _as_files(hf_weights_files)
    weight_map = _read_weight_map(hf_folder, index_file)
    if weight_map is None:
        warnings.warn(
            f"{hf_folder}: there is no {index_file} to tell the language model's files by: all are read",
            stacklevel=2,
        )
        return files
    prefixes = tuple(f"{prefix.removesuffix('.')}." for prefix in _as_names(language_model_prefixes))
    mixed: dict[str, bool] = {}
    for name, entry in weight_map.items():
        if not mixed.get(entry, False):
            new = name if weights_mapper is None else weights_mapper.map_name(name)
            mixed[entry] = new is None or not _is_below(new, prefixes)
    entries = _entries_of(files, hf_folder, mixed)
    kept = [file for file, entry in zip(files, entries, strict=True) if mixed.get(entry, True)]
    if files and not kept:
        warnings.warn(
            f"{hf_folder}: all {len(files)} files hold language-model weights alone, none is left",
            stacklevel=2,
        )
    return kept


def _as_names(names: Iterable[str] | str) -> Iterable[str]:
    # A string is an iterable of strings, too: its letters.
    return (names,) if isinstance(names, str) else names


def _as_files(files: Iterable[File]) -> list[File]:
    """A list of its own, as what is given may be an iterator; its members as they are."""
    if isinstance(files, str | bytes | os.PathLike):
        raise TypeError(f"hf_weights_files must be a list of paths, not the one path {files!r}")
    return list(files)


def _is_below(name: str, prefixes: tuple[str, ...]) -> bool:
    return f"{name}." in prefixes or name.startswith(prefixes)


def _location(path: str | os.PathLike[str]) -> str:
    return os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))


def _entries_of(
    files: Sequence[str | os.PathLike[str]], folder: str | os.PathLike[str], entries: Iterable[str]
) -> list[str]:
    """For each file the index's entry, `""` where there is none."""
    places = {_location(os.path.join(folder, entry)): entry for entry in entries}
    bare = {entry for entry in places.values() if not os.path.lexists(os.path.join(folder, entry))}
    times = Counter(os.path.basename(file) for file in files)

    def entry_of(file: str | os.PathLike[str]) -> str:
        name = os.path.basename(file)
        return places.get(_location(file), name if name in bare and times[name] == 1 else "")

    return [entry_of(file) for file in files]


def _read_weight_map(folder: str | os.PathLike[str], index_file: str) -> dict[str, str] | None:
    path = os.path.join(folder, index_file)
    if not os.path.lexists(path):
        return None
    source = LocalSource(path, os.path.dirname(path), os.path.basename(path))
    return parse_index(source.read(source.only or "", 0, _size(source)), path).weight_map


def _size(source: LocalSource) -> int:
    size = source.size(source.only or "")
    if size is None:
        folder, name = os.path.split(source.ref)
        raise MissingFileError(folder, [name], "there is no such file, or a link leads nowhere")
    return size


def _tensor_names(path: str | os.PathLike[str]) -> Iterable[str]:
    folder, name = os.path.split(path)
    source = LocalSource(os.fspath(path), folder, name)
    return read_one(source, FileEntry(name, _size(source))).tensors
