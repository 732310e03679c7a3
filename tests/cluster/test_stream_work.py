"""The work of streams on nodes in this process, with a real source over HTTP and feeds as ranks have them."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import replace

import pytest

from raywl.actors.chunks import ChunkMover, StageRequest
from raywl.actors.rank_feed import RankFeed, StreamJob
from raywl.actors.stream_work import StreamAsk
from raywl.coordination import StagingBoard
from raywl.coordination.chunks import each_bit
from raywl.errors import ClusterError, CorruptFileError, SourceError
from tests.cluster.local_nodes import LocalCluster, _Link
from tests.cluster.test_stage_work import FILES, NBYTES, hub, pin_of

__all__ = ["hub"]

CHUNK_BYTES = 16_384


class Streams(LocalCluster):
    """Nodes with ranks, each of which needs some chunks."""

    def __init__(self, pin, folder, needs, *, in_flight=3, heads=None, **spec):
        super().__init__(pin, folder, len(needs), chunk_bytes=CHUNK_BYTES, in_flight=in_flight, **spec)
        self.table = self.spec.table
        self.needs = dict(zip(self.names, needs, strict=True))
        """Node to the set of chunks that each of its ranks needs."""
        ranks = iter(range(1000))
        self.ranks = {name: tuple(next(ranks) for _ in sets) for name, sets in self.needs.items()}
        self.heads = heads or {}
        self.store_bytes = 40 * (in_flight + 1) * CHUNK_BYTES
        self.got: dict[int, dict[int, bytes]] = {}
        self.errors: dict[int, BaseException] = {}
        self.loses: set[tuple[int, int]] = set()
        """Ranks and chunks whose first reference leads nowhere."""
        self.before_get = lambda rank, chunk: None
        self.rank_threads: list[threading.Thread] = []

    def start(self, *names, same_agent=False):
        for name in names or self.names:
            pin = replace(self.pin, cache_dir=str(self.cache_of(name)))
            request = StageRequest(self.spec, pin, stream=StreamAsk(self.ranks, self.heads))
            self.movers[name] = mover = ChunkMover(name, name, _Link(self, name))
            self.unreachable.discard(name)
            thread = threading.Thread(target=self._work, args=(name, mover, request), daemon=True)
            self.threads[name] = thread
            thread.start()

    def start_ranks(self):
        for name, sets in self.needs.items():
            for rank, needs in zip(self.ranks[name], sets, strict=True):
                thread = threading.Thread(target=self._feed, args=(name, rank, needs), daemon=True)
                self.rank_threads.append(thread)
                thread.start()

    def feed_of(self, name, rank):
        return RankFeed(_RankLink(self, name, rank), name, name, rank, StreamJob("run", self.table, b""))

    def _feed(self, name, rank, needs):
        got = self.got[rank] = {}
        try:
            for batch in self.feed_of(name, rank).take(needs):
                for chunk, array in batch:
                    got[chunk] = array.tobytes()
        except BaseException as error:
            self.errors[rank] = error

    def join_ranks(self, timeout_s=30.0):
        for thread in self.rank_threads:
            thread.join(timeout_s)
            assert not thread.is_alive()

    def check(self, files=FILES):
        """Every rank got what it needs, bit for bit, and no node has a file."""
        for name, sets in self.needs.items():
            for rank, needs in zip(self.ranks[name], sets, strict=True):
                assert rank not in self.errors, self.errors[rank]
                assert set(self.got[rank]) == set(each_bit(needs))
                for chunk, data in self.got[rank].items():
                    file, start, end = self.table.span(chunk)
                    assert data == files[self.table.files[file][0]][start:end]
            assert not [path for path in self.cache_of(name).rglob("*") if path.is_file()]

    def run(self, timeout_s=30.0):
        self.start()
        self.start_ranks()
        state = self.wait(timeout_s)
        self.join()
        self.join_ranks()
        return state


class _RankLink:
    """One rank's way to its node's agent."""

    def __init__(self, cluster, name, rank):
        self._cluster, self._name, self._rank = cluster, name, rank

    def get(self, ref, timeout_s):
        chunk, array = ref
        self._cluster.before_get(self._rank, chunk)
        if (self._rank, chunk) in self._cluster.loses:
            self._cluster.loses.discard((self._rank, chunk))
            raise ConnectionError("its owner died")
        return array

    def take_chunks(self, node_id, run, rank, needs, done, lost, wait_s):
        assert node_id == self._name
        if node_id in self._cluster.unreachable:
            raise ConnectionError("the agent is starting")
        word, found = self._cluster.movers[node_id].take(run, rank, needs, done, lost, wait_s)
        if node_id in self._cluster.unreachable:
            raise ConnectionError("the agent was killed meanwhile")
        return word, [(c, (c, ref)) for c, ref in found] if word == "here" else found

    def read_range(self, node_id, run, file, start, end, timeout_s):
        return self._cluster.movers[node_id].read(run, file, start, end)


def everything(pin):
    """The set of all chunks."""
    source = pin.open()
    sizes = [source.files[name].size for name in sorted(source.files)]
    return (1 << sum(-(-size // CHUNK_BYTES) for size in sizes)) - 1


@pytest.mark.parametrize("in_flight", [1, 2, 5])
@pytest.mark.parametrize("num_nodes", [1, 3])
def test_all_to_all(hub, tmp_path, num_nodes, in_flight):
    """Two ranks on each node, which all need everything: each byte leaves the source once, each file is
    hashed by one node, and a window is all that a node holds."""
    pin = pin_of(hub)
    cluster = Streams(pin, tmp_path, [[everything(pin)] * 2] * num_nodes, in_flight=in_flight)
    hub.forget()
    state = cluster.run()
    assert state.state == "done", state.error
    cluster.check()
    assert hub.num_bytes() == NBYTES
    assert sum(node.received_bytes for node in state.nodes) == (num_nodes - 1) * NBYTES
    assert all(node.has_bytes == NBYTES for node in state.nodes)
    told = [note for node in state.nodes for note in node.notes]
    assert sum(int(note.split()[0]) for note in told if "hashed" in note) == 3
    assert not any("not hashed" in note for note in told)
    for node in state.nodes:
        assert node.peak_store_bytes <= cluster.store_bytes // 5


def test_parts(hub, tmp_path):
    """Ranks need odd parts of it, and each gets its own."""
    pin = pin_of(hub)
    chosen = random.Random(3)
    full = everything(pin)
    needs = [[chosen.getrandbits(full.bit_length()) & full for _ in range(2)] for _ in range(3)]
    # A node without ranks is one that chunks pass by.
    cluster = Streams(pin, tmp_path, [*needs, []])
    hub.forget()
    state = cluster.run()
    assert state.state == "done", state.error
    cluster.check()
    assert hub.num_bytes() == NBYTES
    assert state.nodes[3].has_bytes == NBYTES


def test_nothing_of_what_nobody_needs(hub, tmp_path):
    """It stays at the source; and what no node gets whole isn't hashed, which is said."""
    pin = pin_of(hub)
    first = 0b1110
    cluster = Streams(pin, tmp_path, [[first], [0, first & 0b110]])
    hub.forget()
    state = cluster.run()
    assert state.state == "done", state.error
    cluster.check()
    assert hub.num_bytes() == cluster.table.nbytes_of(first)
    told = [note for node in state.nodes for note in node.notes]
    assert any("not hashed, as no node gets all of it" in note for note in told)


def test_heads_are_not_fetched_again(hub, tmp_path):
    """What was read to look at a file is known."""
    pin = pin_of(hub)
    name = "model-1.safetensors"
    cluster = Streams(pin, tmp_path, [[everything(pin)]] * 2, heads={name: FILES[name][: CHUNK_BYTES + 99]})
    hub.forget()
    state = cluster.run()
    assert state.state == "done", state.error
    cluster.check()
    assert hub.num_bytes() == NBYTES - CHUNK_BYTES - 99


def test_references_that_lead_nowhere(hub, tmp_path):
    """A rank meets some of an owner that has died: its agent puts what it has mapped."""
    pin = pin_of(hub)
    cluster = Streams(pin, tmp_path, [[everything(pin)] * 2] * 2)
    cluster.loses = {(rank, chunk) for rank in range(4) for chunk in (1, 4, 9)}
    state = cluster.run()
    assert state.state == "done", state.error
    cluster.check()
    assert not cluster.loses


def test_an_agent_starts_again(hub, tmp_path):
    """What it held is fetched again, its ranks say what they lack, and what it was hashing isn't hashed."""
    pin = pin_of(hub)
    cluster = Streams(pin, tmp_path, [[everything(pin)] * 2] * 2, node_lease_s=2.0)
    reached, go_on = threading.Event(), threading.Event()

    def hold(rank, chunk):
        if rank == 0 and chunk == 8:
            reached.set()
            go_on.wait(20)

    cluster.before_get = hold
    hub.forget()
    cluster.start()
    cluster.start_ranks()
    assert reached.wait(20)
    cluster.kill("node0")
    cluster.start("node0")
    go_on.set()
    state = cluster.wait()
    cluster.join()
    cluster.join_ranks()
    assert state.state == "done", state.error
    cluster.check()
    assert hub.num_bytes() <= NBYTES + 8 * CHUNK_BYTES


def test_the_coordinator_starts_again(hub, tmp_path):
    """The nodes tell it what they need, hold and fetch: nothing is fetched twice."""
    pin = pin_of(hub)
    cluster = Streams(pin, tmp_path, [[everything(pin)]] * 3)
    reached, go_on = threading.Event(), threading.Event()

    def hold(rank, chunk):
        if rank == 0 and chunk == 8:
            reached.set()
            go_on.wait(20)

    cluster.before_get = hold
    hub.forget()
    cluster.start()
    cluster.start_ranks()
    assert reached.wait(20)
    with cluster.lock:
        cluster.board = StagingBoard(1000)
    cluster.look()
    go_on.set()
    state = cluster.wait()
    cluster.join()
    cluster.join_ranks()
    assert state.state == "done", state.error
    cluster.check()
    assert hub.num_bytes() <= NBYTES + 8 * CHUNK_BYTES


def test_a_node_is_given_up(hub, tmp_path):
    """The others go on without it."""
    pin = pin_of(hub)
    cluster = Streams(pin, tmp_path, [[everything(pin)]] * 3, node_lease_s=2.0)
    cluster.needs.pop("node2")
    cluster.start("node0", "node1")
    cluster.start_ranks()
    cluster.look()
    with cluster.lock:
        cluster.board.drop_node("run", "node2", "it has no power", time.monotonic())
    state = cluster.wait()
    cluster.join()
    cluster.join_ranks()
    assert state.state == "done", state.error
    cluster.check()
    assert any("was lost: it has no power" in note for note in state.notes)


def test_wrong_bytes(hub, tmp_path):
    """They are found by the hash, whoever fetched them; the ranks are told that it was ended."""
    pin = pin_of(hub)
    cluster = Streams(pin, tmp_path, [[everything(pin)]] * 2)
    hub.fail("/cdn/*model-2*", "garble", times=1)
    state = cluster.run()
    assert state.state == "failed"
    assert isinstance(state.error, CorruptFileError)
    assert "model-2.safetensors" in str(state.error)
    assert all(isinstance(error, ClusterError) for error in cluster.errors.values())


def test_a_source_that_fails_for_all(hub, tmp_path):
    """After every node has tried, with what each met."""
    pin = pin_of(hub)
    cluster = Streams(pin, tmp_path, [[everything(pin)]] * 2)
    hub.fail("*model-2.safetensors", "500")
    state = cluster.run()
    assert state.state == "failed"
    assert isinstance(state.error, SourceError)
    assert "also on node" in " ".join(state.error.__notes__)
    assert all("the stream was ended" in str(error) for error in cluster.errors.values())
    assert len(cluster.errors) == 2


def test_reads_beside_the_stream(hub, tmp_path):
    """Right, once for all ranks of a node, counted; before any rank has said what it needs."""
    pin = pin_of(hub)
    cluster = Streams(pin, tmp_path, [[everything(pin)] * 2])
    hub.forget()
    cluster.start()
    name = "model-1.safetensors"
    for rank in (0, 1):
        assert cluster.feed_of("node0", rank).read(name, 1000, 60_000) == FILES[name][1000:60_000]
    assert hub.num_bytes() == 59_000
    cluster.start_ranks()
    state = cluster.wait()
    cluster.join()
    cluster.join_ranks()
    assert state.state == "done", state.error
    cluster.check()
    (node,) = state.nodes
    assert node.fetched_bytes == NBYTES + 59_000
    assert any("were fetched beside the stream" in note for note in node.notes)
