"""A streamed checkpoint as a rank gets it: chunks out of its node's store, through the node's agent."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from raywl.coordination import ChunkTable
from raywl.coordination.chunks import set_of
from raywl.errors import ClusterError, RaywlError

__all__ = ["FeedLink", "RankFeed", "StreamJob"]

_WAIT_S = 1.0
_PAUSE_S = 0.2
_ALONE_S = 60.0
"""How long an agent may be away: Ray starts it again within seconds."""
_GET_S = 60.0
_READ_S = 600.0


class FeedLink(Protocol):
    """What a feed asks of the cluster."""

    def get(self, ref: Any, timeout_s: float) -> Any:
        """The array behind a reference."""

    def take_chunks(
        self,
        node_id: str,
        run: str,
        rank: int,
        needs: int | None,
        done: tuple[int, ...],
        lost: tuple[int, ...],
        wait_s: float,
    ) -> tuple[str, list[Any]]:
        """Asks the agent of a node for chunks: see `ChunkMover.take`."""

    def read_range(
        self, node_id: str, run: str, file: str, start: int, end: int, timeout_s: float
    ) -> bytes | None:
        """Asks the agent of a node for bytes: see `ChunkMover.read`."""


@dataclass(frozen=True)
class StreamJob:
    """A stream, as its ranks must know it."""

    run: str
    table: ChunkTable
    checkpoint: bytes = field(repr=False)
    """The pickled `Checkpoint`, as the driver opened it: no rank can."""


class RankFeed:
    """A `Feed` in a rank's process. An agent that starts again meanwhile is told what the rank lacks."""

    def __init__(self, link: FeedLink, node_id: str, node: str, rank: int, job: StreamJob) -> None:
        """Args:
        link: The way to the cluster.
        node_id: Of the rank's node.
        node: What to call that.
        rank: Which.
        job: The stream.
        """
        self.table = job.table
        self._link, self._node_id, self._node, self._rank, self._run = link, node_id, node, rank, job.run

    def read(self, file: str, start: int, end: int) -> bytes:
        """As `Feed.read`."""
        answered_s = time.monotonic()
        while True:
            try:
                data = self._link.read_range(self._node_id, self._run, file, start, end, _READ_S)
                error: Exception | None = None
            except RaywlError:
                raise
            except Exception as failed:
                data, error = None, failed
            if data is not None:
                return data
            self._pause(answered_s, error)

    def take(self, needs: int) -> Iterator[list[tuple[int, Any]]]:
        """As `Feed.take`."""
        lacks, told = needs, False
        done: tuple[int, ...] = ()
        lost: tuple[int, ...] = ()
        answered_s = time.monotonic()
        while lacks or done or not told:
            try:
                word, found = self._link.take_chunks(
                    self._node_id, self._run, self._rank, None if told else lacks, done, lost, _WAIT_S
                )
            except Exception as error:
                # It may have got what was said, or not: it is said again.
                self._pause(answered_s, error)
                continue
            if word == "over":
                raise ClusterError(f"the stream was ended: {found[0][1]}", node=self._node, rank=self._rank)
            if word == "gone" and told and not lacks:
                # It ended with the last of its chunks.
                return
            if word in ("gone", "unknown"):
                told = False
                if word == "gone":
                    self._pause(answered_s, None)
                continue
            answered_s, told, done = time.monotonic(), True, ()
            batch, lost = self._got(found)
            del found
            if batch:
                yield batch
                done = tuple(chunk for chunk, _ in batch)
                # The store must not keep them for a variable that nobody looks at any more.
                batch.clear()
                lacks &= ~set_of(done)

    def _got(self, found: list[Any]) -> tuple[list[tuple[int, Any]], tuple[int, ...]]:
        batch, lost = [], []
        for chunk, ref in found:
            try:
                batch.append((chunk, self._link.get(ref, _GET_S)))
            except Exception:
                lost.append(chunk)
        return batch, tuple(lost)

    def _pause(self, answered_s: float, error: Exception | None) -> None:
        alone_s = time.monotonic() - answered_s
        if alone_s > _ALONE_S:
            told = "knows no such stream" if error is None else f"{type(error).__name__}: {error}"
            raise ClusterError(
                f"the node's agent has given nothing for {alone_s:.0f} s: {told}",
                node=self._node,
                rank=self._rank,
            )
        time.sleep(_PAUSE_S)
