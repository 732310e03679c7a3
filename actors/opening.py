"""Opening a checkpoint on every node of a group, and agreeing that it is one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ray

from raywl.actors.agent import Opened
from raywl.actors.deadline import Deadline
from raywl.actors.failures import Place, most_telling
from raywl.actors.raycalls import Node, Settled, from_ray, hold_agents, make_coordinator, settle
from raywl.actors.requests import SourceRequest
from raywl.actors.stage_driver import COORDINATOR, stage_on_nodes
from raywl.errors import NotFoundError, RaywlError, some_of
from raywl.progress import Progress
from raywl.text import format_bytes

__all__ = ["COORDINATOR", "agree_on_nodes", "open_on_nodes", "release_on_nodes"]


def open_on_nodes(
    request: SourceRequest, nodes: Sequence[Node], deadline: Deadline, progress: Progress | None = None
) -> tuple[str, dict[str, int]]:
    """A checkpoint that comes from elsewhere is brought to all nodes; then every node opens it.

    Returns:
        The identity that all found, and the bytes that came, by kind of source, over all nodes.

    Raises:
        NotFoundError: Nodes lack it; they are named.
        CheckpointError: It isn't the same on every node.
        RaywlError: As `open_checkpoint`, of the node that failed most tellingly; as `stage`.
    """
    staged = stage_on_nodes(request, nodes, deadline, progress)
    deadline.enter("open")
    identity, came = agree_on_nodes(request, nodes, deadline)
    if staged is not None and staged.bytes_from_source:
        (kind,) = came or {staged.kind: 0}
        came[kind] = came.get(kind, 0) + staged.bytes_from_source
    return identity, came


def agree_on_nodes(
    request: SourceRequest, nodes: Sequence[Node], deadline: Deadline
) -> tuple[str, dict[str, int]]:
    """Every node opens what it has, and fetches what it hasn't; all must find the same.

    Returns:
        As `open_on_nodes`.

    Raises:
        RaywlError: Likewise.
    """
    agents = hold_agents(nodes, deadline)
    places = [Place(node.label) for node in nodes]
    opening = [agent.open.remote(request) for agent in agents]
    settled = settle(opening, places, deadline, wait_for_all=True)
    if settled.failures:
        raise _opening_error(request.label, settled.failures, nodes)
    opened: list[Opened] = settled.results
    identities = {node.node_id: found.identity for node, found in zip(nodes, opened, strict=True)}
    labels = {node.node_id: node.label for node in nodes}
    coordinator = make_coordinator()
    asked = coordinator.agree.remote(request.group, identities, labels)
    try:
        identity: str = ray.get(asked, timeout=max(1.0, deadline.remaining_s()))
    except ray.exceptions.RayError as error:
        told = from_ray(error, COORDINATOR)
        told.where = None
        raise told from None
    return identity, _fetch_on_nodes(request, opened, agents, nodes, deadline)


def release_on_nodes(
    request: SourceRequest, nodes: Sequence[Node], deadline: Deadline, notes: list[str]
) -> int:
    """Every node drops the checkpoint from its page cache; a node that can't is a note, and no error.

    Returns:
        Bytes that left the page caches.
    """
    deadline.enter("release")
    places = [Place(node.label) for node in nodes]
    settled = Settled([])
    try:
        asked = [agent.release.remote(request) for agent in hold_agents(nodes, deadline)]
        settle(asked, places, deadline, wait_for_all=True, settled=settled)
    except RaywlError as error:
        notes.append(f"page cache not released: {error}")
    notes += [f"page cache not released: {error}" for error in settled.failures.values()]
    released_bytes: int = sum(found for found in settled.results if found is not None)
    notes.append(f"page cache: {format_bytes(released_bytes)} of the checkpoint released")
    return released_bytes


def _fetch_on_nodes(
    request: SourceRequest,
    opened: Sequence[Opened],
    agents: Sequence[Any],
    nodes: Sequence[Node],
    deadline: Deadline,
) -> dict[str, int]:
    """Every node brings the files into its cache that couldn't be staged, or were deleted since."""
    if all(found.kind == "local" for found in opened):
        return {}
    fetching = [agent.fetch.remote(request) for agent in agents]
    settled = settle(fetching, [Place(node.label) for node in nodes], deadline, wait_for_all=True)
    if settled.failures:
        raise _opening_error(request.label, settled.failures, nodes)
    total = sum(settled.results)
    return {opened[0].kind: total} if total else {}


def _opening_error(ref: str, failures: Mapping[int, RaywlError], nodes: Sequence[Node]) -> RaywlError:
    """One error for what several nodes said."""
    # What a hub lacks it says itself; which nodes lack a path is only seen from here.
    lacking = {i: error for i, error in failures.items() if isinstance(error, NotFoundError) and error.local}
    if not lacking or len(nodes) == 1:
        return most_telling(failures)
    if len(lacking) == len(nodes):
        told = NotFoundError(ref, f"not found on any of {len(nodes)} nodes", local=True)
    else:
        names = some_of([nodes[index].label for index in sorted(lacking)])
        told = NotFoundError(
            ref,
            f"not found on {len(lacking)} of {len(nodes)} nodes: {names}; it must be at that path on each",
            local=True,
        )
    for error in failures.values():
        told.add_note(str(error))
    return told
