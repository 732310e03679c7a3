"""The work of staging on nodes in this process, with a real source over HTTP and real files, without Ray."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from huggingface_hub import constants

from raywl.coordination import StagingBoard
from raywl.errors import AuthError, CapacityError, SourceError
from raywl.sources import HubPin
from raywl.sources.transfer import Limits
from tests.cluster.local_nodes import LocalCluster
from tests.hub_server import HubServer

QUICK = Limits(stall_s=2.0, retries=1)


@pytest.fixture
def hub(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    # The client reads its environment once, at import.
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "home" / "hub"))
    with HubServer() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


def random_bytes(count: int, seed: int) -> bytes:
    return np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8).tobytes()


FILES = {
    "config.json": b"{}",
    "empty.txt": b"",
    "model-1.safetensors": random_bytes(300_001, 1),
    "model-2.safetensors": random_bytes(200_000, 2),
}
NBYTES = sum(map(len, FILES.values()))


def pin_of(hub: HubServer, files: dict[str, bytes] = FILES, limits: Limits = QUICK) -> HubPin:
    hub.add("org/name", files)
    pin, _ = HubPin.find("org/name")
    return replace(pin, offline=False, limits=limits)


@pytest.mark.parametrize("num_nodes", [1, 2, 4])
def test_every_node_has_the_files(hub, tmp_path, num_nodes):
    """Bit for bit, under their final names and nothing else; the source sent each byte once, no node more
    than the checkpoint."""
    cluster = LocalCluster(pin_of(hub), tmp_path, num_nodes)
    hub.forget()
    cluster.start()
    state = cluster.wait()
    cluster.join()
    assert state.state == "done", state.error
    for name in cluster.names:
        assert cluster.content(name) == FILES
        assert not cluster.left_over(name)
        assert cluster.results[name] == ""
    assert hub.num_bytes() == NBYTES
    assert sum(node.fetched_bytes for node in state.nodes) == NBYTES
    assert max(cluster.sent.values(), default=0) <= 1.05 * NBYTES


def test_files_that_are_there_are_not_fetched(hub, tmp_path):
    """One node has them all: nobody asks the source, and it sends each byte once."""
    pin = pin_of(hub)
    cluster = LocalCluster(pin, tmp_path, 4)
    cluster.source_of("node2").fetch(FILES)
    hub.forget()
    cluster.start()
    assert cluster.wait().state == "done"
    assert hub.num_bytes() == 0
    assert all(cluster.content(name) == FILES for name in cluster.names)
    assert cluster.sent["node2"] <= 1.05 * NBYTES


def test_a_small_store(hub, tmp_path):
    """The window bounds what is in the store, whatever the checkpoint's size."""
    cluster = LocalCluster(pin_of(hub), tmp_path, 3)
    cluster.store_bytes = 5 * 64 * 4096
    cluster.start()
    state = cluster.wait()
    assert state.state == "done"
    assert all(0 < node.peak_store_bytes <= 64 * 4096 for node in state.nodes)


@pytest.mark.parametrize("blocked", ["node0", "node1"])
def test_wrong_bytes_are_kept_nowhere(hub, tmp_path, blocked):
    """A node that has only a part of a file that another one found wrong throws that away, too: else it
    would hand the wrong bytes on when it is tried again."""
    pin = pin_of(hub)
    cluster = LocalCluster(pin, tmp_path, 2)
    source = cluster.source_of("node0")
    (file,) = [file for file in source.files.values() if file.name == "model-1.safetensors"]
    index = [name for name, _ in cluster.spec.table.files].index(file.name)
    last = cluster.spec.table.file_bits(index).bit_length() - 1
    # All but the end of it, with wrong bytes, are on one node.
    source.repository.make()
    part = source.open_part(file)
    part.write(0, bytes(295_000))
    part.close()
    over = threading.Event()

    def hold(_: str, chunk: int, asker: str) -> None:
        if chunk == last and asker == blocked:
            over.wait(30)

    cluster.on_chunk = hold
    cluster.start()
    state = cluster.wait(until=lambda state: state.nodes[0].state == "finished")
    over.set()
    cluster.join()
    assert state.state == "failed"
    assert isinstance(state.error, SourceError)
    assert "model-1.safetensors brought other bytes than the hub announced" in str(state.error)
    assert file.name not in {**cluster.content("node0"), **cluster.content("node1")}
    again = LocalCluster(pin, tmp_path, 2)
    again.start()
    assert again.wait().state == "done"
    again.join()
    assert all(again.content(name) == FILES and not again.left_over(name) for name in again.names)


def test_what_cannot_be_checked_now_is_kept(hub, tmp_path, monkeypatch):
    """The source can't be asked for a hash: that says nothing against the bytes."""
    source = LocalCluster(pin_of(hub), tmp_path, 1).source_of("node0")
    known = type(source).hashes
    with monkeypatch.context() as patch:

        def hashes(self, file):
            if file.name == "model-1.safetensors":
                raise SourceError("org/name", "try again later", status=503)
            return known(self, file)

        patch.setattr(type(source), "hashes", hashes)
        with pytest.raises(SourceError, match="try again later"):
            source.fetch(["model-1.safetensors"])
        hub.forget()
        cluster = LocalCluster(pin_of(hub), tmp_path, 1)
        cluster.start()
        state = cluster.wait()
        assert "try again later" in str(state.error)
        cluster.join()
    cluster = LocalCluster(pin_of(hub), tmp_path, 1)
    cluster.start()
    assert cluster.wait().state == "done"
    cluster.join()
    assert cluster.content("node0") == FILES
    assert hub.num_bytes("*model-1*") == 0


def test_a_source_without_hashes(hub, tmp_path, monkeypatch):
    """What was not compared is said."""
    pin = pin_of(hub)
    cluster = LocalCluster(pin, tmp_path, 2)
    monkeypatch.setattr(type(pin.open()), "hashes", lambda *_: {})
    cluster.start()
    state = cluster.wait()
    told = f"the source gives no hash of 4 files: {', '.join(FILES)}; only their sizes were checked"
    assert all(told in node.notes for node in state.nodes)


@pytest.mark.parametrize(("what", "passes"), [("PEER", 1), ("DISK", 2)])
def test_a_pace(hub, tmp_path, monkeypatch, what, passes):
    """Not faster than it allows; here both nodes are one process, which shares it."""
    rate = 1e6
    monkeypatch.setenv(f"RAYWL_MAX_{what}_BYTES_PER_S", str(rate))
    cluster = LocalCluster(pin_of(hub), tmp_path, 2)
    began_s = time.monotonic()
    cluster.start()
    assert cluster.wait().state == "done"
    # Threads may be done before they have waited for their last chunk: six receive, eight fetch, on each.
    assert time.monotonic() - began_s >= (passes * NBYTES - 2 * 14 * cluster.spec.table.chunk_bytes) / rate
    assert all(cluster.content(name) == FILES for name in cluster.names)


def test_an_agent_is_killed_and_goes_on(hub, tmp_path):
    """It forgets everything but the disk; the source sends only what was under way again."""
    held = hub.fail("*model-1*", "hang", times=2, after_bytes=1000)
    cluster = LocalCluster(pin_of(hub, limits=Limits(stall_s=20.0)), tmp_path, 3)
    cluster.start()
    assert held.reached.wait(10)
    state = cluster.wait(until=lambda state: state.done_bytes > 400_000)
    assert state.state == "running"
    victim = max(state.nodes, key=lambda node: node.has_bytes).node
    cluster.kill(victim)
    hub.mend()
    cluster.start(victim)
    assert cluster.wait().state == "done"
    cluster.join()
    assert all(cluster.content(name) == FILES for name in cluster.names)
    assert hub.num_bytes() <= NBYTES + 8 * 4096 + 2 * 5000


def test_an_agent_dies_for_good(hub, tmp_path):
    """The others finish without it."""
    cluster = LocalCluster(pin_of(hub), tmp_path, 3, node_lease_s=1.0)
    held = hub.fail("*model-2*", "hang", times=1)
    cluster.start()
    assert held.reached.wait(10)
    cluster.kill("node0")
    with cluster.lock:
        cluster.board.drop_node("run", "node0", "its node died", time.monotonic())
    hub.mend()
    state = cluster.wait()
    assert state.state == "done"
    assert [node.state for node in state.nodes] == ["lost", "finished", "finished"]
    assert all(cluster.content(name) == FILES for name in ("node1", "node2"))


def test_the_coordinator_is_lost(hub, tmp_path):
    """A new one learns everything from the agents; nothing is fetched again."""
    held = hub.fail("*model-2*", "hang", times=1)
    cluster = LocalCluster(pin_of(hub, limits=Limits(stall_s=20.0)), tmp_path, 3)
    hub.forget()
    cluster.start()
    assert held.reached.wait(10)
    with cluster.lock:
        cluster.board = StagingBoard(1000)
    hub.mend()
    assert cluster.wait().state == "done"
    assert all(cluster.content(name) == FILES for name in cluster.names)
    assert hub.num_bytes() <= NBYTES + 4096


def test_a_late_node(hub, tmp_path):
    """It takes part at once, and the source isn't asked again for what others have."""
    cluster = LocalCluster(pin_of(hub), tmp_path, 3, settle_s=0.3)
    hub.forget()
    cluster.start("node0", "node1")
    cluster.wait(until=lambda state: state.done_bytes > NBYTES)
    cluster.start("node2")
    assert cluster.wait().state == "done"
    assert cluster.content("node2") == FILES
    assert hub.num_bytes() == NBYTES


def test_nodes_with_one_folder(hub, tmp_path):
    """Filled once, by one of them; the other one looks."""
    cluster = LocalCluster(pin_of(hub), tmp_path, 2)
    (tmp_path / "node0").mkdir()
    (tmp_path / "node1").symlink_to(tmp_path / "node0")
    hub.forget()
    cluster.start("node0")
    cluster.wait(until=lambda state: state.nodes[0].state == "working")
    cluster.start("node1")
    state = cluster.wait()
    cluster.join()
    assert state.state == "done"
    assert state.nodes[1].guest_of == "node0"
    assert hub.num_bytes() == NBYTES
    assert not cluster.sent
    assert not cluster.left_over("node0")


@pytest.mark.parametrize("how", ["500", "429", "cut", "reset"])
def test_a_source_that_fails_for_a_while(hub, tmp_path, how):
    """Each node tries again by itself, and then the next one does."""
    hub.fail("*model-1*", how, times=6, after_bytes=500)
    cluster = LocalCluster(pin_of(hub), tmp_path, 3)
    cluster.start()
    assert cluster.wait(60.0).state == "done"
    assert all(cluster.content(name) == FILES for name in cluster.names)


def test_a_source_that_always_fails(hub, tmp_path):
    """Every node and the driver are told, with the reason; a second try finishes from what is there."""
    hub.fail("*model-2*", "500")
    cluster = LocalCluster(pin_of(hub), tmp_path, 2)
    cluster.start()
    state = cluster.wait(60.0)
    cluster.join()
    assert state.state == "failed"
    assert isinstance(state.error, SourceError)
    assert state.error.status == 500
    for name in cluster.names:
        assert "500" in cluster.results[name]
        assert set(cluster.content(name)) <= {"config.json", "empty.txt", "model-1.safetensors"}
    hub.mend()
    hub.forget()
    cluster.spec = replace(cluster.spec, run="run-2")
    cluster.start()
    assert cluster.wait().state == "done"
    assert all(cluster.content(name) == FILES for name in cluster.names)
    assert hub.num_bytes("*model-1*") == 0
    assert hub.num_bytes() <= len(FILES["model-2.safetensors"])


def test_wrong_bytes(hub, tmp_path):
    """The hash tells; nothing of it gets a name, and the error has the file."""
    hub.fail("/cdn/*model-2*", "garble", times=1)
    cluster = LocalCluster(pin_of(hub), tmp_path, 2)
    cluster.start()
    state = cluster.wait()
    cluster.join()
    assert state.state == "failed"
    assert "model-2.safetensors" in str(state.error)
    assert "other bytes" in str(state.error)
    for name in cluster.names:
        assert "model-2.safetensors" not in cluster.content(name)


def test_refused(hub, tmp_path):
    """A token that is no longer good, on one node after the other."""
    pin = pin_of(hub)
    cluster = LocalCluster(pin, tmp_path, 2)
    hub.fail("*/resolve/*", "401")
    cluster.start()
    state = cluster.wait()
    assert isinstance(state.error, AuthError)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small disk")
def test_a_full_disk(hub, tmp_path):
    """Known before anything is fetched; the node is named."""
    (tmp_path / "node1").mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=400k", "none", str(tmp_path / "node1")], capture_output=True
    )
    if made.returncode:
        pytest.skip(f"this machine mounts no tmpfs: {made.stderr!r}")
    try:
        cluster = LocalCluster(pin_of(hub), tmp_path, 2)
        cluster.start()
        state = cluster.wait()
        cluster.join()
        assert isinstance(state.error, CapacityError)
        assert "node1" in str(state.error)
        assert not [path for path in cluster.content("node1") if path.endswith(".safetensors")]
    finally:
        subprocess.run(["umount", "-l", str(tmp_path / "node1")], check=True)


def test_one_node_can_not_reach_the_source(hub, tmp_path):
    """The others fetch what it can't, and it gets everything from them."""
    cluster = LocalCluster(pin_of(hub), tmp_path, 3)
    good = cluster.pin
    cluster.pin = replace(good, endpoint="http://127.0.0.1:9")
    cluster.start("node0")
    cluster.pin = good
    cluster.start("node1", "node2")
    state = cluster.wait(60.0)
    assert state.state == "done", state.error
    assert state.nodes[0].fetched_bytes == 0
    assert cluster.content("node0") == FILES


def test_nodes_that_do_not_reach_each_other(hub, tmp_path):
    """After some tries a node fetches what it can't have from those that have it: late, but it comes."""
    cluster = LocalCluster(pin_of(hub, files={"model.safetensors": random_bytes(30_000, 3)}), tmp_path, 2)

    def cut(provider: str, chunk: int, asker: str) -> None:
        raise ConnectionError

    cluster.on_chunk = cut
    cluster.start()
    assert cluster.wait(60.0).state == "done"
    assert not cluster.sent


def test_two_revisions_at_once(hub, tmp_path):
    """Each begins first on another node, where it has the repository's lock: neither waits for the other."""
    old = pin_of(hub)
    files = {**FILES, "model-2.safetensors": random_bytes(200_000, 7)}
    new = pin_of(hub, files)
    assert old.commit != new.commit
    one = LocalCluster(old, tmp_path, 2)
    two = LocalCluster(new, tmp_path, 2)
    two.board, two.lock, two.movers = one.board, one.lock, one.movers
    two.spec = replace(two.spec, run="run-2", key="key-2")
    one.start("node0")
    two.start("node1")
    one.wait(until=lambda state: state.nodes[0].state == "working")
    two.wait(until=lambda state: state.nodes[1].state == "working")
    one.start("node1", same_agent=True)
    two.start("node0", same_agent=True)
    assert one.wait().state == "done"
    assert two.wait().state == "done"
    assert all(one.content(name) == FILES and two.content(name) == files for name in one.names)


def test_another_process_fetches_the_same(hub, tmp_path):
    """A node whose cache is locked waits, and says so; what the other process brings it takes."""
    cluster = LocalCluster(pin_of(hub), tmp_path, 1)
    source = cluster.source_of("node0")
    with source.lock():
        cluster.start()
        state = cluster.wait(until=lambda state: bool(state.nodes[0].notes))
        assert "waits for another process" in state.nodes[0].notes[0]
        assert state.nodes[0].fetched_bytes == 0
        source.bring(list(source.files.values()))
        hub.forget()
    assert cluster.wait().state == "done"
    assert hub.num_bytes() == 0


def test_threads_end(hub, tmp_path):
    """Nothing of a run goes on when it is over."""
    before = threading.active_count()
    cluster = LocalCluster(pin_of(hub), tmp_path, 2)
    cluster.start()
    cluster.wait()
    cluster.join()
    for thread in threading.enumerate():
        if thread.name.startswith("raywl-"):
            thread.join(5.0)
    assert len([t for t in threading.enumerate() if t.name.startswith("raywl-")]) == 0
    assert before >= 1
