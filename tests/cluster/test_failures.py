"""How a launch and a run fail: the right class with rank, node and numbers, soon, and nothing left."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

import raywl
from raywl.actors import raycalls
from raywl.errors import (
    CapacityError,
    ClusterError,
    CorruptFileError,
    MissingWeightsError,
    NodeLostError,
    NotFoundError,
    ShapeMismatchError,
    StagingTimeout,
)
from tests.cluster import parts
from tests.cluster.conftest import eventually
from tests.cluster.parts import SHARDS, Model

TIMEOUT_S = 60.0


@pytest.fixture(autouse=True)
def nothing_left(driver):
    """After each test no rank lives and every CPU is free."""
    import ray
    from ray.util.placement_group import placement_group_table

    yield
    assert all(entry["state"] == "REMOVED" for entry in placement_group_table().values())
    eventually(lambda: ray.available_resources().get("CPU") == 4.0, 10.0, "all CPUs are free")


def launch_two(checkpoint, factory=Model, timeout_s=TIMEOUT_S, **arguments):
    return raywl.launch(checkpoint, factory, tp_size=2, shards=SHARDS, timeout_s=timeout_s, **arguments)


def test_a_factory_that_raises_on_one_rank(checkpoint):
    """Rank, node, class and text arrive though the other rank waits in a collective; then all works."""
    with pytest.raises(ClusterError) as caught:
        launch_two(checkpoint, parts.fails_on_last)
    error = caught.value
    assert type(error) is ClusterError
    assert error.rank == 1
    assert error.node
    assert str(error).startswith(f"[rank 1 on node {error.node}] model_factory raised KeyError: ")
    assert "no such layer: 17" in str(error)
    assert any("fails_on_last" in note and "Traceback" in note for note in error.__notes__)
    with launch_two(checkpoint) as group:
        assert len(group.run(parts.pid_of)) == 2


def test_a_rank_that_is_killed_while_loading(checkpoint):
    """C52: kill -9: the rank, its node and what it was loading are named, soon, and it is no timeout."""
    start_s = time.monotonic()
    with pytest.raises(NodeLostError) as caught:
        launch_two(checkpoint, parts.dies_on_last)
    assert caught.value.rank == 1
    assert f"while loading {checkpoint}" in str(caught.value)
    assert "rank 1 on node" in str(caught.value)
    assert time.monotonic() - start_s < 30


def test_a_rank_that_is_killed_while_running(checkpoint):
    """The call ends with the rank's name, and so does every later one, without touching the live rank."""
    with launch_two(checkpoint) as group:
        start_s = time.monotonic()
        with pytest.raises(NodeLostError, match="rank 1 on node"):
            group.run(parts.die_on_last)
        assert time.monotonic() - start_s < 15
        with pytest.raises(NodeLostError, match="launch again") as caught:
            group.run(parts.pid_of)
        assert caught.value.rank == 1
        status = group.status()
        assert not status["alive"]
        assert [rank["alive"] for rank in status["ranks"]] == [True, False]


def test_an_idle_rank_that_is_killed(checkpoint):
    """The next call notices."""
    with launch_two(checkpoint) as group:
        pids = group.run(parts.pid_of)
        os.kill(pids[0], signal.SIGKILL)
        with pytest.raises(NodeLostError, match="rank 0 on node"):
            group.run(parts.facts)


def test_a_function_that_raises_on_one_rank(checkpoint, monkeypatch):
    """The caller isn't kept by the ranks that still wait; a rank that is stuck is named at the next call."""
    monkeypatch.setattr("raywl.actors.group._ANSWER_S", 1.0)
    with launch_two(checkpoint) as group:
        start_s = time.monotonic()
        with pytest.raises(
            ClusterError, match=r"\[rank 1 on node .*\] fail_on_last raised ValueError: not today"
        ):
            group.run(parts.fail_on_last)
        assert time.monotonic() - start_s < 10
        with pytest.raises(ClusterError, match="still running: rank 0 on node"):
            group.run(parts.pid_of)


def test_a_function_that_raises_everywhere_leaves_the_group_usable(checkpoint):
    """raywl's own errors keep their class; odd ones that can't be read are told by text."""
    with launch_two(checkpoint) as group:

        def corrupt(model: torch.nn.Module) -> None:
            raise CorruptFileError("/x/model.safetensors", "a.b", "header of 0 bytes")

        with pytest.raises(CorruptFileError, match=r"/x/model\.safetensors: tensor 'a\.b'") as caught:
            group.run(corrupt)
        assert caught.value.where.startswith(("rank 0 on node", "rank 1 on node"))
        with pytest.raises(ClusterError, match="Unreadable: this and that"):
            group.run(parts.raises_unreadable)
        with pytest.raises(ClusterError, match="sending the result"):
            group.run(lambda model: threading.Lock())
        assert len(group.run(parts.pid_of)) == 2


def test_what_the_model_lacks_and_what_it_has_too_much(checkpoint):
    """`load_into`'s errors of one rank, with the rank."""
    with pytest.raises(MissingWeightsError) as caught:
        launch_two(checkpoint, parts.too_much)
    assert caught.value.names == ("extra.weight",)
    assert str(caught.value).startswith("[rank 1 on node")
    with pytest.raises(ShapeMismatchError) as caught:
        raywl.launch(checkpoint, Model, tp_size=2, timeout_s=TIMEOUT_S)
    assert caught.value.tensor == "embed.weight"
    assert "on node" in str(caught.value)


def test_a_damaged_file(checkpoint, tmp_path):
    """It is found by the agent, before any model is built; file and node are named."""
    shutil.copytree(checkpoint, tmp_path / "cut")
    file = tmp_path / "cut" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CorruptFileError, match=r"model\.safetensors") as caught:
        launch_two(str(tmp_path / "cut"), parts.never_ends)
    assert caught.value.where.startswith("node ")


def test_a_checkpoint_that_is_nowhere(tmp_path):
    """All nodes lack it: that is said of the path, not of a rank."""
    with pytest.raises(NotFoundError) as caught:
        raywl.launch(tmp_path / "none", Model, tp_size=4, placement="SPREAD", timeout_s=TIMEOUT_S)
    assert caught.value.local
    assert "any of 2 nodes" in str(caught.value)
    assert str(tmp_path / "none") in str(caught.value)


def test_what_a_factory_must_return(checkpoint):
    """Not a module: the type is named."""
    with pytest.raises(ClusterError, match=r"returned str, not a torch\.nn\.Module"):
        raywl.launch(checkpoint, parts.no_module, timeout_s=TIMEOUT_S)
    with pytest.raises(ClusterError, match="Unreadable: this and that"):
        raywl.launch(checkpoint, parts.raises_unreadable, timeout_s=TIMEOUT_S)


def test_the_deadline_says_what_was_waited_for(checkpoint):
    """Phase and rank; the rank that waits for ever is ended."""
    start_s = time.monotonic()
    with pytest.raises(StagingTimeout) as caught:
        launch_two(checkpoint, parts.never_ends, timeout_s=20.0)
    assert time.monotonic() - start_s < 40
    assert "20 s" in str(caught.value)
    assert "rank 1 on node" in str(caught.value)
    assert "rank 0 on node" not in str(caught.value)
    assert isinstance(caught.value, TimeoutError)


def test_too_few_cpus_and_gpus(checkpoint, monkeypatch):
    """The numbers, after a bounded wait."""
    monkeypatch.setattr(raycalls, "_JOINING_NODES_S", 1.0)
    with pytest.raises(CapacityError) as caught:
        raywl.launch(checkpoint, Model, tp_size=8, timeout_s=TIMEOUT_S)
    assert (caught.value.resource, caught.value.needed, caught.value.available) == ("CPUs", 8.0, 4.0)
    with pytest.raises(CapacityError) as caught:
        raywl.launch(checkpoint, Model, tp_size=2, num_gpus_per_rank=0.5, timeout_s=TIMEOUT_S)
    assert (caught.value.resource, caught.value.needed, caught.value.available) == ("GPUs", 1.0, 0.0)
    with pytest.raises(CapacityError, match="on one node"):
        raywl.launch(checkpoint, Model, num_cpus_per_rank=3, timeout_s=TIMEOUT_S)


def test_cpus_that_are_in_use(checkpoint, monkeypatch):
    """Another job holds them: said so, with what is free."""
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    monkeypatch.setattr(raycalls, "_BUSY_CLUSTER_S", 1.0)
    other = placement_group([{"CPU": 1}] * 3)
    ray.get(other.ready(), timeout=20)
    try:
        with pytest.raises(CapacityError, match="in use") as caught:
            launch_two(checkpoint)
        assert (caught.value.needed, caught.value.available) == (2.0, 1.0)
    finally:
        remove_placement_group(other)


def test_wrong_usage_starts_nothing(checkpoint):
    """Checked before any actor is made."""
    import ray

    for arguments, text in [
        ({"tp_size": 2, "ep_size": 3}, "ep_size 3 does not divide"),
        ({"tp_size": 0}, "tp_size must be at least 1"),
        ({"replicas": 0}, "replicas"),
        ({"stage_mode": "memory"}, "stage_mode"),
        ({"placement": "NEAR"}, "PACK"),
        ({"init_distributed": "yes"}, "init_distributed"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"num_cpus_per_rank": 0}, "num_cpus_per_rank"),
    ]:
        with pytest.raises(ValueError, match=text):
            raywl.launch(checkpoint, Model, **arguments)
    for name in ("parallel", "plan"):
        with pytest.raises(TypeError, match=name):
            raywl.launch(checkpoint, Model, **{name: None})
    lock = threading.Lock()
    with pytest.raises(TypeError, match="pickle"):
        raywl.launch(checkpoint, lambda context: lock)
    eventually(lambda: ray.available_resources().get("CPU") == 4.0, 10.0, "all CPUs are free")
    assert Path(checkpoint).is_dir()
