"""What a load would do, without doing it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from raywl.loading.binding import Binding
from raywl.loading.load import fill_report
from raywl.loading.targets import init_buffers, restore
from raywl.opening import Checkpoint
from raywl.readers import OpenFiles, Reader
from raywl.report import LoadReport
from raywl.types import ParallelContext

__all__ = ["plan_model"]


def plan_model(
    model: nn.Module,
    checkpoint: Checkpoint,
    context: ParallelContext,
    *,
    shards: Mapping[str, Any] | None = None,
    tp_plan: Mapping[str, str] | None = None,
) -> LoadReport:
    """The report that `load_into` would give, up to its reads.

    Loaders run and their copies are noted, not made; values that a loader looks at are read. A model on
    `meta` is as before afterwards; one with memory may have been written to by its loaders.

    Args:
        model: As for `load_into`.
        checkpoint: An open checkpoint.
        context: Where the rank stands.
        shards: As for `load_into`.
        tp_plan: As for `load_into`.

    Returns:
        A report with plan, names and notes; nothing was read or timed.

    Raises:
        ValueError: A style or cut that isn't possible.
        ShapeMismatchError: A tensor doesn't fit its parameter.
    """
    report = LoadReport(checkpoint.source.ref, checkpoint.identity, context)
    binding = Binding(
        model, checkpoint, context, shards=shards, tp_plan=tp_plan, mapper=None, stacked=None,
        expert_mapping=None, device=None,
    )  # fmt: skip
    before = [(target, target.tensor) for target in binding.targets]
    with context, torch.no_grad(), OpenFiles(checkpoint) as files, restore(binding.targets):
        unmade = init_buffers(model, binding.targets, binding.device)
        recorder = binding.prepare(Reader(checkpoint, files, "buffered"), None)
        binding.record(recorder, None)
        fill_report(report, binding, recorder, unmade)
        recorder.finish()
    for target, tensor in before:
        target.put(tensor)
    return report
