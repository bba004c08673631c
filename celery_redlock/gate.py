"""Which delivery of a locked task may go to the pool now, and which are parked until their turn.

The state of a worker's main process, without network, thread or clock: `parking.py` feeds it with
what Celery does, `doorman.py` with what the nodes tell. A delivery whose resource is at work here,
or is known to be wanted by more than one, is parked: first come, first served. Parked ones go one
at a time, while this worker has the *turn* for the resource: a lock beside the lock, that says
which worker may try. It is a courtesy: a delivery that goes still has to get its own lock.

Whoever has the turn keeps it for a *tenure*, in which its deliveries follow each other without any
news from the nodes; then it stands back for another worker.
"""

from __future__ import annotations

import bisect
import itertools
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

__all__ = ["TENURE", "Gate", "Parked", "View"]

TENURE = 0.25
"""Seconds that a worker lets its own go, one after the other, before it stands back. It ends with
the end of a body, so that at least one has run."""
HOT = 5.0
"""Seconds that a resource is remembered for which a conflict was met."""
MANY = 10_000
"""Resources at a time; those beyond are not parked."""


@dataclass(frozen=True)
class Parked:
    """A delivery that waits here.

    Attributes:
        request: Celery's, unacknowledged.
        resource: What it waits for.
        ripe: When it may go at the earliest; seconds.
        until: When it goes in any case; seconds.
        order: Its place in the row.
        widened: Whether the prefetch window was widened for it.
    """

    request: Any
    resource: str
    ripe: float
    until: float
    order: tuple[float, int]
    widened: bool


@dataclass(frozen=True)
class View:
    """What the doorman needs to know of a resource.

    Attributes:
        parked: How many wait.
        flying: The ids (`id()`) of those that are with the pool.
        ripe: When the first of those that wait may go; seconds.
        stand_back: Whether the tenure is over.
    """

    parked: int
    flying: frozenset[int]
    ripe: float
    stand_back: bool


@dataclass
class _Row:
    """All that is known of one resource."""

    flying: dict[int, Any] = field(default_factory=dict)
    parked: list[Parked] = field(default_factory=list)
    turn: bool = False
    tenure: float = 0.0
    stand_back: bool = False
    hot: float = 0.0

    def ripe(self, now: float) -> Parked | None:
        return next((parked for parked in self.parked if parked.ripe <= now), None)


class Gate:
    """Safe in threads; nothing here waits.

    Args:
        attend: Told a resource whenever the doorman has to look after it.
    """

    def __init__(self, attend: Callable[[str], None]) -> None:
        self._attend = attend
        self._rows: dict[str, _Row] = {}
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._heated = 0.0
        self.parked = 0

    def arrive(
        self,
        request: Any,
        resource: str,
        now: float,
        *,
        since: float = 0.0,
        waits: bool = False,
        ripe: float = 0.0,
        until: float = 0.0,
        widen: Callable[[], bool] = lambda: False,
    ) -> bool:
        """A delivery is about to go to the pool. Whether it may; else it is parked.

        Args:
            request: Celery's.
            resource: What it locks.
            now: Seconds.
            since: Since when its task waits; who waits longest stands first.
            waits: It has met a held lock before.
            ripe: When it may go, if it is parked.
            until: When it goes in any case.
            widen: Called once if it is parked: widens the prefetch window, and says if it did.
        """
        with self._lock:
            row = self._rows.get(resource)
            if row is None:
                if not waits:
                    if len(self._rows) < MANY:
                        self._rows[resource] = _Row({id(request): request})
                    return True
                row = self._rows[resource] = _Row()
            if not (waits or row.flying or row.parked or row.hot > now):
                row.flying[id(request)] = request
                return True
            order = (since, next(self._numbers))
            parked = Parked(request, resource, ripe, until, order, widen())
            bisect.insort(row.parked, parked, key=lambda one: one.order)
            self.parked += 1
            # The doorman is asked once, not by each of a thousand.
            new = len(row.parked) == 1
        if new:
            self._attend(resource)
        return False

    def landed(
        self, request: Any, resource: str, now: float, *, sure: bool = True, conflict: bool = False
    ) -> list[Parked]:
        """A delivery is no longer with the pool. Which may go now.

        Args:
            request: Celery's.
            resource: What it locked.
            now: Seconds.
            sure: Its lock is free again for certain, if it had it.
            conflict: It did not get it: another has it.
        """
        with self._lock:
            row = self._rows.get(resource)
            if row is None or row.flying.pop(id(request), None) is None:
                return []
            if conflict:
                row.hot = self._heated = now + HOT
            if row.flying:
                return []
            going: list[Parked] = []
            if row.parked and row.turn:
                if now >= row.tenure:
                    row.turn, row.stand_back = False, True
                elif sure and not conflict:
                    going = self._go(row, now)
            attend = (row.parked or row.turn) and not going
            self._tidy(resource, row, now)
        if attend:
            self._attend(resource)
        return going

    def take_turn(self, resource: str, now: float) -> None:
        """This worker has the turn."""
        with self._row(resource) as row:
            row.turn, row.tenure, row.stand_back = True, now + TENURE, False

    def lose_turn(self, resource: str, now: float) -> None:
        """This worker has no turn, or no longer."""
        with self._row(resource) as row:
            row.turn = row.stand_back = False
            self._tidy(resource, row, now)

    def free(
        self, resource: str, now: float, ghosts: Collection[int] = frozenset()
    ) -> list[Parked]:
        """The nodes say that it is free. Which may go, if we still have the turn.

        Args:
            resource: What is free.
            now: Seconds.
            ghosts: Deliveries that have been with the pool for long. Those that have begun are
                dead, and the pool is yet to tell.
        """
        with self._row(resource) as row:
            for each, request in row.flying.items():
                if each not in ghosts or getattr(request, "time_start", None) is None:
                    return []
            return self._go(row, now) if row.turn else []

    def flush(self, resource: str) -> list[Parked]:
        """All of a resource go: there is no quorum to tell whose turn it is."""
        with self._row(resource) as row:
            going = [*row.parked]
            for parked in going:
                self._fly(row, parked)
            return going

    def overdue(self, now: float) -> list[Parked]:
        """Those that go whatever the nodes say: the broker does not leave us a message for ever."""
        going = []
        with self._lock:
            for row in self._rows.values():
                for parked in [one for one in row.parked if one.until <= now]:
                    self._fly(row, parked)
                    going.append(parked)
            if self._heated and self._heated <= now:
                self._heated = 0.0
                for resource, row in list(self._rows.items()):
                    self._tidy(resource, row, now)
        return going

    def waiting(self) -> list[Parked]:
        """All that are parked."""
        with self._lock:
            return [parked for row in self._rows.values() for parked in row.parked]

    def flying(self) -> list[tuple[Any, str]]:
        """All that are with the pool, each with its resource."""
        with self._lock:
            rows = self._rows.items()
            return [(request, name) for name, row in rows for request in row.flying.values()]

    def withdraw(self, parked: Parked) -> bool:
        """A parked one is revoked. Whether it was still here."""
        with self._row(parked.resource) as row:
            if parked not in row.parked:
                return False
            row.parked.remove(parked)
            self.parked -= 1
            attend = not row.parked
        if attend:
            self._attend(parked.resource)
        return True

    def clear(self) -> None:
        """The broker takes all back that is parked: the connection is lost."""
        with self._lock:
            resources = [name for name, row in self._rows.items() if row.parked]
            for name in resources:
                self._rows[name].parked.clear()
            self.parked = 0
        for name in resources:
            self._attend(name)

    def view(self, resource: str, now: float) -> View:
        """What is known of a resource."""
        with self._lock:
            row = self._rows.get(resource) or _Row()
            ripe = min((parked.ripe for parked in row.parked), default=now)
            return View(len(row.parked), frozenset(row.flying), ripe, row.stand_back)

    @contextmanager
    def _row(self, resource: str) -> Iterator[_Row]:
        with self._lock:
            yield self._rows.get(resource) or _Row()

    def _go(self, row: _Row, now: float) -> list[Parked]:
        parked = row.ripe(now)
        if parked is None:
            return []
        self._fly(row, parked)
        return [parked]

    def _fly(self, row: _Row, parked: Parked) -> None:
        row.parked.remove(parked)
        row.flying[id(parked.request)] = parked.request
        self.parked -= 1

    def _tidy(self, resource: str, row: _Row, now: float) -> None:
        if not (row.flying or row.parked or row.turn or row.stand_back or row.hot > now):
            self._rows.pop(resource, None)
