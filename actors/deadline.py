"""One deadline for a whole launch, which knows what is being waited for."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from raywl.errors import StagingTimeout, some_of

__all__ = ["Deadline"]


class Deadline:
    """Seconds that are left, and the phases they went into."""

    def __init__(self, timeout_s: float, what: str, clock: Callable[[], float] = time.monotonic) -> None:
        """Starts to count.

        Args:
            timeout_s: Seconds for all phases together.
            what: What is bounded, for messages: `launch`.
            clock: For tests.

        Raises:
            ValueError: `timeout_s` is not positive.
        """
        if not timeout_s > 0:
            raise ValueError(f"timeout_s must be positive, got {timeout_s}")
        self.timeout_s, self.what = timeout_s, what
        self.phases: dict[str, float] = {}
        """Seconds of each phase that has begun, the last one's up to its end."""
        self.phase = ""
        self._clock = clock
        self._start_s = self._phase_start_s = clock()

    def enter(self, phase: str) -> None:
        """Ends the phase before and begins `phase`; an empty one only ends."""
        now_s = self._clock()
        if self.phase:
            self.phases[self.phase] = self.phases.get(self.phase, 0.0) + now_s - self._phase_start_s
        self.phase, self._phase_start_s = phase, now_s

    @property
    def elapsed_s(self) -> float:
        """Seconds since it began."""
        return self._clock() - self._start_s

    def remaining_s(self, at_most_s: float | None = None) -> float:
        """Seconds left, never below zero, and not more than `at_most_s`."""
        left_s = max(0.0, self.timeout_s - self.elapsed_s)
        return left_s if at_most_s is None else min(left_s, at_most_s)

    def check(self, waiting_for: Iterable[str] = ()) -> None:
        """Raises when the time is up.

        Args:
            waiting_for: Who isn't done.

        Raises:
            StagingTimeout: Which phase it was, and who was not done.
        """
        if self.remaining_s() > 0:
            return
        names = list(waiting_for)
        rest = f"; not done: {some_of(names)}" if names else ""
        during = f" while it was to {self.phase}" if self.phase else ""
        raise StagingTimeout(f"{self.what} was not done after {self.timeout_s:g} s{during}{rest}")
