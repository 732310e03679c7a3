"""What a cluster holds, and deleting from all of its caches."""

from __future__ import annotations

import contextlib
from typing import Any

import ray

from raywl.actors.connect import connect, disconnect
from raywl.actors.deadline import Deadline
from raywl.actors.failures import Place
from raywl.actors.names import agent_name, coordinator_name
from raywl.actors.raycalls import alive_nodes, find_actor, gather, hold_agents
from raywl.caches import PruneReport

__all__ = ["cluster_status", "prune_nodes"]

_ANSWER_S = 10.0


def cluster_status(address: str, timeout_s: float = 60.0) -> dict[str, Any]:
    """Nodes, groups, leases, what is staged, pinned and cached, as JSON values. Starts nothing.

    Args:
        address: Of the cluster: `host:port` or `"auto"`.
        timeout_s: Bounds the call.

    Raises:
        ClusterError: There is no cluster at the address.
    """
    deadline = Deadline(timeout_s, "status")
    connection = connect(address, num_cpus=0, deadline=deadline)
    try:
        nodes = alive_nodes()
        agents = {node.node_id: find_actor(agent_name(node.node_id)) for node in nodes}
        asked = {key: agent.overview.remote() for key, agent in agents.items() if agent is not None}
        answers = _answers(asked)
        coordinator = find_actor(coordinator_name())
        told = {} if coordinator is None else _answers({"": coordinator.status.remote()})
        return {
            "address": connection.address,
            "nodes": [
                {
                    "node": node.label,
                    "node_id": node.node_id,
                    "agent": _state_of(agents[node.node_id], answers.get(node.node_id)),
                    **(answers.get(node.node_id) or {}),
                }
                for node in nodes
            ],
            "coordinator": told.get(""),
        }
    finally:
        disconnect(connection)


def prune_nodes(
    address: str,
    *,
    max_age_s: float | None = None,
    max_bytes: int | None = None,
    dry_run: bool = False,
    timeout_s: float = 600.0,
) -> dict[str, PruneReport]:
    """Deletes what nobody uses from the caches of all nodes; see `raywl.caches.prune_cache`.

    Returns:
        What was deleted, by node.

    Raises:
        RaywlError: Of the node where it failed.
        ClusterError: There is no cluster at the address.
    """
    deadline = Deadline(timeout_s, "prune")
    connection = connect(address, num_cpus=0, deadline=deadline)
    try:
        nodes = alive_nodes()
        agents, places = hold_agents(nodes, deadline), [Place(node.label) for node in nodes]
        asked = [agent.prune.remote(max_age_s, max_bytes, dry_run) for agent in agents]
        found: list[PruneReport] = gather(asked, places, deadline)
        return {node.label: report for node, report in zip(nodes, found, strict=True)}
    finally:
        disconnect(connection)


def _state_of(agent: Any, answer: Any) -> str:
    return "none" if agent is None else "alive" if answer is not None else "silent"


def _answers(asked: dict[str, Any]) -> dict[str, Any]:
    done, _ = (
        ray.wait(list(asked.values()), num_returns=max(1, len(asked)), timeout=_ANSWER_S)
        if asked
        else ([], [])
    )
    answers = {}
    for key, ref in asked.items():
        if ref in done:
            with contextlib.suppress(Exception):
                answers[key] = ray.get(ref)
    return answers
