"""The lease and the arithmetic of time.

A lease is a promise of N independent nodes, each with a clock of its own, so its holder counts for
itself, and always to its own disadvantage. For every node it keeps one number: the time *before*
the acknowledged request was sent, plus the ttl. No node drops our token before that moment (its
own countdown began later), except that clocks run at different rates: the *drift* is deducted for
that. A quorum of nodes holds our token until the q-th largest of these numbers: that is the
deadline. The same rule serves acquisition, late answers, partial extensions and repair, and
nothing else ever moves the deadline.

Once the clock has reached the deadline the lease is lost for good, decided here, without a word
from any node. An extension that is acknowledged later cannot revive it, because another may have
held the resource in between.

Times are seconds on a monotonic clock which the caller owns; this module never looks at one.
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
"""Scripts count in doubles, exactly up to here: microseconds until the year 2255."""


def drift(ttl: float) -> float:
    """Return the seconds of a ttl that are never counted as held, for clock drift (Redis page)."""
    return DRIFT_RATE * ttl + DRIFT_FLOOR


@dataclass(frozen=True, slots=True)
class Lease:
    """A resource that is ours until a deadline. A value: extending one returns a new one.

    Attributes:
        resource: What is exclusive; several names in one text, where it is more than one.
        token: The random proof of who holds it, new for every attempt. It is no fencing token: it
            does not tell which of two leases is the newer one.
        ttl: What the nodes were asked for, in seconds.
        deadline: Held while the clock is before this, in seconds of that clock.
        clock: The monotonic clock of the driver that granted it.
        fencing_token: Larger than that of any earlier holder of the resource, so the resource can
            refuse a write that comes late; None unless asked for (`fencing=True`).
        resources: Each name of what is exclusive.
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
        """Whether this lease is over. Extending may have made a newer one that is not."""
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
