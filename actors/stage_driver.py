"""A run as its driver sees it."""

from __future__ import annotations

import contextlib
import os
import socket
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import ray

from raywl.actors.chunks import StageFiles, StageRequest
from raywl.actors.deadline import Deadline
from raywl.actors.failures import Place
from raywl.actors.raycalls import (
    Node,
    ProgressPoll,
    alive_nodes,
    from_ray,
    gather,
    hold_agents,
    make_coordinator,
)
from raywl.actors.requests import SourceRequest
from raywl.actors.stage_calls import STAGE
from raywl.actors.stage_work import window_of
from raywl.coordination import CHUNK_BYTES, ChunkTable, StageSpec, StageState
from raywl.errors import NodeLostError, RaywlError, StagingTimeout, some_of
from raywl.progress import Progress
from raywl.stage_report import StagedNode, StageReport

__all__ = [
    "COORDINATOR",
    "StagingCalls",
    "choose_nodes",
    "chunk_bytes_for",
    "report_of_nodes",
    "smallest_window_bytes",
    "stage_on_nodes",
    "warm_nodes",
]

COORDINATOR = Place("of the coordinator")

_TICK_S, _TICK_S_PER_NODE = 0.25, 0.002
_CALL_S = 10.0
_MIN_CHUNK_BYTES = 64 << 10
_CHUNKS_IN_WINDOW = 8
_TRIES = 3
_LEAVE_S = 5.0


def choose_nodes(nodes: Sequence[str] | None) -> list[Node]:
    """The live nodes by these ids or addresses, all without any.

    Raises:
        ValueError: There is none by one of the names; those that are there are listed.
    """
    alive = alive_nodes()
    if nodes is None:
        return alive
    if isinstance(nodes, str):
        raise TypeError("nodes must be a list of node ids or addresses, not a single text")
    found = []
    for name in nodes:
        matching = [node for node in alive if name in (node.node_id, node.address, node.label)]
        if not matching:
            known = some_of([f"{node.label} ({node.node_id})" for node in alive])
            raise ValueError(f"no live node is {name!r}; there are {known}")
        found += matching
    return list({node.node_id: node for node in found}.values())


def stage_on_nodes(
    request: SourceRequest, nodes: Sequence[Node], deadline: Deadline, progress: Progress | None = None
) -> StageReport | None:
    """Stages what a request names; `None` for a local path or a cache that is used offline, as there is
    nothing to move.

    Raises:
        RaywlError: As `stage`.
    """
    if isinstance(request.ref, str):
        return None
    if request.ref.offline:
        return None
    found = _look_on_nodes(request, nodes, deadline)
    first = found[0]
    nbytes = sum(size for _, size in first.files)
    report = StageReport(request.label, "", "cache", first.kind, nbytes)
    if len(found) == len(nodes) and all(one.complete for one in found):
        report.nodes = [StagedNode(node.label, node.node_id, "finished", nbytes) for node in nodes]
        return report
    whole_bytes = 0 if first.ranged else _fetch_whole(request, nodes, deadline, progress)
    spec = StageSpec(
        run=f"stage-{uuid.uuid4().hex[:16]}",
        key=f"{request.ref} {first.version} {request.ref.cache_dir}",
        label=request.label,
        table=ChunkTable(first.files, chunk_bytes_for(smallest_window_bytes(nodes))),
        nodes={node.node_id: node.label for node in nodes},
    )
    deadline.enter("stage")
    state = StagingCalls(StageRequest(spec, request.ref), nodes, deadline, progress).run()
    report_of_nodes(report, state, nodes, spec.table.nbytes)
    if whole_bytes:
        report.notes.append(f"the source gives no parts of files: {nodes[0].label} fetched them whole")
        first_node = next((node for node in report.nodes if node.node_id == nodes[0].node_id), None)
        if first_node is not None:
            first_node.fetched_bytes += whole_bytes
    return report


def report_of_nodes(
    report: StageReport, state: StageState, nodes: Sequence[Node], total_bytes: int | None = None
) -> None:
    """Notes in a report how a run ended on some nodes.

    Args:
        report: Takes it.
        state: Of the run.
        nodes: Those that were asked for.
        total_bytes: What a node has that is finished; by default what it said.
    """
    report.notes = list(state.notes)
    labels = {node.node: node.label for node in state.nodes}
    wanted = {node.node_id for node in nodes}
    # What all of them say is said once.
    common = set.intersection(*(set(node.notes) for node in state.nodes)) if state.nodes else set()
    report.notes += sorted(common)
    report.nodes = [
        StagedNode(
            node.label,
            node.node,
            node.state,
            total_bytes if total_bytes is not None and node.state == "finished" else node.has_bytes,
            node.fetched_bytes,
            node.received_bytes,
            node.sent_bytes,
            node.peak_store_bytes,
            None if node.guest_of is None else labels.get(node.guest_of, node.guest_of),
            [
                *(note for note in node.notes if note not in common),
                *(["its link was slow, and spared"] if node.slow else []),
            ],
        )
        for node in state.nodes
        if node.node in wanted
    ]


def smallest_window_bytes(nodes: Sequence[Node]) -> int:
    """What chunks may take of the smallest object store among some nodes."""
    return min(window_of(int(node.resources.get("object_store_memory", 0))) for node in nodes)


def _look_on_nodes(request: SourceRequest, nodes: Sequence[Node], deadline: Deadline) -> list[StageFiles]:
    """What the first node finds, and, where that has everything, all others too."""
    agents = hold_agents(nodes, deadline)
    places = [Place(node.label) for node in nodes]
    found: list[StageFiles] = gather([agents[0].list_files.remote(request)], places[:1], deadline)
    if found[0].complete:
        found += gather([agent.list_files.remote(request) for agent in agents[1:]], places[1:], deadline)
    return found


def _fetch_whole(
    request: SourceRequest, nodes: Sequence[Node], deadline: Deadline, progress: Progress | None
) -> int:
    """Brings files that the source gives only whole to the first node, unless one has them; returns the bytes
    that came. From there they are staged as any other."""
    agents = hold_agents(nodes, deadline)
    places = [Place(node.label) for node in nodes]
    found: list[StageFiles] = gather([agent.list_files.remote(request) for agent in agents], places, deadline)
    if any(one.complete for one in found):
        return 0
    deadline.enter("fetch")
    ask = partial(agents[0].progress.remote, request.group)
    poll = None if progress is None else ProgressPoll([ask], progress)
    (nbytes,) = gather([agents[0].fetch.remote(request)], places[:1], deadline, poll)
    return int(nbytes)


def chunk_bytes_for(window_bytes: int) -> int:
    """8 MiB, or less where a window would hold only a few of them."""
    chunk_bytes = CHUNK_BYTES
    while chunk_bytes > _MIN_CHUNK_BYTES and chunk_bytes * _CHUNKS_IN_WINDOW > window_bytes:
        chunk_bytes //= 2
    return chunk_bytes


@dataclass
class StagingCalls:
    """A run, as its driver sees it: calls that last as long as the nodes take part, and looks in between.

    `run` does it all; or else `begin`, `step` as long as it is running, and in any case `leave`.
    """

    request: StageRequest
    nodes: Sequence[Node]
    deadline: Deadline
    progress: Progress | None
    needs_all: bool = False
    """Whether a node whose agent dies again and again ends it all; else the others go on without it."""
    _calls: dict[Any, Node] = field(default_factory=dict)
    _tries: dict[str, int] = field(default_factory=dict)

    def run(self) -> StageState:
        """Waits until all nodes have it."""
        try:
            state = self.begin()
            while state.state == "running":
                state = self.step()
                if state.state == "running" and self.deadline.remaining_s() == 0:
                    raise StagingTimeout(
                        f"{self.request.spec.label} was not staged after {self.deadline.timeout_s:g} s: "
                        f"{state.waiting}"
                    )
            if state.error is not None:
                raise state.error
            return state
        finally:
            self.leave()

    def begin(self) -> StageState:
        """Asks the coordinator and the nodes for it."""
        self._driver = f"{socket.gethostname()}:{os.getpid()}:{self.request.spec.run}"
        self._coordinator = make_coordinator()
        state = self.look()
        if state.run != self.request.spec.run:
            # Somebody else's run brings the same.
            spec = replace(self.request.spec, run=state.run)
            self.request = replace(self.request, spec=spec)
        self._start(self.nodes)
        return state

    def step(self, wait_s: float | None = None) -> StageState:
        """Looks at how it goes.

        Args:
            wait_s: How long to wait for something to happen; by default as long as suits so many nodes.

        Raises:
            RaywlError: A node refused to take part, or none is left.
        """
        self._take_ended(wait_s)
        state = self.look()
        self._show(state)
        return state

    def _start(self, nodes: Sequence[Node]) -> None:
        agents = hold_agents(nodes, self.deadline)
        # Where an agent is killed and Ray starts it again, Ray makes the call again, too.
        for agent, node in zip(agents, nodes, strict=True):
            call = agent.stage.options(concurrency_group=STAGE)
            self._calls[call.remote(self.request)] = node

    def look(self) -> StageState:
        """The run's state; tells the coordinator that this driver lives."""
        for attempt in range(1, _TRIES + 1):
            asked = self._coordinator.begin_stage.remote(self.request.spec, self._driver)
            try:
                state: StageState = ray.get(asked, timeout=max(_CALL_S, self.deadline.remaining_s(60.0)))
                return state
            except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as error:
                self._coordinator = make_coordinator()
                if attempt == _TRIES or self.deadline.remaining_s() == 0:
                    raise from_ray(error, COORDINATOR) from None
        raise AssertionError

    def _take_ended(self, wait_s: float | None) -> None:
        """Looks at calls that have ended before the run: an agent that died, or that refused."""
        if not self._calls:
            return
        if wait_s is None:
            # A look at a thousand nodes is work for the coordinator.
            wait_s = self.deadline.remaining_s(max(_TICK_S, len(self.nodes) * _TICK_S_PER_NODE))
        ended, _ = ray.wait(list(self._calls), num_returns=1, timeout=wait_s)
        for call in ended:
            node = self._calls.pop(call)
            try:
                ray.get(call)
            except Exception as error:
                self._agent_ended(node, from_ray(error, Place(node.label)))

    def _agent_ended(self, node: Node, error: RaywlError) -> None:
        if not isinstance(error, NodeLostError):
            state = self.look()
            raise state.error or error
        tries = self._tries[node.node_id] = self._tries.get(node.node_id, 0) + 1
        if tries < _TRIES and node.node_id in {other.node_id for other in alive_nodes()}:
            with contextlib.suppress(NodeLostError):
                self._start([node])
                return
        if self.needs_all:
            raise error
        told = self._coordinator.drop_from_stage.remote(self.request.spec.run, node.node_id, error.reason)
        with contextlib.suppress(ray.exceptions.RayError):
            ray.get(told, timeout=_CALL_S)
        if len(self._tries) == len(self.nodes) and not self._calls:
            raise error

    def _show(self, state: StageState) -> None:
        if self.progress is not None and state.total_bytes:
            self.progress(min(state.done_bytes, state.total_bytes), state.total_bytes, "stage")

    def leave(self) -> None:
        """Ends it, if it hasn't ended."""
        run = self.request.spec.run
        with contextlib.suppress(Exception):
            self._coordinator.leave_stage.remote(run, self._driver)
            # They hear of it by their next report.
            if self._calls:
                ray.wait(list(self._calls), num_returns=len(self._calls), timeout=_LEAVE_S)


def warm_nodes(request: SourceRequest, nodes: Sequence[Node], deadline: Deadline) -> list[str]:
    """Has each node read the checkpoint's files into its page cache; returns what is to be said of it."""
    agents = hold_agents(nodes, deadline)
    places = [Place(node.label) for node in nodes]
    told: list[str] = gather([agent.prefetch.remote(request) for agent in agents], places, deadline)
    return [f"{node.label}: {text}" for node, text in zip(nodes, told, strict=True) if text]
