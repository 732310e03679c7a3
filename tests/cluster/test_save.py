"""What ranks on two nodes hold, saved to a folder that both see."""

from __future__ import annotations

import pytest
import torch

import raywl
from tests.cluster.parts import SHARDS, Model, tensors_of

pytestmark = [pytest.mark.usefixtures("driver"), pytest.mark.slow]


def change_and_save(model, folder):
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(2)
    return raywl.save_sharded(model, folder)


@pytest.mark.parametrize("init_distributed", [True, False])
def test_a_group_saves_what_it_holds(checkpoint, tmp_path, init_distributed):
    """By its context alone, or with a process group; one rank puts it together, and a new group loads it."""
    whole = tensors_of(torch)
    arguments = {"shards": SHARDS, "timeout_s": 100.0, "init_distributed": init_distributed}
    with raywl.launch(checkpoint, Model, tp_size=4, **arguments) as group:
        reports = group.run(change_and_save, str(tmp_path / "out"))
    assert [report.context.rank for report in reports] == [0, 1, 2, 3]
    assert sum(bool(report.files) for report in reports) == 1
    saved = dict(raywl.open_checkpoint(tmp_path / "out").iter_weights())
    assert saved.keys() == whole.keys()
    for name, tensor in saved.items():
        assert torch.equal(tensor, whole[name] * 2)
    with raywl.launch(tmp_path / "out", Model, tp_size=2, **arguments) as group:
        rows = group.run(lambda model: model.state_dict()["embed.weight"].clone())
    assert torch.equal(torch.cat(rows), whole["embed.weight"] * 2)
