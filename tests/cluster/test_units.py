"""What the cluster path decides without Ray: devices, threads, deadlines, heartbeats."""

from __future__ import annotations

import threading

import pytest

from raywl.actors.agent import NodeAgent, SourceRequest
from raywl.actors.deadline import Deadline
from raywl.actors.devices import cuda_index, interface_of, num_threads
from raywl.actors.keeper import GroupKeeper
from raywl.coordination import Beat, Group
from raywl.errors import CheckpointError, NotFoundError, StagingTimeout


@pytest.mark.parametrize(
    ("assigned", "visible", "index"),
    [
        ([], None, None),
        ([], "0,1", None),
        (["3"], "3", 0),
        (["3"], None, 3),
        (["3"], "2,3", 1),
        (["0"], "0,1,2", 0),
        (["GPU-1234abcd"], "GPU-1234abcd", 0),
        (["GPU-1234abcd"], "GPU-9, GPU-1234", 1),
        (["MIG-77"], "MIG-66,MIG-77", 1),
        (["1", "2"], "1,2", 0),
    ],
)
def test_the_device_is_the_one_that_ray_gave(assigned, visible, index):
    """C93: whether Ray narrowed the visible devices or not, by number or by UUID."""
    assert cuda_index(assigned, visible) == index


@pytest.mark.parametrize(("assigned", "visible"), [(["3"], "0,1"), (["3"], ""), (["GPU-12"], None)])
def test_a_device_that_cannot_be_found(assigned, visible):
    """Rather than another rank's GPU: an error."""
    with pytest.raises(ValueError, match="GPU"):
        cuda_index(assigned, visible)


def test_ranks_share_the_cores():
    """Never none."""
    assert [num_threads(8, 2), num_threads(8, 3), num_threads(2, 4)] == [4, 2, 1]


def test_interfaces():
    """The loopback has the loopback's address."""
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.77") is None


def test_a_deadline_knows_its_phases():
    """Seconds by phase, and a message with phase and names at the end."""
    now = [0.0]
    deadline = Deadline(10.0, "launch", clock=lambda: now[0])
    deadline.enter("connect")
    now[0] = 2.0
    deadline.enter("load")
    assert deadline.remaining_s() == 8.0
    assert deadline.remaining_s(3.0) == 3.0
    now[0] = 10.0
    with pytest.raises(
        StagingTimeout, match=r"launch was not done after 10 s .* load; not done: rank 1, rank 3"
    ):
        deadline.check(["rank 1", "rank 3"])
    deadline.enter("")
    assert deadline.phases == {"connect": 2.0, "load": 8.0}
    with pytest.raises(ValueError, match="timeout_s"):
        Deadline(0.0, "launch")


class Wire:
    """An agent's way to a coordinator that answers as the test says."""

    def __init__(self, *answers: Beat | Exception) -> None:
        self.answers = list(answers)
        self.ended = threading.Event()

    def beat(self, node_id: str, held: tuple[str, ...]) -> Beat:
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def end_this_actor(self) -> None:
        self.ended.set()

    def count_fetched(self, source: str, nbytes: int) -> None:
        self.fetched_bytes = {source: nbytes}


def test_an_agent_ends_when_it_is_told_to():
    """After heartbeats that were answered, and one that wasn't."""
    wire = Wire(Beat(True, False, 0.01), ValueError("no coordinator"), Beat(False, True, 0.01))
    NodeAgent("n1", "10.0.0.1", wire)
    assert wire.ended.wait(20)


def test_an_agent_ends_when_nobody_can_need_it(monkeypatch):
    """Without a coordinator for long."""
    monkeypatch.setattr("raywl.actors.agent._ALONE_S", 0.0)
    wire = Wire(ValueError("no coordinator"))
    NodeAgent("n1", "10.0.0.1", wire)
    assert wire.ended.wait(20)


def test_an_agent_opens_once_and_says_when_it_changed(checkpoint):
    """All ranks of a node get the same; another identity is refused; what isn't there names the node."""
    agent = NodeAgent("n1", "10.0.0.1", Wire(Beat(True, False, 3600.0, ("g",))))
    request = SourceRequest("g", checkpoint, {"subfolder": None})
    opened = agent.open(request)
    assert (opened.num_tensors, opened.kind) == (2, "local")
    first = agent.checkpoint(request, opened.identity)
    assert agent.checkpoint(request, opened.identity) is first
    with pytest.raises(CheckpointError, match=r"\[node 10\.0\.0\.1\] .*changed"):
        agent.checkpoint(request, "local:other")
    agent.close("g")
    agent.close("g")
    assert agent.checkpoint(request, opened.identity) == first
    with pytest.raises(NotFoundError) as caught:
        agent.open(SourceRequest("h", checkpoint + "/none", {}))
    assert caught.value.where == "node 10.0.0.1"
    assert "token" not in repr(SourceRequest("g", "m", {"token": "secret"}))


def test_a_keeper_goes_on_after_an_error_and_stops():
    """The coordinator may be away for a while."""
    beats: list[Group] = []
    enough = threading.Event()

    def keep(group: Group) -> bool:
        beats.append(group)
        if len(beats) == 1:
            raise ConnectionError("away")
        enough.set()
        return True

    class Quick(Group):
        lease_s = 0.03

    keeper = GroupKeeper(Quick("g", "d", "r"), keep)
    keeper.start()
    assert enough.wait(20)
    keeper.stop(10.0)
    count = len(beats)
    assert count >= 2
    keeper.stop(10.0)
    assert len(beats) == count
