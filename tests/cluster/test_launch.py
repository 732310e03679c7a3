"""`launch` on two real nodes: ranks in order, right bytes, one report, results back."""

from __future__ import annotations

import json
import pickle
import time

import pytest
import torch

import raywl
from raywl.errors import MissingWeightsError
from tests.cluster.conftest import eventually
from tests.cluster.parts import SHARDS, Model, Stage, facts, is_gone, pid_of, tensors_of

pytestmark = pytest.mark.usefixtures("driver")


def test_four_ranks_on_two_nodes(checkpoint):
    """Each rank has its own rows, its context, a place beside its neighbour, and a way to the others."""
    import ray
    from ray.util.placement_group import placement_group_table

    whole = tensors_of(torch)
    seen: list[tuple[int, int, str]] = []
    with raywl.launch(
        checkpoint,
        Model,
        tp_size=4,
        shards=SHARDS,
        timeout_s=100.0,
        progress=lambda *step: seen.append(step),
    ) as group:
        ranks = group.run(facts)
        assert [rank["context"].rank for rank in ranks] == [0, 1, 2, 3]
        assert [rank["context"].tp_rank for rank in ranks] == [0, 1, 2, 3]
        assert [rank["context"].local_rank for rank in ranks] == [0, 1, 0, 1]
        assert {rank["context"].local_size for rank in ranks} == {2}
        assert ranks[0]["node_id"] == ranks[1]["node_id"] != ranks[2]["node_id"] == ranks[3]["node_id"]
        assert not any(rank["cuda"] for rank in ranks)
        for index, rank in enumerate(ranks):
            assert torch.equal(rank["embed"], whole["embed.weight"][2 * index : 2 * index + 2])
            assert torch.equal(rank["norm"], whole["norm.weight"])
            assert rank["total"] == float(whole["embed.weight"].sum())

        report = group.report
        assert report.identity == raywl.open_checkpoint(checkpoint).identity
        assert [rank.bytes_loaded for rank in report.ranks] == [2 * 4 * 4 + 6] * 4
        assert sorted(report.loaded) == sorted(whole)
        assert (report.missing, report.unexpected) == ([], [])
        assert len({rank.node for rank in report.ranks}) == 2
        assert set(report.phases) >= {"connect", "place", "open", "load"}
        json.dumps(report.to_dict())
        assert seen[-1][0] == seen[-1][1] == report.bytes_read

        status = group.status()
        json.dumps(status)
        assert status["alive"]
        assert [rank["pid"] for rank in status["ranks"]] == [rank["pid"] for rank in ranks]
        assert [agent["alive"] for agent in status["agents"]] == [True, True]
        (lease,) = status["coordinator"]["leases"]
        assert lease["resource"] == f"group/{status['name']}"
        assert "4 ranks" in repr(group)
    assert "shut down" in repr(group)
    assert not group.status()["alive"]
    for rank in ranks:
        eventually(lambda pid=rank["pid"]: is_gone(pid), 10.0, "a rank's process ends")
    assert all(entry["state"] == "REMOVED" for entry in placement_group_table().values())
    eventually(lambda: ray.available_resources().get("CPU") == 4.0, 10.0, "all CPUs are free")
    group.shutdown()
    with pytest.raises(raywl.errors.ClusterError, match="shut down"):
        group.run(pid_of)


def test_results_of_any_type_come_back(checkpoint):
    """fp8 as well, which Ray's own way of sending tensors doesn't take; arguments go the other way."""
    dtypes = [torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.bfloat16, torch.uint16, torch.float32]
    scale = 2.0
    with raywl.launch(checkpoint, lambda context: Model(context), num_cpus_per_rank=0.5) as group:
        ((tensors, told),) = group.run(
            lambda model, x, *, y: ([torch.ones(2, 3).to(dtype) for dtype in dtypes], (x * scale, y)),
            2,
            y="z",
        )
        assert [tensor.dtype for tensor in tensors] == dtypes
        assert all(torch.equal(tensor.float(), torch.ones(2, 3)) for tensor in tensors)
        assert told == (4.0, "z")
        assert group.run(lambda model: torch.distributed.is_initialized()) == [False]


def test_stages_and_replicas(checkpoint):
    """What no stage has a place for is unexpected, once; what another stage has is not."""
    with pytest.warns(UserWarning, match="no place on any rank") as warned:
        group = raywl.launch(
            checkpoint, Stage, pp_size=2, replicas=2, strict=False, init_distributed=True, timeout_s=100.0
        )
    with group:
        contexts = group.run(lambda model: raywl.current_context())
        worlds = group.run(lambda model: (torch.distributed.get_rank(), torch.distributed.get_world_size()))
    assert [context.pp_rank for context in contexts] == [0, 1, 0, 1]
    assert worlds == [(0, 2), (1, 2), (0, 2), (1, 2)]
    assert group.report.unexpected == ["norm.weight"]
    assert sum("no place on any rank" in str(warning.message) for warning in warned) == 1
    assert group.report.ranks[1].skipped.keys() >= {"embed.weight"}


def test_exact_holds_for_the_group(checkpoint):
    """`strict="exact"`: a name that no stage has a place for is an error."""

    def first_stage_only(context: raywl.ParallelContext) -> torch.nn.Module:
        return Stage(context) if context.pp_rank == 0 else torch.nn.Module()

    with pytest.raises(MissingWeightsError, match=r"no place on any rank: norm\.weight") as caught:
        raywl.launch(checkpoint, first_stage_only, pp_size=2, strict="exact", timeout_s=100.0)
    assert caught.value.names == ("norm.weight",)
    assert pickle.loads(pickle.dumps(caught.value)).names == ("norm.weight",)


def test_groups_are_independent(checkpoint):
    """Ending one, helpers included, takes nothing from another."""
    with raywl.launch(checkpoint, Model) as first:
        second = raywl.launch(checkpoint, Model)
        second.shutdown(agents=True)
        assert first.run(pid_of) == [first.status()["ranks"][0]["pid"]]
        assert all(agent["alive"] for agent in first.status()["agents"])
        assert first.status()["coordinator"] is not None


def test_relative_paths_count_from_the_driver(checkpoint, tmp_path, monkeypatch):
    """The ranks' own working folders mean nothing to the user."""
    (tmp_path / "here").symlink_to(checkpoint)
    monkeypatch.chdir(tmp_path)
    with raywl.launch("here", Model) as group:
        assert group.report.ref == str(tmp_path / "here")


def test_a_second_launch_finds_the_helpers(checkpoint):
    """Same agents and coordinator, not new ones."""
    from ray.util import list_named_actors

    def helpers() -> list[str]:
        return sorted(actor["name"] for actor in list_named_actors(all_namespaces=True))

    with raywl.launch(checkpoint, Model):
        first = helpers()
    start_s = time.monotonic()
    with raywl.launch(checkpoint, Model):
        assert set(first) <= set(helpers())
        assert len([name for name in helpers() if "coordinator" in name]) == 1
    assert time.monotonic() - start_s < 60
