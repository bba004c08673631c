"""Decide which delivery of a locked task goes to the pool now, and which wait parked.

This is state of a worker's main process, without Celery, network, thread or clock. `consumer.py`
reports arrivals and ends of deliveries, `dispatcher.py` the resources that are free.

A delivery is parked if a body in this worker uses its resources, or if others wait for them here.
Deliveries that are parked for the same resources go one at a time, when the nodes have notified
this worker or have answered that these are free: the most urgent first, then the one that has
waited longest. If a resource has a limit, that many are at work together. All this only keeps
deliveries from meeting held locks: a delivery that goes still has to get its lock.
"""

from __future__ import annotations

import bisect
import itertools
import math
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from ...protocol.names import Limit, Limits, least, of_each

__all__ = ["AdmissionQueue", "Parked", "Resources"]

Resources = tuple[str, ...]
"""The names that a delivery locks, all or none. Here, two deliveries wait for the same only if
all their names are the same."""

PRESUMED_DEAD_S = 0.5
"""Seconds after which a body whose resource is free on the nodes no longer delays the next one: its
process has died or its lease is over, and the pool has not reported that yet."""
PARTS = 4
"""Parts in which the worker checks its parked deliveries, one part a sweep: 20 000 at once would
take longer than the event loop may be blocked."""
MIN_PART = 1000
"""Minimum deliveries in such a part."""

_rank = attrgetter("rank")


@dataclass(eq=False)
class Parked:
    """A delivery that waits here.

    Attributes:
        request: The Celery `Request`, unacknowledged.
        resources: The resources that it waits for.
        limit: How many holders each of them may have at a time.
        shared: True if it is a reader.
        since: Time since which its task waits; seconds since 1970.
        until: Time at which it goes even if its resource is held; seconds.
        latest: Time until which it may be put off; seconds.
        rank: Its place among those for its resource: urgency, since, order of arrival.
        size: Memory that its message takes; bytes.
        deadline: Seconds for which one holder may keep it waiting; None: without a limit.
        dated: Time at which the broker was last informed that it is here; seconds.
    """

    request: Any
    resources: Resources
    limit: Limit
    shared: bool
    since: float
    until: float
    rank: tuple[float, float, int]
    size: int = 0
    latest: float = math.inf
    deadline: float | None = None
    dated: float = -math.inf


@dataclass
class _Group:
    """The deliveries for the same resources."""

    running: dict[int, tuple[Any, float, bool]] = field(default_factory=dict)
    """Each delivery that is with the pool, by the `id` of its request: the request, the time since
    then, and True for a reader."""
    parked: list[Parked] = field(default_factory=list)
    limits: Counter[Limit] = field(default_factory=Counter)
    """Number of the parked deliveries that declare each limit."""
    notified: bool = False
    """True if the nodes have notified this worker, and no delivery has gone since."""


class AdmissionQueue:
    """The parked deliveries of a worker, and those with its pool. Any thread may use it.

    Args:
        limit_now: Function that returns the limit in force for resources with a declared limit,
            which an operator may have changed.

    Attributes:
        most: Maximum number of parked deliveries.
        size: Memory that the messages of all parked deliveries take; bytes.
    """

    def __init__(
        self, limit_now: Callable[[Resources, Limit], Limit] = lambda _of, limit: limit
    ) -> None:
        self.most = math.inf
        self.size = 0
        self._limit_now = limit_now
        self._groups: dict[Resources, _Group] = {}
        self._parked: OrderedDict[Parked, None] = OrderedDict()
        """All parked deliveries, in the order in which the next parts take them."""
        self._new: dict[Parked, None] = {}
        """Those of them that no part has taken yet."""
        self._paused: dict[Parked, None] = {}
        self._running: dict[int, tuple[Any, Resources]] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._parked)

    def arrive(
        self,
        request: Any,
        resources: Resources,
        now: float,
        *,
        since: float,
        until: float,
        latest: float = math.inf,
        deadline: float | None = None,
        urgency: float = 0.0,
        again: bool = False,
        limit: Limit = 1,
        shared: bool = False,
        size: int = 0,
    ) -> bool:
        """Return True if a delivery goes to the pool at once; otherwise park it.

        Args:
            request: The Celery `Request`.
            resources: The resources that it locks.
            now: Seconds.
            since: Time since which its task waits, in seconds since 1970.
            until: Time at which it goes even if its resource is held; seconds.
            latest: Time until which it may be put off; seconds.
            deadline: Seconds for which one holder may keep it waiting; None: without a limit.
            urgency: Smaller goes first.
            again: True if it has met a held lock before.
            limit: How many holders each of its resources may have at a time.
            shared: True if it is a reader.
            size: Memory that its message takes; bytes.
        """
        with self._lock:
            group = self._groups.setdefault(resources, _Group())
            rank = (urgency, since, next(self._numbers))
            parked = Parked(
                request, resources, limit, shared, since, until, rank, size, latest, deadline
            )
            is_first = not group.parked and _has_room(
                parked, [*group.running.values()], self._limit_now(resources, limit)
            )
            if (is_first and not again) or len(self._parked) >= self.most:
                self._run(group, parked, now)
                return True
            bisect.insort(group.parked, parked, key=_rank)
            group.limits[limit] += 1
            self._keep(parked)
            return False

    # -- While keys are paused: a delivery that waits for one of them stays, even if it is free

    def hold(
        self, request: Any, resources: Resources, *, since: float, until: float, size: int = 0
    ) -> bool:
        """Keep a delivery until its key is resumed; return True if there was room.

        Args:
            request: The Celery `Request`.
            resources: The resources that it locks.
            since: Time since which its task waits, in seconds since 1970.
            until: Time at which it goes in any case; seconds.
            size: Memory that its message takes; bytes.
        """
        with self._lock:
            if len(self._parked) >= self.most:
                return False
            rank = (0.0, since, next(self._numbers))
            parked = Parked(request, resources, 1, False, since, until, rank, size)
            self._paused[parked] = None
            self._keep(parked)
            return True

    def pause(self, is_paused: Callable[[Resources], object]) -> list[Parked]:
        """Keep the deliveries that are parked for paused resources; return them."""
        with self._lock:
            now_paused = [
                one for one in self._groups.items() if one[1].parked and is_paused(one[0])
            ]
            held = [parked for _of, group in now_paused for parked in group.parked]
            for resources, group in now_paused:
                self._paused.update(dict.fromkeys(group.parked))
                group.parked.clear()
                group.limits.clear()
                self._drop_idle(resources, group)
            return held

    def resume(self, is_paused: Callable[[Resources], object]) -> list[Parked]:
        """Remove the kept deliveries whose resources are no longer paused; return them in order."""
        with self._lock:
            names = {parked.resources for parked in self._paused}
            free = {resources for resources in names if not is_paused(resources)}
            gone = [parked for parked in self._paused if parked.resources in free]
            for parked in gone:
                self._leave(parked)
            return sorted(gone, key=_rank)

    # -- Choosing the delivery that goes

    def ended(self, request: Any, resources: Resources) -> bool:
        """Remove a delivery that is no longer with the pool; return True if others are parked."""
        with self._lock:
            group = self._groups.get(resources)
            if group is None or group.running.pop(id(request), None) is None:
                return False
            del self._running[id(request)]
            return not self._drop_idle(resources, group)

    def notified(self, resources: Resources, is_ours: bool = True) -> None:
        """Record that the nodes have notified this worker, so that the next delivery may go.

        Args:
            resources: The resources of the notification.
            is_ours: False after the notification was passed on to another worker.
        """
        with self._lock:
            group = self._groups.get(resources)
            if group is not None and group.parked:
                group.notified = is_ours

    def take(self, resources: Resources, now: float, *, free: bool = False) -> Parked | None:
        """Return the delivery that goes now, if there is one.

        Args:
            resources: The resources that it locks.
            now: Seconds.
            free: True if the nodes have just answered that they are free; otherwise the nodes must
                have notified this worker.
        """
        with self._lock:
            group = self._groups.get(resources)
            if group is None or not group.parked or not (group.notified or free):
                return None
            parked = group.parked[0]
            if not _has_room(parked, _at_work(group, now), self._limit(resources, group)):
                return None
            go_on = len(group.parked) > 1 and parked.shared and group.parked[1].shared
            # One notification is for all of the next readers.
            group.notified = group.notified and go_on
            return self._go(parked, now)

    def part(self) -> list[Parked]:
        """Return some of the parked: all new ones, and any other in about 1 of `PARTS` calls."""
        with self._lock:
            count = max(MIN_PART, math.ceil(len(self._parked) / PARTS))
            part = list(itertools.islice(self._parked, count))
            for parked in part:
                self._parked.move_to_end(parked)
                self._new.pop(parked, None)
            part += self._new
            self._new.clear()
            return part

    def go(self, parked: Parked, now: float) -> bool:
        """Let a delivery go though its resource may be held; return True if it was still here."""
        with self._lock:
            if is_here := parked in self._parked:
                self._go(parked, now)
            return is_here

    def take_back(self, keep: int) -> list[Parked]:
        """Remove all but `keep` of the parked, beginning with the last to go; return them."""
        with self._lock:
            if len(self._parked) <= keep:
                return []
            surplus = sorted(self._parked, key=_rank, reverse=True)[: len(self._parked) - keep]
            for parked in surplus:
                self._leave(parked)
            return surplus

    def withdraw(self, parked: Parked) -> bool:
        """Remove a parked delivery; return True if it was still here."""
        with self._lock:
            if is_here := parked in self._parked:
                self._leave(parked)
            return is_here

    def counts(self, resources: Resources) -> tuple[int, int]:
        """Return how many deliveries are parked for resources, and how many are with the pool."""
        with self._lock:
            group = self._groups.get(resources)
            return (len(group.parked), len(group.running)) if group is not None else (0, 0)

    def limit(self, resources: Resources) -> Limit:
        """Return how many holders each may have at a time, by the tasks of the parked ones."""
        with self._lock:
            group = self._groups.get(resources)
            return 1 if group is None or not group.parked else self._limit(resources, group)

    def is_shared(self, resources: Resources) -> bool:
        """Return True if the delivery that goes next is a reader."""
        with self._lock:
            group = self._groups.get(resources)
            return group is not None and bool(group.parked) and group.parked[0].shared

    def parked(self) -> list[Parked]:
        """Return all parked deliveries."""
        with self._lock:
            parked = [one for group in self._groups.values() for one in group.parked]
            return parked + list(self._paused)

    def running(self) -> list[tuple[Any, Resources]]:
        """Return all deliveries that are with the pool, each with its resources."""
        with self._lock:
            return list(self._running.values())

    def first_at_work(self, resources: Resources) -> Any:
        """Return the oldest request for these resources that is with the pool, or None."""
        with self._lock:
            group = self._groups.get(resources)
            return next((one for one, *_ in group.running.values()), None) if group else None

    def _limit(self, resources: Resources, group: _Group) -> Limit:
        """Return the largest of their limits: functions may return several, by task or over time.

        A delivery that goes too early is refused by its lock.
        """
        limit, *others = group.limits
        if others:
            limit = Limits(tuple(map(max, *(of_each(resources, one) for one in group.limits))))
        return self._limit_now(resources, limit)

    def _keep(self, parked: Parked) -> None:
        self._parked[parked] = None
        self._new[parked] = None
        self.size += parked.size

    def _run(self, group: _Group, parked: Parked, now: float) -> None:
        group.running[id(parked.request)] = (parked.request, now, parked.shared)
        self._running[id(parked.request)] = (parked.request, parked.resources)

    def _go(self, parked: Parked, now: float) -> Parked:
        self._run(self._groups.setdefault(parked.resources, _Group()), parked, now)
        self._leave(parked)
        return parked

    def _leave(self, parked: Parked) -> None:
        del self._parked[parked]
        self._new.pop(parked, None)
        self.size -= parked.size
        if parked in self._paused:
            del self._paused[parked]
            return
        group = self._groups[parked.resources]
        del group.parked[bisect.bisect_left(group.parked, parked.rank, key=_rank)]
        group.limits[parked.limit] -= 1
        if not group.limits[parked.limit]:
            del group.limits[parked.limit]
        self._drop_idle(parked.resources, group)

    def _drop_idle(self, resources: Resources, group: _Group) -> bool:
        if not group.parked:
            group.notified = False
            if not group.running:
                del self._groups[resources]
            return True
        return False


def _has_room(parked: Parked, at_work: list[tuple[Any, float, bool]], limit: Limit) -> bool:
    if parked.shared:
        return all(shared for _request, _since, shared in at_work)
    return len(at_work) < least(limit)


def _at_work(group: _Group, now: float) -> list[tuple[Any, float, bool]]:
    """Return those with the pool that may hold the resource, or are about to ask for it."""
    return [
        one
        for one in group.running.values()
        if getattr(one[0], "time_start", None) is None or now - one[1] < PRESUMED_DEAD_S
    ]
