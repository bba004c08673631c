"""Decide which delivery of a locked task goes to the pool now, and which wait parked.

This is state of a worker's main process, without Celery, network, thread or clock. `consumer.py`
tells it what arrives and what ends, `dispatcher.py` which resources are free.

A delivery is parked if a body in this worker uses its resources, or others wait for them here.
Deliveries that are parked for the same resources go one at a time, when the nodes have called this
worker or have said that these are free: the most urgent first, then the one that has waited
longest. Where a resource has a limit, so many are at work together. All this only keeps deliveries
from meeting held locks: one that goes still has to get its lock.
"""

from __future__ import annotations

import bisect
import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ...protocol.names import Limit, Limits, least, of_each

__all__ = ["AdmissionQueue", "Parked", "Resources"]

Resources = tuple[str, ...]
"""The names that a delivery locks, all or none. In here, two deliveries wait for the same only if
all names are the same."""

PRESUMED_DEAD_S = 0.5
"""Seconds after which a body whose resource the nodes call free no longer holds up the next: its
process has died or its lease is over, and the pool has yet to tell."""


@dataclass(frozen=True, eq=False)
class Parked:
    """A delivery that waits here.

    Attributes:
        request: Celery's, unacknowledged.
        resources: What it waits for.
        limit: How many may hold each of that at a time.
        shared: Whether it is a reader.
        since: Since when its task waits; seconds since 1970.
        until: When it goes even though its resource is held; seconds.
        rank: Its place among those of its resource: urgency, since, order of arrival.
    """

    request: Any
    resources: Resources
    limit: Limit
    shared: bool
    since: float
    until: float
    rank: tuple[float, float, int]


@dataclass
class _Known:
    """What is known of the deliveries for the same resources."""

    running: dict[int, tuple[Any, float, bool]] = field(default_factory=dict)
    """By the `id` of its request, each delivery that is with the pool: the request, since when, and
    whether it is a reader."""
    parked: list[Parked] = field(default_factory=list)
    called: bool = False
    """Whether the nodes have called this worker, and no delivery has gone since."""


class AdmissionQueue:
    """The parked deliveries of a worker, and those with its pool. Any thread may use it.

    Args:
        most: How many deliveries are parked at most.
        limit_now: Returns what their declared limit is now: an operator may have changed it.
    """

    def __init__(
        self, most: int, limit_now: Callable[[Resources, Limit], Limit] = lambda _of, limit: limit
    ) -> None:
        self.most = most
        self._limit_now = limit_now
        self._known: dict[Resources, _Known] = {}
        self._paused: dict[Parked, None] = {}
        self._count = 0
        self._numbers = itertools.count()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._count

    def arrive(
        self,
        request: Any,
        resources: Resources,
        now: float,
        *,
        since: float,
        until: float,
        urgency: float = 0.0,
        again: bool = False,
        limit: Limit = 1,
        shared: bool = False,
    ) -> bool:
        """Return whether a delivery goes to the pool at once; else park it.

        Args:
            request: Celery's.
            resources: What it locks.
            now: Seconds.
            since: Since when its task waits, in seconds since 1970.
            until: When it goes in any case.
            urgency: Smaller goes first.
            again: Whether it has met a held lock before.
            limit: How many may hold each of what it locks at a time.
            shared: Whether it is a reader.
        """
        with self._lock:
            known = self._known.setdefault(resources, _Known())
            rank = (urgency, since, next(self._numbers))
            parked = Parked(request, resources, limit, shared, since, until, rank)
            is_first = not known.parked and _has_room(
                parked, [*known.running.values()], self._limit_now(resources, limit)
            )
            if (is_first and not again) or self._count >= self.most:
                known.running[id(request)] = (request, now, shared)
                return True
            bisect.insort(known.parked, parked, key=lambda one: one.rank)
            self._count += 1
            return False

    # -- While keys are paused: a delivery that waits for one of them stays, even if it is free

    def hold(self, request: Any, resources: Resources, *, since: float, until: float) -> bool:
        """Keep a delivery until it is resumed; return whether there was room.

        Args:
            request: Celery's.
            resources: What it locks.
            since: Since when its task waits, in seconds since 1970.
            until: When it goes in any case.
        """
        with self._lock:
            if self._count >= self.most:
                return False
            rank = (0.0, since, next(self._numbers))
            self._paused[Parked(request, resources, 1, False, since, until, rank)] = None
            self._count += 1
            return True

    def pause(self, is_paused: Callable[[Resources], object]) -> list[Parked]:
        """Keep those that are parked for what is paused now; return them."""
        with self._lock:
            everything = [one for known in self._known.values() for one in known.parked]
            held = [parked for parked in everything if is_paused(parked.resources)]
            for parked in held:
                self._leave(parked)
                self._paused[parked] = None
                self._count += 1
            return held

    def resume(self, is_paused: Callable[[Resources], object]) -> list[Parked]:
        """Remove those kept for what is paused no more; return them in their order."""
        with self._lock:
            gone = [parked for parked in self._paused if not is_paused(parked.resources)]
            for parked in gone:
                self._leave(parked)
            return sorted(gone, key=lambda one: one.rank)

    # -- Who goes

    def ended(self, request: Any, resources: Resources) -> bool:
        """Note that a delivery is no longer with the pool; return whether others are parked."""
        with self._lock:
            known = self._known.get(resources)
            if known is None or known.running.pop(id(request), None) is None:
                return False
            return not self._forget_idle(resources, known)

    def called(self, resources: Resources, is_so: bool = True) -> None:
        """Note that the nodes have called this worker, so that the next one may go.

        Args:
            resources: What it was called for.
            is_so: False when the call was handed on to another worker.
        """
        with self._lock:
            known = self._known.get(resources)
            if known is not None and known.parked:
                known.called = is_so

    def take(self, resources: Resources, now: float, *, free: bool = False) -> Parked | None:
        """Return the delivery that goes now, if there is one.

        Args:
            resources: What it locks.
            now: Seconds.
            free: Whether the nodes have just said that it is free; else they must have called this
                worker.
        """
        with self._lock:
            known = self._known.get(resources)
            if known is None or not known.parked or not (known.called or free):
                return None
            parked = known.parked[0]
            if not _has_room(parked, _at_work(known, now), self._limit(resources, known)):
                return None
            go_on = len(known.parked) > 1 and parked.shared and known.parked[1].shared
            known.called = known.called and go_on  # one call is for all readers that come next
            return self._go(parked, now)

    def take_overdue(self, now: float) -> Parked | None:
        """Return one that goes in any case: it must not stay unacknowledged any longer."""
        with self._lock:
            due = (parked for parked in self._everything() if parked.until <= now)
            parked = next(due, None)
            return None if parked is None else self._go(parked, now)

    def take_back(self, keep: int) -> list[Parked]:
        """Remove all but `keep` of the parked, those that would go last first; return them."""
        with self._lock:
            everything = sorted(self._everything(), key=lambda one: one.rank, reverse=True)
            surplus = everything[: max(0, len(everything) - keep)]
            for parked in surplus:
                self._leave(parked)
            return surplus

    def withdraw(self, parked: Parked) -> bool:
        """Remove a parked one; return whether it was still here."""
        with self._lock:
            if parked not in self._everything():
                return False
            self._leave(parked)
            return True

    def counts(self, resources: Resources) -> tuple[int, int]:
        """Return how many deliveries are parked for them, and how many are with the pool."""
        with self._lock:
            known = self._known.get(resources)
            return (len(known.parked), len(known.running)) if known is not None else (0, 0)

    def limit(self, resources: Resources) -> Limit:
        """Return how many may hold each at a time, by the tasks of those that are parked."""
        with self._lock:
            known = self._known.get(resources)
            return 1 if known is None or not known.parked else self._limit(resources, known)

    def is_shared(self, resources: Resources) -> bool:
        """Return whether the one that goes next is a reader."""
        with self._lock:
            known = self._known.get(resources)
            return known is not None and bool(known.parked) and known.parked[0].shared

    def parked(self) -> list[Parked]:
        """Return all that are parked."""
        with self._lock:
            return self._everything()

    def running(self) -> list[tuple[Any, Resources]]:
        """Return all that are with the pool, each with its resources."""
        with self._lock:
            everything = self._known.items()
            return [(one, of) for of, known in everything for one, *_ in known.running.values()]

    def _limit(self, resources: Resources, known: _Known) -> Limit:
        """Return the largest of their limits: functions may return several, for tasks or over time.

        A delivery that goes too early is refused by its lock.
        """
        limits = {parked.limit for parked in known.parked}
        limit = limits.pop()
        if limits:
            limit = Limits(tuple(map(max, *(of_each(resources, one) for one in (limit, *limits)))))
        return self._limit_now(resources, limit)

    def _everything(self) -> list[Parked]:
        parked = [parked for known in self._known.values() for parked in known.parked]
        return parked + list(self._paused)

    def _go(self, parked: Parked, now: float) -> Parked:
        known = self._known.setdefault(parked.resources, _Known())
        known.running[id(parked.request)] = (parked.request, now, parked.shared)
        self._leave(parked)
        return parked

    def _leave(self, parked: Parked) -> None:
        self._count -= 1
        if parked in self._paused:
            del self._paused[parked]
            return
        known = self._known[parked.resources]
        known.parked.remove(parked)
        self._forget_idle(parked.resources, known)

    def _forget_idle(self, resources: Resources, known: _Known) -> bool:
        if not known.parked:
            known.called = False
            if not known.running:
                del self._known[resources]
            return True
        return False


def _has_room(parked: Parked, at_work: list[tuple[Any, float, bool]], limit: Limit) -> bool:
    if parked.shared:
        return all(shared for _request, _since, shared in at_work)
    return len(at_work) < least(limit)


def _at_work(known: _Known, now: float) -> list[tuple[Any, float, bool]]:
    """Return those with the pool that may hold the resource, or are about to ask for it."""
    return [
        one
        for one in known.running.values()
        if getattr(one[0], "time_start", None) is None or now - one[1] < PRESUMED_DEAD_S
    ]
