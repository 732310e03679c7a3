"""The tables that one node holds: read once, put into its object store, handed to readers as references."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from raywl.actors.requests import SourceRequest
from raywl.errors import CheckpointError, ClusterError
from raywl.tables import PlasmaBudget, TableLayout

if TYPE_CHECKING:
    from raywl.opening import Checkpoint

__all__ = ["ShelfLink", "TableParts", "TableRequest", "TableShelf"]


class ShelfLink(Protocol):
    """What a shelf asks of the cluster."""

    def store_bytes(self, node_id: str) -> int:
        """Capacity of a node's object store."""

    def shm_bytes(self) -> tuple[int, int]:
        """Of the memory that this node has its object store in: free bytes, and bytes that it took."""

    def put(self, array: Any) -> Any:
        """Puts an array into this node's object store, owned by this process; returns its reference."""

    def get(self, ref: Any, timeout_s: float) -> Any:
        """The array behind a reference."""

    def table_chunk(self, node_id: str, request: TableRequest, index: int, timeout_s: float) -> Any:
        """One chunk of a table as another node's agent has it; gone from the store when it isn't held."""


@dataclass(frozen=True)
class TableRequest:
    """A table, and how any node comes to its rows."""

    name: str
    """Its handle on the cluster."""
    layout: TableLayout
    placement: str
    """`"plasma"` or `"file"`."""
    identity: str
    """The checkpoint's, or one of its own for a table made of a tensor in memory."""
    source: SourceRequest | None = None
    """Where its rows are read from."""
    home: str | None = None
    """Id of the node that was given the rows, where they are in no checkpoint."""
    maker: str = ""
    """Which call of `share_table` it is of."""

    def is_same(self, other: TableRequest) -> bool:
        """Whether another request is for the same rows, in the same chunks."""
        return (self.name, self.identity, self.layout) == (other.name, other.identity, other.layout)


@dataclass(frozen=True)
class TableParts:
    """Where a reader of this node finds the rows."""

    refs: tuple[Any, ...] = ()
    """References to the chunks, in order."""
    path: str | None = None
    """Or the file of this node that holds them,"""
    start: int = 0
    """with its first byte there,"""
    stamp: tuple[int, int, int] = (0, 0, 0)
    """and the size, modification time in ns and inode that the file has as long as nobody changes it."""

    @property
    def placement(self) -> str:
        """`"plasma"` or `"file"`."""
        return "plasma" if self.path is None else "file"


class TableShelf:
    """Part of a node's agent; every method runs in the agent's process and may be repeated.

    1. `budget` says what the store has room for, before anything is read.
    2. `share` reads a table and puts its chunks; `find` hands them out, and makes what isn't there:
       after the agent was started again, or on a node that joined later.
    3. `drop` forgets it; readers that have it mapped keep their memory. `undo` is for a call of
       `share_table` that failed on another node.
    """

    def __init__(
        self,
        node_id: str,
        label: str,
        link: ShelfLink,
        on_change: Callable[[], None] = lambda: None,
        timeout_s: float = 600.0,
    ) -> None:
        """Runs in the agent's process.

        Args:
            node_id: The node's.
            label: What to call it in messages.
            link: The way to the cluster.
            on_change: Called when `names` has another answer: before a table is made, and after it went.
            timeout_s: For rows from other processes.
        """
        self._node_id, self._label, self._link, self._timeout_s = node_id, label, link, timeout_s
        self._on_change = on_change
        self._lock = threading.Lock()
        self._locks: dict[str, threading.Lock] = {}
        self._making: dict[str, TableRequest] = {}
        self._tables: dict[str, tuple[TableRequest, TableParts]] = {}
        self._over: set[str] = set()
        """Makers whose tables were closed: a late copy of their handle must not bring them back."""

    def names(self) -> tuple[str, ...]:
        """The tables that are here, or are being made."""
        with self._lock:
            return tuple(dict.fromkeys((*self._tables, *self._making)))

    def budget(self, name: str) -> PlasmaBudget:
        """Room in this node's store for a table of that name, whose own bytes count as free."""
        with self._lock:
            held = {key: request for key, (request, _) in self._tables.items()} | self._making
        sizes = {key: r.layout.nbytes for key, r in held.items() if r.placement == "plasma"}
        free_bytes, taken_bytes = self._link.shm_bytes()
        shm_bytes = free_bytes + max(taken_bytes, sum(sizes.values()))
        sizes.pop(name, None)
        return PlasmaBudget(
            self._label, self._link.store_bytes(self._node_id), shm_bytes, sum(sizes.values())
        )

    def share(self, request: TableRequest, rows: Sequence[Any] = ()) -> TableParts:
        """Makes the table on this node, unless it is there.

        Args:
            request: The table.
            rows: References to its chunks, for its home node.

        Raises:
            CapacityError: It doesn't fit into the store.
            CheckpointError: The checkpoint isn't the same here, or is damaged.
            ClusterError: Another table has the name, it was closed, or its rows are lost.
        """
        with self._lock:
            making = self._locks.setdefault(request.name, threading.Lock())
        with making:
            with self._lock:
                self._check_open(request)
                known = self._tables.get(request.name)
                if known is not None:
                    if known[0].is_same(request):
                        return known[1]
                    raise ClusterError(
                        f"another table is named {request.name!r} already (of {known[0].identity})",
                        node=self._label,
                    )
                self._making[request.name] = request
            try:
                self._on_change()
                parts = self._make(request, rows)
                with self._lock:
                    self._check_open(request)
                    self._tables[request.name] = (request, parts)
                return parts
            finally:
                with self._lock:
                    del self._making[request.name]

    def _check_open(self, request: TableRequest) -> None:
        if request.maker in self._over:
            raise ClusterError(f"table {request.name!r} was closed by its maker", node=self._label)

    def find(self, request: TableRequest) -> TableParts:
        """The table's parts on this node, made where they aren't there; raises as `share`."""
        return self.share(request)

    def drop(self, request: TableRequest) -> None:
        """Forgets a table; its chunks leave the store when no reader has them mapped."""
        with self._lock:
            self._over.add(request.maker)
            known = self._tables.get(request.name)
            if known is not None and known[0].is_same(request):
                del self._tables[request.name]
        self._on_change()

    def undo(self, request: TableRequest) -> None:
        """Forgets what this very call of `share_table` made, and not what was here before it."""
        with self._lock:
            self._over.add(request.maker)
            known = self._tables.get(request.name)
            if known is not None and known[0].maker == request.maker:
                del self._tables[request.name]
        self._on_change()

    def _make(self, request: TableRequest, rows: Sequence[Any]) -> TableParts:
        if request.placement == "plasma":
            self.budget(request.name).check(request.layout)
        if request.source is None:
            return TableParts(refs=self._copied(request, rows))
        from raywl.opening import open_checkpoint
        from raywl.readers import OpenFiles

        checkpoint = open_checkpoint(request.source.ref, **request.source.options)
        if checkpoint.identity != request.identity:
            raise CheckpointError(
                request.source.label,
                request.layout.name,
                f"is another checkpoint on node {self._label}: {checkpoint.identity}, "
                f"expected {request.identity}",
            )
        entry = checkpoint.entry(request.layout.name)
        if request.placement == "file":
            with OpenFiles(checkpoint) as files, files.using(entry.file) as fd:
                info = os.fstat(fd)
            stamp = info.st_size, info.st_mtime_ns, info.st_ino
            return TableParts(path=checkpoint.path(entry.file), start=entry.start, stamp=stamp)
        return TableParts(refs=self._read(checkpoint, request.layout))

    def _read(self, checkpoint: Checkpoint, layout: TableLayout) -> tuple[Any, ...]:
        """Reads chunk by chunk: no more than one is in this process's own memory."""
        import numpy as np

        from raywl.readers import OpenFiles

        entry, refs = checkpoint.entry(layout.name), []
        with OpenFiles(checkpoint) as files:
            for chunk in range(layout.num_chunks):
                start, end = layout.bytes_of(chunk)
                array = np.empty(end - start, dtype=np.uint8)
                files.read_into(entry.file, entry.start + start, [array.data])
                refs.append(self._link.put(array))
            files.check_unchanged()
        return tuple(refs)

    def chunk(self, request: TableRequest, index: int) -> Any:
        """One chunk, for another node; raises as `share`."""
        return self._link.get(self.share(request).refs[index], self._timeout_s)

    def _copied(self, request: TableRequest, rows: Sequence[Any]) -> tuple[Any, ...]:
        """Chunks of another process, put again so that this node owns them."""
        if rows:
            return tuple(self._link.put(self._link.get(row, self._timeout_s)) for row in rows)
        home, link, num_chunks = request.home, self._link, request.layout.num_chunks
        if home is None or home == self._node_id:
            if num_chunks:
                raise ClusterError(
                    f"table {request.name!r} was made of a tensor in memory, and its home node has lost it: "
                    "share it again",
                    node=self._label,
                )
            return ()
        # By calls, not by the home's own references: the copies of those would stay in this node's store.
        return tuple(
            link.put(link.table_chunk(home, request, index, self._timeout_s)) for index in range(num_chunks)
        )
