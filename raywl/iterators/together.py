"""Ranks that iterate together: they agree before anything is read, and when one of them ends early, all do.

A collective waits for a rank that failed until the group's timeout, which is half an hour by default. So the
ranks get connections of their own, beside the group that they were given. A rank that fails leaves word in
the group's store and closes them, which ends the waits of the others at once; those of a killed one are
closed by the system.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d

from raywl.errors import ClusterError, RaywlError

__all__ = ["READER", "Ranks", "check_same", "resolve_group", "together"]

READER = 0
"""The rank, in its group, that reads where one rank reads for all."""

_MEET_S = 60.0
"""For making the connections, once all ranks have said that they are there."""
_WAIT_S = 1800.0
"""For one step of the others, which may have to read a whole file first."""
_PIECE_BYTES = 256 << 20

T = TypeVar("T")

_c10d: Any = torch.distributed.distributed_c10d
"""Some of its names aren't exported as types are."""


def resolve_group(group: Any) -> Any:
    """The world group for an ellipsis, where there is one; any other value as it is."""
    if group is ...:
        ready = dist.is_available() and dist.is_initialized()
        return dist.group.WORLD if ready else None
    return group


def together(group: Any, what: str) -> AbstractContextManager[Ranks | None]:
    """The ranks of a group, once all of them are there; a context of `None` where there are no others.

    Args:
        group: A process group of `torch.distributed`, or `None`.
        what: The argument that it came by, for messages.

    Raises:
        ValueError: This process isn't in it.
        ClusterError: One of the ranks has gone.
    """
    if group is None:
        return contextlib.nullcontext()
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if rank < 0:
        raise ValueError(f"this process is none of the ranks of {what}")
    return Ranks(group, rank, size) if size > 1 else contextlib.nullcontext()


class Ranks(AbstractContextManager["Ranks"]):
    """The other ranks of a group, over connections of their own. All of them make all calls, in one order.

    As a context manager it tells the others why it is left early.
    """

    def __init__(self, group: Any, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._told = False
        key = _meet(group, rank, size)
        self._store: Any = _c10d.PrefixStore(key, _c10d._get_default_store())
        try:
            self._line: Any = _c10d.ProcessGroupGloo(self._store, rank, size, timedelta(seconds=_MEET_S))
        except RuntimeError as error:
            raise self.lost(error) from error

    @property
    def is_reader(self) -> bool:
        """Whether this rank is the one that reads for all."""
        return self.rank == READER

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in their order; values as JSON has them."""
        raw = _bytes_of(value)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        self._all(sizes, torch.tensor([raw.numel()]))
        longest = max(int(size) for size in sizes)
        rows = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.size)]
        self._all(rows, torch.nn.functional.pad(raw, (0, longest - raw.numel())))
        return [_value_of(row[: int(size)]) for row, size in zip(rows, sizes, strict=True)]

    def from_reader(self, value: Any = None) -> Any:
        """The reader's value; what the others give is ignored."""
        raw = _bytes_of(value)
        size = torch.tensor([raw.numel()])
        self._from_reader(size)
        if not self.is_reader:
            raw = torch.empty(int(size), dtype=torch.uint8)
        self._from_reader(raw)
        return _value_of(raw)

    def tensor_from_reader(self, tensor: torch.Tensor) -> None:
        """Fills a contiguous tensor with the reader's of the same dtype and shape."""
        if tensor.numel():
            flat = tensor.detach().reshape(-1).view(torch.uint8)
            for start in range(0, flat.numel(), _PIECE_BYTES):
                self._from_reader(flat[start : start + _PIECE_BYTES])

    def step(self, number: int) -> None:
        """Waits for the reader to be at a step.

        Raises:
            ClusterError: It is at another one.
        """
        at = torch.tensor([number])
        self._from_reader(at)
        if int(at) != number:
            raise ClusterError(f"this rank is at step {number}, its reader at {int(at)}", rank=self.rank)

    def check(self) -> None:
        """Raises what another rank has left word of, without waiting for anybody."""
        if (word := self._word()) is not None:
            self._told = True
            raise word

    def tell(self, error: BaseException) -> None:
        """Leaves word for the others of why this rank ends; only the first is left."""
        if self._told:
            return
        self._told = True
        with contextlib.suppress(RuntimeError):
            # Where the process that keeps the store is gone as well, the others still see the line closed.
            self._store.set(f"ended/{self.rank}", pickle.dumps(_for_others(error, self.rank)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            self.tell(error)
        # The connections close with the last reference to them.
        self._line = None

    def _all(self, rows: list[torch.Tensor], own: torch.Tensor) -> None:
        options = _c10d.AllgatherOptions()
        options.timeout = timedelta(seconds=_WAIT_S)
        self._do(lambda: self._line.allgather([rows], [own], options))

    def _from_reader(self, tensor: torch.Tensor) -> None:
        options = _c10d.BroadcastOptions()
        options.rootRank, options.rootTensor = READER, 0
        options.timeout = timedelta(seconds=_WAIT_S)
        self._do(lambda: self._line.broadcast([tensor], options))

    def _do(self, begin: Callable[[], Any]) -> None:
        try:
            begin().wait()
        except RuntimeError as error:
            raise self.lost(error) from error

    def lost(self, error: BaseException) -> RaywlError:
        """What to raise when others have gone: the word that they left, else that there is none."""
        word = self._word()
        # What is raised here tells of another rank: the others have it from there.
        self._told = True
        if word is None:
            first_line = str(error).strip().partition("\n")[0]
            word = ClusterError(
                f"another of the {self.size} ranks that iterate together has gone without a word, or can't "
                f"be reached from rank {self.rank}: {first_line}",
                rank=self.rank,
            )
        return word

    def _word(self) -> RaywlError | None:
        """The error that the lowest of the ranks that ended has left."""
        try:
            for rank in range(self.size):
                if rank != self.rank and self._store.check([f"ended/{rank}"]):
                    # From a rank of this job, as everything that torch's own object collectives bring.
                    found: RaywlError = pickle.loads(self._store.get(f"ended/{rank}"))  # noqa: S301
                    return found
        except RuntimeError:
            return None
        return None


def check_same(what: str, values: list[T], shown: Callable[[T], str] = str) -> None:
    """Raises `ClusterError`, with each kind of value and who has it, where the ranks' values differ."""
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(shown(value), []).append(rank)
    if any(value != values[0] for value in values):
        rows = "; ".join(f"{_ranks(who)}: {value}" for value, who in ranks.items())
        raise ClusterError(f"the ranks disagree on {what}: {rows}")


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _for_others(error: BaseException, rank: int) -> RaywlError:
    """An error as the other ranks raise it: raywl's own as they are, any other by its text."""
    where = f"rank {rank} of the group"
    if isinstance(error, RaywlError):
        copy: RaywlError = pickle.loads(pickle.dumps(error))  # noqa: S301
        return copy if copy.where is not None else copy.at(where)
    if isinstance(error, GeneratorExit):
        return ClusterError("stopped iterating before the end", rank=rank).at(where)
    return ClusterError(f"failed: {type(error).__name__}: {error}", rank=rank).at(where)


def _bytes_of(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _value_of(raw: torch.Tensor) -> Any:
    return json.loads(bytes(raw.numpy()))


def _meet(group: Any, rank: int, size: int) -> str:
    """Waits until all ranks are there; a name for their connections, that no earlier ones had.

    Each rank talks to the first alone, which tells the others when one of them is gone: with a collective, a
    rank that isn't next to the one that is gone would wait for it.
    """
    key = uuid.uuid4().bytes
    if "cpu:" not in dist.get_backend_config(group):
        keys = [key]
        dist.broadcast_object_list(keys, group=group, group_src=0)
        return f"raywl/{keys[0].hex()}"
    message = torch.zeros(1 + len(key), dtype=torch.int64)
    try:
        if rank:
            dist.send(message, group=group, group_dst=0)
            dist.recv(message, group=group, group_src=0)
        else:
            message = _receive(group, size, key)
    except RuntimeError as error:
        raise ClusterError(f"rank 0 of the group has gone, or can't be reached: {error}", rank=0) from error
    if gone := int(message[0]):
        raise ClusterError(f"rank {gone} of the group has gone before anything was read", rank=gone)
    return f"raywl/{bytes(message[1:].tolist()).hex()}"


def _receive(group: Any, size: int, key: bytes) -> torch.Tensor:
    """As the first rank: hears from all others, and tells them the key, or who is gone."""
    gone = []
    for other in range(1, size):
        try:
            dist.recv(torch.zeros(1 + len(key), dtype=torch.int64), group=group, group_src=other)
        except RuntimeError:
            gone.append(other)
    message = torch.tensor([gone[0] if gone else 0, *key])
    for other in range(1, size):
        if other not in gone:
            with contextlib.suppress(RuntimeError):
                # One that goes now is missed when the connections are made.
                dist.send(message, group=group, group_dst=other)
    return message
