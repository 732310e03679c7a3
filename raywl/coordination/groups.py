"""Which groups of ranks live on a cluster, and so which nodes' helpers are still needed."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from raywl.coordination.leases import Lease, LeaseTable
from raywl.errors import CheckpointError, ClusterError, some_of

__all__ = ["Beat", "Group", "GroupRegistry"]

_PREFIX = "group/"
_MIN_LEASE_S, _MAX_LEASE_S = 10.0, 30.0
_MIN_BEAT_S, _MAX_BEAT_S = 0.25, 10.0
_DEFAULT_IDLE_S = 300.0
_HOLDER_LOST_S = 60.0
"""Silence after which a helper that holds something is taken for dead: a busy node skips beats."""


@dataclass(frozen=True, slots=True)
class Group:
    """What a driver says of its group, again with every heartbeat."""

    name: str
    """Unique on the cluster, for all time."""
    driver: str
    """Which process keeps it alive, for people to read: `host:pid`."""
    ref: str
    """The checkpoint that it loads."""
    nodes: tuple[str, ...] = ()
    """Ids of its nodes; empty until it is placed, when it needs every node."""
    num_ranks: int = 1
    idle_s: float = _DEFAULT_IDLE_S
    """How long a helper stays when nothing needs it any more."""

    @property
    def lease_s(self) -> float:
        """How long the group lasts without a heartbeat: long enough for a busy driver."""
        return min(_MAX_LEASE_S, max(_MIN_LEASE_S, self.idle_s))


@dataclass(frozen=True, slots=True)
class Beat:
    """The answer to a node's heartbeat."""

    needed: bool
    """A group lives on the node, or may come to."""
    retire: bool
    """Nothing has needed it for so long that it should end."""
    next_beat_s: float
    """When to beat again."""
    groups: tuple[str, ...] = ()
    """The groups that live, by name; what is kept for others may go."""


class GroupRegistry:
    """The groups of one cluster, each held by a lease of its driver, and the nodes that helpers run on.

    Pure: events in, answers out, `now_s` from the caller's clock. A registry that replaces a lost one
    learns everything again from the next heartbeats.
    """

    def __init__(self, now_s: float, first_epoch: int = 1) -> None:
        self._leases = LeaseTable(first_epoch)
        self._groups: dict[str, Group] = {}
        self._identities: dict[str, dict[str, str]] = {}
        self._beats: dict[str, float] = {}
        self._held: dict[str, tuple[str, ...]] = {}
        self._idle_since: dict[str, float] = {}
        self._idle_s = _DEFAULT_IDLE_S
        self._empty_since = now_s

    def keep(self, group: Group, now_s: float) -> Lease:
        """Registers a group, or notes that its driver still lives.

        Raises:
            ClusterError: Another driver holds a group of that name.
        """
        self.expire(now_s)
        answer = self._leases.acquire(_PREFIX + group.name, group.driver, group.lease_s, now_s)
        if not answer.granted:
            raise ClusterError(f"group {group.name} belongs to another driver, {answer.lease.holder}")
        self._groups[group.name] = group
        self._idle_s = group.idle_s
        self._note_idle(now_s)
        return answer.lease

    def drop(self, name: str, now_s: float) -> None:
        """The group has ended. Harmless when repeated, or when it has expired already."""
        lease = self._leases.lease_of(_PREFIX + name, now_s)
        if lease is not None:
            self._leases.release(lease.resource, lease.holder, lease.epoch, now_s)
        self._forget(name)
        self._note_idle(now_s)

    def expire(self, now_s: float) -> tuple[Group, ...]:
        """Forgets the groups whose drivers have been silent too long, and returns them.

        Nodes become idle at the moment when the lease ran out, not when it was noticed.
        """
        gone = []
        for lease in self._leases.expire(now_s):
            group = self._groups.get(lease.resource.removeprefix(_PREFIX))
            if group is not None:
                gone.append(group)
                self._forget(group.name)
                self._note_idle(min(now_s, lease.expires_s))
        return tuple(gone)

    def agree(self, name: str, identities: Mapping[str, str], labels: Mapping[str, str]) -> str:
        """Notes which checkpoint each node of a group has found, by node id.

        Args:
            name: The group.
            identities: Identity of the checkpoint on each node, by node id.
            labels: What to call the nodes in the message, by node id.

        Returns:
            The identity that all have.

        Raises:
            CheckpointError: They differ; the message names nodes and identities.
            ValueError: No node has reported.
        """
        if not identities:
            raise ValueError(f"no node of group {name} has reported a checkpoint")
        if name in self._groups:
            self._identities[name] = dict(identities)
        nodes_of: dict[str, list[str]] = {}
        for node, identity in identities.items():
            nodes_of.setdefault(identity, []).append(labels.get(node, node))
        if len(nodes_of) > 1:
            told = "; ".join(
                f"{identity} on {some_of(sorted(nodes))}" for identity, nodes in nodes_of.items()
            )
            ref = self._groups[name].ref if name in self._groups else None
            raise CheckpointError(ref, None, f"is not the same checkpoint on every node: {told}")
        return next(iter(nodes_of))

    def beat(self, node: str, now_s: float, held: tuple[str, ...] = ()) -> Beat:
        """A helper on `node` lives and asks whether it is needed.

        Args:
            node: Its node.
            now_s: The time.
            held: What it keeps for anyone on the cluster, by name: it is needed as long as it does.
        """
        self.expire(now_s)
        self._beats[node], self._held[node] = now_s, held
        needed = self._needed(node)
        if needed:
            self._idle_since.pop(node, None)
        else:
            self._idle_since.setdefault(node, now_s)
        idle_for_s = 0.0 if needed else now_s - self._idle_since[node]
        retire = not needed and idle_for_s >= self._idle_s
        return Beat(needed, retire, self.beat_s, tuple(self._groups))

    def see_nodes(self, alive: Collection[str]) -> None:
        """Which nodes the cluster has now: what others held is gone."""
        for node in [node for node in self._beats if node not in alive]:
            self._forget_node(node)

    def retire_idle(self, now_s: float) -> tuple[str, ...]:
        """Nodes whose helpers nothing needs: they are to end now and are forgotten here."""
        self.expire(now_s)
        idle = tuple(node for node in self._beats if not self._needed(node))
        for node in idle:
            self._forget_node(node)
        return idle

    def is_over(self, now_s: float) -> bool:
        """Whether the keeper of this registry should end as well.

        True when there has been no group for the idle time, and no helper has beaten for three beats
        (those that live end first), or for a minute where it held something.
        """
        self.expire(now_s)
        if self._groups or now_s - self._empty_since < self._idle_s:
            return False
        beats_s = 3 * self.beat_s
        return all(
            now_s - last_s > (max(beats_s, _HOLDER_LOST_S) if self._held.get(node) else beats_s)
            for node, last_s in self._beats.items()
        )

    @property
    def is_unused(self) -> bool:
        """No group is registered and no helper is known."""
        return not self._groups and not self._beats

    @property
    def beat_s(self) -> float:
        """Seconds between heartbeats: a third of the shortest time that they keep alive."""
        shortest_s = min([self._idle_s, *(group.lease_s for group in self._groups.values())])
        return min(_MAX_BEAT_S, max(_MIN_BEAT_S, shortest_s / 3))

    def status(self, now_s: float) -> dict[str, Any]:
        """Groups, leases and nodes, as JSON values; times are seconds before or after now."""
        self.expire(now_s)
        leases = [
            {
                "resource": lease.resource,
                "holder": lease.holder,
                "epoch": lease.epoch,
                "held_for_s": now_s - lease.since_s,
                "expires_in_s": lease.expires_s - now_s,
            }
            for lease in self._leases.leases(now_s)
        ]
        groups = {
            group.name: {
                "driver": group.driver,
                "ref": group.ref,
                "nodes": list(group.nodes),
                "num_ranks": group.num_ranks,
                "identities": self._identities.get(group.name, {}),
            }
            for group in self._groups.values()
        }
        nodes = {
            node: {
                "last_beat_s_ago": now_s - last_s,
                "needed": self._needed(node),
                "held": list(self._held.get(node, ())),
            }
            for node, last_s in self._beats.items()
        }
        return {"leases": leases, "groups": groups, "nodes": nodes, "idle_s": self._idle_s}

    def _needed(self, node: str) -> bool:
        if self._held.get(node):
            return True
        return any(not group.nodes or node in group.nodes for group in self._groups.values())

    def _forget(self, name: str) -> None:
        self._groups.pop(name, None)
        self._identities.pop(name, None)

    def _forget_node(self, node: str) -> None:
        self._beats.pop(node, None)
        self._held.pop(node, None)
        self._idle_since.pop(node, None)

    def _note_idle(self, now_s: float) -> None:
        if not self._groups:
            self._empty_since = max(self._empty_since, now_s)
        else:
            self._empty_since = now_s
        for node in self._beats:
            if self._needed(node):
                self._idle_since.pop(node, None)
            else:
                self._idle_since.setdefault(node, now_s)
