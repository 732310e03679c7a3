"""`raywl.stage` on real nodes with caches of their own: S3 on loopback, and what goes wrong there."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save

import raywl
from raywl.errors import CapacityError, RaywlError, SourceError
from tests.cluster.conftest import connected, eventually, ray_cluster
from tests.cluster.parts import is_gone
from tests.s3_server import KEY, SECRET, S3Server
from tests.web_server import WebServer

MIB = 1 << 20
STORE_BYTES = 200 * MIB
KEYS = {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_DEFAULT_REGION": "us-east-1"}


def weights(seed: int, num_files: int = 3, file_bytes: int = 8 * MIB) -> dict[str, bytes]:
    """A checkpoint's files; no two bytes of it are likely to be taken for each other's."""
    random = np.random.default_rng(seed)
    files = {"config.json": b"{}"}
    for number in range(1, num_files + 1):
        rows = torch.from_numpy(random.integers(0, 256, (64, file_bytes // 64), dtype=np.uint8))
        files[f"model-{number:05d}-of-{num_files:05d}.safetensors"] = save({f"w{number}": rows})
    return files


@pytest.fixture(scope="module")
def s3():
    with S3Server() as server:
        yield server


@pytest.fixture(scope="module")
def caches(tmp_path_factory, s3):
    """Three nodes with a cache each; nothing of AWS is set on them."""
    folders = [tmp_path_factory.mktemp(f"node{number}") for number in range(3)]
    nodes = [
        {"num_cpus": 1, "object_store_memory": STORE_BYTES, "env_vars": {"RAYWL_CACHE": str(folder)}}
        for folder in folders
    ]
    with ray_cluster(*nodes) as cluster, connected(cluster.address):
        yield cluster, folders


@pytest.fixture
def store(s3, caches, monkeypatch, tmp_path):
    """The server, as the driver's environment has it; its own cache stays empty."""
    for name, value in {**KEYS, "AWS_ENDPOINT_URL": s3.url, "RAYWL_CACHE": str(tmp_path / "driver")}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("RAYWL_RETRIES", "1")
    monkeypatch.setenv("RAYWL_STALL_S", "5")
    s3.mend()
    yield s3
    s3.mend()
    assert not list((tmp_path / "driver").rglob("*.safetensors"))


def put(s3: S3Server, name: str, files: dict[str, bytes]) -> str:
    return s3.add("bucket", files, f"{name}/")


def files_on(folder: Path, name: str) -> dict[str, bytes]:
    """What a node has of a checkpoint under its final names."""
    found = folder.glob(f"stores/s3--bucket-{name}-*/snapshots/*/*")
    return {path.name: path.read_bytes() for path in found}


def left_over(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if "incomplete" in path.name or path.name.startswith("stage-")]


def agent_of(node_id: str) -> tuple[object, int]:
    """A node's agent: its handle and process."""
    import ray

    from raywl.actors.names import NAMESPACE, agent_name

    handle = ray.get_actor(agent_name(node_id), namespace=NAMESPACE)
    return handle, ray.get(handle.__ray_call__.remote(lambda self: os.getpid()), timeout=30)


def agents() -> dict[str, tuple[object, int]]:
    """By node id, of all nodes."""
    import ray

    return {node["NodeID"]: agent_of(node["NodeID"]) for node in ray.nodes() if node["Alive"]}


class InBackground:
    """A staging in a thread."""

    def __init__(self, ref: str, **arguments) -> None:
        self.result: object = None
        self.seen: list[tuple[int, int, str]] = []
        arguments.setdefault("timeout_s", 120.0)
        self._thread = threading.Thread(target=self._run, args=(ref, arguments), daemon=True)
        self._thread.start()

    def _run(self, ref, arguments):
        try:
            self.result = raywl.stage(ref, progress=lambda *told: self.seen.append(told), **arguments)
        except BaseException as error:
            self.result = error

    def wait(self, timeout_s=150.0):
        self._thread.join(timeout_s)
        assert not self._thread.is_alive()
        if isinstance(self.result, BaseException):
            raise self.result
        return self.result

    def has_bytes(self, at_least):
        return lambda: self.result is not None or (self.seen and self.seen[-1][0] >= at_least)


def test_a_checkpoint_reaches_every_node(store, caches):
    """Bit for bit; the source sends each byte once, no node more than the checkpoint; then nothing moves."""
    _, folders = caches
    files = weights(1)
    nbytes = sum(map(len, files.values()))
    ref = put(store, "once", files)
    seen = []
    report = raywl.stage(ref, timeout_s=120.0, progress=lambda *told: seen.append(told))
    assert [node.state for node in report.nodes] == ["finished"] * 3
    assert all(files_on(folder, "once") == files for folder in folders)
    assert not [path for folder in folders for path in left_over(folder)]
    assert store.num_bytes("/bucket/once/*") <= 1.02 * nbytes
    assert report.bytes_from_source <= 1.02 * nbytes
    assert report.bytes_between_nodes == pytest.approx(2 * nbytes, rel=0.02)
    assert max(node.sent_bytes for node in report.nodes) <= 1.05 * nbytes
    assert max(node.peak_store_bytes for node in report.nodes) <= STORE_BYTES // 5
    assert report.nbytes == nbytes
    assert seen[-1] == (3 * nbytes, 3 * nbytes, "stage")
    assert report.identity.startswith("s3:")
    store.forget()
    again = raywl.stage(ref, timeout_s=60.0)
    assert (again.bytes_from_source, again.bytes_between_nodes) == (0, 0)
    assert store.num_bytes("/bucket/once/*") == 0
    assert again.identity == report.identity


def test_one_node_has_it_already(store, caches):
    """The source isn't asked for data; that node's link carries each byte once."""
    import ray

    _, folders = caches
    files = weights(2)
    nbytes = sum(map(len, files.values()))
    ref = put(store, "warm", files)
    head = ray.get_runtime_context().get_node_id()
    raywl.stage(ref, nodes=[head], timeout_s=60.0)
    store.forget()
    report = raywl.stage(ref, timeout_s=60.0)
    assert store.num_bytes("/bucket/warm/*") == 0
    assert all(files_on(folder, "warm") == files for folder in folders)
    (first,) = [node for node in report.nodes if node.node_id == head]
    assert first.sent_bytes <= 1.05 * nbytes


def test_a_source_without_ranges(caches, monkeypatch):
    """A web server that gives files only whole: to one node, once; the others get them from there."""
    _, folders = caches
    monkeypatch.setenv("no_proxy", "*")
    files = weights(15, num_files=2, file_bytes=4 * MIB)
    with WebServer() as web:
        web.has_ranges = False
        web.files |= {f"m/{name}": data for name, data in files.items()}
        seen: list[tuple[int, int, str]] = []
        report = raywl.stage(f"{web.url}/m", timeout_s=60.0, progress=lambda *told: seen.append(told))
        nbytes = sum(map(len, files.values()))
        # That node's look at the header, which is broken off, and the file; nothing of the other nodes.
        assert Counter(r.path for r in web.requests if "model" in r.path and r.range is None) == {
            f"/m/{name}": 2 for name in files if "model" in name
        }
    assert report.bytes_between_nodes == 2 * nbytes
    assert nbytes * 0.9 <= report.bytes_from_source <= nbytes
    assert any("gives no parts of files" in note for note in report.notes)
    assert seen[-1] == (3 * nbytes, 3 * nbytes, "stage")
    for folder in folders:
        found = {path.name: path.read_bytes() for path in folder.glob("stores/http--*/snapshots/*/*")}
        assert found == files


def test_usage(store):
    """Known before anything is moved."""
    with pytest.raises(ValueError, match="mode must be"):
        raywl.stage("s3://bucket/x", mode="memory")
    with pytest.raises(ValueError, match="no live node is 'nowhere'"):
        raywl.stage("s3://bucket/x", nodes=["nowhere"])
    with pytest.raises(TypeError, match="colour"):
        raywl.stage("s3://bucket/x", colour="red")
    with pytest.raises(SourceError, match="none"):
        raywl.stage("s3://bucket/none", timeout_s=60.0)


def test_launch_stages_by_itself(store, caches):
    """Two ranks on two nodes: the report has the bytes, each counted once; progress is that of all."""
    from tests.cluster.parts import COLUMNS, ROWS, SHARDS, Model, tensors_of

    data = save(tensors_of(torch))
    ref = put(store, "launched", {"model.safetensors": data})
    seen: list[tuple[int, int, str]] = []
    with raywl.launch(
        ref, Model, tp_size=2, shards=SHARDS, placement="STRICT_SPREAD", timeout_s=90.0, agent_idle_s=60.0,
        progress=lambda *told: seen.append(told),
    ) as group:  # fmt: skip
        parts = group.run(lambda model: model.embed.weight.detach().clone())
        assert torch.equal(torch.cat(parts), tensors_of(torch)["embed.weight"])
        assert torch.cat(parts).shape == (ROWS, COLUMNS)
        assert group.report.bytes_by_source["s3"] == store.num_bytes("/bucket/launched/*")
        # Of both nodes together, then of both ranks.
        phases = list(dict.fromkeys(phase for *_, phase in seen))
        assert phases == ["stage", "read"]
        ends = {phase: (done, total) for done, total, phase in seen}
        read = sum(report.bytes_read for report in group.report.ranks)
        assert ends == {"stage": (2 * len(data),) * 2, "read": (read, read)}


@pytest.mark.slow
def test_an_agent_is_killed(store, caches):
    """kill -9 in the middle of fetching: Ray starts it again, it goes on from its journal, the source sends
    hardly more."""
    _, folders = caches
    files = weights(3)
    nbytes = sum(map(len, files.values()))
    ref = put(store, "killed", files)
    held = store.fail("/bucket/killed/model-00003*", "hang", times=2, after_bytes=100_000)
    work = InBackground(ref)
    assert held.reached.wait(60)
    eventually(work.has_bytes(nbytes), 60, "a third of all bytes are there")
    _, pid = next(iter(agents().values()))
    os.kill(pid, 9)
    eventually(lambda: is_gone(pid), 20, "the agent is gone")
    store.mend()
    report = work.wait()
    assert [node.state for node in report.nodes] == ["finished"] * 3
    assert all(files_on(folder, "killed") == files for folder in folders)
    assert store.num_bytes("/bucket/killed/*") <= 1.35 * nbytes
    assert not [path for folder in folders for path in left_over(folder)]


@pytest.mark.slow
def test_an_agent_is_paused(store, caches):
    """For longer than its lease: others take over what it was fetching; when it comes back, it has to join
    again, and has the right files in the end."""
    import ray

    from raywl.actors.names import NAMESPACE, coordinator_name

    _, folders = caches
    files = weights(12)
    nbytes = sum(map(len, files.values()))
    ref = put(store, "paused", files)
    held = store.fail("/bucket/paused/model-00003*", "hang", times=6, after_bytes=100_000)
    work = InBackground(ref)
    assert held.reached.wait(60)
    eventually(work.has_bytes(nbytes), 60, "a third of all bytes are there")
    node_id, (_, pid) = next(iter(agents().items()))
    coordinator = ray.get_actor(coordinator_name(), namespace=NAMESPACE)

    def state_of_it() -> str:
        (run,) = [
            run
            for run in ray.get(coordinator.status.remote(), timeout=30)["stages"]
            if run["label"] == ref and run["state"] == "running"
        ]
        return next(node["state"] for node in run["nodes"] if node["node"] == node_id)

    assert state_of_it() == "working"
    os.kill(pid, signal.SIGSTOP)
    try:
        store.mend()
        eventually(lambda: state_of_it() == "absent", 60, "its lease is over")
    finally:
        os.kill(pid, signal.SIGCONT)
    report = work.wait()
    assert [node.state for node in report.nodes] == ["finished"] * 3
    assert all(files_on(folder, "paused") == files for folder in folders)
    assert store.num_bytes("/bucket/paused/*") <= 1.5 * nbytes


@pytest.mark.slow
def test_the_coordinator_is_killed(store, caches):
    """kill -9: what the agents say next is all that it needs; nothing is fetched again."""
    import ray

    from raywl.actors.names import NAMESPACE, coordinator_name

    _, folders = caches
    files = weights(4)
    nbytes = sum(map(len, files.values()))
    ref = put(store, "headless", files)
    held = store.fail("/bucket/headless/model-00003*", "hang", times=1, after_bytes=100_000)
    work = InBackground(ref)
    assert held.reached.wait(60)
    handle = ray.get_actor(coordinator_name(), namespace=NAMESPACE)
    pid = ray.get(handle.__ray_call__.remote(lambda self: os.getpid()), timeout=30)
    os.kill(pid, 9)
    eventually(lambda: is_gone(pid), 20, "the coordinator is gone")
    store.mend()
    report = work.wait()
    assert [node.state for node in report.nodes] == ["finished"] * 3
    assert all(files_on(folder, "headless") == files for folder in folders)
    assert store.num_bytes("/bucket/headless/*") <= 1.15 * nbytes


@contextlib.contextmanager
def more_nodes(cluster, *folders: Path):
    """Further nodes with these caches; their ids."""
    added = []
    try:
        for folder in folders:
            env = {"RAYWL_CACHE": str(folder)}
            added.append(cluster.add_node(num_cpus=1, object_store_memory=STORE_BYTES, env_vars=env))
        yield [node.node_id for node in added]
    finally:
        for node in added:
            cluster.remove_node(node)


@pytest.mark.slow
def test_a_node_comes_late(store, caches, tmp_path):
    """While others are at it: it takes part at once, and the source sends nothing twice."""
    cluster, folders = caches
    files = weights(16)
    nbytes = sum(map(len, files.values()))
    ref = put(store, "late", files)
    held = store.fail("/bucket/late/model-00003*", "hang", times=1, after_bytes=100_000)
    work = InBackground(ref)
    assert held.reached.wait(60)
    with more_nodes(cluster, tmp_path) as (late,):
        joined = InBackground(ref, nodes=[late])
        eventually(joined.has_bytes(nbytes), 60, "the late one is among those that are counted")
        store.mend()
        assert {node.state for node in work.wait().nodes} == {"finished"}
        (node,) = joined.wait().nodes
        assert (node.node_id, node.state) == (late, "finished")
        assert all(files_on(folder, "late") == files for folder in [*folders, tmp_path])
    assert store.num_bytes("/bucket/late/*") <= 1.02 * nbytes


@pytest.mark.slow
@pytest.mark.parametrize("how", ["goes well", "is paused"])
def test_nodes_that_share_a_folder(store, caches, tmp_path, how):
    """One fills it, the other looks. When the one is paused for longer than its lease, the other fills it
    once that has given the lock back, and the one looks."""
    import ray

    from raywl.actors.names import NAMESPACE, coordinator_name

    cluster, _ = caches
    files = weights(17)
    nbytes = sum(map(len, files.values()))
    name = f"shared-{how.replace(' ', '-')}"
    ref = put(store, name, files)
    held = store.fail(f"/bucket/{name}/model-00003*", "hang", times=2, after_bytes=100_000)
    with more_nodes(cluster, tmp_path, tmp_path) as both:
        work = InBackground(ref, nodes=both)
        eventually(lambda: held.reached.is_set() or work.result is not None, 60, "it is under way")
        assert work.result is None, work.result
        coordinator = ray.get_actor(coordinator_name(), namespace=NAMESPACE)

        def states() -> dict[str, str]:
            runs = ray.get(coordinator.status.remote(), timeout=30)["stages"]
            (run,) = [run for run in runs if run["label"] == ref and run["state"] == "running"]
            return {node["node"]: node["state"] for node in run["nodes"]}

        eventually(lambda: sorted(states().values()) == ["guest", "working"], 30, "one waits for the other")
        (host,) = [node for node, state in states().items() if state == "working"]
        _, pid = agent_of(host)
        if how == "is paused":
            os.kill(pid, signal.SIGSTOP)
            try:
                eventually(lambda: states()[host] == "absent", 60, "its lease is over")
            finally:
                os.kill(pid, signal.SIGCONT)
        store.mend()
        report = work.wait()
        assert {node.state for node in report.nodes} == {"finished"}
        assert sum(node.shares_with is not None for node in report.nodes) == 1
        assert files_on(tmp_path, name) == files
        assert report.bytes_between_nodes == 0
        # What the paused one has begun is its own, and can't be known to be abandoned.
        assert store.num_bytes(f"/bucket/{name}/*") <= (2 if how == "is paused" else 1.02) * nbytes
        assert not left_over(tmp_path)


@pytest.mark.slow
def test_a_node_dies(store, caches, tmp_path):
    """In the middle: the others finish; whoever asked for all nodes is warned, whoever asked for it by name
    gets an error. A node that comes then takes part."""
    cluster, folders = caches
    files = weights(5)
    ref = put(store, "dying", files)
    folder = tmp_path / "fourth"
    folder.mkdir()
    node = cluster.add_node(
        num_cpus=1, object_store_memory=STORE_BYTES, env_vars={"RAYWL_CACHE": str(folder)}
    )
    try:
        held = store.fail("/bucket/dying/model-00002*", "hang", times=6, after_bytes=100_000)
        work = InBackground(ref)
        assert held.reached.wait(60)
    finally:
        cluster.remove_node(node, allow_graceful=False)
        store.mend()
    report = work.wait()
    states = {one.node_id: one.state for one in report.nodes}
    assert sorted(states.values()) == ["finished"] * 3 + ["lost"]
    assert all(files_on(one, "dying") == files for one in folders)
    assert any("was lost" in note for note in report.notes)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["500", "429", "cut"])
def test_a_source_that_fails_for_a_while(store, caches, how):
    """Each node tries again, and then the next one does."""
    _, folders = caches
    files = weights(6, num_files=2, file_bytes=2 * MIB)
    ref = put(store, f"shaky{how}", files)
    store.fail(f"/bucket/shaky{how}/model-00002*", how, times=3, after_bytes=50_000, retry_after_s=1)
    raywl.stage(ref, timeout_s=90.0)
    assert all(files_on(folder, f"shaky{how}") == files for folder in folders)


@pytest.mark.slow
def test_a_source_that_always_fails(store, caches):
    """The error has status and endpoint, comes in time, and nothing half-written has a name; a second try
    finishes from what is there."""
    _, folders = caches
    files = weights(7)
    ref = put(store, "broken", files)
    store.fail("/bucket/broken/model-00003*", "500")
    began_s = time.monotonic()
    with pytest.raises(SourceError) as caught:
        raywl.stage(ref, timeout_s=120.0)
    assert time.monotonic() - began_s < 60.0
    assert caught.value.status == 500
    assert store.url in str(caught.value)
    assert "node" in str(caught.value.where)
    for folder in folders:
        found = files_on(folder, "broken")
        assert all(found[name] == files[name] for name in found)
        assert "model-00003-of-00003.safetensors" not in found
    store.mend()
    store.forget()
    raywl.stage(ref, timeout_s=90.0)
    assert all(files_on(folder, "broken") == files for folder in folders)
    assert store.num_bytes("/bucket/broken/model-00001*") == 0
    assert store.num_bytes("/bucket/broken/*") <= len(files["model-00003-of-00003.safetensors"])


def test_a_source_that_sends_wrong_bytes(store, caches):
    """Of one range, once: the store's hash finds it out on every node that it was passed on to. The error
    names node and file, no node keeps anything of that file, and the next try fetches it anew."""
    _, folders = caches
    files = weights(13)
    ref = put(store, "wrong", files)
    name = "model-00002-of-00003.safetensors"
    store.fail(f"/bucket/wrong/{name}", "garble", times=1)
    with pytest.raises(SourceError, match="other bytes than the store has") as caught:
        raywl.stage(ref, timeout_s=60.0)
    assert name in str(caught.value)
    assert "node" in str(caught.value.where)
    for folder in folders:
        found = files_on(folder, "wrong")
        assert name not in found
        assert all(found[name] == files[name] for name in found)
    store.forget()
    raywl.stage(ref, timeout_s=60.0)
    assert all(files_on(folder, "wrong") == files for folder in folders)
    assert store.num_bytes(f"/bucket/wrong/{name}") == len(files[name])
    assert not [path for folder in folders for path in left_over(folder)]


@pytest.mark.slow
def test_a_source_that_hangs(store, caches):
    """The deadline holds, and the error says who waits for what."""
    files = weights(8, num_files=1, file_bytes=2 * MIB)
    ref = put(store, "silent", files)
    store.fail("/bucket/silent/model*", "hang", after_bytes=1000)
    began_s = time.monotonic()
    with pytest.raises(RaywlError) as caught:
        raywl.stage(ref, timeout_s=15.0)
    assert time.monotonic() - began_s < 40.0
    assert "silent" in str(caught.value)
    store.mend()
    raywl.stage(ref, timeout_s=90.0)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts disks")
@pytest.mark.parametrize("how", ["full", "read-only"])
def test_a_disk_that_takes_nothing(store, caches, tmp_path, how):
    """The node and the path are named; afterwards the same node can be staged to."""
    cluster, _ = caches
    files = weights(9, num_files=2, file_bytes=4 * MIB)
    ref = put(store, f"disk-{how}", files)
    folder = tmp_path / "small"
    folder.mkdir()
    options = "size=3m" if how == "full" else "size=64m,ro"
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(folder)], capture_output=True)
    if done.returncode:
        pytest.skip(f"this machine mounts no tmpfs: {done.stderr!r}")
    node = cluster.add_node(
        num_cpus=1, object_store_memory=STORE_BYTES, env_vars={"RAYWL_CACHE": str(folder)}
    )
    try:
        kind = CapacityError if how == "full" else RaywlError
        with pytest.raises(kind) as caught:
            raywl.stage(ref, timeout_s=90.0)
        assert str(folder) in str(caught.value)
        assert "node" in str(caught.value.where)
        assert not [name for name in files_on(folder, f"disk-{how}") if name.endswith(".safetensors")]
        subprocess.run(["mount", "-o", "remount,rw,size=64m", str(folder)], check=True)
        raywl.stage(ref, timeout_s=90.0)
        assert files_on(folder, f"disk-{how}") == files
        subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
        # All that is needed is there: nothing is written.
        assert raywl.stage(ref, timeout_s=90.0).bytes_from_source == 0
    finally:
        cluster.remove_node(node)
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.slow
def test_pins(store, caches):
    """In memory on every node, within the quota, also after its agent was killed; gone when unpinned."""
    files = weights(10, num_files=1, file_bytes=4 * MIB)
    ref = put(store, "pinned", files)
    with pytest.raises(CapacityError, match="memory for pins") as caught:
        raywl.pin(ref, quota_bytes=1000, timeout_s=60.0)
    assert "node" in str(caught.value)
    report = raywl.pin(ref, timeout_s=60.0)
    assert all(node.notes for node in report.nodes)

    def pinned() -> list[int]:
        import ray

        found = [ray.get(handle.overview.remote(), timeout=30)["pins"] for handle, _ in agents().values()]
        return [len(pins) for pins in found]

    assert pinned() == [1, 1, 1]
    _, pid = next(iter(agents().values()))
    os.kill(pid, 9)
    eventually(lambda: is_gone(pid), 20, "the agent is gone")
    eventually(lambda: pinned() == [1, 1, 1], 30, "it is pinned again")
    assert raywl.unpin(ref) == 3
    assert pinned() == [0, 0, 0]
    assert raywl.unpin(ref) == 0


@pytest.mark.slow
@pytest.mark.parametrize("where", ["terminal", "pipe"])
def test_the_load_command_shows_both(store, caches, tmp_path, where):
    """One bar of the whole cluster at a time, or lines: what is staged, then what is read."""
    cluster, _ = caches
    ref = put(store, f"shown-{where}", weights(14, num_files=1, file_bytes=4 * MIB))
    leader, follower = pty.openpty()
    shown = b""
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "raywl", "load", ref, "--address", cluster.address, "--json"],
            stdout=subprocess.PIPE,
            stderr=follower if where == "terminal" else subprocess.PIPE,
            cwd=tmp_path,
        )
        os.close(follower)
        if where == "pipe":
            out, shown = process.communicate(timeout=120)
        else:
            # Ends with an error when nobody holds the other side any more.
            with contextlib.suppress(OSError):
                while block := os.read(leader, 1 << 16):
                    shown += block
            out, _ = process.communicate(timeout=120)
    finally:
        os.close(leader)
    assert process.returncode == 0, shown
    assert json.loads(out)["bytes_by_source"]["s3"] > 4 * MIB
    end = "100%" if where == "terminal" else "100 %"
    ends = [shown.decode().index(f"{phase}: {end}") for phase in ("stage", "read")]
    assert ends == sorted(ends)


@pytest.mark.slow
def test_the_commands(store, caches, tmp_path):
    """`raywl stage`, `status` and `prune`, as people use them."""
    cluster, folders = caches
    files = weights(11, num_files=1, file_bytes=2 * MIB)
    ref = put(store, "typed", files)

    def raywl_says(*words: str) -> dict:
        done = subprocess.run(
            [sys.executable, "-m", "raywl", *words, "--json"],
            capture_output=True,
            text=True,
            timeout=120,
            cwd=tmp_path,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    page = tmp_path / "stage.html"
    staged = raywl_says("stage", ref, "--address", cluster.address, "--report", str(page))
    assert staged["bytes_from_source"] > 0
    assert len(staged["nodes"]) == 3
    assert "from the source" in page.read_text()
    status = raywl_says("status", "--address", cluster.address)
    assert [node["agent"] for node in status["nodes"]] == ["alive"] * 3
    assert all(any(one["url"] == ref for one in node["cache"]) for node in status["nodes"])
    assert any(
        stage["label"] == ref and stage["state"] == "done" for stage in status["coordinator"]["stages"]
    )
    kept = raywl_says("prune", "--address", cluster.address, "--max-size", "1KB")
    assert all("within the hour" in why for node in kept["nodes"].values() for why in node["kept"].values())
    for folder in folders:
        for blob in folder.rglob("blobs/*"):
            os.utime(blob, (1, 1))
    gone = raywl_says("prune", "--address", cluster.address, "--older-than", "1d")
    assert all(node["freed_bytes"] > 0 for node in gone["nodes"].values())
    assert not files_on(folders[0], "typed")
