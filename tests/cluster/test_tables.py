"""Shared tables on two nodes with object stores of their own, read by other processes."""

from __future__ import annotations

import base64
import json
import os
import pickle
import shutil
import signal
import struct
import subprocess
import sys
import textwrap
import time
import uuid
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import raywl
from raywl.actors.names import NAMESPACE, agent_name, coordinator_name
from raywl.errors import (
    CapacityError,
    CheckpointError,
    ClusterError,
    CorruptFileError,
    MissingFileError,
    NotFoundError,
)
from tests.cluster.conftest import connected, eventually, ray_cluster
from tests.cluster.parts import Model
from tests.cluster.readers import Reader, pss_of, raw_of

MIB = 1 << 20
STORE_BYTES = 400 * MIB
ROOT = str(Path(__file__).parents[2])


def tensors() -> dict[str, torch.Tensor]:
    """Entries of fp8 with a scale for 16 of them each, as engrams have; and others."""
    random = torch.Generator().manual_seed(5)

    def bits(*shape: int) -> torch.Tensor:
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=random)

    return {
        "entries": bits(1000, 64).view(torch.float8_e4m3fn),
        "entries_scale": bits(1000, 4).view(torch.float8_e8m0fnu),
        "bf16": bits(500, 6).view(torch.bfloat16),
        "one": torch.zeros(()),
        "none": torch.zeros(0, 3),
        "thin": torch.zeros(3, 0),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tables")
    save_file(tensors(), path / "model.safetensors")
    return str(path)


@pytest.fixture(scope="module")
def two_nodes():
    """The cluster, with this process as a driver of it."""
    node = {"num_cpus": 2, "object_store_memory": STORE_BYTES}
    with ray_cluster(node, node) as cluster, connected(cluster.address):
        yield cluster


@pytest.fixture
def node_ids(two_nodes):
    import ray

    return [node["NodeID"] for node in ray.nodes() if node["Alive"]]


@pytest.fixture(scope="module")
def processes(two_nodes):
    """Two on each node, in the order of `node_ids`."""
    import ray

    ids = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    return {node_id: [start(node_id), start(node_id)] for node_id in ids}


@dataclass
class Copy:
    """A handle's copy in one of the processes."""

    process: Any
    table: raywl.SharedTable

    def __post_init__(self) -> None:
        self.key = uuid.uuid4().hex
        self("take", self.table)

    def sent(self, method: str, *args: Any) -> Any:
        return getattr(self.process, method).remote(self.key, *args)

    def __call__(self, method: str, *args: Any) -> Any:
        return answers([self.sent(method, *args)])[0]


@pytest.fixture
def copy_of(processes):
    """Makes copies: of a table, in one of a node's two processes."""
    return lambda table, node_id, which=0: Copy(processes[node_id][which], table)


@pytest.fixture(autouse=True)
def all_closed(two_nodes, processes):
    """After each test the stores are empty: nothing keeps a table that nobody has."""
    yield
    answers(process.drop.remote() for group in processes.values() for process in group)
    eventually(lambda: max(used_bytes()) < MIB, 20.0, "the tables' memory is free again")
    assert all(not ask(agent, names_held) for agent in agents_alive())


def used_bytes() -> list[int]:
    """Bytes in each node's object store."""
    import ray
    from ray._private.internal_api import node_stats

    return [
        node_stats(
            node["NodeManagerAddress"], node["NodeManagerPort"], include_memory_info=False
        ).store_stats.object_store_bytes_used
        for node in ray.nodes()
        if node["Alive"]
    ]


def start(node_id: str):
    """A reader's process on a node."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    pinned = NodeAffinitySchedulingStrategy(node_id, soft=False)
    return ray.remote(num_cpus=0, scheduling_strategy=pinned)(Reader).remote()


def ask(actor, function):
    import ray

    return ray.get(actor.__ray_call__.remote(function), timeout=60)


def answers(calls):
    import ray

    return ray.get(list(calls), timeout=100)


def names_held(agent) -> tuple[str, ...]:
    return agent._shelf.names()


def agents_alive():
    import ray

    found = []
    for node in ray.nodes():
        try:
            found.append(ray.get_actor(agent_name(node["NodeID"]), namespace=NAMESPACE))
        except ValueError:
            continue
    return found


def pid_of(agent) -> int:
    return ask(agent, lambda self: os.getpid())


def rows(name: str, ids) -> np.ndarray:
    """A tensor's rows by plain indexing of their bytes."""
    tensor = tensors()[name]
    return raw_of(tensor).reshape(tensor.shape[0], -1)[np.asarray(ids).reshape(-1)].reshape(-1)


IDS = [[0, 999, 3], [3, 128, 127]]


def test_two_readers_on_each_of_two_nodes(folder, node_ids, processes, copy_of):
    """fp8 entries and their E8M0 scales: mapped without a copy, read-only, the checkpoint's bits."""
    with (
        raywl.share_table(folder, "entries", rows_per_chunk=128) as entries,
        raywl.share_table(folder, "entries_scale") as scales,
    ):
        assert (entries.shape, entries.dtype) == ((1000, 64), torch.float8_e4m3fn)
        assert (scales.shape, scales.dtype) == ((1000, 4), torch.float8_e8m0fnu)
        assert (entries.nbytes, entries.num_chunks, entries.placement) == (64_000, 8, "plasma")
        assert entries.name != scales.name
        assert "plasma" in entries.notes[0]
        assert len(set(answers(p.pid.remote() for group in processes.values() for p in group))) == 4
        readers = [copy_of(entries, node_id, which) for node_id in node_ids for which in range(2)]
        for got in answers(reader.sent("gather", IDS) for reader in readers):
            assert np.array_equal(got, rows("entries", IDS))
        for told in answers(reader.sent("write") for reader in readers):
            assert len(told) == 3 * 8
            assert told[0] == "writeable=False owndata=False"
            assert {*told[1:3]} == {
                "assignment destination is read-only",
                "cannot set WRITEABLE flag to True of this array",
            }
        readers = [copy_of(scales, node_id, which) for node_id in node_ids for which in range(2)]
        for got in answers(reader.sent("gather", IDS) for reader in readers):
            assert np.array_equal(got, rows("entries_scale", IDS))
        # This process reads as any other.
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert np.array_equal(raw_of(entries.gather(torch.tensor(IDS))), rows("entries", IDS))
        out = torch.empty(2, 3, 4, dtype=torch.float8_e8m0fnu)
        assert scales.gather(IDS, out) is out
        with pytest.raises(CheckpointError, match=r"'entries': row id 1000 is outside 0\.\.999"):
            entries.gather([1000])
        with pytest.raises(IndexError, match=r"chunk 8 is outside 0\.\.7"):
            entries.chunk(8)
    with pytest.raises(ClusterError, match="closed in this process"):
        entries.gather([0])


def test_tables_of_nothing(folder):
    """No rows, or rows without width."""
    for name, ids, shape in [("none", [], (0, 3)), ("thin", [2, 0], (2, 0))]:
        for placement in ("plasma", "file"):
            with raywl.share_table(folder, name, placement=placement) as table:
                assert table.gather(ids).shape == shape


def test_one_copy_on_each_node(node_ids, processes, copy_of, tmp_path):
    """128 MiB: all that an agent and two readers have more than before is one copy, by PSS."""
    rng = np.random.default_rng(3)
    table = torch.from_numpy(rng.integers(0, 256, (32768, 4096), np.uint8))
    save_file({"big": table, "small": table[:2].clone()}, tmp_path / "model.safetensors")
    with raywl.share_table(tmp_path, "small") as small:
        # So that all have imported what they need.
        for copy in [copy_of(small, node_id, which) for node_id in node_ids for which in range(2)]:
            copy("touch")
        of_node = [
            [pid_of(agent), *answers(process.pid.remote() for process in processes[node_id])]
            for node_id, agent in zip(node_ids, agents_in(node_ids), strict=True)
        ]
        before = [sum(map(pss_of, group)) for group in of_node]
        with raywl.share_table(tmp_path, "big", placement="plasma") as big:
            copies = [copy_of(big, node_id, which) for node_id in node_ids for which in range(2)]
            assert answers(copy.sent("touch") for copy in copies) == [big.nbytes] * 4
            grown = [sum(map(pss_of, group)) - old for group, old in zip(of_node, before, strict=True)]
            print("PSS grown, of", big.nbytes, grown)
            # The node's store has the pages mapped as well, which takes a share of them away from these.
            assert all(0.5 * big.nbytes < more <= 1.05 * big.nbytes for more in grown), grown
            assert all(used <= 1.05 * big.nbytes for used in used_bytes())
            ids = rng.integers(0, 32768, 200)
            for got in answers(copy.sent("gather", ids) for copy in copies):
                assert np.array_equal(got.reshape(200, 4096), table.numpy()[ids])
        # Copies that are mapped keep what they have; when they go, so does the memory.
        assert max(used_bytes()) >= big.nbytes
        assert np.array_equal(copies[3]("gather", [32767]), table.numpy()[32767])
        for copy in copies:
            copy("close")


def agents_in(node_ids):
    import ray

    return [ray.get_actor(agent_name(node_id), namespace=NAMESPACE) for node_id in node_ids]


MAKER = """
    import base64, pickle, sys
    import raywl, ray
    ray.init(address=sys.argv[1], log_to_driver=False, logging_level=30)
    table = raywl.share_table(sys.argv[2], sys.argv[3], rows_per_chunk=100)
    tensor = __import__("torch").arange(60.0).reshape(20, 3)
    other = raywl.share_table(tensor, name="of-a-tensor", rows_per_chunk=7)
    print("HANDLES", base64.b64encode(pickle.dumps([table, other])).decode(), flush=True)
    sys.stdin.readline()
"""


def test_the_maker_is_killed(two_nodes, folder, node_ids, copy_of):
    """Driver and maker at once: its readers go on, and a new driver and new processes get the table."""
    maker = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(MAKER), two_nodes.address, folder, "entries"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert maker.stdout is not None
    told = next(line for line in maker.stdout if line.startswith("HANDLES "))
    table, other = pickle.loads(base64.b64decode(told.split()[1]))
    mapped = [copy_of(table, node_id) for node_id in node_ids]
    answers(copy.sent("gather", [0]) for copy in mapped)
    maker.kill()
    maker.wait()
    late = [copy_of(table, node_id, 1) for node_id in node_ids]
    for got in answers(copy.sent("gather", IDS) for copy in [*mapped, *late]):
        assert np.array_equal(got, rows("entries", IDS))
    for node_id in node_ids:
        assert copy_of(other, node_id)("gather", [[19]]).view(np.float32).tolist() == [57, 58, 59]
    # Whoever shares it again gets the same table, and a handle that ends it.
    again = raywl.share_table(folder, "entries", rows_per_chunk=100)
    assert again.name == table.name
    again.close()
    other.close(everywhere=True)


def test_an_agent_is_killed(folder, node_ids, copy_of):
    """Readers that have it mapped go on; new ones get it again, read from the checkpoint."""
    with raywl.share_table(folder, "bf16", rows_per_chunk=33) as table:
        mapped = [copy_of(table, node_id) for node_id in node_ids]
        answers(copy.sent("gather", [0]) for copy in mapped)
        agent = agents_in(node_ids)[1]
        pid = pid_of(agent)
        os.kill(pid, signal.SIGKILL)
        late = copy_of(table, node_ids[1], 1)
        ids = [499, 0, 33, 32]
        for got in answers(copy.sent("gather", ids) for copy in [*mapped, late]):
            assert np.array_equal(got, rows("bf16", ids))
        assert pid_of(agent) != pid
        assert table.name in ask(agent, names_held)


def test_a_tensor_whose_home_lost_it(node_ids, copy_of):
    """It is in no checkpoint: that is said, with the remedy; the other nodes still have it."""
    import ray

    home = ray.get_runtime_context().get_node_id()
    other = next(node_id for node_id in node_ids if node_id != home)
    tensor = torch.randn(50, 4, dtype=torch.float64)
    with raywl.share_table(tensor.t().contiguous().t(), name="lost", rows_per_chunk=9) as table:
        tensor_rows = raw_of(tensor[[49, 0]])
        assert np.array_equal(raw_of(table.gather([49, 0])), tensor_rows)
        assert max(used_bytes()) < 2 * MIB
        os.kill(pid_of(agents_in([home])[0]), signal.SIGKILL)
        with pytest.raises(ClusterError, match="its home node has lost it: share it again"):
            copy_of(table, home)("gather", [0])
        assert np.array_equal(raw_of(table.gather([49, 0])), tensor_rows)
        assert np.array_equal(copy_of(table, other)("gather", [49, 0]), tensor_rows)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randint(0, 256, (5, 6), dtype=torch.uint8).view(torch.float8_e8m0fnu),
        torch.randint(0, 256, (5, 6), dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
        torch.arange(10).to(torch.uint16),
        torch.randn(4, 3, dtype=torch.complex64).conj(),
        torch.randn(3, 4).t(),
        torch.tensor([[True, False]]),
        torch.zeros(0, 2, dtype=torch.bfloat16),
        torch.nn.Parameter(torch.randn(3, 3)),
    ],
    ids=lambda t: f"{str(t.dtype)[6:]}-{list(t.shape)}",
)
def test_tensors_of_every_kind(tensor, node_ids, copy_of):
    """Their bits, on the other node as well, which has only its own copy of them."""
    plain = tensor.detach().resolve_conj().contiguous()
    ids = torch.arange(plain.shape[0]).flip(0)
    raw = raw_of(plain).reshape(plain.shape[0], -1)[ids.numpy()] if len(plain) else raw_of(plain)
    with raywl.share_table(tensor, rows_per_chunk=2) as table:
        for node_id in node_ids:
            assert np.array_equal(copy_of(table, node_id)("gather", ids), raw.reshape(-1))


def test_what_can_be_no_table(folder, tmp_path):
    """The right class, with names; and wrong usage before anything is looked at."""
    with pytest.raises(CheckpointError, match="entires") as caught:
        raywl.share_table(folder, "entires")
    assert "entries" in str(caught.value)
    assert "node" in str(caught.value.where)
    with pytest.raises(CheckpointError, match="'one': is 0-d"):
        raywl.share_table(folder, "one")
    with pytest.raises(NotFoundError):
        raywl.share_table(tmp_path / "none", "x")
    for arguments, text in [
        ({"ref_or_tensor": folder}, "tensor_name"),
        ({"ref_or_tensor": folder, "tensor_name": "entries", "placement": "disk"}, "auto, plasma, file"),
        ({"ref_or_tensor": folder, "tensor_name": "entries", "rows_per_chunk": 0}, "rows_per_chunk"),
        ({"ref_or_tensor": torch.zeros(2, 2), "placement": "file"}, "no file"),
        ({"ref_or_tensor": torch.zeros(2, 2), "tensor_name": "x"}, "no tensor_name"),
        ({"ref_or_tensor": torch.zeros(2, 2), "revision": "x"}, "no source arguments"),
        ({"ref_or_tensor": torch.zeros(2, 2, device="meta")}, "meta"),
        ({"ref_or_tensor": torch.zeros(2, 2).to_sparse()}, "sparse"),
        ({"ref_or_tensor": torch.zeros(2, 2, dtype=torch.complex128), "timeout_s": 0}, "timeout_s"),
    ]:
        with pytest.raises(ValueError, match=text):
            raywl.share_table(**arguments)
    with pytest.raises(CheckpointError, match="0-d"):
        raywl.share_table(torch.tensor(1.0))


def test_a_name_that_is_taken(folder, node_ids, copy_of):
    """By another table: refused, and that one stays as it is. By the same: it is the same."""
    with raywl.share_table(folder, "entries", name="mine") as table:
        for other, arguments in [
            (folder, {"tensor_name": "bf16"}),
            (folder, {"tensor_name": "entries", "rows_per_chunk": 10}),
            (torch.zeros(3, 3), {}),
        ]:
            with pytest.raises(ClusterError, match="another table is named 'mine' already"):
                raywl.share_table(other, name="mine", **arguments)
        assert all("mine" in ask(agent, names_held) for agent in agents_in(node_ids))
        assert np.array_equal(copy_of(table, node_ids[1])("gather", IDS), rows("entries", IDS))
        same = raywl.share_table(folder, "entries", name="mine")
        assert np.array_equal(raw_of(same.gather(IDS)), rows("entries", IDS))


def sparse(path: Path, nbytes: int) -> None:
    """A checkpoint of one table of zeros that takes no room on the disk."""
    header = json.dumps(
        {"big": {"dtype": "U8", "shape": [nbytes // 1024, 1024], "data_offsets": [0, nbytes]}}
    )
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header.encode())
        file.truncate(file.tell() + nbytes)


def read_bytes(pid: int) -> int:
    with open(f"/proc/{pid}/io") as file:
        return int(file.readline().split()[1])


def test_a_store_that_is_too_small(tmp_path, node_ids, copy_of):
    """With the numbers and the setting, before anything is read; `auto` says that it takes the file."""
    sparse(tmp_path / "model.safetensors", 1024 * MIB)
    raywl.share_table(torch.zeros(1, 1)).close()
    pids = [pid_of(agent) for agent in agents_in(node_ids)]
    before = list(map(read_bytes, pids))
    with pytest.raises(CapacityError) as caught:
        raywl.share_table(tmp_path, "big", placement="plasma")
    error = caught.value
    assert (error.needed, error.available) == (1024 * MIB, int(STORE_BYTES * 0.8))
    assert all(
        part in str(error) for part in ("big", "node", str(STORE_BYTES), "object_store_memory", "file")
    )
    assert sum(map(read_bytes, pids)) - sum(before) < 4 * MIB
    with raywl.share_table(tmp_path, "big") as table:
        assert table.placement == "file"
        assert any("--object-store-memory" in note for note in table.notes)
        copies = [copy_of(table, node_id) for node_id in node_ids]
        for got in answers(copy.sent("gather", [MIB - 1, 0]) for copy in copies):
            assert got.nbytes == 2048
            assert not got.any()
        assert "assignment destination is read-only" in copies[0]("write")
        with pytest.raises(CapacityError):
            raywl.share_table(torch.empty(400 * MIB, 1, dtype=torch.uint8), placement="auto")


def test_the_same_table_fits_once(node_ids, tmp_path):
    """More than half of the store: sharing it again finds it, and closing it makes room for another."""
    sparse(tmp_path / "model.safetensors", 200 * MIB)
    with raywl.share_table(tmp_path, "big", placement="plasma") as table:
        again = raywl.share_table(tmp_path, "big", placement="plasma")
        assert again.name == table.name
        with pytest.raises(CapacityError, match=f"{200 * MIB} are taken"):
            raywl.share_table(tmp_path, "big", name="another", placement="plasma")
    eventually(lambda: max(used_bytes()) < MIB, 20.0, "its memory is free")
    # The store keeps what it has touched, which is room for tables as well.
    assert all(ask(agent, lambda self: self._link.shm_bytes()[1]) >= 200 * MIB for agent in agents_alive())
    raywl.share_table(tmp_path, "big", name="another", placement="plasma").close()


def test_a_file_that_changed(folder, tmp_path):
    """A reader that comes later maps the file that was shared, or none."""
    shutil.copy(Path(folder, "model.safetensors"), tmp_path / "model.safetensors")
    with raywl.share_table(tmp_path, "entries", placement="file") as table:
        first, second, third = (pickle.loads(pickle.dumps(table)) for _ in range(3))
        assert np.array_equal(raw_of(first.gather(IDS)), rows("entries", IDS))
        shutil.copy(tmp_path / "model.safetensors", tmp_path / "new")
        os.replace(tmp_path / "new", tmp_path / "model.safetensors")
        assert np.array_equal(raw_of(first.gather(IDS)), rows("entries", IDS))
        with pytest.raises(CorruptFileError, match="changed since its table was shared"):
            second.gather(IDS)
        (tmp_path / "model.safetensors").unlink()
        with pytest.raises(MissingFileError, match="gone since its table was shared"):
            third.gather(IDS)


def test_closed_by_its_maker(folder, node_ids, copy_of):
    """A copy that was mapped goes on; one that wasn't is told; a copy's own `close` ends nothing."""
    table = raywl.share_table(folder, "entries")
    mapped, late, closing = (copy_of(table, node_ids[1], which) for which in (0, 1, 0))
    answers(copy.sent("gather", [0]) for copy in (mapped, closing))
    closing("close")
    assert all(table.name in ask(agent, names_held) for agent in agents_in(node_ids))
    table.close()
    table.close()
    assert np.array_equal(mapped("gather", IDS), rows("entries", IDS))
    with pytest.raises(ClusterError, match="closed by its maker"):
        late("gather", [0])
    with raywl.share_table(folder, "entries") as again:
        assert np.array_equal(copy_of(again, node_ids[1], 1)("gather", IDS), rows("entries", IDS))


def test_a_node_that_joins_later(two_nodes, folder, node_ids):
    """Its first reader makes the table there: from the checkpoint, or from the tensor's home."""
    with (
        raywl.share_table(folder, "entries", rows_per_chunk=300) as table,
        raywl.share_table(torch.arange(30.0).reshape(10, 3), rows_per_chunk=4) as other,
    ):
        handles = pickle.dumps([table, other])
        node = two_nodes.add_node(num_cpus=1, object_store_memory=STORE_BYTES)
        try:
            process = start(node.node_id)
            first, second = (Copy(process, handle) for handle in pickle.loads(handles))
            assert np.array_equal(first("gather", IDS), rows("entries", IDS))
            assert second("gather", [9]).view(np.float32).tolist() == [27, 28, 29]
        finally:
            two_nodes.remove_node(node)


def helpers() -> list[str]:
    from ray.util import list_named_actors

    return [a["name"] for a in list_named_actors(all_namespaces=True) if a["namespace"] == NAMESPACE]


def test_agents_stay_while_they_hold_a_table(folder, checkpoint, node_ids):
    """Though nothing else needs them; without one they end, at once or after the idle time."""
    raywl.launch(checkpoint, Model, agent_idle_s=1.0).shutdown(agents=True)
    eventually(lambda: not helpers(), 40.0, "the helpers end")
    table = raywl.share_table(folder, "entries")
    group = raywl.launch(checkpoint, Model, agent_idle_s=1.0)
    # At once after the table was made: no heartbeat may have told of it.
    group.shutdown(agents=True)
    names = {coordinator_name(), *map(agent_name, node_ids)}
    assert set(helpers()) == names
    pids = list(map(pid_of, agents_in(node_ids)))
    give_up_s = time.monotonic() + 4.0
    while time.monotonic() < give_up_s:
        assert set(helpers()) == names
        time.sleep(0.2)
    assert list(map(pid_of, agents_in(node_ids))) == pids
    assert np.array_equal(raw_of(table.gather(IDS)), rows("entries", IDS))
    table.close()
    eventually(lambda: not helpers(), 40.0, "the helpers end")


def test_agents_with_a_table_need_no_launch(folder):
    """A table that was shared before anything was launched has a coordinator, and agents that stay."""
    with raywl.share_table(folder, "entries"):
        assert coordinator_name() in helpers()


def test_a_process_without_a_cluster(folder, two_nodes):
    """A handle that is unpickled there says what to do."""
    with raywl.share_table(folder, "entries") as table:
        code = "import pickle, sys; pickle.load(sys.stdin.buffer).gather([0])"
        ended = subprocess.run(
            [sys.executable, "-c", code], input=pickle.dumps(table), capture_output=True, cwd=ROOT, timeout=60
        )
        assert b"call ray.init first" in ended.stderr
