"""`RankGroup.reload` on ranks of two nodes: in place, on all of them or on none."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import raywl
from raywl.errors import (
    CheckpointError,
    ClusterError,
    CorruptFileError,
    MissingWeightsError,
    NodeLostError,
    NotFoundError,
    RaywlError,
    ShapeMismatchError,
    StagingTimeout,
)
from tests.cluster import models
from tests.cluster.conftest import connected, eventually, ray_cluster
from tests.cluster.models import Staged, Waiting, Whole, values
from tests.cluster.parts import SHARDS, is_gone

TIMEOUT_S = 60.0


def save(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def held(seed: int, *names: str) -> dict[str, torch.Tensor]:
    """Some of a checkpoint's tensors."""
    return {name: values(seed)[name] for name in names}


@pytest.fixture(scope="module")
def homes(tmp_path_factory):
    """Two nodes, each with a home folder of its own."""
    folders = [tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("two")]
    nodes = [{"num_cpus": 3, "env_vars": {"HOME": str(folder)}} for folder in folders]
    with ray_cluster(*nodes) as cluster, connected(cluster.address):
        yield folders


def start(ref, factory, **sizes):
    shards = SHARDS if "tp_size" in sizes else None
    return raywl.launch(ref, factory, placement="STRICT_SPREAD", shards=shards, timeout_s=TIMEOUT_S, **sizes)


@pytest.fixture(scope="module")
def whole(homes, tmp_path_factory):
    """A group of tp 2, one rank on each node, with the values of seed 0 at first."""
    folder = save(tmp_path_factory.mktemp("whole"), values(0))
    with start(folder, Whole, tp_size=2) as group:
        group.run(models.derive)
        yield group


@pytest.fixture(scope="module")
def staged(homes, tmp_path_factory):
    folder = save(tmp_path_factory.mktemp("staged"), held(0, "embed.weight", "head.weight"))
    with start(folder, Staged, pp_size=2) as group:
        yield group


def same(one, other) -> bool:
    """Bit for bit, at the same addresses, in the same processes."""
    return all(
        a["addresses"] == b["addresses"]
        and a["pid"] == b["pid"]
        and all(torch.equal(a["values"][name], b["values"][name]) for name in a["values"])
        for a, b in zip(one, other, strict=True)
    )


def refused(group, ref, kind: type[RaywlError], **arguments) -> RaywlError:
    """The error of a reload that leaves every rank as it was; the group goes on."""
    before, report = group.run(models.state), group.report
    start_s = time.monotonic()
    with pytest.raises(kind) as caught:
        group.reload(ref, timeout_s=TIMEOUT_S, **arguments)
    assert time.monotonic() - start_s < 30
    assert not caught.value.partly_loaded
    assert "partly" not in str(caught.value)
    assert same(group.run(models.state), before)
    assert group.report is report
    return caught.value


def test_in_place(whole, tmp_path):
    """Twice: same processes and addresses, new values on every rank, what loaders compute and rebind too."""
    before = whole.run(models.state)
    for seed in (1, 2):
        new = values(seed)
        report = whole.reload(save(tmp_path / str(seed), new), timeout_s=TIMEOUT_S)
        after = whole.run(models.state)
        assert [rank["addresses"] for rank in after] == [rank["addresses"] for rank in before]
        assert [rank["pid"] for rank in after] == [rank["pid"] for rank in before]
        embed = torch.cat([rank["values"]["embed.weight"] for rank in after])
        assert torch.equal(embed, new["embed.weight"])
        for rank in after:
            assert torch.equal(rank["values"]["norm.weight"], new["norm.weight"])
            assert torch.equal(rank["values"]["gain.weight"], new["gain.weight"] * 2)
            assert torch.equal(rank["part"], new["gain.weight"][1:3] * 2)
        assert whole.report is report
        assert report.ref == str(tmp_path / str(seed))
        assert report.identity == raywl.open_checkpoint(tmp_path / str(seed)).identity
        assert [rank.context.rank for rank in report.ranks] == [0, 1]
        assert len({rank.node for rank in report.ranks}) == 2
        assert all(rank.restored == ["gain.weight"] for rank in report.ranks)
        assert all(rank.bytes_read for rank in report.ranks)
        assert {"open", "check", "write"} <= set(report.phases)
        assert report.unexpected == []


@pytest.mark.parametrize(
    ("change", "kind", "told"),
    [
        ({"head.weight": None}, MissingWeightsError, "head.weight"),
        ({"gain.weight": None}, MissingWeightsError, "gain.weight"),
        ({"head.weight": torch.zeros(3, 4)}, ShapeMismatchError, "head.weight"),
        ({"embed.weight": torch.zeros(6, 4)}, ShapeMismatchError, "embed.weight"),
        ({"gain.weight": torch.zeros(5)}, ShapeMismatchError, "gain.weight"),
        ({"norm.weight": torch.zeros(3, dtype=torch.complex64)}, CheckpointError, "norm.weight"),
    ],
    ids=["lacking", "lacking computed", "shape", "cut", "computed shape", "dtype"],
)
def test_another_architecture(whole, tmp_path, change, kind, told):
    """The right class, with rank, node and tensor."""
    new = {name: tensor for name, tensor in {**values(5), **change}.items() if tensor is not None}
    error = refused(whole, save(tmp_path, new), kind)
    assert told in str(error)
    assert str(error.where).startswith("rank ")
    assert "on node" in str(error.where)


def test_damaged_or_absent(whole, homes, tmp_path):
    """A file that is cut, a path that is nowhere or on one node only, other files on each, wrong words."""
    good = save(tmp_path / "good", values(6))
    cut = shutil.copytree(good, tmp_path / "cut") / "model.safetensors"
    cut.write_bytes(cut.read_bytes()[:-1])
    error = refused(whole, tmp_path / "cut", CorruptFileError)
    assert "node" in str(error.where)
    assert "any of 2 nodes" in str(refused(whole, tmp_path / "none", NotFoundError))
    save(homes[0] / "half", values(6))
    assert "on 1 of 2 nodes" in str(refused(whole, "~/half", NotFoundError))
    save(homes[0] / "other", values(6))
    save(homes[1] / "other", {**values(6), "more": torch.zeros(1)})
    assert "not the same checkpoint" in str(refused(whole, "~/other", CheckpointError))
    with pytest.raises(ValueError, match="revision"):
        whole.reload(good, revision="x")
    with pytest.raises(ValueError, match="timeout_s"):
        whole.reload(good, timeout_s=0)
    assert len(whole.run(models.state)) == 2


def test_only_one_rank_has_a_place_for_what_is_wrong(staged, tmp_path):
    """Of two stages the second can't take it: the first is left as it was as well, and says so."""
    new = held(7, "embed.weight", "head.weight")
    for number, (change, kind) in enumerate(
        [
            ({"head.weight": torch.zeros(3, 4)}, ShapeMismatchError),
            ({"head.weight": torch.zeros(2, 4, dtype=torch.complex64)}, CheckpointError),
            ({"head.weight": None}, MissingWeightsError),
        ]
    ):
        tensors = {name: tensor for name, tensor in {**new, **change}.items() if tensor is not None}
        error = refused(staged, save(tmp_path / str(number), tensors), kind)
        assert str(error.where).startswith("rank 1 on node")
    staged.reload(save(tmp_path / "good", new))
    first, second = staged.run(models.state)
    assert torch.equal(first["values"]["embed.weight"], new["embed.weight"])
    assert torch.equal(second["values"]["head.weight"], new["head.weight"])


def test_what_no_rank_has_a_place_for(staged, tmp_path):
    """It is in the report and warned of once; what one of the stages has isn't."""
    new = held(8, "embed.weight", "head.weight")
    with pytest.warns(UserWarning, match="no place on any rank: .*more") as caught:
        report = staged.reload(save(tmp_path, {**new, "more": torch.zeros(1)}))
    assert len(caught) == 1
    assert report.unexpected == ["more"]


def test_run_waits_for_a_reload(whole, tmp_path):
    """And a reload for a run that is under way; neither fails the other."""
    new = values(9)
    folder, file = save(tmp_path / "new", new), tmp_path / "go"
    results: dict[str, object] = {}

    def keep(name, function):
        try:
            results[name] = function()
        except BaseException as error:
            results[name] = error

    running = threading.Thread(target=keep, args=("slow", lambda: whole.run(models.slow, str(file))))
    running.start()
    eventually(lambda: Path(f"{file}.running").exists(), 30.0, "the function runs")
    reloading = threading.Thread(target=keep, args=("reload", lambda: whole.reload(folder)))
    reloading.start()
    eventually(lambda: whole._submitting.locked(), 30.0, "the reload has begun")
    waiting = [threading.Thread(target=keep, args=(i, lambda: whole.run(models.state))) for i in range(3)]
    for thread in waiting:
        thread.start()
    file.touch()
    for thread in (running, reloading, *waiting):
        thread.join(60)
        assert not thread.is_alive()
    assert results["slow"] == [rank["pid"] for rank in whole.run(models.state)]
    assert results["reload"] is whole.report
    for index in range(3):
        embed = torch.cat([rank["values"]["embed.weight"] for rank in results[index]])
        assert torch.equal(embed, new["embed.weight"])


def test_a_rank_is_killed_while_it_reloads(homes, tmp_path):
    """Named, within seconds, and the group is over; nothing is left, and a new launch works."""
    import ray

    file = str(tmp_path / "wait")
    first, second = (save(tmp_path / str(seed), held(seed, "embed.weight", "norm.weight")) for seed in (1, 2))
    launched = {}

    def launch_it():
        return start(first, partial(Waiting, file=file), tp_size=2, strict=True)

    free = ray.available_resources().get("CPU")
    with launch_it() as group:
        launched["pids"] = [rank["pid"] for rank in group.run(models.state)]
        Path(file).touch()
        told: list[BaseException] = []

        def reload():
            try:
                group.reload(second)
            except BaseException as error:
                told.append(error)

        thread = threading.Thread(target=reload)
        thread.start()
        eventually(lambda: Path(f"{file}.reached").exists(), 60.0, "the last rank writes")
        os.kill(launched["pids"][1], signal.SIGKILL)
        start_s = time.monotonic()
        thread.join(30)
        assert time.monotonic() - start_s < 20
        (error,) = told
        assert isinstance(error, NodeLostError)
        assert error.rank == 1
        assert error.partly_loaded
        with pytest.raises(NodeLostError, match="launch again"):
            group.reload(second)
        with pytest.raises(NodeLostError, match="launch again"):
            group.run(models.state)
    eventually(lambda: all(is_gone(pid) for pid in launched["pids"]), 10.0, "the ranks end")
    eventually(lambda: ray.available_resources().get("CPU") == free, 20.0, "the CPUs are free")
    Path(file).unlink()
    with launch_it() as group:
        group.reload(second)
        embed = torch.cat([rank["values"]["embed.weight"] for rank in group.run(models.state)])
        assert torch.equal(embed, values(2)["embed.weight"])


def test_a_reload_that_runs_out_of_time(homes, tmp_path):
    """It says who was not done, that ranks may be written to, and later calls aren't caught unawares."""
    file = str(tmp_path / "wait")
    first, second = (save(tmp_path / str(seed), held(seed, "embed.weight", "norm.weight")) for seed in (1, 2))
    with start(first, partial(Waiting, file=file), tp_size=2) as group:
        Path(file).touch()
        with pytest.raises(StagingTimeout, match="rank 1 on node") as caught:
            group.reload(second, timeout_s=8.0)
        assert caught.value.partly_loaded
        with pytest.raises(ClusterError, match="still running: rank 1 on node"):
            group.run(models.state)


def test_a_group_that_is_shut_down(homes, tmp_path):
    folder = save(tmp_path, values(1))
    group = start(folder, Whole, tp_size=2)
    group.shutdown()
    with pytest.raises(ClusterError, match="shut down"):
        group.reload(folder)
