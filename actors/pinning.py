"""`pin` and `unpin`: a checkpoint stays in each node's memory."""

from __future__ import annotations

import os
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from raywl.actors.connect import connect, disconnect
from raywl.actors.deadline import Deadline
from raywl.actors.failures import Place
from raywl.actors.opening import agree_on_nodes
from raywl.actors.raycalls import alive_nodes, find_agents, gather, hold_agents
from raywl.actors.requests import check_options, request_for_nodes
from raywl.actors.stage_driver import choose_nodes, stage_on_nodes
from raywl.progress import Progress, make_progress
from raywl.stage_report import StagedNode, StageReport

if TYPE_CHECKING:
    from raywl.actors.pins import Pinned
    from raywl.opening import Checkpoint

__all__ = ["pin", "unpin"]


def pin(
    ref: str | os.PathLike[str] | Checkpoint,
    *,
    nodes: Sequence[str] | None = None,
    quota_bytes: int | None = None,
    address: str | None = None,
    timeout_s: float = 3600.0,
    progress: bool | Progress | None = None,
    **source: Any,
) -> StageReport:
    """Keeps a checkpoint in each node's memory, so that loads don't read its disk; it is staged first.

    It stays until `unpin`, or the end of the cluster; also when this process has ended.

    Args:
        ref: As for `stage`.
        nodes: As for `stage`.
        quota_bytes: The most that a node may pin in all; by default `RAYWL_PIN_BYTES` of the node, else half
            of its memory.
        address: As for `launch`.
        timeout_s: Bounds the whole call.
        progress: `True` for a bar on standard error, or a callable.
        **source: Keyword arguments of `open_checkpoint`.

    Raises:
        CapacityError: It is more than a node's quota; the node is named. Nothing was pinned there.
        RaywlError: As `stage`.
    """
    check_options(source)
    deadline = Deadline(timeout_s, "pin")
    deadline.enter("connect")
    connection = connect(address, num_cpus=1, deadline=deadline)
    group, chosen = f"pin-{uuid.uuid4().hex[:16]}", choose_nodes(nodes)
    try:
        request = request_for_nodes(group, ref, source)
        report = stage_on_nodes(request, chosen, deadline, make_progress(progress))
        if report is None:
            report = StageReport(request.label, "", "cache")
            report.nodes = [StagedNode(node.label, node.node_id, "finished") for node in chosen]
        deadline.enter("open")
        report.identity, _ = agree_on_nodes(request, chosen, deadline)
        deadline.enter("pin")
        agents, places = hold_agents(chosen, deadline), [Place(node.label) for node in chosen]
        asked = [name for name in dict.fromkeys((*_names_of(ref), request.label)) if name]
        pinned: list[Pinned] = gather(
            [agent.pin.remote(request, asked, quota_bytes) for agent in agents], places, deadline
        )
        deadline.enter("")
        for node, one in zip(report.nodes, pinned, strict=False):
            node.notes.append("locked in memory" if one.locked else "read again when it is pushed out")
        report.nbytes = report.nbytes or max((one.nbytes for one in pinned), default=0)
        report.notes.insert(0, connection.note)
        report.seconds, report.phases = deadline.elapsed_s, dict(deadline.phases)
        return report
    finally:
        for agent in find_agents(chosen):
            agent.close.remote(group)
        disconnect(connection)


def unpin(
    ref: str | os.PathLike[str] | Checkpoint, *, address: str | None = None, timeout_s: float = 60.0
) -> int:
    """Lets a checkpoint go that was pinned; it stays on the disks.

    Args:
        ref: As it was pinned, or its identity.
        address: As for `launch`.
        timeout_s: Bounds the call.

    Returns:
        On how many nodes it was.

    Raises:
        ClusterError: There is no cluster there.
        NodeLostError: A node died meanwhile.
    """
    deadline = Deadline(timeout_s, "unpin")
    deadline.enter("connect")
    connection = connect(address, num_cpus=1, deadline=deadline)
    try:
        deadline.enter("unpin")
        nodes = alive_nodes()
        agents = find_agents(nodes)
        places = [Place(node.label) for node in nodes][: len(agents)]
        found = gather([agent.unpin.remote(_names_of(ref)) for agent in agents], places, deadline)
        return sum(1 for count in found if count)
    finally:
        disconnect(connection)


def _names_of(ref: Any) -> list[str]:
    """All that a user may call it by."""
    identity = getattr(ref, "identity", None)
    if identity is not None:
        return [identity, ref.source.ref]
    text = os.fspath(ref)
    return list(dict.fromkeys((text, os.path.abspath(text))))
