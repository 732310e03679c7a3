"""What raywl's long-lived actors are called on a cluster."""

from __future__ import annotations

from raywl._version import __version__

__all__ = ["NAMESPACE", "PROTOCOL", "Hello", "agent_name", "coordinator_name", "mine"]

NAMESPACE = "raywl"
PROTOCOL = 2
"""Number of the messages between driver, agents, coordinator and ranks; changed whenever they change."""

Hello = tuple[str, int]
"""Version and protocol, as every helper's `hello` answers, for all time."""


def mine() -> Hello:
    """What this process would answer."""
    return __version__, PROTOCOL


def agent_name(node_id: str) -> str:
    """The NodeAgent's, so that one of another version is never taken for it."""
    return f"raywl-agent-{__version__}-p{PROTOCOL}-{node_id}"


def coordinator_name() -> str:
    """The LoadCoordinator's."""
    return f"raywl-coordinator-{__version__}-p{PROTOCOL}"
