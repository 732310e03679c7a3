"""`launch` on a folder of files of `torch.save`: each rank reads its part of the views."""

from __future__ import annotations

import pytest
import torch

import raywl
from tests.cluster.parts import SHARDS, Model, tensors_of
from tests.torch_states import save_sharded

pytestmark = [pytest.mark.usefixtures("driver"), pytest.mark.slow]


def test_ranks_read_their_parts(tmp_path):
    """Two nodes agree on the checkpoint; a reload from safetensors changes the format under way."""
    from raywl.writing import convert

    whole = tensors_of(torch)
    turned = whole["embed.weight"].t().contiguous().t()
    shards = {
        "pytorch_model-00001-of-00002.bin": {"embed.weight": turned},
        "pytorch_model-00002-of-00002.bin": {"norm.weight": whole["norm.weight"], "step": torch.tensor(3)},
    }
    folder = save_sharded(shards, tmp_path / "in")
    torch.save({"state": 1}, folder / "optimizer.pt")
    with pytest.warns(UserWarning, match="no place on any rank"):
        group = raywl.launch(folder, Model, tp_size=4, shards=SHARDS, timeout_s=100.0)
    with group:
        assert group.report.identity == raywl.open_checkpoint(folder).identity
        assert group.report.unexpected == ["step"]
        assert all(any("a trainer's state" in note for note in rank.notes) for rank in group.report.ranks)
        assert rows_of(group) == whole["embed.weight"].tolist()
        convert(folder, tmp_path / "out")
        group.reload(tmp_path / "out")
        assert rows_of(group) == whole["embed.weight"].tolist()


def rows_of(group) -> list[list[float]]:
    """The rows of all ranks, one after the other."""
    return torch.cat(group.run(lambda model: model.embed.weight.detach())).tolist()
