"""The calls to Ray: making and ending actors, places for ranks, and waiting with a deadline."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from raywl.actors import metrics
from raywl.actors.agent import NodeAgent
from raywl.actors.coordinator import LoadCoordinator
from raywl.actors.deadline import Deadline
from raywl.actors.failures import Place, as_raywl_error, most_telling
from raywl.actors.names import NAMESPACE, agent_name, coordinator_name, mine
from raywl.actors.rank import RankLoader, RankSpec
from raywl.actors.requests import SourceRequest
from raywl.actors.shelf import TableRequest
from raywl.actors.stage_calls import CHUNKS, RANKS, STAGE, StageCalls
from raywl.actors.transport import to_bytes
from raywl.coordination import Beat, shortfall
from raywl.errors import CapacityError, ClusterError, NodeLostError, RaywlError, StagingTimeout
from raywl.node.prefetch import FileRange
from raywl.report import LoadReport

__all__ = [
    "Link",
    "Node",
    "Placement",
    "ProgressPoll",
    "Settled",
    "alive_nodes",
    "ask_progress",
    "end_actor",
    "find_actor",
    "find_agents",
    "from_ray",
    "gather",
    "has_gpus",
    "hold_agents",
    "make_agent",
    "make_coordinator",
    "make_rank",
    "place_ranks",
    "say_hello",
    "settle",
    "wait_until_ended",
]

_CALL_S = 15.0
_TICK_S = 0.5
_GRACE_S = 2.0
_JOINING_NODES_S = 10.0
_BUSY_CLUSTER_S = 60.0
_SOME_RETRIES = 3
_WATCH = "watch"
_CHUNK_CALLS, _STAGE_CALLS, _RANK_CALLS = 32, 8, 32
_TRIES = 3


@dataclass(frozen=True, slots=True)
class Node:
    """A node of the cluster that is alive."""

    node_id: str
    address: str
    label: str
    """What to call it: its address, and the beginning of its id where nodes share an address."""
    resources: Mapping[str, float] = field(default_factory=dict)


class Link(StageCalls):
    """What raywl's actors do through Ray. Made by a driver, used in the actor's own process."""

    def beat(self, node_id: str, held: tuple[str, ...]) -> Beat:
        """An agent's heartbeat to the coordinator.

        Raises:
            ValueError: There is no coordinator, and nothing is held.
        """
        coordinator = find_actor(coordinator_name())
        if coordinator is None:
            if not held:
                raise ValueError("there is no coordinator")
            # A table outlives the launches that a coordinator is made for.
            coordinator = make_coordinator()
        answer: Beat = ray.get(coordinator.beat.remote(node_id, held), timeout=_CALL_S)
        return answer

    def end_this_actor(self) -> None:
        """Ends the calling actor; Ray doesn't start it again."""
        ray.kill(ray.get_runtime_context().current_actor, no_restart=True)

    def alive_node_ids(self) -> set[str]:
        """The cluster's nodes."""
        return {node["NodeID"] for node in ray.nodes() if node["Alive"]}

    def count_fetched(self, source: str, nbytes: int) -> None:
        """Counts bytes that the calling agent has fetched from a kind of source."""
        metrics.count_fetched(source, nbytes)

    def count(self, report: LoadReport, spec: RankSpec, work: str) -> None:
        """Counts a rank's load or reload."""
        metrics.count_load(report, spec.group, spec.rank, work)

    def store_bytes(self, node_id: str) -> int:
        """Capacity of a node's object store."""
        node = next(node for node in ray.nodes() if node["NodeID"] == node_id)
        return int(node["Resources"].get("object_store_memory", 0))

    def shm_bytes(self) -> tuple[int, int]:
        """Of the memory that the calling process's node has its object store in: free bytes, taken bytes."""
        # Ray falls back to its temporary folder, of which nobody is told, where this isn't there.
        free_bytes = shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else sys.maxsize
        return free_bytes, _taken_by_store(os.getppid())

    def put(self, array: Any) -> Any:
        """Puts an array into the object store; the calling process owns it."""
        return ray.put(array)

    def get(self, ref: Any, timeout_s: float) -> Any:
        """The array behind a reference."""
        return ray.get(ref, timeout=timeout_s)

    def table_chunk(self, node_id: str, request: TableRequest, index: int, timeout_s: float) -> Any:
        """One chunk of a table from another node's agent."""
        agent = ray.get_actor(agent_name(node_id), namespace=NAMESPACE)
        return _asked(agent.table_chunk.remote(request, index), timeout_s)

    def gpu_ids(self) -> list[str]:
        """Ray's ids of the GPUs that the calling process was given."""
        return [str(gpu) for gpu in ray.get_gpu_ids()]

    def pickle(self, value: Any) -> bytes:
        """`value` in bytes, functions and classes of scripts included."""
        return to_bytes(value)

    def checkpoint(self, node_id: str, request: SourceRequest, identity: str, timeout_s: float) -> bytes:
        """The pickled checkpoint from the agent of the calling rank's own node."""
        agent = ray.get_actor(agent_name(node_id), namespace=NAMESPACE)
        pickled: bytes = _asked(agent.checkpoint.remote(request, identity), timeout_s)
        return pickled

    def warm(self, node_id: str, group: str, paths: dict[str, str], ranges: list[FileRange]) -> None:
        """Asks the agent of the calling rank's own node to fill the page cache; doesn't wait."""
        agent = ray.get_actor(agent_name(node_id), namespace=NAMESPACE)
        agent.warm.remote(group, paths, ranges)


def _taken_by_store(pid: int) -> int:
    """Bytes of shared memory that the raylet of a process id has touched: it keeps what becomes free."""
    taken_bytes, folder = 0, f"/proc/{pid}/fd"
    with contextlib.suppress(OSError):
        for fd in os.listdir(folder):
            with contextlib.suppress(OSError):
                if os.readlink(f"{folder}/{fd}").startswith("/dev/shm/plasma"):
                    taken_bytes += os.stat(f"{folder}/{fd}").st_blocks * 512
    return taken_bytes


def _asked(ref: Any, timeout_s: float) -> Any:
    """An agent's answer to another actor."""
    try:
        return ray.get(ref, timeout=timeout_s)
    except ray.exceptions.GetTimeoutError:
        raise StagingTimeout(f"the node's agent did not answer within {timeout_s:.1f} s") from None
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, RaywlError):
            raise error.cause from None
        raise


def alive_nodes() -> list[Node]:
    """The nodes that are alive, in Ray's order."""
    alive = [node for node in ray.nodes() if node["Alive"]]
    shared = Counter(node["NodeManagerAddress"] for node in alive)
    return [
        Node(
            node["NodeID"],
            node["NodeManagerAddress"],
            node["NodeManagerAddress"]
            if shared[node["NodeManagerAddress"]] == 1
            else f"{node['NodeManagerAddress']} ({node['NodeID'][:8]})",
            node["Resources"],
        )
        for node in alive
    ]


def has_gpus() -> bool:
    """Whether any node has a GPU."""
    return float(ray.cluster_resources().get("GPU", 0.0)) > 0


# --- helpers that outlive their driver ---


def find_actor(name: str) -> Any | None:
    """The handle of a named helper, or `None` where there is none."""
    with contextlib.suppress(ValueError):
        return ray.get_actor(name, namespace=NAMESPACE)
    return None


def find_agents(nodes: Iterable[Node]) -> list[Any]:
    """The handles of the agents that are there."""
    found = [find_actor(agent_name(node.node_id)) for node in nodes]
    return [agent for agent in found if agent is not None]


def make_coordinator() -> Any:
    """The coordinator's handle; makes the actor where there is none."""
    return _helper(LoadCoordinator, coordinator_name()).remote(Link())


def make_agent(node: Node) -> Any:
    """The handle of a node's agent; makes the actor where there is none."""
    pinned = NodeAffinitySchedulingStrategy(node.node_id, soft=False)
    helper = _helper(
        NodeAgent,
        agent_name(node.node_id),
        scheduling_strategy=pinned,
        max_concurrency=16,
        # Other nodes must get answers, and a staging lasts, whatever else this one is asked.
        concurrency_groups={CHUNKS: _CHUNK_CALLS, STAGE: _STAGE_CALLS, RANKS: _RANK_CALLS},
    )
    return helper.remote(node.node_id, node.label, Link())


def _helper(plain: type, name: str, **options: Any) -> Any:
    # All methods of helpers may be repeated, so Ray may retry them when the actor starts again.
    return ray.remote(
        num_cpus=0,
        name=name,
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        max_restarts=-1,
        max_task_retries=_SOME_RETRIES,
        **options,
    )(plain)


def hold_agents(nodes: Sequence[Node], deadline: Deadline) -> list[Any]:
    """The agents of some nodes, in order, each of this very version; made where there are none.

    Raises:
        ClusterError: raywl is absent on a node or of another version.
        NodeLostError: An agent or its node died.
        StagingTimeout: One didn't answer in time.
    """
    for attempt in range(1, _TRIES + 1):
        agents = [make_agent(node) for node in nodes]
        try:
            for agent, node in zip(agents, nodes, strict=True):
                say_hello(agent, node, deadline)
            break
        except NodeLostError:
            # An agent that was just ending when it was found by its name.
            if attempt == _TRIES:
                raise
    return agents


def say_hello(agent: Any, node: Node, deadline: Deadline) -> None:
    """Checks that the agent of a node is of this very version.

    Raises:
        ClusterError: raywl is absent on the node or of another version; both are named.
        NodeLostError: The agent or its node died.
        StagingTimeout: It didn't answer in time.
    """
    place = Place(node.label)
    try:
        (answer,) = gather([agent.hello.remote()], [place], deadline)
    except StagingTimeout:
        raise
    except RaywlError as error:
        found, detail = _version_on(node, deadline)
        if found == mine()[0] or node.node_id not in {other.node_id for other in alive_nodes()}:
            raise
        end_actor(agent)
        there = f"raywl {found}" if found else f"no raywl that can be imported ({detail})"
        raise ClusterError(f"{there} is on this node, and raywl {mine()[0]} here", node=node.label).at(
            str(place)
        ) from error
    if tuple(answer) != mine():
        end_actor(agent)
        raise ClusterError(
            f"raywl {answer[0]} (protocol {answer[1]}) is installed on this node, and raywl {mine()[0]} "
            f"(protocol {mine()[1]}) here: install the same version everywhere",
            node=node.label,
        ).at(str(place))


def _version_on(node: Node, deadline: Deadline) -> tuple[str | None, str]:
    def look() -> tuple[str | None, str]:
        # Sent by value, since raywl may be absent where it runs.
        import sys

        try:
            import raywl
        except Exception as error:
            return None, f"{sys.executable}: {type(error).__name__}: {error}"
        return getattr(raywl, "__version__", "of unknown version"), sys.executable

    pinned = NodeAffinitySchedulingStrategy(node.node_id, soft=False)
    task = ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=pinned)(look)
    try:
        found: tuple[str | None, str] = ray.get(task.remote(), timeout=deadline.remaining_s(_CALL_S))
    except ray.exceptions.RayError as error:
        return None, " ".join(str(error).split())[:300]
    return found


def end_actor(handle: Any) -> None:
    """Ends an actor for good; harmless when it has ended already."""
    with contextlib.suppress(Exception):
        ray.kill(handle, no_restart=True)


# --- places for ranks ---


@dataclass(frozen=True, slots=True)
class Placement:
    """Reserved places, one for each rank."""

    handle: Any
    nodes: tuple[str, ...]
    """Node id of each place."""

    def remove(self, timeout_s: float) -> None:
        """Gives the places back, and waits until Ray says so."""
        with contextlib.suppress(Exception):
            remove_placement_group(self.handle)
            give_up_s = time.monotonic() + timeout_s
            while placement_group_table(self.handle).get("state") != "REMOVED":
                if time.monotonic() > give_up_s:
                    return
                time.sleep(0.05)


def place_ranks(bundle: Mapping[str, float], count: int, strategy: str, deadline: Deadline) -> Placement:
    """Reserves `count` places of `bundle` resources each.

    Waits some time for nodes that are just joining, and longer for resources that are in use.

    Raises:
        CapacityError: The cluster has too little, or it stays in use; with the numbers.
        StagingTimeout: The deadline passed before either was known.
    """
    start_s = time.monotonic()
    handle = placement_group([dict(bundle)] * count, strategy=strategy)
    try:
        while not handle.wait(deadline.remaining_s(_TICK_S)):
            lack = shortfall([node.resources for node in alive_nodes()], bundle, count)
            waited_s = time.monotonic() - start_s
            if lack is not None and waited_s > deadline.remaining_s(_JOINING_NODES_S):
                raise CapacityError(
                    lack.resource + "s",
                    lack.needed,
                    lack.available,
                    f"{lack.reason}; waited {waited_s:.0f} s",
                )
            if lack is None and waited_s > deadline.remaining_s(_BUSY_CLUSTER_S):
                raise _in_use(bundle, count, strategy, waited_s)
            deadline.check([f"{count} ranks"])
        table = placement_group_table(handle)["bundles_to_node_id"]
        return Placement(handle, tuple(table[index] for index in range(count)))
    except BaseException:
        remove_placement_group(handle)
        raise


def _in_use(bundle: Mapping[str, float], count: int, strategy: str, waited_s: float) -> CapacityError:
    free = ray.available_resources()
    resource = min(bundle, key=lambda name: free.get(name, 0.0) - bundle[name] * count)
    return CapacityError(
        resource + "s",
        bundle[resource] * count,
        float(free.get(resource, 0.0)),
        f"the cluster has enough for {count} ranks, but the rest is in use or can't be had together "
        f"(placement {strategy}); waited {waited_s:.0f} s",
    )


def make_rank(spec: RankSpec, placement: Placement, index: int, bundle: Mapping[str, float]) -> Any:
    """Starts a rank's actor in place `index`; returns its handle."""
    pinned = PlacementGroupSchedulingStrategy(placement.handle, placement_group_bundle_index=index)
    return ray.remote(
        num_cpus=bundle.get("CPU", 0),
        num_gpus=bundle.get("GPU", 0),
        scheduling_strategy=pinned,
        max_restarts=0,
        max_task_retries=0,
        # `progress` must answer while `load` works.
        concurrency_groups={_WATCH: 1},
    )(RankLoader).remote(spec, Link())


def ask_progress(rank: Any) -> Any:
    """Asks a rank how far it is; it answers while it works."""
    return rank.progress.options(concurrency_group=_WATCH).remote()


def wait_until_ended(handles: Sequence[Any], ask: Callable[[Any], Any], timeout_s: float) -> None:
    """Waits until killed actors are gone.

    Args:
        handles: Their handles.
        ask: Makes a call to one that returns at once. A first answer may still come after the kill.
        timeout_s: For all together.
    """
    give_up_s = time.monotonic() + timeout_s
    for handle in handles:
        with contextlib.suppress(ray.exceptions.RayError, TimeoutError):
            while (left_s := give_up_s - time.monotonic()) > 0:
                ray.get(ask(handle), timeout=left_s)
                time.sleep(0.05)


# --- waiting ---


@dataclass(slots=True)
class Settled:
    """What became of some calls."""

    results: list[Any]
    """In order of the calls; `None` where there is none."""
    failures: dict[int, RaywlError] = field(default_factory=dict)
    """By index of the call."""
    unfinished: dict[Any, int] = field(default_factory=dict)
    """Calls that nobody waits for any more, with their indexes."""


def settle(
    refs: Sequence[Any],
    places: Sequence[Place],
    deadline: Deadline | None,
    on_tick: Callable[[], None] | None = None,
    wait_for_all: bool = False,
    settled: Settled | None = None,
) -> Settled:
    """Waits for calls to several actors, until all are done or one has failed.

    After a failure there is a moment in which a more telling one may come: the ranks that waited for a
    dead one fail too, and sometimes first.

    Args:
        refs: The calls.
        places: Where each runs.
        deadline: Bounds the wait; `None` waits as long as the actors live.
        on_tick: Called about twice a second meanwhile.
        wait_for_all: Go on after a failure: for calls that don't wait for each other.
        settled: Filled in and returned, for a caller that needs it after an exception as well.

    Raises:
        StagingTimeout: The deadline passed, and nothing had failed; it names who was not done.
    """
    settled = Settled([]) if settled is None else settled
    settled.results = [None] * len(refs)
    settled.unfinished = waiting = {ref: index for index, ref in enumerate(refs)}
    give_up_s = float("inf")
    while waiting:
        _take_ready(settled, places, _TICK_S if deadline is None else deadline.remaining_s(_TICK_S))
        failures = settled.failures
        if failures and not wait_for_all:
            give_up_s = min(give_up_s, time.monotonic() + _GRACE_S)
            if time.monotonic() >= give_up_s or any(map(_is_cause, failures.values())):
                break
        if deadline is not None and waiting and deadline.remaining_s() == 0:
            if failures:
                break
            deadline.check(str(places[index]) for index in waiting.values())
        if on_tick is not None:
            on_tick()
    return settled


def gather(
    refs: Sequence[Any],
    places: Sequence[Place],
    deadline: Deadline | None,
    on_tick: Callable[[], None] | None = None,
) -> list[Any]:
    """The results of calls to several actors, in order.

    Raises:
        RaywlError: The most telling failure, with its place.
        StagingTimeout: As `settle`.
    """
    settled = settle(refs, places, deadline, on_tick)
    if settled.failures:
        raise most_telling(settled.failures)
    return settled.results


def _take_ready(settled: Settled, places: Sequence[Place], timeout_s: float) -> None:
    waiting = settled.unfinished
    ready, _ = ray.wait(list(waiting), num_returns=len(waiting), timeout=0)
    if not ready:
        ready, _ = ray.wait(list(waiting), num_returns=1, timeout=timeout_s)
    for ref in ready:
        index = waiting.pop(ref)
        try:
            settled.results[index] = ray.get(ref)
        except Exception as error:
            settled.failures[index] = from_ray(error, places[index])


def _is_cause(error: RaywlError) -> bool:
    # Any other ClusterError may be the echo of a peer's death.
    return isinstance(error, NodeLostError) or not isinstance(error, ClusterError)


def from_ray(error: Exception, place: Place) -> RaywlError:
    """raywl's error for what `ray.get` raised."""
    if isinstance(error, ray.exceptions.RayTaskError):
        cause = error.cause
        if isinstance(cause, RaywlError):
            return cause if cause.where is not None else cause.at(str(place))
        told = ClusterError(f"{type(cause).__name__}: {cause}", node=place.node, rank=place.rank).at(
            str(place)
        )
        # Ray gives the error the attributes of its cause, so the text may not be reachable.
        text = getattr(error, "traceback_str", None) or str(error)
        told.add_note(f"The traceback on {place}:\n{text.rstrip()}")
        return told
    lost: tuple[type[Exception], ...] = (
        ray.exceptions.RayActorError,
        ray.exceptions.ActorUnschedulableError,
        ray.exceptions.WorkerCrashedError,
        ray.exceptions.ObjectLostError,
    )
    if isinstance(error, lost):
        who = "the node's agent" if place.rank is None else "the rank's process"
        return NodeLostError(f"{who} died: {_why_dead(error)}", node=place.node, rank=place.rank).at(
            str(place)
        )
    if isinstance(error, RaywlError):
        return error
    return as_raywl_error(error, place, "Ray")


def _why_dead(error: Exception) -> str:
    """The telling line of Ray's long message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if "is dead because" in line or "died because" in line]
    text = (telling or lines or [type(error).__name__])[-1]
    if "creation task" in text:
        text = f"{text} {lines[-1]}"
    # What follows are guesses that are the same for every death.
    text = text.partition(" Some common causes include")[0]
    return text if len(text) <= 600 else text[:600] + " ..."


class ProgressPoll:
    """Asks actors how far they are, one question at a time each, and tells the caller the sum."""

    def __init__(self, asks: Sequence[Callable[[], Any]], progress: Callable[[int, int, str], None]) -> None:
        """Args:
        asks: Makes the call to each, which is answered at once.
        progress: What to tell.
        """
        self._asks = asks
        self._progress = progress
        self._asked: dict[int, Any] = {}
        self._known: dict[int, tuple[int, int, str]] = {}
        self._told: tuple[int, int, str] | None = None

    def __call__(self) -> None:
        """Takes the answers that are there, asks again, and reports if anything is new."""
        for index, ref in list(self._asked.items()):
            if ray.wait([ref], timeout=0)[0]:
                del self._asked[index]
                # One that died is reported by the call that it was to do.
                with contextlib.suppress(Exception):
                    self._known[index] = ray.get(ref)
        for index, ask in enumerate(self._asks):
            if index not in self._asked:
                self._asked[index] = ask()
        self._tell()

    def finish(self, total_bytes: int) -> None:
        """Tells the end once: all are done."""
        phase = self._told[2] if self._told else "read"
        self._progress(total_bytes, total_bytes, phase)

    def _tell(self) -> None:
        begun = [known for known in self._known.values() if known[1]]
        if len(begun) < len(self._asks):
            # Before each of them knows its total, the sum would jump.
            return
        told = sum(k[0] for k in begun), sum(k[1] for k in begun), min(begun, key=lambda k: k[0] / k[1])[2]
        if told != self._told:
            self._told = told
            self._progress(*told)
