"""The cluster path: one process per rank, one agent per node, one coordinator per cluster, all on Ray."""

from raywl.actors.group import RankGroup
from raywl.actors.launching import launch

__all__ = ["RankGroup", "launch"]
