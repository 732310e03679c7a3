"""raywl: a Ray-based cluster loader for model weights.

Names are imported when they are first used, so that `import raywl` imports neither torch nor ray.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from raywl import errors
from raywl._version import __version__
from raywl.types import ParallelContext, Replicate, Shard, current_context

if TYPE_CHECKING:
    from raywl.actors import RankGroup, SharedTable, launch, pin, share_table, stage, unpin
    from raywl.loading import ReloadReport, load_into, reload_into
    from raywl.opening import Checkpoint, open_checkpoint
    from raywl.plan import LoadPlan
    from raywl.report import GroupReport, LoadReport
    from raywl.saving import SaveReport, save_sharded
    from raywl.stage_report import StageReport

_HOMES = {
    "Checkpoint": "raywl.opening",
    "GroupReport": "raywl.report",
    "LoadPlan": "raywl.plan",
    "LoadReport": "raywl.report",
    "RankGroup": "raywl.actors",
    "ReloadReport": "raywl.loading",
    "SaveReport": "raywl.saving",
    "SharedTable": "raywl.actors",
    "StageReport": "raywl.stage_report",
    "launch": "raywl.actors",
    "load_into": "raywl.loading",
    "open_checkpoint": "raywl.opening",
    "pin": "raywl.actors",
    "reload_into": "raywl.loading",
    "save_sharded": "raywl.saving",
    "share_table": "raywl.actors",
    "stage": "raywl.actors",
    "unpin": "raywl.actors",
}

__all__ = [
    "Checkpoint",
    "GroupReport",
    "LoadPlan",
    "LoadReport",
    "ParallelContext",
    "RankGroup",
    "ReloadReport",
    "Replicate",
    "SaveReport",
    "Shard",
    "SharedTable",
    "StageReport",
    "__version__",
    "current_context",
    "errors",
    "launch",
    "load_into",
    "open_checkpoint",
    "pin",
    "reload_into",
    "save_sharded",
    "share_table",
    "stage",
    "unpin",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'raywl' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
