"""All runs of a cluster that bring checkpoints to its nodes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from raywl.coordination.stage_messages import NodeReport, Orders, StageSpec, StageState, Ticket
from raywl.coordination.stage_run import StageRun
from raywl.coordination.stream_run import StreamRun
from raywl.errors import ClusterError

__all__ = ["StagingBoard"]

_KEPT_S = 60.0
"""How long the end of a run is remembered, for drivers and nodes that ask late."""

_ANYBODY = "a driver that has not been heard of yet"


class StagingBoard:
    """The runs of one cluster, by name. Pure, as `StageRun` is.

    1. A driver calls `begin` again and again until its run has ended: that keeps it alive. Who asks for a
       checkpoint that is on its way to the same folders takes part in that run.
    2. Nodes `join` a run, and then `report`. A run that isn't known here, since the coordinator was started
       anew, is begun by whoever speaks of it first; all nodes are told to join again.
    3. A run that no driver asks about fails; a run that has ended is forgotten after a minute.
    """

    def __init__(self, first_epoch: int = 1) -> None:
        """Args:
        first_epoch: A board that replaces a lost one must start above it.
        """
        self._next_number = first_epoch
        self._runs: dict[str, StageRun | StreamRun] = {}
        self._drivers: dict[str, dict[str, float]] = {}
        """Run to the drivers that wait for it, each until when it is believed to live."""
        self._ended_s: dict[str, float] = {}

    def begin(self, spec: StageSpec, driver: str, now_s: float) -> StageState:
        """A driver wants a checkpoint on some nodes, or still does.

        Args:
            spec: The run that it would make, the same in every call.
            driver: Which process asks.
            now_s: The time.

        Returns:
            The state of the run that does it, which may have another name; that of one with the driver's own
            name, also when it has ended.
        """
        self.tick(now_s)
        run = self._runs.get(spec.run) or self._alike(spec) or self._add(spec, now_s)
        drivers = self._drivers[run.spec.run]
        if driver not in drivers and run.spec.run != spec.run:
            run.want(spec.nodes, now_s)
        drivers[driver] = now_s + spec.driver_lease_s
        drivers.pop(_ANYBODY, None)
        return run.status(now_s)

    def leave(self, name: str, driver: str, now_s: float) -> None:
        """A driver doesn't wait for a run any more; one that nobody waits for fails at once."""
        if (run := self._runs.get(name)) is not None:
            self._drivers[name].pop(driver, None)
            if not self._drivers[name]:
                run.fail(ClusterError(f"{run.spec.label}: whoever wanted it staged has stopped waiting"))
        self.tick(now_s)

    def drop_node(self, name: str, node: str, why: str, now_s: float) -> None:
        """A driver knows that a node of a run is gone."""
        if (run := self._runs.get(name)) is not None:
            run.drop_node(node, why, now_s)

    def join(
        self,
        spec: StageSpec,
        node: str,
        has: int,
        fetching: Iterable[int],
        shares: Iterable[str],
        now_s: float,
    ) -> Ticket | None:
        """A node takes part in a run: see `StageRun.join`. `None`: the run is over."""
        self.tick(now_s)
        run = self._runs.get(spec.run) or self._add(spec, now_s)
        if run.state != "running":
            return None
        self._next_number += 1
        return run.join(node, has, fetching, shares, self._next_number, now_s)

    def report(self, report: NodeReport, now_s: float) -> Orders:
        """A node's heartbeat: see `StageRun.report`."""
        self.tick(now_s)
        run = self._runs.get(report.run)
        if run is None or report.ticket.epoch != run.epoch:
            return Orders("join", "the coordinator was started anew")
        return run.report(report, now_s)

    def tick(self, now_s: float) -> None:
        """Ends and forgets what is due."""
        for name, run in list(self._runs.items()):
            drivers = self._drivers[name]
            for driver in [driver for driver, expires_s in drivers.items() if expires_s <= now_s]:
                del drivers[driver]
                if not drivers:
                    run.fail(ClusterError(f"{run.spec.label}: whoever wanted it staged is gone ({driver})"))
            run.tick(now_s)
            if run.state == "running":
                self._ended_s.pop(name, None)
            elif now_s - self._ended_s.setdefault(name, now_s) >= _KEPT_S:
                for known in (self._runs, self._drivers, self._ended_s):
                    known.pop(name, None)

    @property
    def is_idle(self) -> bool:
        """No run is under way."""
        return all(run.state != "running" for run in self._runs.values())

    def status(self, now_s: float) -> list[dict[str, Any]]:
        """All runs, as JSON values."""
        self.tick(now_s)
        return [
            {
                "label": run.spec.label,
                "key": run.spec.key,
                "drivers": sorted(self._drivers[name]),
                **run.status(now_s).to_dict(),
            }
            for name, run in self._runs.items()
        ]

    def _alike(self, spec: StageSpec) -> StageRun | StreamRun | None:
        for run in self._runs.values():
            if run.spec.key == spec.key and run.spec.table == spec.table and run.state == "running":
                return run
        return None

    def _add(self, spec: StageSpec, now_s: float) -> StageRun | StreamRun:
        self._next_number += 1
        kind = StreamRun if spec.in_flight else StageRun
        run = self._runs[spec.run] = kind(spec, self._next_number, now_s)
        # A run that a node told of has as long as any driver to be asked about.
        self._drivers[spec.run] = {_ANYBODY: now_s + spec.driver_lease_s}
        return run
