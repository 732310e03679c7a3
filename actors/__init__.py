"""The cluster path: one process per rank, one agent per node, one coordinator per cluster, all on Ray."""

from raywl.actors.group import RankGroup
from raywl.actors.launching import launch
from raywl.actors.pinning import pin, unpin
from raywl.actors.staging import stage
from raywl.actors.tables import SharedTable, share_table

__all__ = ["RankGroup", "SharedTable", "launch", "pin", "share_table", "stage", "unpin"]
