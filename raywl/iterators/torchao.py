"""The `"torchao"` strategy: files that `torchao` has taken quantised tensors apart for, put together again.

Such a file holds the pieces of a tensor `a.weight` as `a._weight_qdata`, `a._weight_scale`, ..., and its
metadata has the list of tensors and, for each, its class, what the class is made with, and its pieces. The
metadata may be of all files of a checkpoint, and pieces of one tensor in several of them.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from raywl.errors import CheckpointError, CorruptFileError, some_of
from raywl.iterators.files import FileWork, plan_files
from raywl.iterators.reading import read_file
from raywl.iterators.tally import Tally
from raywl.node.prefetch import local_rank_and_size
from raywl.readers import choose_num_threads
from raywl.remap.experts import should_skip_weight

__all__ = ["torchao_iterator"]

_MIN_VERSION = (0, 15)
_LIST = "tensor_names"


@dataclass(frozen=True, slots=True)
class _Whole:
    """One tensor of the model, and what it is made of."""

    name: str
    pieces: tuple[str, ...]
    described: str
    """The metadata that its class is made by."""
    path: str
    """The file that describes it."""
    is_plain: bool = False


def torchao_iterator(
    paths: list[str], use_tqdm_on_load: bool, ids: frozenset[int] | None
) -> Generator[tuple[str, torch.Tensor], None, None]:
    """As `safetensors_weights_iterator` with that strategy; a tensor comes with the file of its last piece.

    Raises:
        ImportError: `torchao` is absent or too old.
    """
    _check_installed()
    return _run(paths, use_tqdm_on_load, ids)


def _check_installed() -> None:
    try:
        import torchao
    except ImportError as error:
        raise ImportError(
            "the strategy 'torchao' needs the package torchao: pip install 'raywl[torchao]'"
        ) from error
    version = str(getattr(torchao, "__version__", "0"))
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < _MIN_VERSION:
        raise ImportError(f"the strategy 'torchao' needs torchao 0.15 or later, not {version}")


def _run(
    paths: list[str], use_tqdm_on_load: bool, ids: frozenset[int] | None
) -> Generator[tuple[str, torch.Tensor], None, None]:
    works = plan_files(paths)
    wholes = _described(works)
    owners = {piece: whole for whole in wholes.values() for piece in whole.pieces}
    _check_pieces(works, wholes, owners)
    works = [_without_experts(work, owners, ids) for work in works]
    tally = Tally(sum(work.nbytes for work in works), use_tqdm_on_load)
    # Pieces whose tensor isn't complete yet.
    carried: dict[str, torch.Tensor] = {}
    for work in works:
        if not work.names:
            continue
        tally.starts(work)
        carried |= read_file(work, num_threads=choose_num_threads(local_rank_and_size()[1]))
        tally.add(work.nbytes)
        touched = {
            name: owners.get(name) or _Whole(name, (name,), "", work.path, True) for name in work.names
        }
        whole_by_name = {whole.name: whole for whole in touched.values()}
        for name in sorted(whole_by_name):
            whole = whole_by_name[name]
            if all(piece in carried for piece in whole.pieces):
                yield name, _rebuilt(whole, {piece: carried.pop(piece) for piece in whole.pieces})


def _described(works: Sequence[FileWork]) -> dict[str, _Whole]:
    """The tensors that the files' metadata lists."""
    wholes: dict[str, _Whole] = {}
    for work in works:
        for whole in _listed(work):
            other = wholes.setdefault(whole.name, whole)
            if (other.pieces, other.described) != (whole.pieces, whole.described):
                raise CheckpointError(work.path, whole.name, f"is described in another way by {other.path}")
    return wholes


def _listed(work: FileWork) -> list[_Whole]:
    if _LIST not in work.metadata:
        return []
    names = _json(work, None, work.metadata[_LIST])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CorruptFileError(work.path, None, f"__metadata__[{_LIST!r}] is no list of names")
    return [_whole_of(name, work) for name in names]


def _whole_of(name: str, work: FileWork) -> _Whole:
    text = work.metadata.get(name)
    if text is None:
        raise CorruptFileError(work.path, name, f"is in {_LIST!r}, but the metadata doesn't describe it")
    described = _json(work, name, text)
    kind = described.get("_type") if isinstance(described, dict) else None
    if kind == "Tensor":
        return _Whole(name, (name,), text, work.path, is_plain=True)
    pieces = described.get("_tensor_data_names") if isinstance(described, dict) else None
    if (
        not isinstance(kind, str)
        or not isinstance(pieces, list)
        or not all(isinstance(p, str) for p in pieces)
    ):
        raise CorruptFileError(work.path, name, "its metadata has no class and list of pieces")
    return _Whole(name, tuple(_prefix(name) + piece for piece in pieces), text, work.path)


def _prefix(name: str) -> str:
    module, dot, attribute = name.rpartition(".")
    return f"{module}{dot}_{attribute}_"


def _json(work: FileWork, name: str | None, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CorruptFileError(work.path, name, f"its metadata is not JSON: {error}") from None


def _check_pieces(
    works: Sequence[FileWork], wholes: Mapping[str, _Whole], owners: Mapping[str, _Whole]
) -> None:
    """Nothing is left over: pieces of which others are missing, and tensors that belong to nothing."""
    present = {name: work for work in works for name in work.names}
    prefixes = {_prefix(whole.name): whole for whole in wholes.values() if not whole.is_plain}
    for name, work in present.items():
        if name in owners:
            continue
        # `a._weight_extra`: its name may have further underscores.
        cuts = (name[: found.end()] for found in re.finditer("_", name))
        whole = next((prefixes[cut] for cut in cuts if cut in prefixes), None)
        if whole is not None or _LIST in work.metadata:
            belongs = "" if whole is None else f" ({whole.name!r} is made of {', '.join(whole.pieces)})"
            raise CheckpointError(work.path, name, f"is a piece that belongs to no tensor{belongs}")
    absent = []
    for whole in wholes.values():
        missing = [piece for piece in whole.pieces if piece not in present]
        if len(missing) == len(whole.pieces):
            absent.append(whole.name)
        elif missing:
            there = [piece for piece in whole.pieces if piece in present]
            reason = (
                f"none of the {len(works)} files has {some_of(missing)}: {some_of(there)} would be left over"
            )
            raise CheckpointError(present[there[0]].path, whole.name, reason)
    if absent:
        warnings.warn(
            f"{len(absent)} tensors that the metadata of {works[0].path} and others list are in none of the "
            f"{len(works)} files: {some_of(absent)}",
            stacklevel=3,
        )


def _without_experts(work: FileWork, owners: Mapping[str, _Whole], ids: frozenset[int] | None) -> FileWork:
    """Experts are told by the name of the whole tensor, not by those of its pieces."""
    names = tuple(
        name
        for name in work.names
        if not should_skip_weight(owners[name].name if name in owners else name, ids)
    )
    return replace(work, names=names)


def _rebuilt(whole: _Whole, pieces: dict[str, torch.Tensor]) -> torch.Tensor:
    if whole.is_plain:
        return pieces[whole.name]
    from torchao.prototype.safetensors.safetensors_support import unflatten_tensor_state_dict

    # One at a time: the function looks at every piece that it is given for every tensor.
    metadata = {_LIST: json.dumps([whole.name]), whole.name: whole.described}
    try:
        made, left = unflatten_tensor_state_dict(pieces, metadata)
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
        raise CheckpointError(whole.path, whole.name, f"torchao can't make it: {error}") from error
    if left or whole.name not in made:
        raise CheckpointError(whole.path, whole.name, f"torchao made nothing of {some_of(list(pieces))}")
    tensor = made[whole.name]
    assert isinstance(tensor, torch.Tensor)
    return tensor
