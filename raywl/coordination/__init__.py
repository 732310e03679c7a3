"""Who holds what on a cluster: pure state machines, without Ray and without a clock of their own."""

from raywl.coordination.groups import Beat, Group, GroupRegistry
from raywl.coordination.leases import Acquired, Lease, LeaseTable
from raywl.coordination.placement import Shortfall, rank_order, shortfall

__all__ = [
    "Acquired",
    "Beat",
    "Group",
    "GroupRegistry",
    "Lease",
    "LeaseTable",
    "Shortfall",
    "rank_order",
    "shortfall",
]
