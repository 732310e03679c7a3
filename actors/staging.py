"""`stage`: a checkpoint leaves its source once and reaches every node."""

from __future__ import annotations

import os
import uuid
import warnings
from collections.abc import Sequence
from typing import Any

from raywl.actors.connect import connect, disconnect
from raywl.actors.deadline import Deadline
from raywl.actors.opening import agree_on_nodes
from raywl.actors.raycalls import Node, find_agents
from raywl.actors.requests import check_options, request_for_nodes
from raywl.actors.stage_driver import choose_nodes, stage_on_nodes, warm_nodes
from raywl.actors.streaming import NOTHING_TO_STREAM, Stream, check_mode, open_for_stream
from raywl.errors import NodeLostError, some_of
from raywl.opening import Checkpoint
from raywl.progress import Progress, make_progress
from raywl.stage_report import StagedNode, StageReport

__all__ = ["stage"]


def stage(
    ref: str | os.PathLike[str] | Checkpoint,
    *,
    nodes: Sequence[str] | None = None,
    mode: str = "cache",
    cache_dir: str | os.PathLike[str] | None = None,
    prefetch: bool = True,
    address: str | None = None,
    timeout_s: float = 3600.0,
    progress: bool | Progress | None = None,
    **source: Any,
) -> StageReport:
    """Brings a checkpoint to the nodes of a Ray cluster; each byte leaves its source once.

    Every node fetches a part of it and gets the rest from the others through Ray's object store. What is in a
    node's cache already is neither fetched nor sent again; what came of an interrupted staging counts too.

    Args:
        ref: As for `open_checkpoint`. Of a local path, only whether all nodes have the same there is looked
            at.
        nodes: Ids or addresses of nodes; by default all that are alive.
        mode: `"cache"`: into each node's cache folder, where `open_checkpoint` and `launch` find it.
            `"stream"`: past each node and nowhere: all weight files come to every node once, are checked, and
            dropped. It shows what a `launch` with `stage_mode="stream"` has to expect of source and network.
        cache_dir: That folder, on every node; by default as each node's environment says.
        prefetch: Whether each node reads the files into its page cache as well, where they fit.
        address: As for `launch`.
        timeout_s: Bounds the whole call.
        progress: `True` for a bar on standard error, or a callable; for all nodes together.
        **source: Other keyword arguments of `open_checkpoint`.

    Returns:
        Where the bytes came from and went to, by node.

    Raises:
        ValueError: An unknown mode or node.
        SourceError: The source can't be reached, refuses, or sends wrong bytes; from every node that tried.
        CapacityError: The disk of a node is full. What came stays, and the next try goes on from there.
        NodeLostError: One of the nodes that were asked for by name died; the others have the checkpoint.
        StagingTimeout: `timeout_s` passed, or nothing moved any more; it says who holds what since when.
        ClusterError: As `launch`.
    """
    check_mode("mode", mode)
    if cache_dir is not None:
        source = {**source, "cache_dir": cache_dir}
    check_options(source)
    streamed = open_for_stream(ref, source) if mode == "stream" else None
    shown = make_progress(progress)
    deadline = Deadline(timeout_s, "stage")
    deadline.enter("connect")
    connection = connect(address, num_cpus=1, deadline=deadline)
    group, chosen = f"stage-{uuid.uuid4().hex[:16]}", list[Node]()
    try:
        chosen = choose_nodes(nodes)
        if streamed is not None:
            deadline.enter("stream")
            report = _stream_past(streamed, chosen, deadline, shown)
        else:
            deadline.enter("look")
            request = request_for_nodes(group, ref, source)
            report = stage_on_nodes(request, chosen, deadline, shown) or _nothing(request.label, mode, chosen)
        lost = [node for node in report.nodes if node.state == "lost"]
        if streamed is None:
            deadline.enter("open")
            living = [node for node in chosen if node.node_id not in {other.node_id for other in lost}]
            report.identity, _ = agree_on_nodes(request, living, deadline)
            if prefetch and mode == "cache":
                deadline.enter("prefetch")
                report.notes += warm_nodes(request, living, deadline)
        deadline.enter("")
        report.notes.insert(0, connection.note)
        report.seconds, report.phases = deadline.elapsed_s, dict(deadline.phases)
        names = some_of([node.node for node in lost])
        if lost and nodes is not None:
            raise NodeLostError(f"{names} died; the other nodes have {report.ref}", node=lost[0].node)
        if lost:
            warnings.warn(f"{report.ref} is not on nodes that died meanwhile: {names}", stacklevel=2)
        return report
    finally:
        for agent in find_agents(chosen):
            agent.close.remote(group)
        disconnect(connection)


def _nothing(label: str, mode: str, nodes: Sequence[Node]) -> StageReport:
    """The report where nothing is to be moved."""
    report = StageReport(label, "", mode)
    report.nodes = [StagedNode(node.label, node.node_id, "finished") for node in nodes]
    told = "nothing to move: each node opened what it has, or fetched it by itself"
    report.notes.append(told if mode == "cache" else NOTHING_TO_STREAM)
    return report


def _stream_past(
    checkpoint: Checkpoint, nodes: Sequence[Node], deadline: Deadline, progress: Progress | None
) -> StageReport:
    """Has all chunks come to every node once."""
    stream = Stream(checkpoint, nodes, {}, deadline, progress)
    try:
        with stream.watched():
            stream.begin()
            return stream.finish()
    finally:
        stream.leave()
