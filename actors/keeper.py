"""A driver's heartbeats for its group."""

from __future__ import annotations

import threading
from collections.abc import Callable

from raywl.coordination import Group

__all__ = ["GroupKeeper"]


class GroupKeeper:
    """A thread of the driver's process that keeps a group registered until it is stopped.

    1. `start` begins the heartbeats, after the launch has registered the group itself.
    2. `update` replaces what they say.
    3. `stop` ends them; the driver then drops the group. When the driver dies they stop by themselves,
       and the group's lease runs out.
    """

    def __init__(self, group: Group, keep: Callable[[Group], bool]) -> None:
        """Args:
        group: The record to send.
        keep: Sends it; may raise, and is called again at the next beat unless it returns false.
        """
        self._group, self._keep = group, keep
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="raywl-keeper", daemon=True)

    def start(self) -> None:
        """Begins."""
        self._thread.start()

    def update(self, group: Group) -> None:
        """What the next heartbeats say."""
        self._group = group

    def stop(self, timeout_s: float) -> None:
        """Ends the heartbeats, and waits for one that is under way."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _beat(self) -> None:
        while not self._stopped.wait(self._group.lease_s / 3):
            try:
                if not self._keep(self._group):
                    return
            except Exception:
                # The coordinator may be starting again; the next beat tells it all.
                continue
