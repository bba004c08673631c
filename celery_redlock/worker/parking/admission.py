"""Which delivery of a locked task goes to the pool now, and which wait parked: decisions only.

The state of a worker's main process, without Celery, network, thread or clock. `consumer.py` tells
it what arrives and what ends, `dispatcher.py` which resources are free.

A delivery whose resource is at work in this worker, or is waited for here, is parked. Those parked
for a resource go one at a time, when the nodes have called this worker for it or have said that it
is free: the most urgent first, then the one that has waited longest. This only keeps deliveries
from meeting held locks: one that goes still has to get its lock.
"""

from __future__ import annotations

import bisect
import itertools
import threading
from dataclasses import dataclass, field
from typing import Any

__all__ = ["AdmissionQueue", "Parked"]

PRESUMED_DEAD_S = 0.5
"""Seconds after which a body that has begun, and whose resource is free all the same, holds up no
other: its process has died or its lease is over, and the pool is yet to tell."""


@dataclass(frozen=True, eq=False)
class Parked:
    """A delivery that waits here.

    Attributes:
        request: Celery's, unacknowledged.
        resource: What it waits for.
        since: Since when its task waits; seconds since 1970.
        until: When it goes even though its resource is held; seconds.
        rank: Its place among those of its resource: urgency, since, order of arrival.
    """

    request: Any
    resource: str
    since: float
    until: float
    rank: tuple[float, float, int]


@dataclass
class _Resource:
    """What is known of one resource."""

    running: dict[int, tuple[Any, float]] = field(default_factory=dict)
    """By identity: the deliveries that are with the pool, and since when."""
    parked: list[Parked] = field(default_factory=list)
    called: bool = False
    """Whether the nodes have called this worker for it, and nobody has gone since."""


class AdmissionQueue:
    """Safe in threads; nothing here waits.

    Args:
        most: How many deliveries are parked at most.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._resources: dict[str, _Resource] = {}
        self._count = 0
        self._numbers = itertools.count()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._count

    def arrive(
        self,
        request: Any,
        resource: str,
        now: float,
        *,
        since: float,
        until: float,
        urgency: float = 0.0,
        again: bool = False,
    ) -> bool:
        """Decide whether a delivery goes to the pool at once; else it is parked.

        Args:
            request: Celery's.
            resource: What it locks.
            now: Seconds.
            since: Since when its task waits, in seconds since 1970.
            until: When it goes in any case.
            urgency: Smaller goes first.
            again: Whether it has met a held lock before.
        """
        with self._lock:
            known = self._resources.get(resource)
            if (known is None and not again) or self._count >= self.most:
                known = self._resources.setdefault(resource, _Resource())
                known.running[id(request)] = (request, now)
                return True
            known = self._resources.setdefault(resource, _Resource())
            rank = (urgency, since, next(self._numbers))
            parked = Parked(request, resource, since, until, rank)
            bisect.insort(known.parked, parked, key=lambda one: one.rank)
            self._count += 1
            return False

    def ended(self, request: Any, resource: str) -> bool:
        """Note that a delivery is no longer with the pool; return whether others are parked."""
        with self._lock:
            known = self._resources.get(resource)
            if known is None or known.running.pop(id(request), None) is None:
                return False
            return not self._forget_idle(resource, known)

    def called(self, resource: str, is_so: bool = True) -> None:
        """Note that the nodes have called this worker, so that the next one may go.

        Args:
            resource: What it was called for.
            is_so: False when the call was handed on to another worker.
        """
        with self._lock:
            known = self._resources.get(resource)
            if known is not None and known.parked:
                known.called = is_so

    def take(self, resource: str, now: float, *, free: bool = False) -> Parked | None:
        """Return the delivery that goes now, if there is one.

        Args:
            resource: What it locks.
            now: Seconds.
            free: Whether the nodes have just said that the resource is free; else they must have
                called this worker.
        """
        with self._lock:
            known = self._resources.get(resource)
            if known is None or not (known.called or free) or _at_work(known, now):
                return None
            if not known.parked:
                return None
            known.called = False
            return self._go(known, known.parked[0], now)

    def take_overdue(self, now: float) -> Parked | None:
        """Return one that goes whatever the nodes say: it must not stay unacknowledged longer."""
        with self._lock:
            for known in self._resources.values():
                for parked in known.parked:
                    if parked.until <= now:
                        return self._go(known, parked, now)
            return None

    def take_back(self, keep: int) -> list[Parked]:
        """Remove all but `keep` of the parked, those that would go last first; return them."""
        with self._lock:
            everything = [one for known in self._resources.values() for one in known.parked]
            everything.sort(key=lambda one: one.rank, reverse=True)
            surplus = everything[: max(0, len(everything) - keep)]
            for parked in surplus:
                self._leave(self._resources[parked.resource], parked)
                self._forget_idle(parked.resource, self._resources[parked.resource])
            return surplus

    def withdraw(self, parked: Parked) -> bool:
        """Remove a parked one; return whether it was still here."""
        with self._lock:
            known = self._resources.get(parked.resource)
            if known is None or parked not in known.parked:
                return False
            self._leave(known, parked)
            self._forget_idle(parked.resource, known)
            return True

    def counts(self, resource: str) -> tuple[int, int]:
        """Return how many of a resource are parked, and how many are with the pool."""
        with self._lock:
            known = self._resources.get(resource)
            return (len(known.parked), len(known.running)) if known is not None else (0, 0)

    def parked(self) -> list[Parked]:
        """Return all that are parked."""
        with self._lock:
            return [parked for known in self._resources.values() for parked in known.parked]

    def running(self) -> list[tuple[Any, str]]:
        """Return all that are with the pool, each with its resource."""
        with self._lock:
            resources = self._resources.items()
            return [(one, name) for name, known in resources for one, _ in known.running.values()]

    def _go(self, known: _Resource, parked: Parked, now: float) -> Parked:
        self._leave(known, parked)
        known.running[id(parked.request)] = (parked.request, now)
        return parked

    def _leave(self, known: _Resource, parked: Parked) -> None:
        known.parked.remove(parked)
        self._count -= 1

    def _forget_idle(self, resource: str, known: _Resource) -> bool:
        if not known.parked:
            known.called = False
            if not known.running:
                del self._resources[resource]
            return True
        return False


def _at_work(known: _Resource, now: float) -> list[Any]:
    """Those with the pool that may hold the resource, or are about to ask for it."""
    return [
        request
        for request, since in known.running.values()
        if getattr(request, "time_start", None) is None or now - since < PRESUMED_DEAD_S
    ]
