"""Scales of the KV cache that a load leaves out: the model works without them, with 1.0 in their place."""

from __future__ import annotations

from raywl.remap.kv_scales import kv_scale_kind
from raywl.report import LoadReport

__all__ = ["IGNORED", "LEFT", "unused_scales"]

IGNORED = "the model says that it ignores this name"
"""Why a tensor is skipped that has no place, and is on a list of the model's."""
LEFT = "used none of it"
"""How the reason ends where a parameter's loader looked at nothing of a tensor."""


def unused_scales(report: LoadReport) -> list[str]:
    """Scales that have no place in the model, that it says to ignore, or that a loader made no use of."""
    # On a lone stage a name may be ignored since it is another stage's.
    reasons = (IGNORED, LEFT) if report.context.pp_size == 1 else (LEFT,)
    left = [name for name, why in report.skipped.items() if why.endswith(reasons)]
    return [name for name in (*report.unexpected, *left) if kv_scale_kind(name) is not None]
