"""Reloading a group in place: all ranks check, and only then does any of them write."""

from __future__ import annotations

import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import ray

from raywl.actors.deadline import Deadline
from raywl.actors.failures import Place, most_telling
from raywl.actors.opening import open_on_nodes, release_on_nodes
from raywl.actors.rank import Job
from raywl.actors.raycalls import Node, Settled, find_agents, settle
from raywl.actors.requests import check_options, request_for_nodes
from raywl.actors.streaming import NOTHING_TO_STREAM, load_by_stream, open_for_stream
from raywl.errors import RaywlError, some_of
from raywl.report import GroupReport, LoadReport

if TYPE_CHECKING:
    from raywl.actors.group import GroupParts
    from raywl.loading.reload import ReloadReport

__all__ = ["reload_group", "unexpected_everywhere"]


def reload_group(
    parts: GroupParts, ref: Any, source: Mapping[str, Any], deadline: Deadline, unfinished: dict[Any, int]
) -> GroupReport:
    """Checks a checkpoint on every rank of a group, then writes it on all of them.

    Args:
        parts: The group's.
        ref: The checkpoint.
        source: Keyword arguments of `open_checkpoint`.
        deadline: Bounds it all.
        unfinished: Takes the calls that ranks are still busy with at an error, with the ranks' indexes.

    Raises:
        RaywlError: Of the rank that failed. As long as `partly_loaded` is false, every rank has its old
            weights, bit for bit.
    """
    deadline.enter("open")
    check_options(source)
    streamed = open_for_stream(ref, source) if parts.stage_mode == "stream" else None
    group = f"{parts.name}/{uuid.uuid4().hex[:8]}"
    request = request_for_nodes(group, *((ref, source) if streamed is None else (streamed, {})))
    notes = [f"{len(parts.specs)} ranks reloaded in place"]
    released_bytes = 0
    reload = partial(_check_and_write, parts, deadline, unfinished)
    try:
        if streamed is None:
            if parts.stage_mode == "stream":
                notes.append(NOTHING_TO_STREAM)
            identity, fetched = open_on_nodes(request, parts.nodes, deadline)
            reports = reload(Job(request, identity, b"", deadline.remaining_s()))
            if parts.release_page_cache:
                released_bytes = release_on_nodes(request, parts.nodes, deadline, notes)
        else:
            identity = streamed.identity
            job = Job(request, identity, b"", deadline.remaining_s())
            reports, staged = load_by_stream(streamed, parts, job, deadline, reload)
            fetched = {staged.kind: staged.bytes_from_source}
            notes += staged.notes
    finally:
        _close(request.group, parts.nodes)
    world_size = parts.specs[0].context.world_size
    unexpected = unexpected_everywhere(reports[:world_size])
    if unexpected:
        text = f"{len(unexpected)} tensors that have no place on any rank: {request.label}"
        warnings.warn(f"{text}: {some_of(unexpected)}", stacklevel=3)
    deadline.enter("")
    return GroupReport(
        request.label,
        identity,
        ranks=list(reports),
        unexpected=unexpected,
        seconds=deadline.elapsed_s,
        phases=dict(deadline.phases),
        fetched_bytes=fetched,
        released_bytes=released_bytes,
        notes=notes,
    )


def _check_and_write(
    parts: GroupParts,
    deadline: Deadline,
    unfinished: dict[Any, int],
    job: Job,
    on_tick: Callable[[], None] | None = None,
) -> list[ReloadReport]:
    sent, places = ray.put(job), [spec.place for spec in parts.specs]
    deadline.enter("check")
    _all_of([rank.check_reload.remote(sent) for rank in parts.ranks], places, deadline, unfinished, on_tick)
    deadline.enter("write")
    try:
        reports: list[ReloadReport] = _all_of(
            [rank.reload.remote(sent) for rank in parts.ranks], places, deadline, unfinished, on_tick
        )
        return reports
    except BaseException as error:
        # Other ranks may have written already, whatever became of this one.
        if isinstance(error, RaywlError):
            error.partly_loaded = True
        raise


def _all_of(
    refs: Sequence[Any],
    places: Sequence[Place],
    deadline: Deadline,
    unfinished: dict[Any, int],
    on_tick: Callable[[], None] | None = None,
) -> list[Any]:
    settled = Settled([])
    try:
        settle(refs, places, deadline, on_tick, settled=settled)
    finally:
        unfinished.update(settled.unfinished)
    if settled.failures:
        raise most_telling(settled.failures)
    return settled.results


def unexpected_everywhere(reports: Sequence[LoadReport]) -> list[str]:
    """Tensors that no rank of a replica has a place for, by the reports of its ranks.

    A rank of one pipeline stage can't know whether another stage has one.
    """
    homeless = [
        {*report.unexpected, *(n for n, why in report.skipped.items() if why.startswith("no place on stage"))}
        for report in reports
    ]
    nowhere = set.intersection(*homeless)
    names = [name for report in reports for name in (*report.unexpected, *report.skipped)]
    return [name for name in dict.fromkeys(names) if name in nowhere]


def _close(group: str, nodes: Sequence[Node]) -> None:
    for agent in find_agents(nodes):
        agent.close.remote(group)
