"""Laws of staging, whatever nodes do: one lease to a chunk, nothing twice for nothing, no endless wait."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from raywl.coordination import NOBODY, ChunkTable, FetchFailure, NodeReport, StageSpec, StagingBoard
from raywl.coordination.chunks import each_bit, lowest_bit, set_of
from raywl.coordination.stage_messages import unpack_route
from raywl.errors import SourceError

TABLE = ChunkTable((("a", 35), ("empty", 0), ("b", 10), ("c", 12)), 10)
NAMES = ["n0", "n1", "n2", "n3", "n4"]
SPEC = StageSpec("run", "key", "org/name", TABLE, {name: name.upper() for name in NAMES})
NODES = st.sampled_from(NAMES)
SUBSETS = st.integers(0, TABLE.everything)


class Node:
    """A node as it sees itself. Its disk outlives its process."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.disk = 0
        self.start()

    def start(self) -> None:
        self.ticket = None
        self.orders = None
        self.reports: list[NodeReport] = []
        self.providers: dict[int, int] = {}
        self.ids: list[str] = []
        self.seen = 0


class Staging(RuleBasedStateMachine):
    """Nodes that fetch, pass on, fail, forget, fall silent and come back, against what was granted."""

    @initialize(disks=st.lists(SUBSETS, min_size=5, max_size=5), share=st.booleans())
    def begin(self, disks, share):
        self.now_s = 0.0
        self.board = StagingBoard(first_epoch=10)
        self.nodes = {name: Node(name) for name in NAMES}
        for node, disk in zip(self.nodes.values(), disks, strict=True):
            node.disk = disk if disk % 3 == 0 else 0
        self.shares = {"n4": ("n3",)} if share else {}
        self.granted: dict[int, int] = {}
        self.excused: dict[int, int] = {}
        self.all_failed = False
        self.board.begin(SPEC, "driver", self.now_s)

    @property
    def run_(self):
        return self.board._runs.get("run")

    @property
    def over(self):
        return self.run_ is None or self.run_.state != "running"

    @rule(seconds=st.sampled_from([0.05, 0.3, 1.1, 4.0]))
    def time_passes(self, seconds):
        self.watch(lambda: self.pass_time(seconds))

    @precondition(lambda self: not self.over)
    @rule(seconds=st.sampled_from([16.0, 125.0]))
    def much_time_passes(self, seconds):
        """The driver lives; nodes are silent."""
        self.watch(lambda: self.pass_time(seconds))

    def pass_time(self, seconds):
        self.now_s += seconds
        self.board.begin(SPEC, "driver", self.now_s)

    @precondition(lambda self: not self.over)
    @rule(name=NODES, fetching=st.lists(st.integers(-1, TABLE.num_chunks), max_size=2))
    def join(self, name, fetching):
        self.watch(lambda: self.join_now(self.nodes[name], fetching))

    def join_now(self, node, fetching=()):
        node.start()
        node.ticket = self.board.join(
            SPEC, node.name, node.disk, fetching, self.shares.get(node.name, ()), self.now_s
        )

    @precondition(lambda self: not self.over)
    @rule(
        name=NODES, fetch=SUBSETS, receive=SUBSETS, rate=st.sampled_from([0.0, 1.0, 10.0]), lost=st.booleans()
    )
    def work(self, name, fetch, receive, rate, lost):
        """A node does some of what it was told, and reports; the answer may get lost."""
        node = self.nodes[name]
        if node.ticket is not None:
            self.watch(lambda: self.report(node, fetch, receive, rate=rate, lost_answer=lost))

    def report(self, node, fetch, receive, lost_answer=False, rate=0.0, **more):
        if node.orders is not None:
            node.disk |= set_of(node.orders.leases) & fetch
            for chunk, provider in node.providers.items():
                if provider != NOBODY and receive >> chunk & 1:
                    node.disk |= self.nodes[node.ids[provider]].disk & 1 << chunk
        sent = NodeReport(
            "run",
            node.name,
            node.ticket,
            answered=0 if node.orders is None else node.orders.serial,
            has=node.disk,
            seen_routes=node.seen,
            seen_nodes=len(node.ids),
            num_wanted=3,
            shares=self.shares.get(node.name, ()),
            fetch_bytes_per_s=rate,
            send_bytes_per_s=rate,
            finished=node.disk == TABLE.everything,
            **more,
        )
        node.reports.append(sent)
        orders = self.board.report(sent, self.now_s)
        if orders.state == "join":
            node.start()
            return orders
        if orders.look:
            node.disk = TABLE.everything
        if not lost_answer and orders.state == "run":
            node.orders = orders
            node.ids += orders.nodes
            node.seen = orders.seen_routes
            for route in map(unpack_route, orders.routes):
                node.providers[route.chunk] = route.provider(node.ids.index(node.name))
        return orders

    @precondition(lambda self: not self.over)
    @rule(name=NODES)
    def fails_to_fetch(self, name):
        node = self.nodes[name]
        if node.orders is not None and node.orders.leases:
            error = SourceError("s3://bucket", "status 500", status=500)
            failure = FetchFailure(node.orders.leases[0], error)
            self.watch(lambda: self.report(node, 0, 0, failed=(failure,)))

    @precondition(lambda self: not self.over)
    @rule(name=NODES, chunk=st.integers(0, TABLE.num_chunks - 1))
    def asks_in_vain(self, name, chunk):
        node = self.nodes[name]
        provider = node.providers.get(chunk, NOBODY)
        if node.ticket is not None and provider != NOBODY and not node.disk >> chunk & 1:
            self.watch(lambda: self.report(node, 0, 0, lost=((chunk, provider),)))

    @precondition(lambda self: not self.over)
    @rule(name=NODES, kept=SUBSETS)
    def dies(self, name, kept):
        """And has lost some of its disk; what it alone had may be fetched again."""
        node = self.nodes[name]
        node.start()
        node.disk &= kept

    @precondition(lambda self: not self.over)
    @rule(name=NODES)
    def is_given_up(self, name):
        self.watch(lambda: self.board.drop_node("run", name, "the node is gone", self.now_s))

    @precondition(lambda self: not self.over)
    @rule(name=NODES, data=st.data())
    def repeats_an_old_report(self, name, data):
        """A message that arrives again, or late: nothing is leased twice by it."""
        node = self.nodes[name]
        if node.reports:
            old = data.draw(st.sampled_from(node.reports))
            self.watch(lambda: self.board.report(old, self.now_s))

    @precondition(lambda self: not self.over)
    @rule(name=NODES, number=st.integers(1, 9))
    def a_stranger_reports(self, name, number):
        """Of another epoch or membership: refused, and without effect."""
        known = self.run_._members.get(name)
        before = None if known is None else (known.has, dict(known.leases), known.expires_s)
        ticket = type(SPEC_TICKET)(SPEC_TICKET.epoch, number)
        orders = self.board.report(
            NodeReport("run", name, ticket, has=TABLE.everything, finished=True), self.now_s
        )
        assert orders.state == "join"
        assert not orders.leases
        again = self.run_._members.get(name)
        if again is not None:
            assert before == (again.has, again.leases, again.expires_s)

    @precondition(lambda self: not self.over)
    @rule()
    def the_coordinator_starts_anew(self):
        leased = [] if self.run_ is None else list(self.run_._holder)
        self.board = StagingBoard(first_epoch=self.board._next_number + 100)
        self.board.begin(SPEC, "driver", self.now_s)
        for chunk in leased:
            # Whoever had it is fetching it, and may not say so when it joins again.
            self.excused[chunk] = self.excused.get(chunk, 0) + 1

    def watch(self, event):
        """Does something, and notes which leases were granted and which were taken away by it."""
        before = dict(self.run_._holder) if self.run_ else {}
        had = {m.node: m.has for m in self.run_._members} if self.run_ else {}
        event()
        after = self.run_._holder if self.run_ else {}
        for chunk, member in before.items():
            if after.get(chunk) is not member and not member.has >> chunk & 1:
                self.excused[chunk] = self.excused.get(chunk, 0) + 1
        now_has = {m.node: m.has for m in self.run_._members} if self.run_ else {}
        for name, has in had.items():
            for chunk in each_bit(has & ~now_has.get(name, 0)):
                self.excused[chunk] = self.excused.get(chunk, 0) + 1
        for chunk, member in after.items():
            if before.get(chunk) is not member:
                again = self.run_._again >> chunk & 1
                self.granted[chunk] = self.granted.get(chunk, 0) + 1 - again

    @invariant()
    def every_chunk_is_in_one_state(self):
        run = getattr(self, "board", None) and self.run_
        if not run:
            return
        leased = [chunk for member in run._members for chunk in member.leases]
        assert len(leased) == len(set(leased)), "two leases of one chunk"
        assert set_of(leased) == run._leased
        assert all(run._holder[chunk].leases for chunk in leased)
        assert not run._free & run._leased
        if run._settled:
            held = run._members.held_by_any()
            assert not run._free & held
            assert run._free | run._leased | held == TABLE.everything
            assert not run._again & ~run._leased
            for member in run._members:
                assert member.guest_of is None or not member.leases

    @invariant()
    def nothing_is_fetched_twice_for_nothing(self):
        for chunk, count in getattr(self, "granted", {}).items():
            assert count <= 1 + self.excused.get(chunk, 0), f"chunk {chunk} was leased {count} times"

    @invariant()
    def memory_is_bounded(self):
        run = getattr(self, "board", None) and self.run_
        if run:
            assert len(run._planner.routes.since(0)[0]) <= 3 * TABLE.num_chunks + 65
            assert len(run._failures) <= TABLE.num_chunks
            assert all(len(m.misses) <= TABLE.num_chunks for m in run._members)

    def teardown(self):
        if not hasattr(self, "board"):
            return
        if self.over:
            return
        # All that live work honestly from here on: it ends well.
        given_up = set(self.run_._given_up)
        for _ in range(200):
            if self.over:
                break
            self.watch(lambda: self.pass_time(1.0))
            for node in self.nodes.values():
                if self.over or node.name in given_up:
                    continue
                if node.ticket is None:
                    self.join_now(node)
                vain = () if node.orders is None else self.vain(node)
                self.report(node, TABLE.everything, TABLE.everything, lost=vain)
        assert self.board.begin(SPEC, "driver", self.now_s).state in ("done", "failed")
        if self.run_.state == "failed":
            assert isinstance(self.run_.error, SourceError), self.run_.error

    def vain(self, node):
        """What a node asks for in vain: one chunk each time, as long as it isn't told of another way."""
        lacking = TABLE.everything & ~node.disk & set_of(node.providers)
        for chunk in each_bit(lacking):
            provider = node.providers[chunk]
            if provider != NOBODY and not self.nodes[node.ids[provider]].disk >> chunk & 1:
                return ((chunk, provider),)
        return ()


SPEC_TICKET = StagingBoard(1).join(SPEC, "n0", 0, (), (), 0.0)
TestStaging = Staging.TestCase
TestStaging.settings = settings(
    max_examples=50, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)


@settings(max_examples=60, deadline=None)
@given(
    disks=st.lists(SUBSETS, min_size=1, max_size=4),
    speak_s=st.floats(0.0, 20.0),
    driver=st.booleans(),
)
def test_silence_has_an_end(disks, speak_s, driver):
    """Nodes join and then say nothing more: the run fails in bounded time, and says who wasn't done."""
    board = StagingBoard()
    board.begin(SPEC, "driver", 0.0)
    for name, disk in zip(NAMES, disks, strict=False):
        board.join(SPEC, name, disk, (), (), speak_s)
    now_s, limit_s = speak_s, speak_s + SPEC.node_lease_s + SPEC.stall_s + SPEC.driver_lease_s
    while now_s < limit_s:
        now_s += 5.0
        state = board.begin(SPEC, "driver", now_s) if driver else None
        board.tick(now_s)
        if state is not None and state.state == "failed":
            assert "N0" in str(state.error)
            return
    assert not driver
    assert board.is_idle


@given(bits=st.integers(0, 1 << 70))
def test_sets(bits):
    """Sets of chunks as integers."""
    numbers = list(each_bit(bits))
    assert numbers == [n for n in range(71) if bits >> n & 1]
    assert set_of(numbers) == bits
    if bits:
        assert lowest_bit(bits) == numbers[0]


@given(sizes=st.lists(st.integers(0, 50), max_size=8), chunk_bytes=st.integers(1, 20))
def test_chunks_tile_the_files(sizes, chunk_bytes):
    """Every byte of every file is in one chunk, in order."""
    table = ChunkTable(tuple((f"f{n}", size) for n, size in enumerate(sizes)), chunk_bytes)
    spans = [table.span(chunk) for chunk in range(table.num_chunks)]
    for file, size in enumerate(sizes):
        mine = [span for span in spans if span.file == file]
        assert [span.start for span in mine] == list(range(0, size, chunk_bytes))
        assert [span.end for span in mine] == [
            min(s + chunk_bytes, size) for s in range(0, size, chunk_bytes)
        ]
        assert list(each_bit(table.file_bits(file))) == list(table.chunks_of(file))
        for start in range(size + 1):
            for end in range(start, size + 1):
                inside = [c for c in table.chunks_of(file) if start <= spans[c].start and spans[c].end <= end]
                assert list(each_bit(table.bits_within(file, start, end))) == inside
    assert [table.size(chunk) for chunk in range(table.num_chunks)] == [s.end - s.start for s in spans]
    assert table.nbytes == sum(sizes) == table.nbytes_of(table.everything)
