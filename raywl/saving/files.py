"""The files of a save: a rank's part, and whole tensors put together out of all parts."""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Container, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch

from raywl.checkpoint.dtypes import torch_itemsize
from raywl.checkpoint.manifest import Manifest
from raywl.errors import CheckpointError
from raywl.locks import atomic_writer
from raywl.plan.pending import Pending
from raywl.readers.memory import bytes_of, int_dtype
from raywl.saving.pieces import Place, Whole
from raywl.sources.local import LocalSource
from raywl.types import ParallelContext
from raywl.writing.headers import header_bytes

__all__ = ["Held", "Part", "read_part", "write_part", "write_whole"]

_KEY = "raywl_save"
_CHUNK_BYTES = 16 << 20


class Held:
    """What a live model holds."""

    who = "this rank"

    def __init__(self, pieces: Sequence[tuple[Place, torch.Tensor]]) -> None:
        self._pieces = pieces

    def pieces(self, wanted: Container[str]) -> Iterator[tuple[Place, torch.Tensor]]:
        """Its pieces of the tensors that are wanted."""
        return ((place, values) for place, values in self._pieces if place.tensor in wanted)


class Part:
    """One rank's part of a save, as it was written."""

    def __init__(self, path: str, manifest: Manifest, facts: Mapping[str, Any]) -> None:
        self.path = path
        self.who = f"rank {facts['rank']}"
        self.token: str = facts["token"]
        """The same for all parts of one save, where the ranks could agree on one."""
        self.wholes = {name: Whole(dtype, tuple(shape)) for name, (dtype, shape) in facts["wholes"].items()}
        self._manifest = manifest
        self._places = {
            key: Place(tensor, start, tuple(shape), tuple(strides), itemsize)
            for key, (tensor, start, shape, strides, itemsize) in facts["pieces"].items()
        }

    def pieces(self, wanted: Container[str]) -> Iterator[tuple[Place, torch.Tensor]]:
        """Its pieces of the tensors that are wanted, mapped; the mapping lives as long as they do."""
        found = [(key, place) for key, place in self._places.items() if place.tensor in wanted]
        if not found:
            return
        with open(self.path, "rb") as file:
            # Private, since torch takes no read-only memory without a warning; nothing is written to it.
            mapped = mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE)
        for key, place in found:
            entry = self._manifest.tensors[key]
            raw = torch.frombuffer(mapped, dtype=torch.uint8, count=entry.nbytes, offset=entry.start)
            yield place, raw.view(int_dtype(place.itemsize)).view(place.shape)


def write_part(
    path: str,
    context: ParallelContext,
    token: str,
    wholes: Mapping[str, Whole],
    pieces: Sequence[tuple[Place, torch.Tensor]],
) -> None:
    """Writes a rank's part: a safetensors file of its pieces, whose metadata says where each belongs.

    Raises:
        CheckpointError: There are so many pieces that they have no room in a header.
        OSError: The file can't be written.
    """
    order = sorted(range(len(pieces)), key=lambda i: -pieces[i][0].itemsize)
    names = {i: f"{pieces[i][0].tensor}:{i}" for i in order}
    facts = {
        "rank": context.rank,
        "context": context.to_dict(),
        "token": token,
        "wholes": wholes,
        "pieces": {
            names[i]: (p.tensor, p.start, p.shape, p.strides, p.itemsize)
            for i in order
            for p in [pieces[i][0]]
        },
    }
    tensors = {names[i]: Whole("U8", (pieces[i][0].nbytes,)) for i in order}
    with atomic_writer(path, "w+b") as file:
        file.write(header_bytes(tensors, path, {_KEY: json.dumps(facts)}))
        for i in order:
            for chunk in _chunks(pieces[i][1]):
                file.write(bytes_of(chunk))


def read_part(path: str) -> Part:
    """A part's header.

    Raises:
        CheckpointError: It is damaged, or no part of a save.
    """
    folder, name = os.path.split(path)
    manifest = Manifest.read(LocalSource(path, folder, name))
    try:
        return Part(path, manifest, json.loads(manifest.metadata[_KEY]))
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(path, None, f"is no part of a save: {error!r}") from error


def write_whole(path: str, wholes: Mapping[str, Whole], sources: Sequence[Held | Part], where: str) -> int:
    """Writes a safetensors file of whole tensors, put together out of pieces.

    Args:
        path: The file; it appears when it is whole.
        wholes: Its tensors.
        sources: Who has pieces of them.
        where: How messages name the save.

    Returns:
        Its size in bytes.

    Raises:
        CheckpointError: Pieces of a tensor are lacking, or two ranks have different values for one place.
        OSError: The file can't be written.
    """
    order = sorted(wholes, key=lambda name: -torch_itemsize(wholes[name].dtype))
    header = header_bytes({name: wholes[name] for name in order}, path)
    ends = list(accumulate((wholes[name].nbytes for name in order), initial=len(header)))
    with atomic_writer(path, "w+b") as file:
        file.write(header)
        file.truncate(ends[-1])
        file.flush()
        # Not closed by hand: it can't be while a traceback holds a view of it.
        mapped = mmap.mmap(file.fileno(), ends[-1])
        tensors = {
            name: _Filling(name, wholes[name].nbytes, mapped, start, where)
            for name, start in zip(order, ends, strict=False)
        }
        for source in sources:
            for place, values in source.pieces(tensors):
                tensors[place.tensor].put(place, values, source.who)
        for tensor in tensors.values():
            tensor.check_full()
        mapped.flush()
    return ends[-1]


class _Filling:
    """One tensor while it is put together."""

    def __init__(self, name: str, nbytes: int, mapped: mmap.mmap, start: int, where: str) -> None:
        self._name, self._nbytes, self._where = name, nbytes, where
        self._mapped, self._start = mapped, start
        self._owners: dict[Place, str] = {}
        self._taken = Pending()

    def put(self, place: Place, values: torch.Tensor, who: str) -> None:
        """Writes a piece, or compares it where its place is taken.

        Raises:
            CheckpointError: It isn't what was there, or only a part of its place is taken.
        """
        raw = torch.frombuffer(self._mapped, dtype=torch.uint8, count=self._nbytes, offset=self._start)
        there = place.view(raw).view(values.shape)
        owner = self._owners.get(place)
        if owner is not None:
            if not torch.equal(there, values.to(there.device)):
                raise CheckpointError(
                    self._where,
                    self._name,
                    f"{owner} and {who} hold different values for the same part of it: if it is cut, say how "
                    "with shards=",
                )
            return
        if self._taken.may_overlap(place.as_copy()):
            raise CheckpointError(self._where, self._name, f"what {who} holds of it lies across other parts")
        self._taken.add(place.as_copy())
        self._owners[place] = who
        there.copy_(values)

    def check_full(self) -> None:
        """Raises `CheckpointError` where bytes are lacking."""
        filled = sum(place.nbytes for place in self._owners)
        if filled != self._nbytes:
            raise CheckpointError(
                self._where, self._name, f"the ranks hold {filled} of its {self._nbytes} bytes"
            )


def _chunks(values: torch.Tensor) -> Iterator[torch.Tensor]:
    """The elements row after row, as 1-d bytes on the CPU, a bounded number at a time."""
    nbytes = values.numel() * values.itemsize
    if nbytes <= _CHUNK_BYTES or not values.dim():
        # A copy, since what is contiguous may still have a stride of 0, which bytes can't be seen through.
        flat = values.cpu().clone(memory_format=torch.contiguous_format).view(-1)
        yield flat.view(torch.uint8)
        return
    rows = max(1, _CHUNK_BYTES * values.shape[0] // nbytes)
    for block in torch.split(values, rows):
        yield from _chunks(block[0] if rows == 1 else block)
