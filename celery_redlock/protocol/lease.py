"""The lease and the arithmetic of time.

A lease is a promise of N independent nodes, each with a clock of its own. So the holder counts the
time itself, and always to its own disadvantage. For every node it keeps one number: the time
*before* the acknowledged request was sent, plus the ttl. No node drops our token before then,
because the node's own countdown began later. Clocks may run at different rates, so the *drift* is
deducted. A quorum of nodes holds our token until the q-th largest of these numbers: that is the
deadline. The same rule serves acquisition, late answers, partial extensions and repair, and
nothing else ever moves the deadline.

Once the clock has reached the deadline, the lease is lost for good. That is decided here, without
asking any node. An extension that is acknowledged later cannot revive it, because another may have
held the resource in between.

Times are seconds on a monotonic clock that the caller owns; this module never reads a clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from .errors import LeaseLost

__all__ = [
    "FENCE_LIMIT",
    "NEVER",
    "Lease",
    "drift",
]

NEVER = -math.inf

DRIFT_RATE = 0.01
"""Allowance for clocks that run at different rates (Redis page, "Safety arguments")."""
DRIFT_FLOOR = 0.002
"""Allowance in seconds for the 1 ms granularity of expiry on a node, at both ends."""

FENCE_LIMIT = 2**53 - 1
"""The largest fencing token. Lua scripts count in doubles, which are exact up to here: enough for
microseconds until the year 2255."""


def drift(ttl: float) -> float:
    """Return the seconds of a ttl that are never counted as held, for clock drift (Redis page)."""
    return DRIFT_RATE * ttl + DRIFT_FLOOR


@dataclass(frozen=True, slots=True)
class Lease:
    """A resource that is ours until a deadline. A value: extending it makes a new one.

    Attributes:
        resource: The name of the resource; several names are joined to one text.
        token: The random proof of its holder, new for every attempt. It is not a fencing token:
            of two tokens you cannot see which one is newer.
        ttl: The ttl that the nodes were asked for, in seconds.
        deadline: The lease is held while the clock is before this, in seconds of that clock.
        clock: The monotonic clock of the driver that acquired it.
        fencing_token: A number larger than that of any earlier holder of the resource, so that the
            resource can refuse a late write; None unless asked for (`fencing=True`).
        resources: The names of all resources, one by one.
        granted_at: When it was granted, in seconds of that clock; 0.0 if that is not known.
    """

    __module__ = "celery_redlock"

    resource: str
    token: str = field(repr=False)
    ttl: float
    deadline: float
    clock: Callable[[], float] = field(repr=False, compare=False)
    fencing_token: int | None = None
    resources: tuple[str, ...] = field(default=(), repr=False)
    granted_at: float = field(default=0.0, repr=False, compare=False)

    def remaining(self, now: float | None = None) -> float:
        """Return the seconds left, drift deducted (*validity* on the Redis page); 0.0 when over."""
        return max(0.0, self.deadline - (self.clock() if now is None else now))

    @property
    def lost(self) -> bool:
        """True if this lease is over. An extension may have made a newer one that is not over."""
        return self.remaining() <= 0.0

    def ensure(self, seconds: float = 0.0) -> None:
        """Raise unless more than `seconds` are left.

        Raises:
            LeaseLost: The lease is over, or will be in `seconds`.
        """
        left = self.remaining()
        if left <= seconds:
            raise LeaseLost(
                f"{self.resource}: {left:.3f} s are left of the lease, more than {seconds:g} s"
                " were asked for; stop writing, another may hold the resource",
                resource=self.resource,
                lease=self,
                reason="expired",
            )
