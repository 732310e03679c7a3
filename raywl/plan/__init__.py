"""Which bytes of which file a rank needs, and where they go. Imports neither torch nor Ray."""

from raywl.plan.copies import Copy
from raywl.plan.declare import declare_plan
from raywl.plan.plan import LoadPlan, TargetInfo
from raywl.plan.reads import Read, schedule
from raywl.plan.shards import copy_of_box, cut, local_box

__all__ = [
    "Copy",
    "LoadPlan",
    "Read",
    "TargetInfo",
    "copy_of_box",
    "cut",
    "declare_plan",
    "local_box",
    "schedule",
]
