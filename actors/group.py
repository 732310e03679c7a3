"""A group of loaded ranks, as its driver holds it."""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import ray

from raywl.actors.connect import Connection, disconnect, is_connected
from raywl.actors.deadline import Deadline
from raywl.actors.failures import most_telling, usage_as_value_error
from raywl.actors.keeper import GroupKeeper
from raywl.actors.names import agent_name, coordinator_name
from raywl.actors.rank import RankFacts, RankSpec
from raywl.actors.raycalls import (
    Node,
    Placement,
    Settled,
    ask_progress,
    end_actor,
    find_actor,
    settle,
    wait_until_ended,
)
from raywl.actors.reloading import reload_group
from raywl.actors.transport import to_bytes
from raywl.errors import ClusterError, NodeLostError, some_of
from raywl.report import GroupReport

if TYPE_CHECKING:
    from raywl.opening import Checkpoint

__all__ = ["GroupParts", "RankGroup"]

_END_S = 10.0
_ANSWER_S = 5.0


@dataclass
class GroupParts:
    """What a launch has made so far on the cluster, so that it can be taken away again at any point."""

    name: str
    connection: Connection
    release_page_cache: bool = False
    """Whether its nodes drop a checkpoint's pages once all ranks have read it."""
    stage_mode: str = "cache"
    """How checkpoints that aren't on the nodes come to them."""
    keeper: GroupKeeper | None = None
    placement: Placement | None = None
    nodes: list[Node] = field(default_factory=list)
    """The nodes that the ranks are on."""
    specs: list[RankSpec] = field(default_factory=list)
    facts: list[RankFacts] = field(default_factory=list)
    ranks: list[Any] = field(default_factory=list)
    """Handles, in order of `specs`."""
    ended: bool = False

    def __post_init__(self) -> None:
        # Registered after Ray's own, so it runs before: helpers needn't wait for a lease to run out.
        atexit.register(self.end)

    def end(self, agents: bool = False) -> None:
        """Takes everything away but the helpers; those too with `agents`, where nothing else needs them.

        May be repeated. Never raises for what has gone already.
        """
        first, self.ended = not self.ended, True
        if first:
            atexit.unregister(self.end)
            if self.keeper is not None:
                self.keeper.stop(_END_S)
        if is_connected(self.connection):
            if first:
                self._end_ranks()
                self._deregister()
            if agents and not self.connection.started:
                _end_idle_helpers()
        if first:
            disconnect(self.connection)

    def _end_ranks(self) -> None:
        for rank in self.ranks:
            end_actor(rank)
        if self.placement is not None:
            self.placement.remove(_END_S)
        wait_until_ended(self.ranks, ask_progress, _END_S)

    def _deregister(self) -> None:
        asked = []
        with contextlib.suppress(Exception):
            for node in self.nodes:
                if (agent := find_actor(agent_name(node.node_id))) is not None:
                    asked.append(agent.close.remote(self.name))
            if (coordinator := find_actor(coordinator_name())) is not None:
                asked.append(coordinator.drop.remote(self.name))
            ray.wait(asked, num_returns=max(1, len(asked)), timeout=_ANSWER_S)


def _end_idle_helpers() -> None:
    coordinator = find_actor(coordinator_name())
    if coordinator is None:
        return
    with contextlib.suppress(ray.exceptions.RayError):
        node_ids, unused = ray.get(coordinator.retire_idle.remote(), timeout=_ANSWER_S)
        ending = [agent for node_id in node_ids if (agent := find_actor(agent_name(node_id))) is not None]
        if unused:
            ending.append(coordinator)
        for helper in ending:
            end_actor(helper)
        wait_until_ended(ending, lambda helper: helper.hello.remote(), _END_S)


class RankGroup:
    """The ranks that `launch` loaded. It lives in the driver's process; all its methods run there.

    1. `launch` returns it when every rank is loaded.
    2. `run` calls functions on all ranks, as often as wanted.
    3. `shutdown`, or leaving the `with` block, ends ranks and placement group. So does the driver's end.
    """

    def __init__(self, parts: GroupParts, report: GroupReport) -> None:
        self.report = report
        """What was loaded, by rank."""
        self._parts = parts
        self._submitting = threading.Lock()
        self._unfinished: dict[Any, int] = {}
        self._lost: NodeLostError | None = None

    def run(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Calls `fn(model, *args, **kwargs)` on every rank, with the rank's context entered.

        It waits as long as the function runs and the ranks live. When the function fails on a rank, the
        call ends at once, even if other ranks still wait for that one in a collective.

        Args:
            fn: A function, a lambda or a closure; it is sent by value where the ranks can't import it.
            *args: For all ranks alike.
            **kwargs: Likewise.

        Returns:
            The results, in rank order; with replicas, one replica after the other.

        Raises:
            RaywlError: raywl's own error that `fn` raised, with rank and node; for any other exception
                a `ClusterError` with its text.
            NodeLostError: A rank has died; the group can only be shut down then.
            ClusterError: The group is shut down, or a rank is still caught in an earlier call that
                failed elsewhere.
        """
        call = to_bytes((fn, args, kwargs))
        settled = Settled([])
        with self._submitting:
            self._check_usable()
            sent = ray.put(call)
            refs = [rank.run.remote(sent) for rank in self._parts.ranks]
        try:
            settle(refs, [spec.place for spec in self._parts.specs], None, settled=settled)
        finally:
            # Also when interrupted: the ranks go on, and the next call must know.
            self._unfinished.update(settled.unfinished)
        if settled.failures:
            error = most_telling(settled.failures)
            if isinstance(error, NodeLostError):
                self._lost = error
            raise error
        return [self._unpickle(result, index) for index, result in enumerate(settled.results)]

    def reload(
        self,
        ref: str | os.PathLike[str] | Checkpoint,
        *,
        timeout_s: float = 600.0,
        **source: Any,
    ) -> GroupReport:
        """Loads another checkpoint into the live ranks, in place: parameters keep their addresses.

        Every rank checks it first; only when it fits all of them does any of them write. A checkpoint that
        doesn't fit leaves the old weights as they are, bit for bit.

        Args:
            ref: As for `launch`; names and cuts are bound as they were then. It comes to the nodes as the
                first one did: a group that was launched by a stream is reloaded by one.
            timeout_s: Bounds the whole reload.
            **source: Keyword arguments of `open_checkpoint`.

        Returns:
            The new report, which is `report` from then on.

        Raises:
            RaywlError: As `reload_into`, with rank and node; `partly_loaded` tells whether anything may
                have been written.
            NodeLostError: A rank has died; the group can only be shut down then.
            StagingTimeout: `timeout_s` passed.
        """
        with self._submitting:
            self._check_usable()
            deadline = Deadline(timeout_s, "reload")
            try:
                with usage_as_value_error():
                    self.report = reload_group(self._parts, ref, source, deadline, self._unfinished)
            except NodeLostError as error:
                self._lost = error
                raise
            return self.report

    def status(self) -> dict[str, Any]:
        """Ranks, agents of their nodes, and what the coordinator knows, as JSON values; within seconds."""
        parts = self._parts
        if parts.ended or not is_connected(parts.connection):
            return {"name": parts.name, "alive": False, "ranks": [], "agents": [], "coordinator": None}
        alive = _answers([ask_progress(rank) for rank in parts.ranks])
        ranks = [
            {
                "rank": spec.rank,
                "node": spec.node,
                "node_id": spec.node_id,
                "pid": facts.pid,
                "device": facts.device,
                "alive": answer is not None,
                "context": spec.context.to_dict(),
            }
            for spec, facts, answer in zip(parts.specs, parts.facts, alive, strict=True)
        ]
        handles = [find_actor(agent_name(node.node_id)) for node in parts.nodes]
        hellos = iter(_answers([handle.hello.remote() for handle in handles if handle is not None]))
        agents: list[dict[str, Any]] = []
        for node, handle in zip(parts.nodes, handles, strict=True):
            hello = None if handle is None else next(hellos)
            version = None if hello is None else hello[0]
            agents.append(
                {"node": node.label, "node_id": node.node_id, "alive": hello is not None, "version": version}
            )
        coordinator = find_actor(coordinator_name())
        told = None if coordinator is None else _answers([coordinator.status.remote()])[0]
        whole = all(rank["alive"] for rank in ranks)
        return {"name": parts.name, "alive": whole, "ranks": ranks, "agents": agents, "coordinator": told}

    def shutdown(self, agents: bool = False) -> None:
        """Ends the ranks and gives their places back. May be repeated.

        A cluster that raywl started for it ends as well, with the last of its groups.

        Args:
            agents: End the agents and the coordinator too, at once, where nothing else needs them;
                otherwise they stay for `agent_idle_s`, so that the next launch is faster.
        """
        self._parts.end(agents)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def __repr__(self) -> str:
        state = "shut down" if self._parts.ended else f"{len(self._parts.ranks)} ranks"
        return f"<RankGroup of {self.report.ref!r}: {state}>"

    def _check_usable(self) -> None:
        if self._parts.ended:
            raise ClusterError("the group is shut down")
        if not is_connected(self._parts.connection):
            raise ClusterError("this process has left the group's Ray cluster")
        if self._lost is not None:
            raise NodeLostError(
                f"the group can't go on: {self._lost.reason}; shut it down and launch again",
                node=self._lost.node,
                rank=self._lost.rank,
            )
        if not self._unfinished:
            return
        done, rest = ray.wait(
            list(self._unfinished), num_returns=len(self._unfinished), timeout=_ANSWER_S, fetch_local=False
        )
        for ref in done:
            del self._unfinished[ref]
        if rest:
            busy = [str(self._parts.specs[self._unfinished[ref]].place) for ref in rest]
            raise ClusterError(
                f"an earlier call that ended in an error is still running: {some_of(busy)}; shut the group "
                f"down and launch again"
            )

    def _unpickle(self, result: bytes, index: int) -> Any:
        try:
            return pickle.loads(result)  # noqa: S301 (from the own ranks)
        except Exception as error:
            place = self._parts.specs[index].place
            raise ClusterError(
                f"its result can't be read here: {type(error).__name__}: {error}",
                node=place.node,
                rank=place.rank,
            ).at(str(place)) from error


def _answers(refs: Sequence[Any]) -> list[Any]:
    """What the calls returned within a few seconds, `None` for those that failed or didn't answer."""
    if not refs:
        return []
    done, _ = ray.wait(list(refs), num_returns=len(refs), timeout=_ANSWER_S)
    answers: dict[Any, Any] = {}
    for ref in done:
        with contextlib.suppress(Exception):
            answers[ref] = ray.get(ref)
    return [answers.get(ref) for ref in refs]
