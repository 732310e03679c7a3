"""Wrong usage is a ValueError wherever it is found, before or after ranks have started."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import raywl
from tests.cluster.parts import SHARDS, Model, tensors_of

pytestmark = pytest.mark.usefixtures("driver")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"strategy": "zzz"}, "unknown strategy 'zzz'"),
        ({"strict": "zz"}, "strict must be"),
        ({"tp_size": 2.5}, "tp_size must be a whole number"),
        ({"replicas": 0}, "replicas must be at least 1"),
        ({"num_cpus_per_rank": -1}, "num_cpus_per_rank must be at least 0 and finite, got -1"),
        ({"num_cpus_per_rank": float("nan")}, "num_cpus_per_rank must be at least 0 and finite"),
        ({"num_gpus_per_rank": "all"}, "num_gpus_per_rank must be a number, not 'all'"),
        ({"num_gpus_per_rank": 1.5}, "num_gpus_per_rank over 1 must be whole, got 1.5"),
    ],
    ids=str,
)
def test_known_before_anything_starts(checkpoint, arguments, message):
    """No rank is started for it."""
    with pytest.raises(ValueError, match=message):
        raywl.launch(checkpoint, Model, **{"shards": SHARDS, **arguments})


def test_unknown_arguments(checkpoint):
    """They are named."""
    with pytest.raises(TypeError, match="unknown arguments: nonsense"):
        raywl.launch(checkpoint, Model, nonsense=1)
    with pytest.raises(TypeError, match="not a shard spec"):
        raywl.launch(checkpoint, Model, shards={"embed.weight": 0})
    with pytest.raises(TypeError, match="tp_plan must be a mapping"):
        raywl.launch(checkpoint, Model, tp_plan=["embed"])


def test_found_by_a_rank(checkpoint):
    """A style that isn't supported shows only when the model is there; it keeps its class and its rank."""
    with pytest.raises(ValueError, match=r"rank \d on node .*zz") as caught:
        raywl.launch(checkpoint, Model, tp_size=2, tp_plan={"embed": "zz"}, timeout_s=100.0)
    assert type(caught.value) is ValueError


def test_sizes_of_numpy(checkpoint):
    """Whatever integer type they are of."""
    whole = tensors_of(torch)["embed.weight"]
    with raywl.launch(checkpoint, Model, tp_size=np.int64(2), shards=SHARDS, timeout_s=100.0) as group:
        parts = group.run(lambda model: model.embed.weight.detach().clone())
    assert torch.equal(torch.cat(parts), whole)
