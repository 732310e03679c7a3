"""Leases: each resource has one holder at a time, for a time, under an epoch that only grows."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from raywl.errors import LeaseLostError

__all__ = ["Acquired", "Lease", "LeaseTable"]


@dataclass(frozen=True, slots=True)
class Lease:
    """A resource is one holder's until `expires`."""

    resource: str
    holder: str
    epoch: int
    """Larger than that of every lease granted before; a message under an older one is stale."""
    since_s: float
    """When it was granted, on the caller's clock."""
    expires_s: float
    """When it ends unless renewed; at this very moment it has ended."""


@dataclass(frozen=True, slots=True)
class Acquired:
    """The answer to `acquire`."""

    granted: bool
    lease: Lease
    """The caller's own, or the one that is in the way: ask again when it expires."""


class LeaseTable:
    """All leases of one cluster.

    Events in, answers out. It is not safe for threads, and `now_s` must never go back: both are for
    the shell around it to see to.
    """

    def __init__(self, first_epoch: int = 1) -> None:
        """Args:
        first_epoch: Epoch of the first lease. A table that replaces a lost one must start above it.
        """
        self._next_epoch = first_epoch
        self._leases: dict[str, Lease] = {}

    def acquire(self, resource: str, holder: str, ttl_s: float, now_s: float) -> Acquired:
        """Asks for `resource` until `now_s + ttl_s`.

        A holder that asks again gets its lease renewed, so that a repeated message does no harm.

        Raises:
            ValueError: `ttl_s` is not a positive, finite number.
        """
        _check_ttl(ttl_s)
        held = self.lease_of(resource, now_s)
        if held is not None and held.holder != holder:
            return Acquired(False, held)
        if held is None:
            held = Lease(resource, holder, self._next_epoch, now_s, now_s + ttl_s)
            self._next_epoch += 1
        else:
            held = replace(held, expires_s=max(held.expires_s, now_s + ttl_s))
        self._leases[resource] = held
        return Acquired(True, held)

    def renew(self, resource: str, holder: str, epoch: int, ttl_s: float, now_s: float) -> Lease:
        """Extends a lease until `now_s + ttl_s`, and never shortens it.

        Raises:
            LeaseLostError: It ran out or passed to another meanwhile, even if nobody holds it now.
            ValueError: `ttl_s` is not a positive, finite number.
        """
        _check_ttl(ttl_s)
        held = self._own(resource, holder, epoch, now_s)
        self._leases[resource] = renewed = replace(held, expires_s=max(held.expires_s, now_s + ttl_s))
        return renewed

    def release(self, resource: str, holder: str, epoch: int, now_s: float) -> None:
        """Gives a lease back before its time.

        Raises:
            LeaseLostError: It ran out or passed to another meanwhile; the other's lease stays.
        """
        self._own(resource, holder, epoch, now_s)
        del self._leases[resource]

    def expire(self, now_s: float) -> tuple[Lease, ...]:
        """Forgets the leases that have ended, and returns them in the order of their ends."""
        ended = [lease for lease in self._leases.values() if lease.expires_s <= now_s]
        for lease in ended:
            del self._leases[lease.resource]
        return tuple(sorted(ended, key=lambda lease: (lease.expires_s, lease.epoch)))

    def lease_of(self, resource: str, now_s: float) -> Lease | None:
        """The lease on `resource` that is in force, if any."""
        held = self._leases.get(resource)
        return held if held is not None and held.expires_s > now_s else None

    def leases(self, now_s: float) -> tuple[Lease, ...]:
        """All leases in force, by epoch."""
        live = (lease for lease in self._leases.values() if lease.expires_s > now_s)
        return tuple(sorted(live, key=lambda lease: lease.epoch))

    def _own(self, resource: str, holder: str, epoch: int, now_s: float) -> Lease:
        held = self._leases.get(resource)
        if held is None:
            raise LeaseLostError(f"{resource}: {holder} holds no lease of epoch {epoch}: it ran out")
        if (held.holder, held.epoch) != (holder, epoch):
            raise LeaseLostError(
                f"{resource}: the lease of {holder}, epoch {epoch}, has passed to {held.holder}, "
                f"epoch {held.epoch}"
            )
        if held.expires_s <= now_s:
            late_s = now_s - held.expires_s
            raise LeaseLostError(
                f"{resource}: the lease of {holder}, epoch {epoch}, ran out {late_s:.1f} s ago"
            )
        return held


def _check_ttl(ttl_s: float) -> None:
    if not (ttl_s > 0 and math.isfinite(ttl_s)):
        raise ValueError(f"ttl_s must be positive and finite, got {ttl_s}")
