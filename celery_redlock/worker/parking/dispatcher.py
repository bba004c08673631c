"""Tells a worker's main process which of the resources it waits for may be asked for now.

One thread, started by the first parking; all that parking needs from the network happens here, so
that the main process never waits. For each resource that somebody is parked for, the worker stands
in the wait queue on the nodes (`wait_queue.py`), like any other waiter: a release calls the first
of the queue only. When it is called, the main process lets one delivery go, and the worker queues
again behind the other waiters. A worker without a free pool slot hands the call on at once, and
does not stand in the queue until it has one: it never keeps a free resource from others.

Calls get lost, holders die, nodes are away: so the nodes are also asked which of the resources are
free, all of them in one request, more often than once a second.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace

from ...locking.redlock import Redlock
from ...locking.wait_queue import FEW_CALLED_S, Waiter
from ...protocol import outcome, quorum
from ...protocol.round import Verb
from ...protocol.values import Query, QueueEntry, printable
from ...runtime.clock import monotonic
from ...runtime.event import SafeEvent
from ...stores.redis.driver import BATCH
from .admission import AdmissionQueue

__all__ = ["ParkingDispatcher"]

logger = logging.getLogger("celery_redlock.parking")

LOOK_S = (0.4, 0.8)
"""Seconds, at random, between two looks at a resource that nobody has called us for. Below one: a
free resource that is waited for is taken within a second, whatever became of its call."""
AFTER_END_S = 0.1
"""Seconds after the end of a body of ours until we look: its release has called someone."""
SLOT_S = 0.05
"""Seconds between two looks at the pool, where a resource is free and no slot is."""
QUEUE_UP_S = 1.0
"""Seconds for which a resource is free and no slot is, until a delivery is given to the pool all
the same: it takes its turn there among the other tasks, or it would never have one."""
CALLED_S = 0.1
"""Seconds for which we keep a call for a body of ours that has just released its slot."""
RENEW_S = 20.0
"""Seconds between two requests that keep our place; the nodes forget it after 60."""
SWEEP_S = 0.25
"""Seconds between two sweeps through what is parked."""
NO_QUORUM_S = 1.0
"""Seconds without a quorum after which deliveries go, one at a time, to do as they are told."""

JITTER = random.SystemRandom()


class _Call(SafeEvent):
    """Rings the dispatcher's bell as well."""

    def __init__(self, bell: SafeEvent) -> None:
        super().__init__()
        self._bell = bell

    def set(self) -> None:
        super().set()
        self._bell.set()


class _WatchedKey:
    """One resource that somebody here is parked for."""

    def __init__(self, resource: str, place: Waiter, entry: QueueEntry, exits: ExitStack) -> None:
        self.resource = resource
        self.place = place
        self.entry = entry
        self.exits = exits
        self.queued: float | None = None
        """Since when we stand in its queue; None if we do not."""
        self.due = 0.0
        self.called = False
        """Whether we were called, and nothing has come of it yet."""
        self.no_slot: float | None = None
        """Since when no slot has been seen for it."""
        self.no_quorum: float | None = None


class ParkingDispatcher:
    """One per worker.

    Args:
        redlock: The locks that are waited for.
        admission: Knows who is parked.
        has_slot: Tells whether the pool could begin with another task now.
        proceed: Called with a resource that may be asked for; whether the nodes have just said that
            it is free (else they have called us); and whether its delivery is to join the pool's
            own queue, though no slot is free.
        sweep: Called every `SWEEP_S` while anybody is parked.
    """

    def __init__(
        self,
        redlock: Redlock,
        admission: AdmissionQueue,
        has_slot: Callable[[], bool],
        proceed: Callable[[str, bool, bool], None],
        sweep: Callable[[], None],
    ) -> None:
        self._redlock = redlock
        self._admission = admission
        self._has_slot = has_slot
        self._proceed = proceed
        self._sweep = sweep
        self._bell = SafeEvent()
        self._watched: dict[str, _WatchedKey] = {}
        self._asked: deque[tuple[str, Callable[[_WatchedKey, float], None]]] = deque()
        self._thread: threading.Thread | None = None
        self._swept = 0.0
        self._closing = False

    def watch(self, resource: str) -> None:
        """Look after a resource, from now on. Does not wait."""
        self._ask(resource, self._look_now)

    def ended(self, resource: str) -> None:
        """A body of ours has ended, and others are parked."""
        self._ask(resource, self._look_soon)

    def gone(self, resource: str) -> None:
        """A delivery was given to the pool: stand in the queue again, for the next one."""
        self._ask(resource, self._queue)

    def queued(self) -> list[str]:
        """Return the resources in whose queues on the nodes this worker stands."""
        return [one.resource for one in list(self._watched.values()) if one.queued is not None]

    def close(self) -> None:
        """Leave all queues, soon: this worker asks for nothing any more."""
        self._closing = True
        self._bell.set()

    def _ask(self, resource: str, what: Callable[[_WatchedKey, float], None]) -> None:
        self._asked.append((resource, what))
        if self._thread is None and not self._closing:
            self._thread = threading.Thread(
                target=self._run, name="celery_redlock parking", daemon=True
            )
            self._thread.start()
        self._bell.set()

    def _run(self) -> None:
        while not self._closing:
            try:
                self._bell.wait(self._work())
            except Exception:
                logger.exception("parking dispatcher failed; retrying in 1 s")
                self._bell.wait(1.0)
        for watched in list(self._watched.values()):
            self._unwatch(watched)

    def _work(self) -> float:
        """Do what is due; return the seconds until something is."""
        now = monotonic()
        while self._asked:
            resource, what = self._asked.popleft()
            watched = self._watched.get(resource)
            if watched is None and self._admission.counts(resource)[0]:
                watched = self._begin(resource, now)
            if watched is not None:
                what(watched, now)
        if now - self._swept >= SWEEP_S:
            self._swept = now
            self._sweep()
        looks: list[_WatchedKey] = []
        waits = not any(watched.due <= now for watched in self._watched.values())
        horizon = now if waits else now + LOOK_S[0]
        for watched in list(self._watched.values()):
            try:
                if self._attend(watched, now, horizon):
                    looks.append(watched)
            except Exception:  # of one, and it holds up no other
                logger.exception("%s is looked after again in 1 s", printable(watched.resource))
                watched.due = now + 1.0
        for at in range(0, len(looks), BATCH):
            self._look(looks[at : at + BATCH])
        if not self._watched:
            return 3600.0
        due = min(watched.due for watched in self._watched.values())
        return max(0.0, min(due, self._swept + SWEEP_S) - monotonic())

    # -- What is asked of it ---------------------------------------------------------------------

    def _begin(self, resource: str, now: float) -> _WatchedKey:
        exits = ExitStack()
        place = exits.enter_context(self._redlock.client.wakeup.waiter())
        place.news = _Call(self._bell)
        entry = QueueEntry((resource,), len(self._redlock.nodes), place.member, place.since)
        watched = self._watched[resource] = _WatchedKey(resource, place, entry, exits)
        self._queue(watched, now)
        return watched

    def _look_now(self, watched: _WatchedKey, now: float) -> None:
        watched.due = now

    def _look_soon(self, watched: _WatchedKey, now: float) -> None:
        watched.due = min(watched.due, now + AFTER_END_S)

    def _queue(self, watched: _WatchedKey, now: float) -> None:
        """Stand in the queue, behind those who wait already."""
        watched.entry = replace(watched.entry, since=time.time_ns() // 1000)
        watched.called = False
        watched.no_slot = None
        watched.due = now + JITTER.uniform(*LOOK_S)
        self._stand(watched, now)

    def _stand(self, watched: _WatchedKey, now: float) -> None:
        watched.place.forget()
        watched.queued = now
        self._leave(watched, Verb.ENQUEUE)

    def _leave(self, watched: _WatchedKey, verb: Verb) -> None:
        self._redlock.client.driver.run(lambda now: quorum.leave(watched.entry, now, verb))

    def _unwatch(self, watched: _WatchedKey) -> None:
        self._watched.pop(watched.resource, None)
        watched.exits.close()
        if watched.queued is not None:
            self._leave(watched, Verb.HAND_ON)

    # -- What may go -----------------------------------------------------------------------------

    def _attend(self, watched: _WatchedKey, now: float, horizon: float) -> bool:
        """Do what is due for one resource; return whether the nodes are to be asked about it.

        Args:
            watched: The resource.
            now: Seconds.
            horizon: Until when what is due may be asked along with what is due now.
        """
        parked, running = self._admission.counts(watched.resource)
        if not parked:
            self._unwatch(watched)
            return False
        calls = watched.place.calls if watched.queued is not None else 0
        if 0 < calls < watched.place.quorum and watched.due > now:
            # The nodes do not agree; most likely the others' calls are on their way.
            watched.due = min(watched.due, now + JITTER.uniform(*FEW_CALLED_S))
            return False
        if calls and (calls < watched.place.quorum or not watched.place.sure):
            self._stand(watched, now)  # another was called, or nobody: the nodes are asked
            watched.due = now
        elif calls:
            watched.place.forget()
            watched.queued = None  # whoever is called stands in the queue no more
            watched.called = True
            watched.due = now
            if self._has_slot() or running:  # the slot of a body that has just released
                watched.due = now + CALLED_S
                self._admission.called(watched.resource)
                self._proceed(watched.resource, False, False)
                return False
        if watched.due > (now if watched.called or watched.no_slot is not None else horizon):
            return False
        if watched.called:  # and nothing has come of it: another may have a slot for it
            watched.called = False
            self._admission.called(watched.resource, False)
            self._leave(watched, Verb.HAND_ON)
        if not self._has_slot():
            watched.no_slot = now if watched.no_slot is None else watched.no_slot
            watched.due = now + SLOT_S
            return now - watched.no_slot >= QUEUE_UP_S
        if watched.queued is None:
            self._queue(watched, now)
        elif now - watched.queued >= RENEW_S:
            self._stand(watched, now)
        return True

    def _look(self, looks: Sequence[_WatchedKey]) -> None:
        """Ask which of some resources are free, and let those go."""
        redlock = self._redlock
        asked = [Query(watched.entry.resources, len(redlock.nodes)) for watched in looks]
        patience = redlock.node_timeout
        ballot = redlock.client.driver.run(lambda now: quorum.peek(asked, now, patience))
        now = monotonic()
        for number, watched in enumerate(looks):
            watched.due = now + JITTER.uniform(*LOOK_S)
            if ballot.yes < ballot.quorum:
                watched.no_quorum = now if watched.no_quorum is None else watched.no_quorum
                free = now - watched.no_quorum >= NO_QUORUM_S
            else:
                watched.no_quorum = None
                free_in = outcome.free_in(ballot, number)
                free = free_in <= 0
                if not free:  # its holder may have died without a word
                    watched.due = min(watched.due, now + free_in + 0.002)
            if free:
                queue_up = watched.no_slot is not None and now - watched.no_slot >= QUEUE_UP_S
                watched.no_slot = None
                self._proceed(watched.resource, True, queue_up)
