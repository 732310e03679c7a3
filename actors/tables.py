"""Shared tables: one copy on each node, mapped by all of its processes."""

from __future__ import annotations

import hashlib
import mmap
import os
import threading
import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import ray

from raywl.actors.connect import Connection, connect, disconnect, is_connected
from raywl.actors.deadline import Deadline
from raywl.actors.failures import Place, most_telling
from raywl.actors.raycalls import Node, alive_nodes, find_agents, from_ray, gather, hold_agents, settle
from raywl.actors.requests import check_options, request_for_nodes
from raywl.actors.shelf import TableParts, TableRequest
from raywl.errors import CapacityError, ClusterError, CorruptFileError, MissingFileError, NodeLostError
from raywl.tables import PlasmaBudget, TableLayout
from raywl.types import whole_number

if TYPE_CHECKING:
    import torch

    from raywl.opening import Checkpoint
    from raywl.tables.rows import RowReader

__all__ = ["SharedTable", "share_table"]

_PLACEMENTS = ("auto", "plasma", "file")
_MAP_S = 600.0
_CLOSE_S = 10.0
_TRIES = 3


def share_table(
    ref_or_tensor: str | os.PathLike[str] | Checkpoint | torch.Tensor,
    tensor_name: str | None = None,
    *,
    name: str | None = None,
    rows_per_chunk: int | None = None,
    placement: str = "auto",
    timeout_s: float = 600.0,
    **source: Any,
) -> SharedTable:
    """Shares a table with all processes of the cluster: one read-only copy on each node.

    The copies belong to raywl's agents on the nodes, not to this process: they outlive it, until the
    table is closed or the cluster ends.

    Args:
        ref_or_tensor: A checkpoint, as `launch` takes it: every node opens it itself. Or a tensor, which is
            copied to every node.
        tensor_name: Which tensor of the checkpoint; its dim 0 are the rows.
        name: The table's handle on the cluster; by default made of the checkpoint's identity and the
            tensor's name, so that sharing it twice gives the same table.
        rows_per_chunk: Rows in one object; by default as many as make 64 MiB.
        placement: `"plasma"`: in the object store, which must have room. `"file"`: as a read-only mapping
            of the node's file. `"auto"`: the first where it fits on every node, else the second; `notes`
            says which.
        timeout_s: Bounds the whole call.
        **source: Keyword arguments of `open_checkpoint`.

    Raises:
        CapacityError: `"plasma"`, or a tensor in memory, and the store of a node is too small. Nothing
            was read.
        CheckpointError: There is no such tensor, or it isn't the same on every node.
        NotFoundError: A node lacks the checkpoint.
        ValueError: An unknown placement, or arguments that don't go together.
        ClusterError: Another table has the name; or as `launch`.
    """
    if placement not in _PLACEMENTS:
        raise ValueError(f"unknown placement {placement!r}: expected one of {', '.join(_PLACEMENTS)}")
    is_tensor = hasattr(ref_or_tensor, "untyped_storage")
    if is_tensor and (tensor_name is not None or source):
        raise ValueError("a tensor in memory has no tensor_name and no source arguments")
    if is_tensor and placement == "file":
        raise ValueError("a tensor in memory has no file: placement must be 'plasma' or 'auto'")
    if not is_tensor and tensor_name is None:
        raise ValueError("tensor_name says which tensor of the checkpoint is the table")
    if rows_per_chunk is not None:
        rows_per_chunk = whole_number("rows_per_chunk", rows_per_chunk)
    if name is not None and not isinstance(name, str):
        raise TypeError(f"name must be a text, not {type(name).__name__}")
    check_options(source)
    if rows_per_chunk is not None and rows_per_chunk < 1:
        raise ValueError(f"rows_per_chunk must be at least 1, got {rows_per_chunk}")
    deadline = Deadline(timeout_s, "share_table")
    deadline.enter("connect")
    connection = connect(None, num_cpus=1, deadline=deadline)
    try:
        nodes = alive_nodes()
        deadline.enter("agents")
        agents = hold_agents(nodes, deadline)
        places = [Place(node.label) for node in nodes]
        rows: list[Any] = []
        if tensor_name is None:
            request, rows = _of_tensor(ref_or_tensor, name, rows_per_chunk)
        else:
            deadline.enter("open")
            request = _of_checkpoint(
                ref_or_tensor, tensor_name, name, rows_per_chunk, source, agents, places, deadline
            )
        deadline.enter("room")
        budgets = gather([agent.table_budget.remote(request.name) for agent in agents], places, deadline)
        request, notes = _placed(request, placement, budgets)
        deadline.enter("share")
        found = _share_on_all(request, rows, agents, places, nodes, deadline)
        if found != request.placement:
            # It was there already, and is read where it is.
            notes = [f"placement {found!r}: it is shared already"]
            request = replace(request, placement=found)
        return SharedTable(request, notes, connection)
    except BaseException:
        disconnect(connection)
        raise


class SharedTable:
    """A table that all processes of a node share. Read-only; pickles without the data.

    In the process that reads, the rows are mapped at the first use: from the node's object store, or
    from its file. A copy in another process, on another node as well, maps that node's memory.
    """

    def __init__(
        self, request: TableRequest, notes: Sequence[str] = (), connection: Connection | None = None
    ) -> None:
        """Made by `share_table`, and by pickle, which leaves the connection out.

        Args:
            request: What to ask a node's agent for.
            notes: What was chosen automatically, and why.
            connection: How its maker came to its Ray.
        """
        self._request, self._connection = request, connection
        self.notes = list(notes)
        """What was chosen automatically, and why."""
        self._lock = threading.Lock()
        self._mapped: tuple[RowReader, list[np.ndarray[Any, Any]]] | None = None
        self._closed = False

    @property
    def name(self) -> str:
        """Its handle on the cluster."""
        return self._request.name

    @property
    def shape(self) -> tuple[int, ...]:
        """`(rows, ...)`, in torch's elements."""
        return self._request.layout.shape

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of its elements."""
        import torch

        found: torch.dtype = getattr(torch, self._request.layout.dtype)
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of all rows: what each node holds."""
        return self._request.layout.nbytes

    @property
    def num_chunks(self) -> int:
        """Number of chunks."""
        return self._request.layout.num_chunks

    @property
    def placement(self) -> str:
        """`"plasma"` or `"file"`."""
        return self._request.placement

    def gather(self, row_ids: Any, out: torch.Tensor | None = None) -> torch.Tensor:
        """Copies rows into a tensor of this process.

        Args:
            row_ids: Integers of any shape: a tensor, an array, or a list.
            out: A contiguous CPU tensor of shape `(*row_ids.shape, *table.shape[1:])` to fill.

        Raises:
            CheckpointError: A row id is outside the table.
            ShapeMismatchError: `out` has another shape.
            NodeLostError: The table isn't mapped yet, and the node's agent is gone.
        """
        return self._map()[0].gather(row_ids, out)

    def chunk(self, index: int) -> np.ndarray[Any, Any]:
        """One chunk's bytes, `(rows, bytes of a row)`, uint8, read-only, without a copy.

        Raises:
            IndexError: There is no such chunk.
        """
        start, end = self._request.layout.rows_of(index)
        return self._map()[1][index].reshape(end - start, self._request.layout.row_bytes)

    def close(self, everywhere: bool | None = None) -> None:
        """Lets go of the mapping; and of the table itself, when this is the handle that made it.

        Processes that have it mapped keep what they have.

        Args:
            everywhere: End the table on all nodes; by default only from the handle that
                `share_table` returned.
        """
        with self._lock:
            self._mapped, first = None, not self._closed
            self._closed = True
        mine = self._connection
        if first and (mine is not None if everywhere is None else everywhere) and self._is_there():
            asked = [agent.drop_table.remote(self._request) for agent in find_agents(alive_nodes())]
            ray.wait(asked, num_returns=max(1, len(asked)), timeout=_CLOSE_S)
        if first and mine is not None:
            disconnect(mine)

    def _is_there(self) -> bool:
        """Whether this process is still on the table's cluster, as far as it knows."""
        return bool(ray.is_initialized()) and (self._connection is None or is_connected(self._connection))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return SharedTable, (self._request, self.notes)

    def __repr__(self) -> str:
        layout = self._request.layout
        return f"<SharedTable {self.name!r}: {list(layout.shape)} {layout.dtype}, {self.placement}>"

    def _map(self) -> tuple[RowReader, list[np.ndarray[Any, Any]]]:
        with self._lock:
            if self._closed:
                raise ClusterError(f"table {self.name!r} is closed in this process")
            if self._mapped is None:
                # Here, since it imports torch, which agents and drivers can do without.
                from raywl.tables.rows import RowReader

                chunks = self._chunks()
                self._mapped = (RowReader(self._request.layout, chunks), chunks)
            return self._mapped

    def _parts(self) -> tuple[TableParts, Place]:
        """Asks the agent of this process's own node, which makes the table where it isn't."""
        if not ray.is_initialized():
            raise ClusterError(
                f"table {self.name!r} is read in a process that isn't part of a Ray cluster: "
                "call ray.init first"
            )
        mine = ray.get_runtime_context().get_node_id()
        node = next((node for node in alive_nodes() if node.node_id == mine), None)
        if node is None:
            raise ClusterError(f"this process's node {mine} is not among the cluster's live nodes")
        deadline = Deadline(_MAP_S, f"mapping table {self.name!r}")
        deadline.enter("ask the node's agent")
        place = Place(node.label)
        for attempt in range(1, _TRIES + 1):
            (agent,) = hold_agents([node], deadline)
            try:
                (parts,) = gather([agent.find_table.remote(self._request)], [place], deadline)
                break
            except NodeLostError:
                # An agent that was just ending, as nothing had needed it.
                if attempt == _TRIES:
                    raise
        return parts, place

    def _chunks(self) -> list[np.ndarray[Any, Any]]:
        for attempt in range(1, _TRIES + 1):
            parts, place = self._parts()
            if parts.path is not None:
                chunks = self._file_chunks(parts.path, parts)
                break
            try:
                chunks = [np.asarray(chunk) for chunk in ray.get(list(parts.refs), timeout=_MAP_S)]
                break
            except ray.exceptions.RayError as error:
                # An agent that died after its answer: the next one makes the table again.
                if attempt == _TRIES:
                    raise from_ray(error, place) from None
        for chunk in chunks:
            chunk.flags.writeable = False
        return chunks

    def _file_chunks(self, path: str, parts: TableParts) -> list[np.ndarray[Any, Any]]:
        layout = self._request.layout
        try:
            with open(path, "rb") as file:
                info = os.fstat(file.fileno())
                if (info.st_size, info.st_mtime_ns, info.st_ino) != parts.stamp:
                    raise CorruptFileError(path, layout.name, "the file changed since its table was shared")
                mapping = mmap.mmap(file.fileno(), info.st_size, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            reason = "it has gone since its table was shared"
            raise MissingFileError(os.path.dirname(path), [os.path.basename(path)], reason) from None
        whole = np.frombuffer(mapping, dtype=np.uint8)
        spans = [layout.bytes_of(index) for index in range(layout.num_chunks)]
        return [whole[parts.start + start : parts.start + end] for start, end in spans]


def _of_checkpoint(
    ref: Any,
    tensor_name: str,
    name: str | None,
    rows_per_chunk: int | None,
    source: dict[str, Any],
    agents: Sequence[Any],
    places: Sequence[Place],
    deadline: Deadline,
) -> TableRequest:
    """Every node opens the checkpoint, and they agree on it."""
    handle = f"table-{uuid.uuid4().hex}"
    request = request_for_nodes(handle, ref, source)
    try:
        asked = [agent.table_entry.remote(request, tensor_name) for agent in agents]
        # All answers are taken, also after a failure: Ray prints those that nobody has asked for.
        settled = settle(asked, places, deadline, wait_for_all=True)
    finally:
        for agent in agents:
            agent.close.remote(handle)
    if settled.failures:
        raise most_telling(settled.failures)
    found = settled.results
    entry, identity = found[0]
    for (_, other), place in zip(found, places, strict=True):
        if other != identity:
            raise ClusterError(
                f"{request.label} is not the same checkpoint on every node: {identity} on {places[0]}, "
                f"{other} on {place}"
            )
    layout = TableLayout.of_entry(tensor_name, entry, rows_per_chunk)
    default = hashlib.sha256(f"{identity}\0{tensor_name}\0{layout.rows_per_chunk}".encode()).hexdigest()[:32]
    return TableRequest(name or default, layout, "plasma", identity, source=request, maker=handle)


def _of_tensor(tensor: Any, name: str | None, rows_per_chunk: int | None) -> tuple[TableRequest, list[Any]]:
    """The table of a tensor in this process, whose chunks go through the object store to its home node."""
    import torch

    if tensor.is_meta or tensor.layout is not torch.strided:
        raise ValueError(f"a table can't be made of a {tensor.layout} tensor on {tensor.device}")
    dtype = str(tensor.dtype).removeprefix("torch.")
    layout = TableLayout.of(name or "tensor", dtype, tuple(tensor.shape), rows_per_chunk)
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    raw = plain.reshape(-1).view(torch.uint8).numpy()
    if raw.nbytes != layout.nbytes:
        raise ValueError(f"a table can't be made of {tensor.dtype}")
    identity = f"tensor:{uuid.uuid4().hex}"
    home = ray.get_runtime_context().get_node_id()
    request = TableRequest(name or identity, layout, "plasma", identity, home=home, maker=identity)
    return request, [raw[slice(*layout.bytes_of(index))] for index in range(layout.num_chunks)]


def _placed(
    request: TableRequest, placement: str, budgets: Sequence[PlasmaBudget]
) -> tuple[TableRequest, list[str]]:
    """The request with its placement decided, by what every node's store has room for."""
    if placement == "file":
        return replace(request, placement="file"), []
    try:
        for budget in budgets:
            budget.check(request.layout)
    except CapacityError as error:
        if placement == "plasma" or request.source is None:
            raise
        return replace(request, placement="file"), [f"placement 'file': {error}"]
    room = min((budget.free_bytes for budget in budgets), default=0)
    note = f"placement 'plasma': {request.layout.nbytes} bytes fit, at least {room} are free on every node"
    return replace(request, placement="plasma"), [note] if placement == "auto" else []


def _share_on_all(
    request: TableRequest,
    rows: Sequence[Any],
    agents: Sequence[Any],
    places: Sequence[Place],
    nodes: Sequence[Node],
    deadline: Deadline,
) -> str:
    """Fills every node; for a tensor in memory its home node first, which the others copy from.

    Returns:
        Where the table is: not where it was asked for, perhaps, when it was there before.
    """
    waiting = list(zip(agents, places, nodes, strict=True))
    found: list[TableParts] = []
    try:
        if request.home is not None:
            home = next(item for item in waiting if item[2].node_id == request.home)
            refs = [ray.put(row) for row in rows]
            found += gather([home[0].share_table.remote(request, refs)], [home[1]], deadline)
            waiting.remove(home)
        found += gather(
            [agent.share_table.remote(request) for agent, _, _ in waiting],
            [place for _, place, _ in waiting],
            deadline,
        )
    except BaseException:
        for agent in agents:
            agent.undo_table.remote(request)
        raise
    return "file" if any(parts.placement == "file" for parts in found) else "plasma"
