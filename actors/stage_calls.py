"""The calls to Ray that staging makes from the agents' processes."""

from __future__ import annotations

from typing import Any

import ray

from raywl.actors.names import NAMESPACE, agent_name, coordinator_name
from raywl.coordination import NodeReport, Orders, StageSpec, Ticket
from raywl.errors import RaywlError

__all__ = ["CHUNKS", "RANKS", "STAGE", "StageCalls"]

CHUNKS, STAGE, RANKS = "chunks", "stage", "ranks"
"""Groups of an agent's threads: those that answer other nodes, those that take part in runs, and those that
give chunks to ranks."""

_CALL_S = 15.0


class StageCalls:
    """What the agents of a run say to each other and to the coordinator."""

    def join_stage(
        self, spec: StageSpec, node_id: str, has: int, fetching: tuple[int, ...], shares: tuple[str, ...]
    ) -> Ticket | None:
        """Tells the coordinator that a node takes part.

        Raises:
            ValueError: There is no coordinator now.
        """
        coordinator = ray.get_actor(coordinator_name(), namespace=NAMESPACE)
        asked = coordinator.join_stage.remote(spec, node_id, has, fetching, shares)
        ticket: Ticket | None = ray.get(asked, timeout=_CALL_S)
        return ticket

    def report_stage(self, report: NodeReport) -> Orders:
        """A node's heartbeat for a run.

        Raises:
            ValueError: There is no coordinator now.
        """
        coordinator = ray.get_actor(coordinator_name(), namespace=NAMESPACE)
        orders: Orders = ray.get(coordinator.report_stage.remote(report), timeout=_CALL_S)
        return orders

    def ask_chunk(
        self, node_id: str, run: str, chunk: int, asker: str, wait_s: float
    ) -> tuple[str, list[Any]]:
        """Asks another node's agent for a chunk. Not repeated by Ray: whoever asks knows when to give up."""
        agent = ray.get_actor(agent_name(node_id), namespace=NAMESPACE)
        call = agent.chunk.options(concurrency_group=CHUNKS, max_task_retries=0)
        answer: tuple[str, list[Any]] = ray.get(
            call.remote(run, chunk, asker, wait_s), timeout=wait_s + _CALL_S
        )
        return answer

    def thank_for_chunk(self, node_id: str, run: str, chunk: int, asker: str) -> None:
        """Tells another node's agent that a chunk has come; doesn't wait."""
        agent = ray.get_actor(agent_name(node_id), namespace=NAMESPACE)
        agent.thanks.options(concurrency_group=CHUNKS, max_task_retries=0).remote(run, chunk, asker)

    def take_chunks(
        self,
        node_id: str,
        run: str,
        rank: int,
        needs: int | None,
        done: tuple[int, ...],
        lost: tuple[int, ...],
        wait_s: float,
    ) -> tuple[str, list[Any]]:
        """Asks the agent of the calling rank's own node for chunks: see `ChunkMover.take`."""
        agent = ray.get_actor(agent_name(node_id), namespace=NAMESPACE)
        call = agent.take_chunks.options(concurrency_group=RANKS, max_task_retries=0)
        asked = call.remote(run, rank, needs, done, lost, wait_s)
        answer: tuple[str, list[Any]] = ray.get(asked, timeout=wait_s + _CALL_S)
        return answer

    def read_range(
        self, node_id: str, run: str, file: str, start: int, end: int, timeout_s: float
    ) -> bytes | None:
        """Asks the agent of the calling rank's own node for bytes: see `ChunkMover.read`.

        Raises:
            RaywlError: As the source.
        """
        agent = ray.get_actor(agent_name(node_id), namespace=NAMESPACE)
        call = agent.read_range.options(concurrency_group=RANKS, max_task_retries=0)
        try:
            data: bytes | None = ray.get(call.remote(run, file, start, end), timeout=timeout_s)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, RaywlError):
                raise error.cause from None
            raise
        return data
