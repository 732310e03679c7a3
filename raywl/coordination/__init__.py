"""Who holds what on a cluster: pure state machines, without Ray and without a clock of their own."""

from raywl.coordination.chunks import CHUNK_BYTES, ChunkTable
from raywl.coordination.groups import Beat, Group, GroupRegistry
from raywl.coordination.leases import Acquired, Lease, LeaseTable
from raywl.coordination.placement import Shortfall, rank_order, shortfall
from raywl.coordination.stage_messages import (
    NOBODY,
    FetchFailure,
    FileCheck,
    NodeReport,
    NodeState,
    Orders,
    Route,
    StageSpec,
    StageState,
    Ticket,
    unpack_route,
)
from raywl.coordination.staging import StagingBoard

__all__ = [
    "CHUNK_BYTES",
    "NOBODY",
    "Acquired",
    "Beat",
    "ChunkTable",
    "FetchFailure",
    "FileCheck",
    "Group",
    "GroupRegistry",
    "Lease",
    "LeaseTable",
    "NodeReport",
    "NodeState",
    "Orders",
    "Route",
    "Shortfall",
    "StageSpec",
    "StageState",
    "StagingBoard",
    "Ticket",
    "rank_order",
    "shortfall",
    "unpack_route",
]
