"""`launch`: from a checkpoint and a model factory to loaded ranks."""

from __future__ import annotations

import math
import os
import socket
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import ray

from raywl.actors.connect import Connection, connect, is_connected
from raywl.actors.deadline import Deadline
from raywl.actors.failures import Place, usage_as_value_error
from raywl.actors.group import GroupParts, RankGroup
from raywl.actors.keeper import GroupKeeper
from raywl.actors.opening import COORDINATOR, open_on_nodes, release_on_nodes
from raywl.actors.rank import Job, RankSpec, Rendezvous
from raywl.actors.raycalls import (
    Node,
    ProgressPoll,
    alive_nodes,
    ask_progress,
    gather,
    has_gpus,
    hold_agents,
    make_coordinator,
    make_rank,
    place_ranks,
)
from raywl.actors.reloading import unexpected_everywhere
from raywl.actors.requests import SourceRequest, check_options, request_for_nodes
from raywl.actors.streaming import NOTHING_TO_STREAM, check_mode, load_by_stream, open_for_stream
from raywl.actors.transport import to_bytes
from raywl.coordination import Group, rank_order
from raywl.errors import MissingWeightsError, NodeLostError, some_of
from raywl.progress import Progress, make_progress
from raywl.report import GroupReport, LoadReport
from raywl.strategies import check_strategy
from raywl.types import ParallelContext, as_shard_spec, check_patterns, whole_number

if TYPE_CHECKING:
    import torch

    from raywl.opening import Checkpoint

__all__ = ["launch"]

_PLACEMENTS = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
_TRIES = 3


@dataclass(frozen=True)
class _Ask:
    """What the caller wants, checked."""

    request: SourceRequest
    factory: Callable[[ParallelContext], torch.nn.Module]
    sizes: Mapping[str, int]
    replicas: int
    num_cpus_per_rank: float
    num_gpus_per_rank: float | None
    placement: str
    address: str | None
    init_distributed: bool | None
    """`None`: where there is more than one rank to a replica."""
    agent_idle_s: float
    load: Mapping[str, Any]
    strict: bool | str
    release_page_cache: bool
    stage_mode: str
    streamed: Checkpoint | None
    """What comes to the ranks by a stream; `None`: nothing does."""

    @property
    def world_size(self) -> int:
        """Ranks of a replica."""
        return self.sizes["pp_size"] * self.sizes["dp_size"] * self.sizes["tp_size"]

    @property
    def num_ranks(self) -> int:
        """Ranks of all replicas."""
        return self.world_size * self.replicas


def launch(
    ref: str | os.PathLike[str],
    model_factory: Callable[[ParallelContext], torch.nn.Module],
    *,
    tp_size: int = 1,
    pp_size: int = 1,
    dp_size: int = 1,
    ep_size: int = 1,
    replicas: int = 1,
    num_cpus_per_rank: float = 1,
    num_gpus_per_rank: float | None = None,
    placement: str | None = None,
    address: str | None = None,
    init_distributed: bool | str = "auto",
    stage_mode: str = "cache",
    timeout_s: float = 600.0,
    agent_idle_s: float = 300.0,
    shards: Mapping[str, Any] | None = None,
    tp_plan: Mapping[str, str] | None = None,
    mapper: Any = None,
    stacked: Sequence[tuple[str, str, Any]] | None = None,
    expert_mapping: Sequence[tuple[str, str, int | None, Any]] | None = None,
    strategy: str | None = None,
    strict: bool | str = True,
    device: torch.device | str | None = None,
    optional: Sequence[str] | None = None,
    release_page_cache: bool = False,
    progress: bool | Progress | None = None,
    **source: Any,
) -> RankGroup:
    """Loads a checkpoint onto the ranks of a Ray cluster.

    Args:
        ref: A path that every node of the group has: each opens it itself, and all must find the same
            checkpoint there. A relative path counts from the driver's folder, `~` is each node's own. Or a
            repository or a URL, as for `open_checkpoint`: the driver looks it up, and each node gets that.
        model_factory: Called on each rank with its context; returns the model, on `meta` or a device.
            A function, a lambda or a closure: it is sent by value where the ranks can't import it.
        tp_size: Tensor-parallel ranks.
        pp_size: Pipeline stages.
        dp_size: Data-parallel ranks.
        ep_size: Ranks over which experts are spread; divides `dp_size * tp_size`.
        replicas: Independent groups of `pp_size * dp_size * tp_size` ranks each.
        num_cpus_per_rank: CPUs that a rank reserves.
        num_gpus_per_rank: GPUs, fractions allowed; by default 1 where the cluster has GPUs, else 0.
        placement: Ray's strategy for the placement group; by default `"PACK"`, on few nodes.
        address: `None` for the Ray that is initialised already, else `RAY_ADDRESS`, else a local cluster,
            which then has enough CPUs; or `host:port`, `"auto"`, `"local"`.
        init_distributed: `"auto"` initialises `torch.distributed` over each replica's ranks when there
            is more than one (nccl for whole GPUs, else gloo); `True` always, `False` never.
        stage_mode: How a checkpoint that isn't on the nodes comes to them. `"cache"`: into each node's cache
            folder. `"stream"`: straight to the ranks, in chunks through the object stores; no file is written
            anywhere. Files on the nodes are read where they are.
        timeout_s: Bounds everything until all ranks are loaded.
        agent_idle_s: How long raywl's helpers on the nodes stay when nothing needs them any more.
        shards: As in `load_into`; so are `tp_plan`, `mapper`, `stacked`, `expert_mapping` and `strategy`.
        tp_plan: See there.
        mapper: See there.
        stacked: See there.
        expert_mapping: See there.
        strategy: See there.
        strict: As in `load_into`; a tensor counts as unexpected when no rank of a replica has a place for it.
        device: Where `meta` parameters are made; by default the rank's GPU, else the CPU.
        optional: As in `load_into`.
        release_page_cache: Drop the checkpoint from the nodes' page caches once all ranks have loaded,
            and so after each reload of the group.
        progress: `True` for a bar on standard error, or a callable; for all ranks together.
        **source: Keyword arguments of `open_checkpoint`.

    Returns:
        The group, loaded. Use it as a context manager, or call its `shutdown`.

    Raises:
        ValueError: Sizes that don't divide, or an unknown word.
        CheckpointError: The checkpoint is damaged, doesn't fit, or isn't the same on every node.
        CorruptFileError: Of a stream, a file's hash isn't what the source announced.
        SourceError: The source can't be reached or refuses; or gives no parts of files, and so can't be
            streamed.
        NotFoundError: Nodes lack it; they are named.
        CapacityError: The cluster has too few CPUs or GPUs, or they stay in use.
        NodeLostError: A rank or its node died.
        StagingTimeout: `timeout_s` passed; it says in which phase, and who was not done.
        ClusterError: There is no cluster at the address, raywl is absent or of another version on a node,
            or `model_factory` raised.
    """
    check_mode("stage_mode", stage_mode)
    if init_distributed not in ("auto", True, False):
        raise ValueError(f"init_distributed must be 'auto', True or False, not {init_distributed!r}")
    if placement is not None and placement not in _PLACEMENTS:
        raise ValueError(f"placement must be one of {', '.join(_PLACEMENTS)}, not {placement!r}")
    check_strategy(strategy)
    if strict not in (True, False, "exact"):
        raise ValueError(f"strict must be True, False or 'exact', not {strict!r}")
    for name, patterns in (("shards", shards), ("tp_plan", tp_plan)):
        check_patterns(name, patterns)
    for spec in (shards or {}).values():
        as_shard_spec(spec)
    replicas = whole_number("replicas", replicas)
    if replicas < 1:
        raise ValueError(f"replicas must be at least 1, got {replicas}")
    num_cpus_per_rank = _amount("num_cpus_per_rank", num_cpus_per_rank)
    if num_gpus_per_rank is not None:
        num_gpus_per_rank = _amount("num_gpus_per_rank", num_gpus_per_rank)
        if num_gpus_per_rank > 1 and num_gpus_per_rank % 1:
            raise ValueError(f"num_gpus_per_rank over 1 must be whole, got {num_gpus_per_rank:g}")
    for name in ("parallel", "plan"):
        if name in source:
            raise TypeError(f"launch() takes no {name!r}: each rank has its own")
    check_options(source)
    opened = open_for_stream(ref, source) if stage_mode == "stream" else None
    group = uuid.uuid4().hex
    ask = _Ask(
        request=request_for_nodes(group, *((ref, source) if opened is None else (opened, {}))),
        factory=model_factory,
        sizes={
            name: whole_number(name, size)
            for name, size in {
                "tp_size": tp_size,
                "pp_size": pp_size,
                "dp_size": dp_size,
                "ep_size": ep_size,
            }.items()
        },
        replicas=replicas,
        num_cpus_per_rank=num_cpus_per_rank,
        num_gpus_per_rank=num_gpus_per_rank,
        placement=placement or "PACK",
        address=address,
        init_distributed=None if init_distributed == "auto" else bool(init_distributed),
        agent_idle_s=agent_idle_s,
        load=_given(
            shards=shards,
            tp_plan=tp_plan,
            mapper=mapper,
            stacked=stacked,
            expert_mapping=expert_mapping,
            strategy=strategy,
            strict=strict,
            device=device,
            optional=optional,
        ),
        strict=strict,
        release_page_cache=release_page_cache,
        stage_mode=stage_mode,
        streamed=opened,
    )
    ParallelContext.of_rank(0, **ask.sizes)  # refuses impossible sizes before anything is started
    work = to_bytes((ask.factory, dict(ask.load)))
    with usage_as_value_error():
        return _Launch(ask, work, Deadline(timeout_s, "launch"), make_progress(progress)).run()


def _amount(name: str, value: Any) -> float:
    """A resource's amount, as Ray takes it."""
    try:
        amount = float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be a number, not {value!r}") from None
    if not (0 <= amount < math.inf):
        raise ValueError(f"{name} must be at least 0 and finite, got {amount:g}")
    return amount


class _Launch:
    """One launch under way, in the driver's process: its steps, and what they have made so far."""

    def __init__(self, ask: _Ask, work: bytes, deadline: Deadline, progress: Progress | None) -> None:
        self._ask, self._work, self._deadline, self._progress = ask, work, deadline, progress
        self._notes: list[str] = []
        self._parts: GroupParts

    def run(self) -> RankGroup:
        """All steps; takes everything away again when one fails."""
        self._deadline.enter("connect")
        connection = connect(
            self._ask.address,
            num_cpus=self._ask.num_ranks * self._ask.num_cpus_per_rank,
            deadline=self._deadline,
        )
        self._notes.append(connection.note)
        self._parts = GroupParts(
            self._ask.request.group,
            connection,
            release_page_cache=self._ask.release_page_cache,
            stage_mode=self._ask.stage_mode,
        )
        try:
            return self._build(connection)
        except BaseException:
            self._parts.end()
            raise

    def _build(self, connection: Connection) -> RankGroup:
        ask, deadline, parts = self._ask, self._deadline, self._parts
        deadline.enter("register")
        group = Group(
            parts.name,
            f"{socket.gethostname()}:{os.getpid()}",
            ask.request.label,
            num_ranks=ask.num_ranks,
            idle_s=ask.agent_idle_s,
        )
        self._keep(group)
        parts.keeper = GroupKeeper(group, partial(_keep_once, connection))
        parts.keeper.start()

        deadline.enter("place")
        bundle = self._bundle()
        parts.placement = place_ranks(bundle, ask.num_ranks, ask.placement, deadline)
        self._notes.append(f"placement {ask.placement}, each rank {dict(bundle)}")
        nodes = {node.node_id: node for node in alive_nodes()}
        order = rank_order(parts.placement.nodes)
        self._find_nodes(nodes, [parts.placement.nodes[index] for index in order])
        group = replace(group, nodes=tuple(node.node_id for node in parts.nodes))
        parts.keeper.update(group)
        self._keep(group)

        # Ranks start (importing torch takes seconds) while the nodes open the checkpoint.
        parts.ranks = [
            make_rank(spec, parts.placement, index, bundle)
            for spec, index in zip(parts.specs, order, strict=True)
        ]
        starting = [rank.start.remote() for rank in parts.ranks]
        deadline.enter("open")
        if ask.streamed is None:
            if ask.stage_mode == "stream":
                self._notes.append(NOTHING_TO_STREAM)
            identity, fetched = open_on_nodes(ask.request, parts.nodes, deadline, self._progress)
        else:
            hold_agents(parts.nodes, deadline)
            identity, fetched = ask.streamed.identity, {}
        deadline.enter("start ranks")
        places = [spec.place for spec in parts.specs]
        parts.facts = gather(starting, places, deadline)
        self._init_distributed(bundle.get("GPU", 0.0))

        deadline.enter("load")
        job = Job(ask.request, identity, self._work, deadline.remaining_s())
        if ask.streamed is None:
            reports = self._load(job, places)
        else:
            reports, staged = load_by_stream(
                ask.streamed, parts, job, deadline, partial(self._load, places=places)
            )
            fetched = {staged.kind: staged.bytes_from_source}
            self._notes += staged.notes
        report = self._report(identity, fetched, reports)
        if ask.release_page_cache and ask.streamed is None:
            report.released_bytes = release_on_nodes(ask.request, parts.nodes, deadline, report.notes)
        deadline.enter("")
        report.seconds, report.phases = deadline.elapsed_s, dict(deadline.phases)
        return RankGroup(parts, report)

    def _keep(self, group: Group) -> None:
        """Registers the group; again where the coordinator was just ending."""
        for attempt in range(1, _TRIES + 1):
            try:
                # Older Rays lose a handle that only a method of it is held of.
                coordinator = make_coordinator()
                gather([coordinator.keep.remote(group)], [COORDINATOR], self._deadline)
                return
            except NodeLostError:
                if attempt == _TRIES:
                    raise

    def _bundle(self) -> dict[str, float]:
        num_gpus = self._ask.num_gpus_per_rank
        if num_gpus is None:
            num_gpus = 1 if has_gpus() else 0
            self._notes.append(
                f"{num_gpus} GPUs to a rank, as the cluster has {'some' if num_gpus else 'none'}"
            )
        bundle = {"CPU": float(self._ask.num_cpus_per_rank), "GPU": float(num_gpus)}
        bundle = {name: amount for name, amount in bundle.items() if amount}
        if not bundle:
            raise ValueError("a rank without GPU must reserve some CPU: num_cpus_per_rank is 0")
        return bundle

    def _find_nodes(self, nodes: Mapping[str, Node], node_ids: Sequence[str]) -> None:
        """Who the ranks are, from the node of each."""
        parts, world_size = self._parts, self._ask.world_size
        for rank, node_id in enumerate(node_ids):
            if node_id not in nodes:
                raise NodeLostError("the node died when ranks had been placed on it", node=node_id, rank=rank)
            node = nodes[node_id]
            context = ParallelContext.of_rank(
                rank % world_size,
                **self._ask.sizes,
                local_rank=node_ids[:rank].count(node_id),
                local_size=node_ids.count(node_id),
            )
            parts.specs.append(RankSpec(rank, context, node_id, node.label, node.address, parts.name))
        parts.nodes = [nodes[node_id] for node_id in dict.fromkeys(node_ids)]

    def _init_distributed(self, num_gpus_per_rank: float) -> None:
        ask, parts, deadline = self._ask, self._parts, self._deadline
        wanted = ask.world_size > 1 if ask.init_distributed is None else ask.init_distributed
        if not wanted:
            return
        deadline.enter("join torch.distributed")
        # nccl refuses two ranks on one GPU.
        backend = "nccl" if num_gpus_per_rank >= 1 else "gloo"
        self._notes.append(f"torch.distributed over {backend}, {ask.world_size} ranks to a replica")
        heads = range(0, ask.num_ranks, ask.world_size)
        places = [spec.place for spec in parts.specs]
        timeout_s = max(1.0, deadline.remaining_s())
        ports = gather(
            [parts.ranks[head].serve_store.remote(timeout_s) for head in heads],
            [places[head] for head in heads],
            deadline,
        )
        meetings = [
            Rendezvous(parts.specs[head].address, port, backend, timeout_s)
            for head, port in zip(heads, ports, strict=True)
        ]
        joining = [
            rank.join.remote(meetings[index // ask.world_size]) for index, rank in enumerate(parts.ranks)
        ]
        gather(joining, places, deadline)

    def _load(
        self, job: Job, places: Sequence[Place], on_tick: Callable[[], None] | None = None
    ) -> list[LoadReport]:
        parts = self._parts
        sent = ray.put(job)
        poll = None
        if self._progress is not None:
            poll = ProgressPoll([partial(ask_progress, rank) for rank in parts.ranks], self._progress)
        loading = [rank.load.remote(sent) for rank in parts.ranks]

        def tick() -> None:
            for look in (on_tick, poll):
                if look is not None:
                    look()

        try:
            reports: list[LoadReport] = gather(loading, places, self._deadline, on_tick=tick)
        except NodeLostError as error:
            told = f"while loading {self._ask.request.label}: {error.reason}"
            lost = NodeLostError(told, node=error.node, rank=error.rank)
            raise (lost if error.where is None else lost.at(error.where)) from error
        if poll is not None:
            poll.finish(sum(report.bytes_read for report in reports))
        return reports

    def _report(self, identity: str, fetched_bytes: dict[str, int], reports: list[LoadReport]) -> GroupReport:
        ask = self._ask
        unexpected = unexpected_everywhere(reports[: ask.world_size])
        if unexpected:
            text = "tensors that have no place on any rank"
            if ask.strict == "exact":
                raise MissingWeightsError(ask.request.label, unexpected, text)
            warnings.warn(
                f"{len(unexpected)} {text}: {ask.request.label}: {some_of(unexpected)}", stacklevel=5
            )
        unused = set.intersection(*(set(report.unused_shards) for report in reports))
        if unused:
            told = some_of(sorted(unused))
            warnings.warn(f"shards match no parameter that they could cut, on any rank: {told}", stacklevel=5)
        return GroupReport(
            ask.request.label,
            identity,
            ranks=reports,
            unexpected=unexpected,
            fetched_bytes=fetched_bytes,
            notes=self._notes,
        )


def _keep_once(connection: Connection, group: Group) -> bool:
    """A heartbeat; false where it is over, since this process has left the cluster."""
    # Any call to Ray would join or start one again by itself.
    if not is_connected(connection):
        return False
    coordinator = make_coordinator()
    ray.get(coordinator.keep.remote(group), timeout=group.lease_s / 3)
    return True


def _given(**arguments: Any) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if value is not None}
