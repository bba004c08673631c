"""Find out for a worker's main process which of its awaited resources may be asked for now.

This is one thread, started when the first delivery is parked. All network requests of parking
happen here, so that the main process never waits. For each resource with a parked delivery, the
worker stands in the wait queue on the nodes (`wait_queue.py`), like any other waiter: a release
notifies only the first waiter in the queue. When the worker is notified, the main process lets one
delivery go, and the worker queues again behind the other waiters. A worker without a free pool slot
passes the notification on at once, and stays out of the queue until it has one: it never keeps a
free resource from others.

Notifications get lost, holders die, nodes are away. So the nodes are also asked which of the
resources are free, all in one request, more often than once a second (less often for thousands).

For deliveries that lock several resources the worker stands in the queues of those that were held
at the last look. When it is notified for one of them, it checks if all are free. If not, it passes
the notification on, so that another waiter can take the free one.
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
from itertools import islice

from ...locking.redlock import Redlock
from ...locking.wait_queue import FEW_NOTIFIED_S
from ...protocol import outcome, quorum
from ...protocol.names import Limit, grouped, plain, slots_of, takeable
from ...protocol.round import Verb
from ...protocol.texts import event, printable, shown
from ...protocol.values import SHARED, Query, QueueEntry
from ...runtime.clock import monotonic
from ...runtime.event import SafeEvent
from .admission import AdmissionQueue, Resources
from .watched import Call, Watched, batches, free_in

__all__ = ["ParkingDispatcher"]

logger = logging.getLogger("celery_redlock.parking")
FAILED = event("parking_failed")

LOOK_S = (0.4, 0.8)
"""Seconds, at random, between two looks at a resource without a notification. Below one, so that a
free resource is taken within a second even if its notification got lost."""
LOOKED_AT = 1000
"""Resources for which that holds; of more, each waits longer: these cost a third of a core."""
AFTER_END_S = 0.1
"""Seconds from the end of a body of ours to the next look: its release has notified a waiter."""
SLOT_S = 0.05
"""Seconds between two checks of the pool while a resource is free and no pool slot is."""
QUEUE_UP_S = 1.0
"""Seconds for which a resource is free without a free pool slot, until a delivery goes to the pool
all the same. It takes its turn there among the other tasks; otherwise it might never get one."""
KEEP_NOTIFICATION_S = 0.1
"""Seconds for which we keep a notification because a body of ours is about to free its slot."""
RENEW_S = 20.0
"""Seconds between two requests that keep our place; the nodes drop it after 60."""
SPREAD_S = 0.1
"""Seconds over which workers that wait for the same start spread: only one of them gets it."""
SWEEP_S = 0.25
"""Seconds between two sweeps through the parked deliveries."""
NO_QUORUM_S = 1.0
"""Seconds without a quorum after which deliveries go, one at a time, and follow their
`on_unavailable`."""

JITTER = random.SystemRandom()


class ParkingDispatcher:
    """The waiter on the nodes for all parked deliveries; there is one in each worker.

    Args:
        redlock: The lock whose resources are waited for.
        admission: The parked deliveries.
        slots: Function that returns how many tasks the pool could begin with now.
        proceed: Called with resources that may be asked for; True if the nodes have just answered
            that they are free (False after a notification); and True if the delivery must join
            the pool's own queue although no pool slot is free.
        sweep: Called every `SWEEP_S` while any delivery is parked.

    Attributes:
        watched: The state of each of the resources that it watches.
    """

    def __init__(
        self,
        redlock: Redlock,
        admission: AdmissionQueue,
        slots: Callable[[], int],
        proceed: Callable[[Resources, bool, bool], None],
        sweep: Callable[[], None],
    ) -> None:
        self._redlock = redlock
        self._admission = admission
        self._slots = slots
        self._proceed = proceed
        self._sweep = sweep
        self._bell = SafeEvent()
        self.watched: dict[Resources, Watched] = {}
        self._slotless: dict[Resources, None] = {}  # seen free, in this order, when no slot was
        self._asked: deque[tuple[Resources, Callable[[Watched, float], object]]] = deque()
        self._thread: threading.Thread | None = None
        self._swept = 0.0
        self._closing = False

    def watch(self, resources: Resources) -> None:
        """Watch some resources from now on. Does not wait."""
        self._ask(resources, lambda *_: None)

    def ended(self, resources: Resources) -> None:
        """Look again soon: a body of ours has ended, and others are parked."""
        self._ask(resources, self._look_soon)

    def found_no_slot(self, resources: Resources) -> None:
        """Let a delivery for them go as soon as a pool slot is free: it might have gone now."""
        self._ask(resources, lambda *_: self._slotless.setdefault(resources))

    def slot_freed(self) -> None:
        """Let the next delivery go that has found no slot: a body of ours has ended."""
        if self._slotless:
            self._bell.set()

    def gone(self, resources: Resources) -> None:
        """Queue again, for the next delivery: one was given to the pool."""
        self._ask(resources, self._queue_for_next)

    def queued(self) -> list[str]:
        """Return the resources in whose queues on the nodes this worker stands."""
        queued = [one.entry for one in list(self.watched.values()) if one.queued is not None]
        return [plain(name) for entry in queued for name in entry.resources]

    def close(self) -> None:
        """Leave all queues soon: this worker stops asking for locks."""
        self._closing = True
        self._bell.set()

    def _ask(self, resources: Resources, what: Callable[[Watched, float], object]) -> None:
        self._asked.append((resources, what))
        if self._thread is None and not self._closing:
            self._bell = self._redlock.client.wakeup.event()  # its thread reads the nodes' calls
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
                logger.exception("the parking dispatcher failed; it goes on in 1 s", extra=FAILED)
                self._bell.wait(1.0)
        for watched in list(self.watched.values()):
            self._unwatch(watched)

    def _work(self) -> float:
        """Do what is due; return the seconds until something is."""
        now = monotonic()
        while self._asked:
            resources, what = self._asked.popleft()
            watched = self.watched.get(resources)
            if self._admission.counts(resources)[0]:
                what(watched or self._begin(resources, now), now)
            elif watched is not None:
                self._unwatch(watched)
        if now - self._swept >= SWEEP_S:
            self._swept = now
            self._sweep()
        looks: list[Watched] = []
        waits = not any(watched.due <= now for watched in self.watched.values())
        horizon = now if waits else now + LOOK_S[0]
        self._offer_slots(now)
        for watched in list(self.watched.values()):
            if watched.due > horizon and not watched.place.notifications:
                continue
            try:
                if self._attend(watched, now, horizon):
                    looks.append(watched)
            except Exception:  # the other resources must go on
                name = printable(shown(watched.resources))
                logger.exception("parking failed for %s; it goes on in 1 s", name, extra=FAILED)
                watched.due = now + 1.0
        for batch in batches(looks, self._admission):
            self._look(batch)
        if not self.watched:
            return 3600.0
        due = min(watched.due for watched in self.watched.values())
        if self._slotless:
            due = min(due, now + SLOT_S)  # the ends of other tasks are not reported here
        return max(0.0, min(due, self._swept + SWEEP_S) - monotonic())

    def _offer_slots(self, now: float) -> None:
        """Let as many deliveries go as slots are free, of those that have found none before."""
        for resources in list(islice(self._slotless, max(0, self._slots()))):
            del self._slotless[resources]
            if (watched := self.watched.get(resources)) is None:
                continue
            if watched.notified and watched.is_one:
                self._proceed(resources, False, False)
            else:
                watched.due = now

    # -- Our place in the queues -----------------------------------------------------------------

    def _begin(self, resources: Resources, now: float) -> Watched:
        exits = ExitStack()
        place = exits.enter_context(self._redlock.client.wakeup.waiter())
        place.news = Call(self._bell)
        entry = QueueEntry(resources, len(self._redlock.nodes), place.member, place.since)
        watched = self.watched[resources] = Watched(resources, place, entry, exits)
        self._queue(watched, now)
        watched.due = now
        return watched

    def _look_soon(self, watched: Watched, now: float) -> None:
        watched.due = min(watched.due, now + AFTER_END_S)

    def _queue(self, watched: Watched, now: float) -> None:
        """Join the queue, behind the others that wait already."""
        since = time.time_ns() // 1000
        watched.entry = replace(watched.entry, resources=watched.resources, since=since)
        watched.notified = False
        watched.no_slot = None
        watched.due = now + self._pause()
        self._stand(watched, now)

    def _queue_for_next(self, watched: Watched, now: float) -> None:
        self._queue(watched, now)
        if self._admission.limit(watched.resources) != 1:
            self._look_soon(watched, now)  # one notification may be for two freed places

    def _pause(self) -> float:
        """Return the seconds until the next look at a resource without a notification."""
        return JITTER.uniform(*LOOK_S) * max(1.0, len(self.watched) / LOOKED_AT)

    def _stand(self, watched: Watched, now: float) -> None:
        """Join the queue, or keep our place in it."""
        member = self._member(watched)
        if member != watched.entry.token:
            if watched.queued is not None:
                self._request_queue(watched, Verb.DEQUEUE)
            watched.entry = replace(watched.entry, token=member)
        watched.place.forget()
        watched.queued = now
        self._request_queue(watched, Verb.ENQUEUE)

    def _member(self, watched: Watched) -> str:
        """Return our name in the queue: another one if the delivery that goes next is a reader."""
        is_shared = self._admission.is_shared(watched.resources)
        return watched.place.member + (SHARED if is_shared else "")

    def _request_queue(self, watched: Watched, verb: Verb, names: Resources | None = None) -> None:
        entry = replace(watched.entry, resources=names or watched.entry.resources)
        self._redlock.client.driver.run(lambda now: quorum.queue(entry, now, verb))

    def _unwatch(self, watched: Watched) -> None:
        self.watched.pop(watched.resources, None)
        self._slotless.pop(watched.resources, None)
        watched.exits.close()
        if watched.queued is not None:
            self._request_queue(watched, Verb.HAND_ON)

    # -- What may go -----------------------------------------------------------------------------

    def _attend(self, watched: Watched, now: float, horizon: float) -> bool:
        """Do what is due for some resources; return True if the nodes must be asked about them.

        Args:
            watched: The resources.
            now: Seconds.
            horizon: Looks that are due until then may be made together with those due now; seconds.
        """
        parked, running = self._admission.counts(watched.resources)
        if not parked:
            self._unwatch(watched)
            return False
        calls = watched.place.notifications if watched.queued is not None else 0
        if calls and self._answer(watched, calls, now, running > 0):
            return False
        if watched.due > (now if watched.notified or watched.no_slot is not None else horizon):
            return False
        has_slot = self._slots() > 0
        if watched.notified and (watched.is_one or not has_slot):
            # We cannot use the notification: another worker may have a free pool slot.
            self._admission.notified(watched.resources, False)
            self._pass_on(watched)
        if not has_slot:
            self._slotless.setdefault(watched.resources)
            watched.no_slot = since = now if watched.no_slot is None else watched.no_slot
            watched.due = max(since + QUEUE_UP_S, now + SLOT_S)
            return now >= since + QUEUE_UP_S
        if watched.queued is None and not watched.notified:
            self._queue(watched, now)
        elif watched.queued is not None and (
            now - watched.queued >= RENEW_S or watched.entry.token != self._member(watched)
        ):
            self._stand(watched, now)
        return True

    def _answer(self, watched: Watched, calls: int, now: float, is_running: bool) -> bool:
        """Let a delivery go if the nodes have notified us; return True if nothing more is due now.

        Args:
            watched: The resources.
            calls: How many nodes have notified us.
            now: Seconds.
            is_running: True if a body of ours has them: it may be about to free its pool slot.
        """
        place = watched.place
        if calls < place.quorum and watched.due > now:  # more notifications may be on their way
            watched.due = min(watched.due, now + JITTER.uniform(*FEW_NOTIFIED_S))
            return True
        if watched.is_one and not (calls >= place.quorum and place.sure):
            self._stand(watched, now)  # the notification is not certain: ask the nodes
            watched.due = now
            return False
        place.forget()
        watched.queued = None  # a node removes a notified waiter from the queue
        watched.notified = True
        goes = watched.is_one and (is_running or self._slots() > 0)
        watched.due = now + KEEP_NOTIFICATION_S if goes else now
        if goes:
            self._admission.notified(watched.resources)
            self._proceed(watched.resources, False, False)
        return goes

    def _pass_on(self, watched: Watched) -> None:
        """Make the nodes notify the next waiter in our place."""
        watched.notified = False
        self._request_queue(watched, Verb.HAND_ON)

    def _look(self, looks: Sequence[tuple[Watched, Limit]]) -> None:
        """Ask the nodes for the holders, and let those deliveries go whose resources are free."""
        redlock = self._redlock
        every = [slots_of(watched.resources, limit) for watched, limit in looks]
        readers = [self._admission.is_shared(watched.resources) for watched, _limit in looks]
        asked = [
            Query((slot,), len(redlock.nodes), shared=shared)
            for each, shared in zip(every, readers, strict=True)
            for slots in each
            for slot in slots
        ]
        patience = redlock.node_timeout
        ballot = redlock.client.driver.run(lambda now: quorum.peek(asked, now, patience))
        now = monotonic()
        at = 0
        for (watched, limit), each in zip(looks, every, strict=True):
            watched.due = now + self._pause()
            count = sum(map(len, each))
            left = [] if ballot.yes < ballot.quorum else free_in(ballot, at, count)
            if watched.is_start and left and min(left) > 0:
                watched.next_at = now + min(left)
                if outcome.settled(ballot, range(at, at + count)):
                    # A start is never released, so nothing changes until then.
                    soon = watched.next_at + JITTER.uniform(0.002, SPREAD_S)
                    watched.due = min(soon, now + RENEW_S)
            watched.note_holders(ballot, range(at, at + count), now)
            at += count
            for _ in range(self._may_go(watched, limit, left, now)):
                queue_up = watched.no_slot is not None and now - watched.no_slot >= QUEUE_UP_S
                self._proceed(watched.resources, True, queue_up)
                watched.no_slot = None

    def _may_go(self, watched: Watched, limit: Limit, left: Sequence[float], now: float) -> int:
        """Return how many deliveries may go; if none, queue for those resources that are full.

        Args:
            watched: The resources.
            limit: How many holders each of them may have.
            left: Seconds for which each slot is still held; empty if no quorum has answered.
            now: Seconds.
        """
        if not left:
            watched.no_quorum = now if watched.no_quorum is None else watched.no_quorum
            return int(now - watched.no_quorum >= NO_QUORUM_S)
        watched.no_quorum = None
        names = watched.resources
        free = takeable(names, limit, [seconds <= 0 for seconds in left])
        if count := min(map(len, free)):
            return count
        if not watched.is_start:  # its holder may have died without a release
            seconds = max(map(min, grouped(left, slots_of(names, limit))))
            watched.due = min(watched.due, now + seconds + 0.002)
        full = tuple(name for name, slots in zip(names, free, strict=True) if not slots)
        if not watched.is_one and (watched.notified or full != watched.entry.resources):
            room = tuple(name for name in watched.entry.resources if name not in full)
            # HAND_ON checks one slot alone, but notifies in any case if we stand in no queue.
            if room and limit != 1:
                self._request_queue(watched, Verb.DEQUEUE, room)
            self._pass_on(watched)
            watched.entry = replace(watched.entry, resources=full)
            self._stand(watched, now)
        return 0
