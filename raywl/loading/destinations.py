"""What is known of the memory that targets lie in, while a load is recorded."""

from __future__ import annotations

from dataclasses import dataclass

from raywl.plan.copies import Copy, may_overlap
from raywl.plan.fills import Fill
from raywl.plan.pending import Pending
from raywl.plan.places import Places

__all__ = ["Destination"]


@dataclass(slots=True, eq=False)
class Destination:
    """One storage that targets lie in.

    Most hold one target, and one copy goes there: a hundred thousand of them are to take little memory, so
    that what only others need is made when it is needed.
    """

    name: str
    """The first target in it."""
    places: Places | None = None
    """Where each target lies, if there are several."""
    noted: Copy | Pending | None = None
    """Copies that haven't been made: none, one, or more; their `dst_start` counts from its first byte."""
    fills: list[Fill] | None = None
    """Constants that haven't been made, to be made before the copies; they count likewise."""
    immediate: bool = False
    """Whether something holds an alias that torch functions don't show."""
    repeated: bool = False
    """Whether copies may have written some bytes more than once."""
    merged: list[tuple[int, int]] | None = None
    """What copies have set of it in the end, once that was asked for."""

    @property
    def names(self) -> tuple[str, ...]:
        """All targets in it."""
        return (self.name,) if self.places is None else self.places.names

    @property
    def is_waiting(self) -> bool:
        """Whether anything is noted."""
        return self.noted is not None or self.fills is not None

    def may_overlap(self, copy: Copy) -> bool:
        """Whether a copy could write a byte that a noted one writes."""
        noted = self.noted
        if noted is None:
            return False
        return noted.may_overlap(copy) if isinstance(noted, Pending) else may_overlap(copy, noted)

    def add(self, copy: Copy) -> None:
        """Notes a copy."""
        if self.noted is None:
            self.noted = copy
            return
        if not isinstance(self.noted, Pending):
            first, self.noted = self.noted, Pending()
            self.noted.add(first)
        self.noted.add(copy)

    def take(self) -> list[Copy]:
        """All noted copies, in order; none are left."""
        noted, self.noted = self.noted, None
        if noted is None:
            return []
        return noted.take() if isinstance(noted, Pending) else [noted]
