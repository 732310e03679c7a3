"""The page cache of a node is filled once, whatever number of its ranks want the same bytes."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

import raywl
from raywl.node import page_cache
from tests.cluster.conftest import eventually

pytestmark = pytest.mark.usefixtures("driver")

ROWS, COLUMNS = 1024, 2048


@pytest.fixture(scope="module")
def strided(tmp_path_factory):
    """Two matrices of 8 MiB that are cut along dim 1: every rank wants the pages of every row."""
    folder = tmp_path_factory.mktemp("strided")
    torch.manual_seed(0)
    for index in (1, 2):
        tensors = {f"w{index}": torch.randn(ROWS, COLUMNS)}
        save_file(tensors, folder / f"model-0000{index}-of-00002.safetensors")
    return str(folder)


def _factory(context):
    import torch

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            for name in ("w1", "w2"):
                shape = (ROWS, COLUMNS // context.tp_size)
                setattr(self, name, torch.nn.Parameter(torch.empty(shape, device="meta")))

    return Model()


def _warmed(group):
    import ray

    from raywl.actors.names import NAMESPACE, agent_name

    nodes = {rank["node_id"] for rank in group.status()["ranks"]}
    agents = [ray.get_actor(agent_name(node), namespace=NAMESPACE) for node in nodes]
    return [
        done
        for answer in ray.get([a.warmed.remote() for a in agents], timeout=30)
        for done in answer.values()
    ]


def test_each_byte_is_read_once_for_all_ranks_of_a_node(strided):
    """Two ranks ask for all pages of both files; the agent reads them once, and all are resident."""
    files = raywl.open_checkpoint(strided)
    for file in files.files:
        page_cache.drop(files.path(file.name))
    with raywl.launch(
        strided,
        _factory,
        tp_size=2,
        shards={"*": raywl.Shard(1)},
        placement="STRICT_PACK",
        strategy="prefetch",
        timeout_s=100.0,
    ) as group:
        asked = sum(report.bytes_read for report in group.report.ranks)
        assert asked > 1.9 * files.nbytes
        eventually(
            lambda: sum(d["read_bytes"] for d in _warmed(group)) >= files.nbytes * 0.99, 60, "prefetch"
        )
        (done,) = _warmed(group)
        assert done["asked_bytes"] == asked
        assert done["read_bytes"] <= files.nbytes
        assert all("prefetch was asked for" in " ".join(r.notes) for r in group.report.ranks)
        parts = group.run(lambda model: model.w1.detach().clone())
    expected = dict(files.iter_weights(["w1"]))["w1"]
    assert torch.equal(torch.cat(parts, 1), expected)


def test_off_by_default_on_a_local_disk(strided):
    """Nothing is prefetched where nobody asked and the file system is no network one."""
    with raywl.launch(strided, _factory, tp_size=1, timeout_s=100.0) as group:
        assert _warmed(group) == []
        assert not any("prefetch" in note for report in group.report.ranks for note in report.notes)


def _resident(files):
    return sum(page_cache.resident_bytes(files.path(file.name)) for file in files.files)


@pytest.mark.parametrize("strategy", ["buffered", "prefetch"])
def test_pages_are_dropped_after_the_last_rank(strided, strategy):
    """Once all ranks have loaded, and after a reload; the report has the bytes, each counted once."""
    files = raywl.open_checkpoint(strided)
    size = sum(file.size for file in files.files)
    for file in files.files:
        page_cache.drop(files.path(file.name))
    if _resident(files):
        pytest.skip("this file system keeps its pages")
    with raywl.launch(
        strided,
        _factory,
        tp_size=2,
        shards={"*": raywl.Shard(1)},
        placement="STRICT_PACK",
        strategy=strategy,
        release_page_cache=True,
        timeout_s=100.0,
    ) as group:
        assert _resident(files) == 0
        assert group.report.released_bytes == group.report.to_dict()["released_bytes"] == size
        assert "release" in group.report.phases
        report = group.reload(strided)
        assert _resident(files) == 0
        assert report.released_bytes == size


def test_pages_stay_when_nobody_asked(strided):
    files = raywl.open_checkpoint(strided)
    with raywl.launch(strided, _factory, tp_size=1, timeout_s=100.0) as group:
        assert group.report.released_bytes == 0
        assert not any("page cache" in note for note in group.report.notes)
    assert _resident(files) == sum(file.size for file in files.files)
