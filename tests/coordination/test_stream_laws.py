"""Laws of streams, whatever nodes do: all that is needed arrives, with windows of any size, and no more than
a window is ever in a node's hands."""

from __future__ import annotations

import random

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from raywl.coordination import NOBODY, ChunkTable, FetchFailure, NodeReport, StageSpec, StagingBoard
from raywl.coordination.chunks import each_bit, lowest_bit
from raywl.coordination.stage_messages import unpack_route
from raywl.coordination.stream_run import StreamRun
from raywl.errors import SourceError, StagingTimeout

TABLE = ChunkTable((("a", 35), ("empty", 0), ("b", 10), ("c", 41)), 10)
NAMES = ["n0", "n1", "n2", "n3"]
NODES = st.sampled_from(NAMES)
SUBSETS = st.integers(0, TABLE.everything)


def spec_of(in_flight: int, names: list[str] = NAMES) -> StageSpec:
    labels = {name: name.upper() for name in names}
    return StageSpec("run", "key", "org/name", TABLE, labels, in_flight=in_flight)


class Node:
    """A node as it sees itself: what its ranks lack outlives its agent, what the agent holds doesn't."""

    def __init__(self, name: str, lacks: int) -> None:
        self.name, self.lacks = name, lacks
        self.start()

    def start(self) -> None:
        self.ticket = None
        self.orders = None
        self.ids: list[str] = []
        self.told = False
        self.here = self.mine = 0
        """What is in its hands; of it, what it fetched."""
        self.needs = 0
        self.keep = 0
        self.checks: dict[int, bool] = {}

    def must_wait(self, chunk: int) -> bool:
        """Whether a chunk waits for one before it: it is hashed in order."""
        file = TABLE.span(chunk).file
        if not self.checks.get(file):
            return False
        before = self.needs & TABLE.file_bits(file) & (1 << chunk) - 1
        return bool(before)

    def consume(self, which: int) -> None:
        """Its ranks take, and it hashes, what of these is here and can be."""
        for chunk in each_bit(self.here & which):
            self.lacks &= ~(1 << chunk)
            if not self.must_wait(chunk):
                self.needs &= ~(1 << chunk)
        self.here &= self.needs | self.mine
        gone = self.mine & ~self.needs & ~self.keep
        self.here &= ~gone
        self.mine &= ~gone


class Streaming(RuleBasedStateMachine):
    """Nodes that fetch, get, take, fail, forget and come back."""

    @initialize(lacks=st.lists(SUBSETS, min_size=4, max_size=4), in_flight=st.integers(1, 4))
    def begin(self, lacks, in_flight):
        self.now_s = 0.0
        self.in_flight, self.spec = in_flight, spec_of(in_flight)
        self.board = StagingBoard(first_epoch=10)
        self.nodes = {
            name: Node(name, TABLE.everything if bits % 3 == 0 else bits)
            for name, bits in zip(NAMES, lacks, strict=True)
        }
        self.wanted = {name: node.lacks for name, node in self.nodes.items()}
        self.delivered = dict.fromkeys(NAMES, 0)
        self.fetches: dict[int, int] = {}
        self.calm = True
        self.dropped: set[str] = set()
        self.board.begin(self.spec, "driver", self.now_s)

    @property
    def run_(self):
        return self.board._runs.get("run")

    @property
    def over(self):
        return self.run_ is None or self.run_.state != "running"

    def pass_time(self, seconds):
        """The driver lives."""
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            self.now_s = min(until_s, self.now_s + 10.0)
            before = self.run_
            self.board.begin(self.spec, "driver", self.now_s)
            if self.run_ is not before:
                # It had failed, was forgotten, and is begun anew.
                self.dropped.clear()

    @rule(seconds=st.sampled_from([0.05, 0.3, 1.1, 6.0]))
    def time_passes(self, seconds):
        self.pass_time(seconds)

    @precondition(lambda self: not self.over)
    @rule(seconds=st.sampled_from([16.0, 125.0]))
    def much_time_passes(self, seconds):
        self.calm = False
        self.pass_time(seconds)

    def join_now(self, node):
        node.start()
        node.ticket = self.board.join(self.spec, node.name, 0, (), (), self.now_s)

    @precondition(lambda self: not self.over)
    @rule(name=NODES)
    def starts_again(self, name):
        """Its agent was killed: what it held is gone."""
        if name not in self.dropped:
            self.calm = self.calm and self.nodes[name].ticket is None
            self.join_now(self.nodes[name])

    @precondition(lambda self: not self.over)
    @rule(name=NODES, fetch=SUBSETS, get=SUBSETS, take=SUBSETS, ready=st.booleans(), lost=st.booleans())
    def work(self, name, fetch, get, take, ready, lost):
        node = self.nodes[name]
        if node.ticket is not None:
            self.step(node, fetch, get, take, ready, lost)

    def step(self, node, fetch, get, take, ready=True, lost_answer=False, **more):
        if ready and not node.told:
            node.told, node.needs = True, node.lacks
        if node.orders is not None:
            for chunk in node.orders.leases:
                if fetch >> chunk & 1 and not node.here >> chunk & 1:
                    node.here |= 1 << chunk
                    node.mine |= 1 << chunk
                    node.keep |= node.orders.keep & 1 << chunk
                    self.fetches[chunk] = self.fetches.get(chunk, 0) + 1
            for route in map(unpack_route, node.orders.routes):
                provider = self.nodes[node.ids[route.provider(NOBODY - 1)]]
                wanted = node.needs & ~node.here & get & provider.mine
                if wanted >> route.chunk & 1:
                    node.here |= 1 << route.chunk
        before = node.lacks
        node.consume(take)
        self.delivered[node.name] |= before & ~node.lacks
        sent = NodeReport(
            "run",
            node.name,
            node.ticket,
            answered=0 if node.orders is None else node.orders.serial,
            seen_nodes=len(node.ids),
            num_wanted=2,
            finished=node.told and not node.needs,
            needs=node.needs if node.told else None,
            holds=node.mine,
            **more,
        )
        orders = self.board.report(sent, self.now_s)
        if orders.state == "join":
            self.calm = False
            node.start()
        elif not lost_answer and orders.state == "run":
            node.orders = orders
            node.ids += orders.nodes
            for check in orders.checks:
                whole = check.whole and not TABLE.file_bits(check.file) & ~node.lacks
                node.checks.setdefault(check.file, whole)
            if orders.keep is not None:
                node.keep = orders.keep
        return orders

    @precondition(lambda self: not self.over)
    @rule(name=NODES)
    def fails_to_fetch(self, name):
        node = self.nodes[name]
        if node.orders is not None and node.orders.leases:
            self.calm = False
            error = SourceError("s3://bucket", "status 500", status=500)
            self.step(node, 0, 0, 0, failed=(FetchFailure(node.orders.leases[0], error),))

    @precondition(lambda self: not self.over)
    @rule(name=NODES)
    def asks_in_vain(self, name):
        node = self.nodes[name]
        if node.orders is not None and node.orders.routes:
            self.calm = False
            route = unpack_route(node.orders.routes[0])
            self.step(node, 0, 0, 0, lost=((route.chunk, route.source),))

    @precondition(lambda self: not self.over)
    @rule(name=NODES)
    def is_given_up(self, name):
        self.calm = False
        self.dropped.add(name)
        self.nodes[name].start()
        self.board.drop_node("run", name, "the node is gone", self.now_s)

    @precondition(lambda self: not self.over)
    @rule()
    def the_coordinator_starts_anew(self):
        self.calm = False
        self.board = StagingBoard(first_epoch=self.board._next_number + 100)
        self.board.begin(self.spec, "driver", self.now_s)
        for name in self.dropped:
            self.board.drop_node("run", name, "the node is gone", self.now_s)

    @precondition(lambda self: not self.over)
    @rule(name=NODES, number=st.integers(1, 9))
    def a_stranger_reports(self, name, number):
        """Of another epoch or membership: refused, and without effect."""
        ticket = type(self.board.join(self.spec, "stranger", 0, (), (), self.now_s))(1, number)
        before = dict(self.run_._needs)
        orders = self.board.report(NodeReport("run", name, ticket, needs=0, finished=True), self.now_s)
        assert orders.state == "join"
        assert before == self.run_._needs

    @invariant()
    def nothing_is_leased_twice_or_for_nobody(self):
        run = getattr(self, "board", None) and self.run_
        if not run or not self.calm:
            return
        leased = [chunk for member in run._members for chunk in member.leases]
        assert len(leased) == len(set(leased))
        wanted = 0
        for bits in self.wanted.values():
            wanted |= bits
        assert all(wanted >> chunk & 1 for chunk in leased)

    @invariant()
    def no_node_has_more_than_a_window_in_its_hands(self):
        if not getattr(self, "calm", False):
            return
        for node in self.nodes.values():
            member = self.run_ and self.run_._members.get(node.name)
            coming = set() if member is None else set(member.leases)
            own = node.mine.bit_count() + len(coming - set(each_bit(node.mine)))
            assert own <= self.in_flight + 1
            assert (node.here & ~node.mine).bit_count() <= self.in_flight + 1

    @invariant()
    def in_calm_each_chunk_is_fetched_once(self):
        if getattr(self, "calm", False):
            assert all(count == 1 for count in self.fetches.values())

    def teardown(self):
        if not hasattr(self, "board") or self.over:
            return
        # All that live work honestly from here on: it ends, and well unless the source failed.
        for _ in range(400):
            if self.over:
                break
            for node in self.nodes.values():
                if self.over or node.name in self.dropped:
                    continue
                if node.ticket is None:
                    self.join_now(node)
                self.step(node, TABLE.everything, TABLE.everything, TABLE.everything, lost=self.vain(node))
            self.pass_time(1.0)
        state = self.board.begin(self.spec, "driver", self.now_s)
        assert state.state in ("done", "failed"), state.waiting
        if state.state == "failed":
            assert isinstance(state.error, SourceError), state.error
        else:
            for name in set(NAMES) - self.dropped:
                assert self.delivered[name] == self.wanted[name]

    def vain(self, node):
        """What a node asks for in vain."""
        if node.orders is None:
            return ()
        for route in map(unpack_route, node.orders.routes):
            provider = self.nodes[node.ids[route.source]]
            if node.needs >> route.chunk & 1 and not provider.mine >> route.chunk & 1:
                return ((route.chunk, route.source),)
        return ()


TestStreaming = Streaming.TestCase
TestStreaming.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)


@settings(max_examples=60, deadline=None)
@given(
    lacks=st.lists(SUBSETS, min_size=1, max_size=4),
    in_flight=st.integers(1, 5),
    whole=st.booleans(),
    seed=st.integers(0, 1 << 30),
)
def test_every_window_is_wide_enough(lacks, in_flight, whole, seed):
    """Nodes work in any order, a bit at a time: no deadlock, and nothing that nobody needs is fetched."""
    order = random.Random(seed)
    machine = Streaming()
    machine.begin(lacks + [0] * (4 - len(lacks)), in_flight)
    for node in machine.nodes.values():
        node.lacks = machine.wanted[node.name] = TABLE.everything if whole else node.lacks
        machine.join_now(node)
    for _ in range(2000):
        if machine.over:
            break
        machine.pass_time(0.1)
        node = order.choice(list(machine.nodes.values()))
        machine.step(node, *(order.getrandbits(TABLE.num_chunks) for _ in range(3)))
        machine.nothing_is_leased_twice_or_for_nobody()
        machine.no_node_has_more_than_a_window_in_its_hands()
    machine.in_calm_each_chunk_is_fetched_once()
    assert machine.run_.state == "done"
    wanted = 0
    for name, bits in machine.wanted.items():
        assert machine.delivered[name] == bits
        wanted |= bits
    assert set(machine.fetches) == set(each_bit(wanted))


def test_nothing_moves_until_all_have_spoken():
    """A node that fetched before another has said what it needs would drop what that one needs."""
    spec = spec_of(3, ["n0", "n1"])
    board = StagingBoard(1)
    board.begin(spec, "driver", 0.0)
    tickets = {name: board.join(spec, name, 0, (), (), 0.0) for name in ("n0", "n1")}

    def report(name, needs, now_s, **more):
        return board.report(NodeReport("run", name, tickets[name], num_wanted=2, needs=needs, **more), now_s)

    assert report("n0", TABLE.everything, 1.0).leases == ()
    for now_s in range(2, 400, 10):
        # Ranks that take their time with a model aren't a stall.
        report("n0", TABLE.everything, float(now_s))
        assert report("n1", None, float(now_s)).keep is None
        assert board.begin(spec, "driver", float(now_s)).state == "running"
    report("n1", 0, 400.0)
    assert report("n0", TABLE.everything, 400.1).leases == (0, 1)


def test_one_that_needs_nothing_fetches_where_the_others_can_not():
    spec = spec_of(3, ["n0", "n1"])
    board = StagingBoard(1)
    board.begin(spec, "driver", 0.0)
    tickets = {name: board.join(spec, name, 0, (), (), 0.0) for name in ("n0", "n1")}

    def report(name, needs, **more):
        return board.report(NodeReport("run", name, tickets[name], num_wanted=1, needs=needs, **more), 1.0)

    report("n1", 0)
    first = report("n0", 0b101)
    assert first.leases == (0,)
    failure = FetchFailure(0, SourceError("s3://bucket", "refused", status=500))
    assert report("n0", 0b101, failed=(failure,), answered=first.serial).leases == ()
    taken = report("n1", 0)
    assert taken.leases == (0,)
    assert taken.keep == 1
    route = unpack_route(report("n0", 0b101, answered=first.serial + 1).routes[0])
    assert (route.chunk, route.source) == (0, 1)


def test_the_first_chunk_of_all_may_exceed_the_window():
    """n0 holds as much as it may, for a node that waits for what only n0 can still fetch."""
    spec = spec_of(1, ["n0", "n1", "n2"])
    board = StagingBoard(1)
    board.begin(spec, "driver", 0.0)
    tickets = {name: board.join(spec, name, 0, (), (), 0.0) for name in spec.nodes}

    def report(name, needs, **more):
        return board.report(NodeReport("run", name, tickets[name], num_wanted=2, needs=needs, **more), 1.0)

    report("n1", 0b01)
    report("n2", 0b10)
    assert report("n0", 0b10).leases == (1,)
    assert report("n1", 0b01).leases == (0,)
    assert report("n0", 0b00, holds=0b10).leases == ()
    error = SourceError("s3://bucket", "refused", status=500)
    report("n1", 0b01, failed=(FetchFailure(0, error),))
    assert report("n0", 0b00, holds=0b10).leases == (0,)


def test_two_that_fetch_one_chunk_since_the_same_moment_are_both_named():
    """As nodes do that can't get it from the one that has it."""
    run = StreamRun(spec_of(2), 1, 0.0)
    for number, node in enumerate(NAMES[:2], 1):
        run.join(node, 0, (), (), number, 0.0)
        run._members.get(node).leases[0] = 0.0
    told = run.status(1.0).waiting
    assert [f"{node.upper()} fetches chunk 0" in told for node in NAMES[:2]] == [True, True]


def test_silence_has_an_end():
    """Both say what they need, and then one fetches for ever: the error says who, what and since when."""
    spec = spec_of(2, ["n0", "n1"])
    board = StagingBoard(1)
    board.begin(spec, "driver", 0.0)
    tickets = {name: board.join(spec, name, 0, (), (), 0.0) for name in ("n0", "n1")}
    now_s = 0.0
    while (state := board.begin(spec, "driver", now_s)).state == "running":
        assert now_s < 500
        for name, ticket in tickets.items():
            board.report(NodeReport("run", name, ticket, num_wanted=1, needs=0b11), now_s)
        now_s += 5.0
    assert isinstance(state.error, StagingTimeout)
    assert "fetches chunk" in str(state.error)
    assert "lacks 2 of 2 chunks" in str(state.error)


def test_a_file_is_checked_by_one_node():
    """By one that gets all of it, in turn; else by one that gets some, which can't hash it."""
    spec = spec_of(2, ["n0", "n1"])
    board = StagingBoard(1)
    board.begin(spec, "driver", 0.0)
    tickets = {name: board.join(spec, name, 0, (), (), 0.0) for name in ("n0", "n1")}
    part = 1 << lowest_bit(TABLE.file_bits(3))
    needs = {"n0": TABLE.file_bits(0) | TABLE.file_bits(2), "n1": TABLE.file_bits(2) | part}
    checks = {}
    for _ in range(2):
        for name, ticket in tickets.items():
            orders = board.report(NodeReport("run", name, ticket, needs=needs[name]), 1.0)
            checks[name] = {(check.file, check.whole) for check in orders.checks}
    assert checks == {"n0": {(0, True)}, "n1": {(2, True), (3, False)}}
