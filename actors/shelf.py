"""The tables that one node holds: read once, put into its object store, handed to readers as references."""

from __future__ import annotations

import threading
from collections.abc import Sequence
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

    def shm_free_bytes(self) -> int:
        """Free bytes where this node's object store takes its memory from."""

    def put(self, array: Any) -> Any:
        """Puts an array into this node's object store, owned by this process; returns its reference."""

    def get(self, ref: Any, timeout_s: float) -> Any:
        """The array behind a reference."""

    def table_of(self, node_id: str, request: TableRequest, timeout_s: float) -> TableParts:
        """The parts of a table as another node's agent has them."""


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


@dataclass(frozen=True)
class TableParts:
    """Where a reader of this node finds the rows."""

    refs: tuple[Any, ...] = ()
    """References to the chunks, in order."""
    path: str | None = None
    """Or the file of this node that holds them,"""
    start: int = 0
    """with its first byte there,"""
    file_bytes: int = 0
    """and the size that the file must have."""


class TableShelf:
    """Part of a node's agent; every method runs in the agent's process and may be repeated.

    1. `budget` says what the store has room for, before anything is read.
    2. `share` reads a table and puts its chunks; `find` hands them out, and makes what isn't there:
       after the agent was started again, or on a node that joined later.
    3. `drop` forgets it; readers that have it mapped keep their memory.
    """

    def __init__(self, node_id: str, label: str, link: ShelfLink, timeout_s: float = 600.0) -> None:
        self._node_id, self._label, self._link, self._timeout_s = node_id, label, link, timeout_s
        self._lock = threading.Lock()
        self._making: dict[str, threading.Lock] = {}
        self._tables: dict[str, tuple[TableRequest, TableParts]] = {}

    def names(self) -> tuple[str, ...]:
        """The tables that are here."""
        with self._lock:
            return tuple(self._tables)

    def budget(self) -> PlasmaBudget:
        """Room for tables in this node's store."""
        with self._lock:
            held = [request for request, _ in self._tables.values() if request.placement == "plasma"]
        return PlasmaBudget(
            self._label,
            self._link.store_bytes(self._node_id),
            self._link.shm_free_bytes(),
            sum(request.layout.nbytes for request in held),
        )

    def share(self, request: TableRequest, rows: Sequence[Any] = ()) -> TableParts:
        """Makes the table on this node, unless it is there.

        Args:
            request: The table.
            rows: References to its chunks, for its home node.

        Raises:
            CapacityError: It doesn't fit into the store.
            CheckpointError: The checkpoint isn't the same here, or is damaged.
            ClusterError: Another table has the name, or its rows are lost.
        """
        with self._lock:
            making = self._making.setdefault(request.name, threading.Lock())
        with making:
            known = self._tables.get(request.name)
            if known is not None:
                if known[0].identity != request.identity or known[0].layout != request.layout:
                    raise ClusterError(
                        f"another table is named {request.name!r} already (of {known[0].identity})",
                        node=self._label,
                    )
                return known[1]
            parts = self._make(request, rows)
            with self._lock:
                self._tables[request.name] = (request, parts)
            return parts

    def find(self, request: TableRequest) -> TableParts:
        """The table's parts on this node, made where they aren't there; raises as `share`."""
        return self.share(request)

    def drop(self, name: str) -> None:
        """Forgets a table; its chunks leave the store when no reader has them mapped."""
        with self._lock:
            self._tables.pop(name, None)
            self._making.pop(name, None)

    def _make(self, request: TableRequest, rows: Sequence[Any]) -> TableParts:
        if request.placement == "plasma":
            self.budget().check(request.layout)
        if request.source is None:
            return self._copied(request, rows)
        from raywl.opening import open_checkpoint

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
            size = next(file.size for file in checkpoint.files if file.name == entry.file)
            return TableParts(path=checkpoint.path(entry.file), start=entry.start, file_bytes=size)
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
                files.read_into(entry.file, entry.start + start, [array.data.cast("B")])
                refs.append(self._link.put(array))
            files.check_unchanged()
        return tuple(refs)

    def _copied(self, request: TableRequest, rows: Sequence[Any]) -> TableParts:
        """Chunks out of another process's references, put again so that this node owns them."""
        if not rows:
            if request.home in (None, self._node_id):
                raise ClusterError(
                    f"table {request.name!r} was made of a tensor in memory, and its home node has lost it: "
                    "share it again",
                    node=self._label,
                )
            rows = self._link.table_of(str(request.home), request, self._timeout_s).refs
        return TableParts(refs=tuple(self._link.put(self._link.get(row, self._timeout_s)) for row in rows))
