"""Park deliveries of locked tasks in a worker's main process, until they may ask for their lock.

A bootstep of the worker's consumer. It stands between the consumer and the pool, asks the
`AdmissionQueue` about every delivery of a locked task, and tells it what becomes of those that
went. A parked delivery stays unacknowledged, like one with an ETA: the broker has it if this worker
dies.

1. While a pool slot is free, the prefetch window is wider by the number of those parked, so that
   tasks of other keys pass by (`prefetch.py`).
2. While none is, nothing could pass by, and others may have slots: the window is the ordinary one,
   and what is parked beyond it goes back to the broker.
3. When the worker stops, all of it goes back at once; the bodies that still run are not waited for.

No error in here stops a delivery: it goes to the pool, as it would without us.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from celery import bootsteps, signals
from celery.bootsteps import RUN  # type: ignore[attr-defined]
from celery.worker import state

from ...config.options import TaskOptions
from ...config.settings import enabled, read_settings
from ...config.task_lock import lock_of, resources_of
from ...locking.redlock import Redlock
from ...locking.wait_queue import JITTER
from ...messages.broker import has_way_back, on_last_delivery, unacknowledged_for
from ...messages.headers import ATTEMPTS, MANY, attempts_of, said
from ...messages.parkable import parkable, set_at_work
from ...messages.reservation import HEADER, Reservation
from ...protocol.values import Owner, printable
from ...runtime.clock import monotonic
from ..task_events import WAITING, told
from .admission import AdmissionQueue, Parked
from .dispatcher import ParkingDispatcher
from .prefetch import MAX_PARKED, Prefetch

__all__ = ["Parking", "begin"]

logger = logging.getLogger("celery_redlock.parking")

MAX_PARKED_S = 600.0
"""Seconds that a delivery is parked at most, and a quarter of what the broker allows: then it goes,
meets the lock and is sent again, or the broker would give it to another worker."""
MIN_PARKED_S = 0.1
"""Seconds that a delivery is parked at least before it goes to be refused."""
FULL_S = 0.5
"""Seconds without a free slot after which others get what this worker holds back."""


def begin(app: Any) -> None:
    """Have the workers of `app` park deliveries. For the main process, before it forks its pool."""
    conf = app.conf
    parking = (
        conf.get("redlock_parking", True)
        and enabled(conf)
        # Without prefetching, what is parked would count as what is at work.
        and not conf.get("worker_disable_prefetch", False)
        and any(map(_parks, app.tasks.values()))
    )
    set_at_work(bool(parking))
    if parking:
        app.steps["consumer"].add(Parking)
    else:
        app.steps["consumer"].discard(Parking)


def _parks(task: Any) -> bool:
    lock = lock_of(task)
    return lock is not None and parkable(lock.options(task.app))


class Parking(bootsteps.StartStopStep):
    """Stands where the consumer gives requests to the pool: `consumer.on_task_request`.

    Attributes:
        admission: Knows who is parked.
        dispatcher: Learns from the nodes who may go.
    """

    requires = ("celery.worker.consumer.tasks:Tasks",)

    def __init__(self, consumer: Any, **options: Any) -> None:
        super().__init__(consumer, **options)
        self._consumer = consumer
        self._app = app = consumer.app
        self._to_pool: Callable[[Any], Any] = consumer.on_task_request
        consumer.on_task_request = self
        self._sends_events = read_settings(app).events
        self._longest = min(MAX_PARKED_S, unacknowledged_for(app) / 4)
        self._full_since: float | None = None
        self._some_are_new = False
        self._prefetch = Prefetch(consumer)
        self._wire: tuple[int, int] | None = None
        self._posted: deque[Callable[[], None]] = deque()
        self.admission = AdmissionQueue(MAX_PARKED)
        self.dispatcher = ParkingDispatcher(
            Redlock.from_app(app),
            self.admission,
            self._free_slots,
            lambda parked: self._post(partial(self._go, parked)),
            lambda: self._post(self._sweep),
        )
        signals.task_revoked.connect(lambda **_: self._post(self._sweep), weak=False)

    # -- Celery's main thread: connecting and stopping -------------------------------------------

    def start(self, consumer: Any) -> None:
        """The consumer has connected to its broker, and has yet to ask for messages."""
        self.admission.take_back(0)  # of another connection: the broker delivers them again
        self._prefetch.connected()
        if consumer.hub is not None:
            if self._wire is None:
                self._wire = os.pipe()
                for end in self._wire:
                    os.set_blocking(end, False)
            consumer.hub.add_reader(self._wire[0], self._read)

    def stop(self, consumer: Any) -> None:
        """The consumer stops, or has lost its connection."""
        if consumer.blueprint.state != RUN:
            self.dispatcher.close()
        self._prefetch.stop([parked.request for parked in self.admission.take_back(0)])

    # -- Deliveries ------------------------------------------------------------------------------

    def _free_slots(self) -> int:
        """Return how many more tasks the pool could begin with now."""
        given = len(state.reserved_requests) - len(self.admission)
        return int(self._consumer.pool.num_processes - given)

    def __call__(self, request: Any) -> Any:
        """A request is to go to the pool."""
        try:
            if self._is_parked(request):
                return None
        except Exception:
            logger.exception("%s[%s] is not parked", request.name, request.id)
        return self._to_pool(request)

    def _is_parked(self, request: Any) -> bool:
        lock = lock_of(request.task)
        if lock is None or not parkable(options := lock.options(self._app)):
            return False
        try:
            keys = resources_of(request.task, request.args, request.kwargs)
        except Exception:
            return False  # the body's process says what is wrong
        attempts = attempts_of(request.request_dict)
        refused = attempts["held"] > 0
        if len(keys) != 1 or (not refused and _may_be_a_duplicate(request, options)):
            return False
        if on_last_delivery(self._app, request.request_dict):
            return False  # given back once more it would be dropped: it goes, and is sent anew
        if not has_way_back(request.request_dict):
            return False
        key, now, longest = keys[0], monotonic(), self._longest * JITTER.uniform(0.75, 1.0)
        if options.retry_deadline is not None:
            # In time to be refused once more; and once before, to learn who is in its way.
            left = options.retry_deadline
            left = left - attempts["stuck"] if refused else left / 4
            longest = min(longest, max(left, MIN_PARKED_S))
        self.admission.most = self._prefetch.most
        for ending in ("on_success", "on_failure", "on_timeout"):
            # Of this instance: its class has its own.
            setattr(request, ending, self._notes_end(request, key, getattr(request, ending)))
        if self.admission.arrive(
            *(request, key, now),
            since=attempts["since"],
            until=now + longest,
            urgency=self._urgency(request),
            refused=refused,
        ):
            return False
        # Its time has begun, though it may have met no lock yet.
        request.request_dict[ATTEMPTS] = {**attempts, "parked": True}
        self._some_are_new = True
        try:
            self._widen()
            self.dispatcher.wake()
            self._say_parked(request, key, attempts["since"])
        except Exception:  # it is parked all the same, and must not go to the pool twice
            logger.exception("%s[%s] is parked", request.name, request.id)
        return True

    def _urgency(self, request: Any) -> float:
        """The message's priority: AMQP's larger ones go first, other transports' smaller ones."""
        priority = (request.delivery_info or {}).get("priority")
        if not isinstance(priority, int) or abs(priority) > MANY:
            return 0.0
        amqp = self._consumer.connection.transport.driver_type == "amqp"
        return float(-priority if amqp else priority)

    def _say_parked(self, request: Any, key: str, since: float) -> None:
        """Tell people, and monitors; and who holds the key, if its body is at work here."""
        here = next((one for one, name in self.admission.running() if name == key), None)
        if self._sends_events:
            holder = None
            if here is not None:
                pid = here.worker_pid or 0
                holder = told(Owner(socket.gethostname(), pid, here.id, task=here.name))
            waited = max(0.0, time.time() - since)
            request.send_event(WAITING, resource=printable(key), holder=holder, waited=waited)
        logger.info(
            "%s waits (parked) for %s%s",
            printable(f"{request.name}[{request.id}]"),
            printable(key),
            "" if here is None else f", which {printable(here.id)} has or asks for here",
        )

    def _notes_end(self, request: Any, key: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def told(*args: Any, **kwargs: Any) -> Any:
            try:
                return method(*args, **kwargs)
            finally:
                self._note_end(request, key)

        return told

    # -- In whichever thread Celery tells of it --------------------------------------------------

    def _note_end(self, request: Any, key: str) -> None:
        # At a soft limit it is not over, nor at the hard one before its process was killed.
        over = request not in state.reserved_requests
        if over and self.admission.ended(request, key, monotonic()):
            self.dispatcher.wake()

    def _post(self, function: Callable[[], None]) -> None:
        """Have it called in the main thread, soon."""
        self._posted.append(function)
        if self._wire is not None:
            with contextlib.suppress(OSError):  # it is full: it will be read
                os.write(self._wire[1], b"\0")
        elif getattr(self._consumer.pool, "is_green", False):
            # Whoever gives a full pool a task waits for a slot: no greenlet of the pool may.
            self._consumer.timer.call_after(0.0, self._do_posted)
        else:
            self._consumer.call_soon(self._do_posted)

    def _read(self) -> None:
        assert self._wire is not None
        with contextlib.suppress(OSError):
            os.read(self._wire[0], 4096)
        self._do_posted()

    def _do_posted(self) -> None:
        with contextlib.suppress(IndexError):  # none is left; others may take them as well
            while True:
                function = self._posted.popleft()
                try:
                    function()
                except Exception:
                    logger.exception("parking failed; retrying within 1 s")

    # -- The main thread again -------------------------------------------------------------------

    def _go(self, parked: Parked) -> None:
        request = parked.request
        self._widen()
        if request in state.reserved_requests:
            if self._prefetch.keep(request):
                self._to_pool(request)
                return
            logger.info("%s was given to another worker: it is left to it", request.id)
            state.task_ready(request)
        self._note_end(request, parked.key)

    def _widen(self) -> None:
        """Let others pass by; nothing passes by while the pool is full."""
        self._prefetch.widen(0 if self._is_full else len(self.admission))

    @property
    def _is_full(self) -> bool:
        return self._full_since is not None and monotonic() - self._full_since >= FULL_S

    def _sweep(self) -> None:
        """Look after the revoked and the expired, and how full the pool is."""
        now = monotonic()
        if self._free_slots() > 0:
            self._full_since = None
        elif self._full_since is None:
            self._full_since = now
        for parked in self.admission.parked():
            request = parked.request
            if (request.expires or request.id in state.revoked) and request.revoked():
                self.admission.withdraw(parked)
        for request, key in self.admission.running():
            self._note_end(request, key)
        self._widen()
        if self._is_full and self._prefetch.widens:
            # What is with the pool and not acknowledged is in the window as well.
            held = [not request.acknowledged for request in tuple(state.reserved_requests)]
            beyond = sum(held) - self._consumer.qos.value
            surplus = self.admission.take_back(max(0, len(self.admission) - beyond))
            self._prefetch.give_back([parked.request for parked in surplus])
        some_are_new, self._some_are_new = self._some_are_new, False
        requests = [parked.request for parked in self.admission.parked()]
        self._prefetch.renew(requests, now, some_are_new=some_are_new)


def _may_be_a_duplicate(request: Any, options: TaskOptions) -> bool:
    """Whether its task is reserved, and it is not known to have the reservation.

    Then it does not wait its turn: the body's process finds out, and skips it.
    """
    note = Reservation.of(said(request.request_dict, HEADER), request.id, options)
    if note is not None:
        return note.scope != "while_executing" and not (note.token or note.begun)
    return options.scope != "while_executing"
