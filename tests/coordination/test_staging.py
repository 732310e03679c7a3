"""Staging as events: what each node is told, when nodes and coordinators come and go."""

from __future__ import annotations

import pickle
from collections import Counter

import pytest

from raywl.bench.coordinator import Simulation
from raywl.coordination import NOBODY, ChunkTable, FetchFailure, NodeReport, StageSpec, StagingBoard
from raywl.coordination.chunks import each_bit, set_of
from raywl.coordination.stage_messages import unpack_route
from raywl.errors import AuthError, ClusterError, SourceError, StagingTimeout


def spec_of(num_nodes: int, num_chunks: int = 32, **more) -> StageSpec:
    names = {f"n{number}": f"10.0.0.{number}" for number in range(num_nodes)}
    return StageSpec("run", "key", "org/name", ChunkTable((("model", 10 * num_chunks),), 10), names, **more)


class Node:
    """An agent in miniature: it does what it is told, at once."""

    def __init__(
        self,
        cluster: Cluster,
        name: str,
        has: int = 0,
        shares: tuple[str, ...] = (),
        fetching: tuple[int, ...] = (),
    ) -> None:
        self.cluster, self.name, self.has, self.shares = cluster, name, has, shares
        self.ids: list[str] = []
        self.providers: dict[int, int] = {}
        self.seen = self.serial = 0
        self.fetched: Counter[int] = Counter()
        self.got_from: Counter[str] = Counter()
        self.sends_at: float = 0.0
        self.last = None
        self.ticket = cluster.board.join(cluster.spec, name, has, fetching, shares, cluster.now_s)

    def report(self, **more):
        sent = NodeReport(
            "run",
            self.name,
            self.ticket,
            **{
                "answered": self.serial,
                "has": self.has,
                "seen_routes": self.seen,
                "seen_nodes": len(self.ids),
                "num_wanted": 2,
                "shares": self.shares,
                "finished": self.has == self.cluster.spec.table.everything,
                "send_bytes_per_s": self.sends_at,
                **more,
            },
        )
        orders = self.last = self.cluster.board.report(sent, self.cluster.now_s)
        if orders.state == "run":
            self.serial, self.seen = orders.serial, orders.seen_routes
            self.ids += orders.nodes
            for route in map(unpack_route, orders.routes):
                self.providers[route.chunk] = route.provider(self.ids.index(self.name))
        return orders

    def fetch(self):
        """All its leases, from the source."""
        for chunk in self.last.leases if self.last else ():
            if not self.has >> chunk & 1:
                self.has |= 1 << chunk
                self.fetched[chunk] += 1

    def receive(self):
        """Whatever others have for it."""
        for chunk, index in self.providers.items():
            if index != NOBODY and not self.has >> chunk & 1:
                other = self.cluster.nodes[self.ids[index]]
                if other.has >> chunk & 1:
                    self.has |= 1 << chunk
                    self.got_from[other.name] += 1


class Cluster:
    """A board and its nodes."""

    def __init__(self, num_nodes: int, num_chunks: int = 32, **more) -> None:
        self.spec = spec_of(num_nodes, num_chunks, **more)
        self.board = StagingBoard(first_epoch=1)
        self.now_s = 0.0
        self.nodes: dict[str, Node] = {}
        self.begin()

    def begin(self):
        return self.board.begin(self.spec, "driver:1", self.now_s)

    def join(
        self, name: str, has: int = 0, shares: tuple[str, ...] = (), fetching: tuple[int, ...] = ()
    ) -> Node:
        self.nodes[name] = Node(self, name, has, shares, fetching)
        return self.nodes[name]

    def round(self, *, fetch: bool = True, seconds: float = 0.2):
        """Everybody works and reports once."""
        self.now_s += seconds
        for node in self.nodes.values():
            node.report()
        for node in self.nodes.values():
            if fetch:
                node.fetch()
            node.receive()
        return self.begin()

    def finish(self, rounds: int = 200):
        for _ in range(rounds):
            state = self.round()
            if state.state != "running":
                return state
        raise AssertionError(state.waiting)

    @property
    def sent(self) -> Counter[str]:
        return sum((node.got_from for node in self.nodes.values()), Counter())

    @property
    def fetched(self) -> Counter[int]:
        return sum((node.fetched for node in self.nodes.values()), Counter())


@pytest.mark.parametrize("num_nodes", [1, 2, 3, 4, 7])
def test_each_chunk_is_fetched_once_and_sent_evenly(num_nodes):
    """Shares are equal, routes direct, and no link carries more than the checkpoint."""
    cluster = Cluster(num_nodes)
    for name in cluster.spec.nodes:
        cluster.join(name)
    state = cluster.finish()
    assert state.state == "done"
    assert state.done_bytes == state.total_bytes == num_nodes * 320
    assert cluster.fetched == dict.fromkeys(range(32), 1)
    shares = [sum(node.fetched.values()) for node in cluster.nodes.values()]
    assert max(shares) - min(shares) <= 4
    assert max(cluster.sent.values(), default=0) <= 32


@pytest.mark.parametrize("num_nodes", [2, 3, 4, 8])
def test_one_node_has_it_all(num_nodes):
    """The source is never asked, and the node sends each byte once: others pass it on."""
    cluster = Cluster(num_nodes)
    names = list(cluster.spec.nodes)
    cluster.join(names[0], has=cluster.spec.table.everything)
    for name in names[1:]:
        cluster.join(name)
    assert cluster.finish().state == "done"
    assert not cluster.fetched
    assert cluster.sent[names[0]] == 32
    assert max(cluster.sent.values()) <= 32


def test_two_nodes_have_it_all():
    """They share the work, and need nobody to pass it on."""
    cluster = Cluster(4)
    for number, name in enumerate(cluster.spec.nodes):
        cluster.join(name, has=cluster.spec.table.everything if number < 2 else 0)
    assert cluster.finish().state == "done"
    assert not cluster.fetched
    assert cluster.sent == {"n0": 32, "n1": 32}


def test_what_is_there_is_known_before_anything_is_fetched():
    """A node that says later what it has, within the time to settle, has it not fetched by others."""
    cluster = Cluster(2, settle_s=3.0)
    first = cluster.join("n0")
    cluster.now_s = 1.0
    assert not first.report().leases
    cluster.join("n1", has=0xFFFF)
    assert set(first.report().leases) == {16, 17}
    cluster.finish()
    assert set(cluster.fetched) == set(range(16, 32))


def test_a_node_that_stays_away_delays_little():
    """After the time to settle the others begin; it is named as long as it is missed."""
    cluster = Cluster(2, settle_s=3.0)
    first = cluster.join("n0")
    cluster.now_s = 3.5
    assert first.report().leases
    assert "10.0.0.1 (takes no part)" in cluster.begin().waiting


def test_a_faster_node_fetches_more():
    cluster = Cluster(2, num_chunks=60)
    fast, slow = cluster.join("n0"), cluster.join("n1")
    for step in range(200):
        cluster.now_s += 0.2
        fast.report(fetch_bytes_per_s=50.0)
        slow.report(fetch_bytes_per_s=10.0)
        fast.fetch()
        if step % 5 == 0:
            slow.fetch()
        fast.receive()
        slow.receive()
        if cluster.begin().state == "done":
            break
    assert sum(fast.fetched.values()) > 3 * sum(slow.fetched.values())
    assert cluster.fetched == dict.fromkeys(range(60), 1)


def test_a_slow_link_is_relieved():
    """A node that sends at less than half the median rate sends its chunks once, and nobody else's."""
    cluster = Cluster(4, num_chunks=80)
    nodes = [cluster.join(name) for name in cluster.spec.nodes]
    for node, rate in zip(nodes, [100.0, 100.0, 100.0, 20.0], strict=True):
        node.sends_at = rate
    slow = nodes[3]
    cluster.round(fetch=False)
    cluster.round(fetch=False, seconds=2.0)
    assert [node.slow for node in cluster.begin().nodes] == [False, False, False, True]
    before = set_of(slow.last.leases)
    cluster.finish()
    assert cluster.fetched == dict.fromkeys(range(80), 1)
    assert cluster.sent["n3"] <= sum(slow.fetched.values()) + 2 * before.bit_count()
    assert max(cluster.sent.values()) <= 80


def test_late_nodes_take_from_all_and_from_each_other():
    """Two that join when all is there: no link carries more than 1.05 x the checkpoint in the end."""
    cluster = Cluster(6, num_chunks=100, settle_s=0.1)
    for number in range(4):
        cluster.join(f"n{number}")
    for _ in range(40):
        cluster.round()
    for number in (4, 5):
        cluster.join(f"n{number}")
    assert cluster.finish().state == "done"
    assert cluster.fetched == dict.fromkeys(range(100), 1)
    assert max(cluster.sent.values()) <= 105


def test_a_node_that_falls_silent_loses_its_leases():
    """They go to another; when the node comes back, what it says under its old ticket is refused, and what it
    has counts once it has joined again."""
    cluster = Cluster(2, node_lease_s=10.0)
    gone, other = cluster.join("n0"), cluster.join("n1")
    held = set(gone.report().leases)
    assert held
    for _ in range(60):
        cluster.now_s += 0.2
        other.report()
        other.fetch()
        other.receive()
    assert held <= set(other.fetched)
    gone.has |= set_of(held)
    answer = gone.report()
    assert answer.state == "join"
    assert not answer.leases
    cluster.join("n0", has=gone.has)
    assert cluster.finish().state == "done"
    assert sum(cluster.fetched.values()) <= 32


def test_a_node_that_starts_again_goes_on_with_its_disk():
    """Its old membership ends at once, without waiting for its lease; what it had passed on stays routed."""
    cluster = Cluster(3)
    for name in cluster.spec.nodes:
        cluster.join(name)
    cluster.round()
    old = cluster.nodes["n1"]
    begun = set(old.report().leases)
    new = cluster.join("n1", has=old.has)
    new.fetched = old.fetched
    assert old.report().state == "join"
    assert cluster.finish().state == "done"
    assert all(count == 1 for chunk, count in cluster.fetched.items() if chunk not in begun)


def test_the_coordinator_starts_anew():
    """It knows nothing but what the next reports say; nothing is fetched again."""
    cluster = Cluster(3)
    for name in cluster.spec.nodes:
        cluster.join(name)
    for _ in range(3):
        cluster.round()
    before = cluster.fetched
    cluster.board = StagingBoard(first_epoch=1000)
    for node in cluster.nodes.values():
        assert node.report().state == "join"
    for name, old in list(cluster.nodes.items()):
        under_way = tuple(chunk for chunk in old.last.leases or () if not old.has >> chunk & 1)
        new = cluster.join(name, has=old.has, fetching=under_way)
        new.fetched = old.fetched
    assert cluster.finish().state == "done"
    assert cluster.fetched == dict.fromkeys(range(32), 1)
    assert before


def test_what_is_under_way_stays_where_it_is():
    """A coordinator that starts anew leases it to whoever says that it fetches it, and to nobody else."""
    cluster = Cluster(2)
    first = cluster.join("n0", fetching=(3, 4))
    second = cluster.join("n1", has=1 << 4, fetching=(3, 5, 99))
    assert {3} <= set(first.report(num_wanted=1).leases)
    assert {5} <= set(second.report(num_wanted=1).leases)
    assert not {3, 4} & set(second.last.leases)
    assert cluster.finish().state == "done"
    assert 4 not in cluster.fetched


def test_nodes_speak_first_to_a_new_coordinator():
    """A run is begun by whoever speaks of it; a driver that is not heard of again ends it."""
    cluster = Cluster(1, driver_lease_s=30.0)
    cluster.board = StagingBoard(first_epoch=1000)
    node = cluster.join("n0")
    assert node.report().leases
    cluster.now_s = 31.0
    assert cluster.board.join(cluster.spec, "n0", node.has, (), (), cluster.now_s) is None
    assert "gone" in str(cluster.begin().error)


def test_a_failure_passes_the_chunk_to_the_next():
    """The other node gets it, and the reason is shown while anybody waits."""
    cluster = Cluster(2)
    bad, good = cluster.join("n0"), cluster.join("n1")
    chunk = bad.report().leases[0]
    bad.report(failed=(FetchFailure(chunk, SourceError("s3://b", "it broke", status=500)),))
    assert chunk not in bad.last.leases
    assert "10.0.0.0 failed: s3://b: it broke (status 500)" in cluster.begin().waiting
    for _ in range(4):
        good.report()
        good.fetch()
    assert good.fetched[chunk] == 1
    assert cluster.begin().state == "running"


def test_a_failure_of_all_reaches_all():
    """Nodes and driver are told, with each node's own reason."""
    cluster = Cluster(3)
    nodes = [cluster.join(name) for name in cluster.spec.nodes]
    for node in nodes:
        cluster.now_s += 1.0
        orders = node.report(num_wanted=1)
        assert orders.leases == (0,)
        error = AuthError("s3://bucket", f"refused {node.name}")
        node.report(failed=(FetchFailure(0, error),), num_wanted=0)
    state = cluster.begin()
    assert state.state == "failed"
    assert isinstance(state.error, AuthError)
    assert "refused n2" in str(state.error)
    told = "\n".join(state.error.__notes__)
    assert "10.0.0.0" in told
    assert "refused n0" in told
    assert "refused n1" in told
    assert {node.report().state for node in nodes} == {"over"}


def test_a_node_that_keeps_a_lease_too_long():
    """It lives, but the chunk isn't coming: the other one gets it, and that is the reason given."""
    cluster = Cluster(2, chunk_lease_s=60.0)
    stuck, other = cluster.join("n0"), cluster.join("n1")
    chunk = stuck.report(num_wanted=1).leases[0]
    for _ in range(65):
        cluster.now_s += 1.0
        cluster.begin()
        stuck.report(num_wanted=1)
        other.report()
        other.fetch()
    assert other.fetched[chunk] == 1
    # It comes after all: a fact, and no harm.
    stuck.has |= 1 << chunk
    cluster.finish()


def test_a_lone_node_keeps_its_lease():
    """Nobody else could take it: a slow source is no failure."""
    cluster = Cluster(1, chunk_lease_s=60.0)
    node = cluster.join("n0")
    leases = node.report().leases
    for _ in range(70):
        cluster.now_s += 1.0
        assert set(leases) <= set(node.report().leases)
        cluster.begin()


def test_a_node_that_others_can_not_reach():
    """Who asks it in vain gets the chunk elsewhere, and, if nobody else has it, fetches it."""
    cluster = Cluster(2)
    owner, other = cluster.join("n0"), cluster.join("n1")
    chunk = owner.report().leases[0]
    owner.fetch()
    owner.report()
    for _ in range(8):
        cluster.now_s += 5.0
        cluster.begin()
        owner.report()
        other.report(lost=((chunk, 0),), num_wanted=0)
    assert chunk in other.last.leases
    other.fetch()
    assert other.fetched[chunk] == 1
    assert cluster.finish().state == "done"


def test_nodes_that_share_a_folder():
    """It is filled once; the guests look when it is full, and fill it if the first one dies."""
    cluster = Cluster(3)
    host = cluster.join("n0")
    guest = cluster.join("n1", shares=("n0",))
    cluster.join("n2")
    assert guest.report().guest_of == "n0"
    assert not guest.last.leases
    assert not guest.last.look
    for _ in range(40):
        cluster.now_s += 0.2
        for node in (host, cluster.nodes["n2"]):
            node.report()
            node.fetch()
            node.receive()
    host.report()
    assert guest.report().look
    guest.has = cluster.spec.table.everything
    state = cluster.finish()
    assert state.state == "done"
    assert not guest.fetched
    assert state.total_bytes == 2 * 320


def test_the_host_of_a_folder_dies():
    """Its guest joins again, with what it finds in the folder."""
    cluster = Cluster(2)
    host, guest = cluster.join("n0"), cluster.join("n1", shares=("n0",))
    host.report()
    host.fetch()
    host.report()
    guest.report()
    cluster.board.drop_node("run", "n0", "its node died", cluster.now_s)
    del cluster.nodes["n0"]
    assert guest.report().state == "join"
    heir = cluster.join("n1", has=host.has, shares=("n0",))
    assert heir.report().leases
    state = cluster.finish()
    assert state.state == "done"
    assert not set(each_bit(host.has)) & set(heir.fetched)
    assert any("10.0.0.0 was lost: its node died" in note for note in state.notes)


def test_two_drivers_want_the_same():
    """One run does it for both; it goes on when one of them leaves, and fails when both have."""
    cluster = Cluster(1)
    other = StageSpec("run-2", "key", "org/name", cluster.spec.table, {"n0": "a", "n9": "b"})
    state = cluster.board.begin(other, "driver:2", 0.0)
    assert state.run == "run"
    assert {node.node for node in state.nodes} == {"n0", "n9"}
    cluster.board.leave("run", "driver:1", 1.0)
    assert cluster.board.begin(other, "driver:2", 1.0).state == "running"
    cluster.board.leave("run", "driver:2", 2.0)
    assert cluster.board.is_idle


def test_a_wait_ends_with_who_holds_what():
    """Nodes that live and get nowhere: after the time the error names holder, chunk, file and age."""
    cluster = Cluster(2, stall_s=60.0, chunk_lease_s=1000.0)
    for name in cluster.spec.nodes:
        cluster.join(name)
    for _ in range(70):
        state = cluster.round(fetch=False, seconds=1.0)
    assert state.state == "failed"
    assert isinstance(state.error, StagingTimeout)
    for part in ("10.0.0.0 fetches chunk 0 (model, bytes 0 to 10)", "not done: 10.0.0.0 (has 0 %"):
        assert part in str(state.error)


def test_runs_are_forgotten():
    """After a minute nothing is left of a run that has ended."""
    cluster = Cluster(1)
    cluster.join("n0", has=cluster.spec.table.everything)
    assert cluster.finish().state == "done"
    assert len(cluster.board.status(cluster.now_s)) == 1
    assert not cluster.board.status(cluster.now_s + 61.0)


def test_messages_travel():
    """Everything that is sent pickles, and is what it was."""
    cluster = Cluster(2)
    node = cluster.join("n0")
    cluster.join("n1")
    orders = node.report()
    state = cluster.begin()
    for message in (cluster.spec, node.ticket, orders, state):
        assert pickle.loads(pickle.dumps(message)) == message
    table = pickle.loads(pickle.dumps(cluster.spec.table))
    assert (table.num_chunks, table.nbytes) == (32, 320)
    assert state.to_dict()["nodes"][0]["label"] == "10.0.0.0"


def test_odd_messages_do_no_harm():
    """Chunks that don't exist, leases that aren't held."""
    cluster = Cluster(2)
    node = cluster.join("n0")
    cluster.join("n1")
    failure = FetchFailure(7, ClusterError("not mine"))
    orders = node.report(has=1 << 99, failed=(failure,), lost=((99, 1), (-1, 0), (0, 77)))
    assert orders.state == "run"
    assert cluster.finish().state == "done"
    assert cluster.fetched == dict.fromkeys(range(32), 1)


def test_a_hundred_nodes_of_which_some_die():
    """Every byte once but for what dead nodes alone had, and an end; the coordinator's own time is small."""
    found = Simulation(num_nodes=60, num_files=40, num_deaths=20, death_span_s=6.0, seed=5).run(300.0)
    assert found["all_excused"]
    assert found["finished"] == 50
    assert found["own_s"] < 5.0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_thousand_nodes_and_files():
    """Under ten seconds of the coordinator's own processor time, on two slow cores."""
    found = Simulation(num_nodes=1000, num_files=1000, num_deaths=100).run(600.0)
    assert found["all_excused"]
    assert found["finished"] == 950
    assert found["own_s"] < 10.0
