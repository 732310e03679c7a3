"""Reloading a group in place: all ranks check, and only then does any of them write."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import ray

from raywl.actors.deadline import Deadline
from raywl.actors.opening import open_on_nodes
from raywl.actors.rank import Job
from raywl.actors.raycalls import Node, find_agents, gather
from raywl.actors.requests import request_for_nodes
from raywl.errors import RaywlError
from raywl.report import GroupReport

if TYPE_CHECKING:
    from raywl.actors.group import GroupParts
    from raywl.loading.reload import ReloadReport

__all__ = ["reload_group"]


def reload_group(parts: GroupParts, ref: Any, source: Mapping[str, Any], deadline: Deadline) -> GroupReport:
    """Checks a checkpoint on every rank of a group, then writes it on all of them.

    Raises:
        RaywlError: Of the rank that failed. As long as `partly_loaded` is false, every rank has its old
            weights, bit for bit.
    """
    deadline.enter("open")
    request = request_for_nodes(f"{parts.name}/{uuid.uuid4().hex[:8]}", ref, source)
    places = [spec.place for spec in parts.specs]
    try:
        identity, fetched = open_on_nodes(request, parts.nodes, deadline)
        job = ray.put(Job(request, identity, b"", deadline.remaining_s()))
        deadline.enter("check")
        gather([rank.check_reload.remote(job) for rank in parts.ranks], places, deadline)
        deadline.enter("write")
        try:
            reports: list[ReloadReport] = gather(
                [rank.reload.remote(job) for rank in parts.ranks], places, deadline
            )
        except RaywlError as error:
            # Other ranks may have written already, whatever became of this one.
            error.partly_loaded = True
            raise
    finally:
        _close(request.group, parts.nodes)
    deadline.enter("")
    return GroupReport(
        request.label,
        identity,
        ranks=list(reports),
        unexpected=[],
        seconds=deadline.elapsed_s,
        phases=dict(deadline.phases),
        fetched_bytes={"hub": fetched} if fetched else {},
        notes=[f"{len(reports)} ranks reloaded in place"],
    )


def _close(group: str, nodes: Sequence[Node]) -> None:
    for agent in find_agents(nodes):
        agent.close.remote(group)
