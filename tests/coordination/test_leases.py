"""Leases and groups as events: never two holders, epochs only grow, no wait without an end."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from raywl.coordination import Group, GroupRegistry, LeaseTable
from raywl.errors import CheckpointError, ClusterError, LeaseLostError

HOLDERS = st.sampled_from(["a", "b", "c"])
RESOURCES = st.sampled_from(["x", "y"])
TTLS = st.integers(1, 20).map(float)


class Leasing(RuleBasedStateMachine):
    """Holders that believe in leases until they are told otherwise, against a model of the truth."""

    def __init__(self) -> None:
        super().__init__()
        self.table = LeaseTable()
        self.now_s = 0.0
        self.epochs: list[int] = []
        self.believed: list = []
        self.ends: dict[str, tuple[str, int, float]] = {}

    def in_force(self, resource):
        held = self.ends.get(resource)
        return held if held is not None and held[2] > self.now_s else None

    @rule(seconds=st.integers(0, 15).map(float))
    def time_passes(self, seconds):
        self.now_s += seconds

    @rule(resource=RESOURCES, holder=HOLDERS, ttl_s=TTLS)
    def acquire(self, resource, holder, ttl_s):
        before = self.in_force(resource)
        answer = self.table.acquire(resource, holder, ttl_s, self.now_s)
        lease = answer.lease
        assert answer.granted == (before is None or before[0] == holder)
        assert lease.expires_s > self.now_s
        if not answer.granted:
            assert (lease.holder, lease.epoch, lease.expires_s) == before
            return
        if before is None:
            assert all(lease.epoch > epoch for epoch in self.epochs)
            self.epochs.append(lease.epoch)
            assert lease.expires_s == self.now_s + ttl_s
        else:
            assert lease.epoch == before[1]
        self.ends[resource] = (holder, lease.epoch, lease.expires_s)
        self.believed.append(lease)

    @precondition(lambda self: self.believed)
    @rule(data=st.data(), ttl_s=TTLS)
    def renew(self, data, ttl_s):
        lease = data.draw(st.sampled_from(self.believed))
        held = self.in_force(lease.resource)
        if held is not None and held[:2] == (lease.holder, lease.epoch):
            renewed = self.table.renew(lease.resource, lease.holder, lease.epoch, ttl_s, self.now_s)
            assert renewed.epoch == lease.epoch
            assert renewed.expires_s == max(held[2], self.now_s + ttl_s)
            self.ends[lease.resource] = (lease.holder, lease.epoch, renewed.expires_s)
        else:
            with pytest.raises(LeaseLostError, match=f"epoch {lease.epoch}"):
                self.table.renew(lease.resource, lease.holder, lease.epoch, ttl_s, self.now_s)

    @precondition(lambda self: self.believed)
    @rule(data=st.data())
    def release(self, data):
        lease = data.draw(st.sampled_from(self.believed))
        held = self.in_force(lease.resource)
        if held is not None and held[:2] == (lease.holder, lease.epoch):
            self.table.release(lease.resource, lease.holder, lease.epoch, self.now_s)
            del self.ends[lease.resource]
        else:
            with pytest.raises(LeaseLostError):
                self.table.release(lease.resource, lease.holder, lease.epoch, self.now_s)

    @rule()
    def expire(self):
        for lease in self.table.expire(self.now_s):
            assert lease.expires_s <= self.now_s
            assert self.in_force(lease.resource) is None

    @rule(resource=RESOURCES, holder=HOLDERS)
    def whoever_waits_is_served_when_the_holder_falls_silent(self, resource, holder):
        answer = self.table.acquire(resource, holder, 1.0, self.now_s)
        waits = 0
        while not answer.granted:
            waits += 1
            self.now_s = answer.lease.expires_s
            answer = self.table.acquire(resource, holder, 1.0, self.now_s)
        assert waits <= 1
        if waits or self.in_force(resource) is None:
            self.epochs.append(answer.lease.epoch)
        self.ends[resource] = (holder, answer.lease.epoch, answer.lease.expires_s)
        self.believed.append(answer.lease)

    @invariant()
    def one_holder_each(self):
        live = self.table.leases(self.now_s)
        assert len({lease.resource for lease in live}) == len(live)
        told = {lease.resource: (lease.holder, lease.epoch, lease.expires_s) for lease in live}
        assert told == {name: held for name, held in self.ends.items() if held[2] > self.now_s}


TestLeasing = Leasing.TestCase
TestLeasing.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("ttl_s", [0.0, -1.0, float("inf"), float("nan")])
def test_a_lease_without_end_is_refused(ttl_s):
    """A wait must have an end, so a lease must."""
    with pytest.raises(ValueError, match="ttl_s"):
        LeaseTable().acquire("x", "a", ttl_s, 0.0)


def test_a_lease_has_ended_at_its_very_end():
    """The end is exclusive: at `expires_s` another may have it and the old holder is refused."""
    table = LeaseTable()
    old = table.acquire("x", "a", 5.0, 0.0).lease
    assert not table.acquire("x", "b", 5.0, 4.999).granted
    new = table.acquire("x", "b", 5.0, 5.0)
    assert new.granted
    with pytest.raises(LeaseLostError, match="passed to b"):
        table.release("x", "a", old.epoch, 5.0)
    assert table.lease_of("x", 5.0) == new.lease


def test_a_table_that_replaces_a_lost_one_grants_later_epochs():
    """A holder from before the restart is refused, even when it is the same process."""
    before = LeaseTable().acquire("x", "a", 5.0, 0.0).lease
    table = LeaseTable(first_epoch=1000)
    again = table.acquire("x", "a", 5.0, 0.0).lease
    assert again.epoch > before.epoch
    with pytest.raises(LeaseLostError):
        table.renew("x", "a", before.epoch, 5.0, 1.0)


def group(name="g", nodes=("n1",), idle_s=10.0, driver="host:1"):
    return Group(name, driver, "/models/m", nodes, len(nodes), idle_s)


def test_a_node_is_needed_while_a_group_lives_on_it():
    """Helpers stay for the group, then for the idle time, then end."""
    registry = GroupRegistry(0.0)
    registry.keep(group(), 0.0)
    assert registry.beat("n1", 0.0).needed
    other = registry.beat("n2", 0.0)
    assert (other.needed, other.retire) == (False, False)
    registry.drop("g", 5.0)
    assert not registry.beat("n1", 14.9).retire
    assert registry.beat("n1", 15.0).retire
    assert registry.beat("n2", 15.0).retire


def test_a_group_that_is_not_placed_yet_needs_every_node():
    """A launch under way must not lose a helper between asking for it and using it."""
    registry = GroupRegistry(0.0)
    registry.beat("n1", 0.0)
    registry.keep(group(nodes=()), 9.0)
    assert registry.beat("n1", 18.0).needed


def test_a_silent_driver_loses_its_group():
    """Its nodes count as idle from the end of the lease, however late that is noticed."""
    registry = GroupRegistry(0.0)
    registry.beat("n1", 0.0)
    lease = registry.keep(group(idle_s=10.0), 0.0)
    assert registry.beat("n1", lease.expires_s - 0.1).needed
    late = registry.beat("n1", lease.expires_s + 10.0)
    assert (late.needed, late.retire) == (False, True)
    assert registry.status(50.0)["groups"] == {}


def test_a_driver_that_comes_back_has_its_group_again_under_a_new_epoch():
    """Heartbeats carry the whole record, so a lost registry or an expired lease is mended by the next one."""
    registry = GroupRegistry(0.0)
    first = registry.keep(group(), 0.0)
    assert registry.expire(100.0) == (group(),)
    again = registry.keep(group(), 101.0)
    assert again.epoch > first.epoch
    assert registry.beat("n1", 101.0).needed


def test_a_name_belongs_to_one_driver():
    """Two drivers with one group name would end each other's groups."""
    registry = GroupRegistry(0.0)
    registry.keep(group(), 0.0)
    with pytest.raises(ClusterError, match="host:1"):
        registry.keep(group(driver="host:2"), 1.0)


def test_dropping_twice_or_after_expiry_is_harmless():
    """`shutdown` may be repeated, and may come late."""
    registry = GroupRegistry(0.0)
    registry.keep(group(), 0.0)
    registry.drop("g", 1.0)
    registry.drop("g", 2.0)
    registry.drop("never", 2.0)
    assert registry.status(2.0)["groups"] == {}


def test_ending_idle_helpers_at_once_spares_those_of_other_groups():
    """`shutdown(agents=True)` of one group takes nothing from another."""
    registry = GroupRegistry(0.0)
    registry.keep(group("g", ("n1", "n2")), 0.0)
    registry.keep(group("h", ("n2",)), 0.0)
    for node in ("n1", "n2"):
        registry.beat(node, 0.0)
    registry.drop("g", 1.0)
    assert registry.retire_idle(1.0) == ("n1",)
    assert not registry.is_unused
    registry.drop("h", 2.0)
    assert registry.retire_idle(2.0) == ("n2",)
    assert registry.is_unused


def test_the_registry_ends_last():
    """Only after the idle time, and when no helper beats any more."""
    registry = GroupRegistry(0.0)
    registry.keep(group(idle_s=3.0), 0.0)
    registry.beat("n1", 0.0)
    registry.drop("g", 1.0)
    assert not registry.is_over(3.9)
    registry.beat("n1", 4.0)
    assert not registry.is_over(4.5)
    assert registry.is_over(4.0 + 3 * registry.beat_s + 0.1)


def test_a_busy_helper_that_holds_something_keeps_the_registry():
    """It may skip beats for a while; only a dead one is silent for a minute."""
    registry = GroupRegistry(0.0)
    registry.keep(group(idle_s=1.0), 0.0)
    registry.drop("g", 0.5)
    registry.beat("n1", 1.0, ("table",))
    registry.beat("n2", 1.0)
    assert not registry.is_over(1.0 + 60.0)
    assert registry.is_over(1.0 + 60.1)
    registry.beat("n1", 70.0)
    assert registry.is_over(70.0 + 3 * registry.beat_s + 0.1)


def test_what_a_dead_node_held_keeps_nobody():
    """The cluster tells that it is gone."""
    registry = GroupRegistry(0.0)
    registry.keep(group(idle_s=1.0), 0.0)
    registry.drop("g", 0.0)
    registry.beat("n1", 1.0, ("table",))
    registry.beat("n2", 1.0)
    assert registry.retire_idle(1.0) == ("n2",)
    registry.beat("n2", 1.1)
    registry.see_nodes({"n2", "n3"})
    assert list(registry.status(1.1)["nodes"]) == ["n2"]
    assert registry.retire_idle(1.2) == ("n2",)
    assert registry.is_unused


def test_agreement_is_the_identity_and_disagreement_names_nodes():
    """C100: a path may hold different things on different nodes."""
    registry = GroupRegistry(0.0)
    registry.keep(group(nodes=("n1", "n2", "n3")), 0.0)
    labels = {"n1": "10.0.0.1", "n2": "10.0.0.2", "n3": "10.0.0.3"}
    assert registry.agree("g", dict.fromkeys(labels, "local:1"), labels) == "local:1"
    with pytest.raises(CheckpointError) as caught:
        registry.agree("g", {"n1": "local:1", "n2": "local:2", "n3": "local:1"}, labels)
    for part in ("/models/m", "local:1 on 10.0.0.1, 10.0.0.3", "local:2 on 10.0.0.2"):
        assert part in str(caught.value)
    with pytest.raises(ValueError, match="reported"):
        registry.agree("g", {}, {})


@given(
    events=st.lists(
        st.tuples(
            st.sampled_from(["keep", "drop", "beat", "pass"]),
            st.sampled_from(["g1", "g2"]),
            st.sampled_from([("n1",), ("n1", "n2"), ()]),
            st.floats(0, 20),
        ),
        max_size=40,
    )
)
@settings(max_examples=150, deadline=None)
def test_every_helper_ends_once_all_drivers_are_silent(events):
    """Whatever happened before, silence of the drivers ends helpers and registry within a bounded time."""
    registry, now_s = GroupRegistry(0.0), 0.0
    for kind, name, nodes, seconds in events:
        if kind == "keep":
            registry.keep(group(name, nodes, idle_s=5.0), now_s)
            assert all(registry.beat(node, now_s).needed for node in nodes)
        elif kind == "drop":
            registry.drop(name, now_s)
        elif kind == "beat":
            registry.beat("n1", now_s)
        else:
            now_s += seconds
        assert 0.25 <= registry.beat_s <= 10.0
    registry.keep(group("last", idle_s=5.0), now_s)
    deadline_s = now_s + group(idle_s=5.0).lease_s + 5.0 + 2 * registry.beat_s
    beating = {"n1", "n2"}
    while beating:
        assert now_s <= deadline_s
        for node in sorted(beating):
            if registry.beat(node, now_s).retire:
                beating.discard(node)
        now_s += registry.beat_s
    assert registry.is_over(now_s + 4 * registry.beat_s)


def test_values_pickle():
    """They are what actors send each other."""
    registry = GroupRegistry(0.0)
    lease = registry.keep(group(), 0.0)
    beat = registry.beat("n1", 0.0)
    assert pickle.loads(pickle.dumps((group(), lease, beat))) == (group(), lease, beat)
