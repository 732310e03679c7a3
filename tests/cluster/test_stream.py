"""`stage_mode="stream"`: from an S3 or a hub on loopback to the ranks of two nodes, and no file anywhere."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import save
from torch import nn

import raywl
from raywl.cli import main
from raywl.errors import CorruptFileError, NodeLostError, RaywlError, SourceError
from tests.cluster.conftest import connected, eventually, ray_cluster
from tests.cluster.parts import Part, is_gone
from tests.hub_server import HubServer
from tests.s3_server import KEY, SECRET, S3Server
from tests.web_server import WebServer

MIB = 1 << 20
STORE_BYTES = 200 * MIB
WINDOW_BYTES = 2 * MIB
"""Eight chunks of 256 KiB, of which three may be on their way to a node: much less than a checkpoint."""
ROWS, COLUMNS = 1024, 1024
TIMEOUT_S = 120.0
SHARDS = {f"w{number}.weight": raywl.Shard(number % 2) for number in range(3)}
KEYS = {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_DEFAULT_REGION": "us-east-1"}


class Model(nn.Module):
    """Three large parameters, cut along both dims, and a small one that every rank has."""

    def __init__(self, context: raywl.ParallelContext) -> None:
        super().__init__()
        size = context.tp_size
        for number in range(3):
            shape = (ROWS // size, COLUMNS) if number % 2 == 0 else (ROWS, COLUMNS // size)
            setattr(self, f"w{number}", Part(*shape, dtype=torch.bfloat16))
        self.norm = Part(7)


class Peeking(Model):
    """`w1` is cut by a loader of its own, which looks at the last row of what it is given."""

    def __init__(self, context: raywl.ParallelContext) -> None:
        super().__init__(context)
        self.w1.weight.weight_loader = scaled


def scaled(param: nn.Parameter, weight: torch.Tensor) -> None:
    context = raywl.current_context()
    assert context is not None
    columns = param.shape[1]
    param.data.copy_(weight.narrow(1, context.tp_rank * columns, columns))
    if float(weight[-1].abs().max()) > 100:
        raise ValueError("impossible")


class Half(nn.Module):
    """Wants one file of three."""

    def __init__(self, context: raywl.ParallelContext) -> None:
        super().__init__()
        self.w1 = Part(ROWS, COLUMNS, dtype=torch.bfloat16)


def tensors(seed: int) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    made = {f"w{n}.weight": torch.randn(ROWS, COLUMNS, generator=random).bfloat16() for n in range(3)}
    return {**made, "norm.weight": torch.randn(7, generator=random)}


def files_of(seed: int) -> dict[str, bytes]:
    """Three files of 2 MiB and an index."""
    held = tensors(seed)
    names = {name: f"model-0000{n + 1}-of-00003.safetensors" for n, name in enumerate(list(held)[:3])}
    names["norm.weight"] = names["w2.weight"]
    files: dict[str, dict[str, torch.Tensor]] = {}
    for name, file in names.items():
        files.setdefault(file, {})[name] = held[name]
    return {
        **{file: save(parts) for file, parts in files.items()},
        "model.safetensors.index.json": json.dumps({"weight_map": names}).encode(),
        "config.json": b"{}",
    }


@pytest.fixture(scope="module")
def s3():
    with S3Server() as server:
        yield server


@pytest.fixture(scope="module")
def homes(tmp_path_factory, s3):
    """Two nodes whose homes and caches are empty folders."""
    folders = [tmp_path_factory.mktemp(name) for name in ("first", "second")]
    nodes = [
        {
            "num_cpus": 2,
            "object_store_memory": STORE_BYTES,
            "env_vars": {
                "HOME": str(folder),
                "RAYWL_CACHE": str(folder / "cache"),
                "HF_HOME": str(folder / "hub"),
                "HF_HUB_OFFLINE": "0",
                "HF_HUB_DISABLE_XET": "1",
                "TMPDIR": str(folder / "tmp"),
                "RAYWL_STAGE_WINDOW_BYTES": str(WINDOW_BYTES),
            },
        }
        for folder in folders
    ]
    with ray_cluster(*nodes) as cluster, connected(cluster.address):
        yield folders


@pytest.fixture
def store(s3, homes, monkeypatch, tmp_path):
    """The server, as the driver's environment has it. Afterwards no disk and no store has anything."""
    told = {**KEYS, "AWS_ENDPOINT_URL": s3.url, "RAYWL_CACHE": str(tmp_path / "driver")}
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("RAYWL_RETRIES", "1")
    monkeypatch.setenv("RAYWL_STALL_S", "5")
    monkeypatch.setenv("RAYWL_STAGE_WINDOW_BYTES", str(WINDOW_BYTES))
    s3.mend()
    yield s3
    s3.mend()
    check_nothing_is_left([*homes, tmp_path / "driver"])


def check_nothing_is_left(folders) -> None:
    written = [path for folder in folders for path in Path(folder).rglob("*") if path.is_file()]
    assert not written
    eventually(lambda: not stages(), 20, "agents have forgotten the stream")
    eventually(lambda: store_bytes() < 64 << 10, 20, "the stores are empty")
    assert not spilled()


def agents():
    """By node id: the agent's handle."""
    import ray

    from raywl.actors.names import NAMESPACE, agent_name

    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    return {node: ray.get_actor(agent_name(node), namespace=NAMESPACE) for node in nodes}


def stages() -> dict:
    import ray

    return {
        run: told
        for agent in agents().values()
        for run, told in ray.get(agent.staging.remote(), timeout=30).items()
    }


def store_bytes() -> float:
    """What is in all nodes' object stores."""
    import ray

    return ray.cluster_resources()["object_store_memory"] - ray.available_resources()["object_store_memory"]


def spilled() -> list[Path]:
    """What Ray has put on a disk instead of into a store."""
    import ray

    session = Path(ray._private.worker._global_node.get_session_dir_path())
    return [path for path in session.rglob("*") if "spilled" in str(path) and path.is_file()]


def put(s3: S3Server, name: str, files: dict[str, bytes]) -> str:
    return s3.add("bucket", files, f"{name}/")


def launch(ref, factory=Model, **arguments) -> raywl.RankGroup:
    arguments = {"tp_size": 2, "dp_size": 2, "shards": SHARDS, "timeout_s": TIMEOUT_S, **arguments}
    return raywl.launch(ref, factory, placement="PACK", stage_mode="stream", agent_idle_s=120.0, **arguments)


def parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def wanted(folder, files, factory=Model, tp_size=2, shards=SHARDS) -> list[dict[str, torch.Tensor]]:
    """The parameters of each rank as they are after a load from local files."""
    folder.mkdir(exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    found = []
    for rank in range(tp_size):
        context = raywl.ParallelContext(tp_rank=rank, tp_size=tp_size)
        with context:
            model = factory(context)
        raywl.load_into(model, folder, parallel=context, shards=shards if tp_size > 1 else None)
        found.append(parameters(model))
    return found


def check_same(got: list[dict[str, torch.Tensor]], expected: list[dict[str, torch.Tensor]]) -> None:
    for rank, held in enumerate(got):
        for name, values in expected[rank % len(expected)].items():
            assert torch.equal(held[name], values), (rank, name)


def test_from_s3_to_four_ranks(store, homes, tmp_path):
    """Bit for bit as from local files; each byte leaves the source once; no store has more than a window."""
    files = files_of(1)
    nbytes = sum(len(data) for name, data in files.items() if name.endswith(".safetensors"))
    ref = put(store, "once", files)
    with launch(ref) as group:
        check_same(group.run(parameters), wanted(tmp_path / "local", files))
        report = group.report
        assert len({rank.node for rank in report.ranks}) == 2
    assert store.num_bytes("/bucket/once/*") <= 1.02 * nbytes
    assert report.fetched_bytes["s3"] <= nbytes
    assert report.bytes_by_source["chunks"] >= 2 * nbytes * 0.99
    told = " ".join(report.notes)
    assert "nothing to disks" in told
    assert "hashed on the way" in told
    assert report.identity == raywl.open_checkpoint(ref).identity


def test_a_loader_that_looks_at_values_and_a_reload(store, tmp_path):
    """What is looked at is fetched by itself, and told; cuts over two nodes; then another one in place."""
    files, other = files_of(2), files_of(3)
    ref, second = put(store, "peek", files), put(store, "other", other)
    shards = {name: spec for name, spec in SHARDS.items() if name != "w1.weight"}
    with launch(ref, Peeking, tp_size=4, dp_size=1, shards=shards) as group:
        check_same(group.run(parameters), wanted(tmp_path / "local", files, Peeking, 4, shards))
        told = " ".join(group.report.notes)
        assert "2.0 KiB were fetched beside the stream" in told
        # Rows of it are cut over both nodes, so that nobody sees all of the file.
        assert "model-00001-of-00003.safetensors: not hashed" in told
        before = group.run(lambda model: [p.data_ptr() for p in model.parameters()])
        store.forget()
        report = group.reload(second, timeout_s=TIMEOUT_S)
        assert group.run(lambda model: [p.data_ptr() for p in model.parameters()]) == before
        check_same(group.run(parameters), wanted(tmp_path / "other", other, Peeking, 4, shards))
        assert "streamed" in " ".join(report.notes)
        assert store.num_bytes("/bucket/other/*") <= 1.03 * sum(map(len, other.values()))


def test_what_nobody_wants_stays_where_it_is(store, tmp_path):
    """A model that has one of three files: no byte of the others but their headers leaves the source."""
    files = files_of(4)
    ref = put(store, "part", files)
    with pytest.warns(UserWarning, match="no place"):
        group = launch(ref, Half, tp_size=1, dp_size=2, shards=None, strict=False)
    with group:
        held = tensors(4)["w1.weight"]
        assert all(torch.equal(one["w1.weight"], held) for one in group.run(parameters))
    assert store.num_bytes("/bucket/part/model-00001*") < 20_000
    assert store.num_bytes("/bucket/part/model-00002*") <= 1.01 * len(
        files["model-00002-of-00003.safetensors"]
    )


def test_past_all_nodes(store):
    """`stage(mode="stream")`: everything comes to each node once, is hashed, and is gone."""
    files = files_of(5)
    nbytes = sum(len(data) for name, data in files.items() if name.endswith(".safetensors"))
    ref = put(store, "past", files)
    seen = []
    report = raywl.stage(ref, mode="stream", timeout_s=TIMEOUT_S, progress=lambda *told: seen.append(told))
    assert report.mode == "stream"
    assert [node.state for node in report.nodes] == ["finished"] * 2
    assert [node.has_bytes for node in report.nodes] == [nbytes] * 2
    assert report.bytes_from_source <= nbytes
    assert report.bytes_between_nodes == pytest.approx(nbytes, rel=0.01)
    assert max(node.peak_store_bytes for node in report.nodes) <= WINDOW_BYTES
    hashed = [int(note.split()[0]) for node in report.nodes for note in node.notes if "hashed" in note]
    assert sum(hashed) == 3
    assert seen[-1] == (2 * nbytes, 2 * nbytes, "stage")
    assert store.num_bytes("/bucket/past/*") <= 1.02 * nbytes


def test_on_the_command_line(store, capsys):
    """`raywl stage --mode` and `raywl load --stage-mode`; an unknown word is wrong usage."""
    ref = put(store, "told", files_of(13))
    assert main(["stage", ref, "--mode", "stream", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["mode"] == "stream"
    assert told["bytes_from_source"] <= told["nbytes"]
    assert main(["load", ref, "--tp", "2", "--stage-mode", "stream", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["bytes_by_source"].keys() == {"s3", "chunks"}
    assert main(["stage", ref, "--mode", "memory"]) == 2
    assert main(["load", ref, "--stage-mode", "memory"]) == 2


def test_usage(store, tmp_path):
    """Known before anything is started; of local files there is nothing to stream, which is said."""
    with pytest.raises(ValueError, match="stage_mode must be one of 'cache', 'stream', not 'memory'"):
        raywl.launch("s3://bucket/x", Model, stage_mode="memory")
    with pytest.raises(ValueError, match="mode must be one of 'cache', 'stream', not 'memory'"):
        raywl.stage("s3://bucket/x", mode="memory")
    folder = tmp_path / "local"
    expected = wanted(folder, files_of(6), tp_size=1)
    report = raywl.stage(folder, mode="stream", timeout_s=TIMEOUT_S)
    assert any("nothing to stream" in note for note in report.notes)
    with launch(folder, tp_size=1, dp_size=1, shards=None) as group:
        check_same(group.run(parameters), expected)
        assert any("nothing to stream" in note for note in group.report.notes)


def test_a_server_without_ranges(homes, monkeypatch):
    """It can't be streamed, and the error says what to do."""
    with WebServer() as web:
        web.has_ranges = False
        for name, data in files_of(6).items():
            web.files[f"m/{name}"] = data
        with pytest.raises(SourceError, match=r"can't be streamed.*use 'cache'"):
            launch(f"{web.url}/m")


@pytest.mark.slow
def test_from_a_hub(homes, monkeypatch, tmp_path):
    """Each byte once; the commit is what is loaded; no file in the hub's cache of any node."""
    files = files_of(7)
    nbytes = sum(len(data) for name, data in files.items() if name.endswith(".safetensors"))
    for name, value in {"HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True}.items():
        monkeypatch.setattr(constants, name, value)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "driver" / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "driver" / "token"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("RAYWL_STAGE_WINDOW_BYTES", str(WINDOW_BYTES))
    with HubServer() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        commit = hub.add("org/name", files)
        with launch("org/name") as group:
            check_same(group.run(parameters), wanted(tmp_path / "local", files))
            assert group.report.identity == f"hf:org/name@{commit}"
            assert "hashed on the way" in " ".join(group.report.notes)
        assert hub.num_bytes("*.safetensors") <= 1.02 * nbytes
    check_nothing_is_left([*homes, tmp_path / "driver"])


class InBackground:
    """A launch in a thread."""

    def __init__(self, ref, factory=Model, **arguments) -> None:
        self.result: object = None
        self._thread = threading.Thread(target=self._run, args=(ref, factory, arguments), daemon=True)
        self._thread.start()

    def _run(self, ref, factory, arguments):
        try:
            with launch(ref, factory, **arguments) as group:
                self.result = group.run(parameters)
        except BaseException as error:
            self.result = error

    def wait(self, timeout_s=TIMEOUT_S):
        self._thread.join(timeout_s)
        assert not self._thread.is_alive()
        if isinstance(self.result, BaseException):
            raise self.result
        return self.result


def test_wrong_bytes(store, homes):
    """The hash of a file isn't that which the source announced: nobody gets the model."""
    ref = put(store, "garbled", files_of(8))
    checkpoint = raywl.open_checkpoint(ref)
    store.fail("/bucket/garbled/model-00002*", "garble", times=1)
    with pytest.raises(
        CorruptFileError, match=r"model-00002-of-00003.*other bytes than it announced"
    ) as caught:
        launch(checkpoint)
    assert "node" in str(caught.value.where)


@pytest.mark.slow
def test_an_agent_is_killed(store, homes, tmp_path):
    """kill -9 in mid-stream: Ray starts it again, the ranks tell it what they lack, what it held is fetched
    again."""
    import ray

    files = files_of(9)
    ref = put(store, "killed", files)
    checkpoint = raywl.open_checkpoint(ref)
    held = store.fail("/bucket/killed/model-00002*", "hang", times=1, after_bytes=100_000)
    work = InBackground(checkpoint)
    assert held.reached.wait(60)
    agent = next(iter(agents().values()))
    pid = ray.get(agent.__ray_call__.remote(lambda self: os.getpid()), timeout=30)
    os.kill(pid, 9)
    eventually(lambda: is_gone(pid), 20, "the agent is gone")
    store.mend()
    check_same(work.wait(), wanted(tmp_path / "local", files))
    assert store.num_bytes("/bucket/killed/*") <= 1.5 * sum(map(len, files.values()))


@pytest.mark.slow
def test_a_rank_is_killed(store, homes):
    """kill -9 in mid-stream: the error names it, and nothing is left of the others."""
    ref = put(store, "dead", files_of(10))
    checkpoint = raywl.open_checkpoint(ref)
    held = store.fail("/bucket/dead/model-00002*", "hang", times=1, after_bytes=100_000)
    work = InBackground(checkpoint)
    assert held.reached.wait(60)
    ranks = [p for p in psutil.process_iter(["cmdline"]) if "RankLoader" in " ".join(p.info["cmdline"] or ())]
    ours = [p for p in ranks if is_of_this_session(p)]
    assert len(ours) == 4
    ours[-1].kill()
    with pytest.raises(NodeLostError, match="while loading") as caught:
        work.wait()
    assert caught.value.rank is not None
    eventually(lambda: all(is_gone(p.pid) for p in ours), 30, "all ranks are gone")


def is_of_this_session(process: psutil.Process) -> bool:
    """Whether a process is of this test's cluster: several run on a machine."""
    import ray

    session = ray._private.worker._global_node.get_session_dir_path()
    with contextlib.suppress(psutil.Error):
        return any(session in part for parent in process.parents() for part in parent.cmdline())
    return False


@pytest.mark.slow
def test_a_source_that_hangs(store, homes):
    """The deadline holds, and the error says who waits for which bytes."""
    ref = put(store, "silent", files_of(11))
    checkpoint = raywl.open_checkpoint(ref)
    store.fail("/bucket/silent/model-00002*", "hang", after_bytes=1000)
    began_s = time.monotonic()
    with pytest.raises(RaywlError) as caught:
        launch(checkpoint, timeout_s=30.0)
    assert time.monotonic() - began_s < 60.0
    assert "model-00002-of-00003.safetensors" in str(caught.value)


@pytest.mark.slow
def test_a_source_that_cuts(store, homes, tmp_path):
    """It goes on from the byte where it broke off."""
    files = files_of(12)
    ref = put(store, "shaky", files)
    checkpoint = raywl.open_checkpoint(ref)
    store.fail("/bucket/shaky/model-00002*", "cut", times=3, after_bytes=50_000)
    with launch(checkpoint) as group:
        check_same(group.run(parameters), wanted(tmp_path / "local", files))
