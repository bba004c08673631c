"""Park deliveries of locked tasks in a worker's main process, until they may ask for their lock.

This is a bootstep of the worker's consumer. It stands between the consumer and the pool, passes
each delivery of a locked task to the `AdmissionQueue`, and reports the ends of those that went. A
parked delivery stays unacknowledged, like one with an ETA: if we die, the broker still has it.

1. While a pool slot is free, the prefetch window is widened by the number of parked deliveries, so
   that tasks of other keys pass by (`prefetch.py`).
2. While no slot is free, nothing could pass by, and other workers may have a free slot: the window
   is the ordinary one, and parked deliveries beyond it go back to the broker.
3. If the window cannot be widened, and is full while a slot is free, the last delivery is sent
   again. So are a few each second if the parked deliveries take more memory than they may.
4. When the worker stops, all of them go back at once, without waiting for running bodies.

No error here stops a delivery: it goes to the pool, as it would without parking.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import Any

from celery import bootsteps, signals
from celery.bootsteps import RUN  # type: ignore[attr-defined]
from celery.worker import state

from ...config.settings import enabled, read_settings
from ...config.task_lock import lock_of, resources_of
from ...locking.pauses import Pause, covering, limited
from ...locking.redlock import Redlock
from ...messages.broker import can_be_returned, max_unacknowledged_s, may_be_dropped, priority_order
from ...messages.headers import ATTEMPTS, attempts_of, header_of, receive
from ...messages.policy import parkable, set_parking
from ...messages.received import is_discarded, may_be_a_duplicate
from ...protocol.names import START_SUFFIX
from ...protocol.texts import event
from ...runtime.clock import monotonic
from .admission import AdmissionQueue, Parked, Resources
from .deadlines import goes_now
from .dispatcher import ParkingDispatcher
from .memory import ParkingMemory, size_of
from .notices import WaitReports, discard_revoked, on_end
from .prefetch import Prefetch, size_of_pool

__all__ = ["Parking", "begin"]

logger = logging.getLogger("celery_redlock.parking")
FAILED = event("parking_failed")

MAX_PARKED_S = 600.0
"""Maximum seconds for which a delivery is parked; and at most a quarter of what the broker allows.
Then it goes, meets the lock and is sent again, or the broker would give it to another worker."""
MIN_PARKED_S = 0.1
"""Minimum seconds for which a delivery is parked before it goes to be refused."""
FULL_S = 0.5
"""Seconds without a free slot after which other workers get the parked deliveries."""
OVERDUE_PER_SLOT = 4
"""Overdue deliveries that go in a sweep for each free slot: each is refused in a few milliseconds,
and keeps other tasks waiting for that long."""
JITTER = random.SystemRandom()


def begin(app: Any) -> None:
    """Make the workers of `app` park deliveries. For the main process, before it forks its pool."""
    conf = app.conf
    parking = conf.get("redlock_parking", True) and enabled(conf)
    if conf.get("worker_disable_prefetch", False):
        parking = False  # parked deliveries would count as running ones
    # Tasks that never wait for a lock count as well, because their keys can be paused.
    parking = bool(parking) and any(lock_of(task) is not None for task in app.tasks.values())
    set_parking(parking)
    if parking:
        app.steps["consumer"].add(Parking)
    else:
        app.steps["consumer"].discard(Parking)


class Parking(bootsteps.StartStopStep):
    """The step in place of `consumer.on_task_request`, which gives requests to the pool.

    Attributes:
        admission: The parked deliveries.
        dispatcher: The thread that finds out from the nodes which deliveries may go.
    """

    requires = ("celery.worker.consumer.tasks:Tasks",)

    def __init__(self, consumer: Any, **options: Any) -> None:
        super().__init__(consumer, **options)
        self._consumer = consumer
        self._app = app = consumer.app
        self._to_pool: Callable[[Any], Any] = consumer.on_task_request
        consumer.on_task_request = self
        self._longest = min(MAX_PARKED_S, max_unacknowledged_s(app) / 4)
        self._full_since: float | None = None
        self._prefetch = Prefetch(consumer)
        self._pipe: tuple[int, int] | None = None
        self._pauses: tuple[Pause, ...] = ()
        self._posted: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self.admission = AdmissionQueue(lambda *call: limited(self._pauses, *call))
        settings = read_settings(app)
        self._memory = ParkingMemory(self.admission, settings.parking_memory)
        self._reports = WaitReports(self.admission, events=settings.events)
        self.dispatcher = ParkingDispatcher(
            Redlock.from_app(app),
            self.admission,
            self._slots,
            lambda *what: self._post(self._proceed, *what),
            lambda: self._post(self._sweep),
        )
        signals.task_revoked.connect(self._revoked, weak=False)

    # -- Celery's main thread: connecting and stopping -------------------------------------------

    def start(self, consumer: Any) -> None:
        """Begin: the consumer has connected to its broker, and not asked for messages yet."""
        self.admission.take_back(0)  # from an old connection: the broker delivers them again
        self._prefetch.connected()
        self.admission.most = self._prefetch.most
        if consumer.hub is not None:
            if self._pipe is None:
                self._pipe = os.pipe()
                for end in self._pipe:
                    os.set_blocking(end, False)
            consumer.hub.add_reader(self._pipe[0], self._read)

    def stop(self, consumer: Any) -> None:
        """Give all deliveries back: the consumer stops, or has lost its connection."""
        if consumer.blueprint.state != RUN:
            self.dispatcher.close()
            # Another worker may not have received the revocation, and would run the task.
            discard_revoked(self.admission, self.admission.parked())
        self._prefetch.stop([parked.request for parked in self.admission.take_back(0)])

    # -- Deliveries ------------------------------------------------------------------------------

    @property
    def _full(self) -> bool:
        return self._full_since is not None and monotonic() - self._full_since >= FULL_S

    def _slots(self) -> int:
        """Return how many tasks the pool could begin with now; negative if some wait there."""
        given = len(state.reserved_requests) - len(self.admission)
        return size_of_pool(self._consumer.pool) - given

    def __call__(self, request: Any) -> None:
        """Give a request to the pool, unless it has to wait here."""
        if is_discarded(request):
            request.revoked()
            return
        try:
            waits = (self._pauses and self._hold_back(request)) or self._park(request)
        except Exception:
            logger.exception("%s[%s] could not be parked", request.name, request.id, extra=FAILED)
            waits = False
        if not waits:
            self._to_pool(request)
        if not self._memory.is_over:  # otherwise `_sweep` does so, four times a second
            _guarded(self._leave_room)

    def _leave_room(self) -> None:
        """Send the last in line again if the window is full: nothing could come for a free slot."""
        is_over, slots, count = self._memory.is_over, self._slots(), len(self.admission)
        if count and slots > 0 and self._prefetch.is_full(is_over):
            for parked in self.admission.take_back(count - (min(slots, count) if is_over else 1)):
                if is_over:  # its pauses grow, so that it is not in the way again soon
                    message = parked.request.request_dict
                    message[ATTEMPTS] = {**attempts_of(message), "parked": False}
                self._unpark(parked)

    def _park(self, request: Any) -> bool:
        """Park a delivery if it has to wait for its lock; return True if it is parked."""
        lock = lock_of(request.task)
        if lock is None or not parkable(options := lock.options(self._app)):
            return False
        try:
            headers = partial(header_of, request.request_dict)
            call = request.task, request.task.run, request.args, request.kwargs, headers
            resources, limit = lock.resources(*call), lock.limit(options, *call)
        except Exception:
            return False  # the body's process reports what is wrong
        if (pace := options.pace) is not None:
            if len(resources) > 1:
                return False
            resources, limit = (resources[0] + START_SUFFIX,), pace.starts
        attempts = attempts_of(request.request_dict)
        again = attempts["held"] > 0
        if not resources or (not again and may_be_a_duplicate(request, options)):
            return False
        if may_be_dropped(self._app, request.request_dict):
            return False  # if we gave it back, it would be dropped; the pool sends it again
        if not can_be_returned(request.request_dict):
            return False
        now = monotonic()
        since = attempts["since"]
        until = latest = now + self._longest * JITTER.uniform(0.75, 1.0)
        if (deadline := options.retry_deadline) is not None:
            until = min(latest, now + max(deadline - attempts["stuck"], MIN_PARKED_S))
        on_end(request, partial(self._ended, request, resources))
        if self.admission.arrive(
            request,
            resources,
            now,
            since=since,
            until=until,
            latest=latest,
            deadline=deadline,
            urgency=priority_order(request.delivery_info, amqp=self._prefetch.amqp),
            again=again,
            limit=limit,
            shared=options.shared,
            size=size_of(request),
        ):
            return False
        # It waits from now on, though it may not have met a lock yet.
        request.request_dict[ATTEMPTS] = {**attempts, "parked": True}
        try:
            self._prefetch.widen(self._extra)
            self.dispatcher.watch(resources)
            self._reports.parked(request, resources, since)
        except Exception:  # it is parked all the same, and must not go to the pool twice
            line = "%s[%s] is parked, but with an error"
            logger.exception(line, request.name, request.id, extra=FAILED)
        return True

    def _hold_back(self, request: Any) -> bool:
        """Keep a delivery if its key is paused; return True if it is kept.

        If it is not kept, the process that runs the body sends it again.
        """
        if lock_of(request.task) is None:
            return False
        try:
            headers = partial(header_of, request.request_dict)
            resources = resources_of(request.task, request.args, request.kwargs, headers)
        except Exception:
            return False  # the body's process reports what is wrong
        pause, message = covering(self._pauses, resources), request.request_dict
        if pause is None or not can_be_returned(message) or may_be_dropped(self._app, message):
            return False
        attempts, now = attempts_of(request.request_dict), monotonic()
        until = now + self._longest * JITTER.uniform(0.75, 1.0)
        on_end(request, partial(self._ended, request, resources))
        when: dict[str, float] = {"since": attempts["since"], "until": until}
        if not self.admission.hold(request, resources, **when, size=size_of(request)):
            return False
        try:
            request.request_dict[ATTEMPTS] = attempts
            self._prefetch.widen(self._extra)
            self._reports.held_back(request, resources, pause)
        except Exception:  # it is kept all the same, and must not go to the pool twice
            line = "%s[%s] is held back, but with an error"
            logger.exception(line, request.name, request.id, extra=FAILED)
        return True

    # -- In whichever thread Celery reports it ---------------------------------------------------

    def _ended(self, request: Any, resources: Resources) -> None:
        if self.admission.ended(request, resources):
            self._post(self._proceed, resources, False, False)
            self.dispatcher.ended(resources)
        self.dispatcher.slot_freed()

    def _revoked(self, request: Any = None, **_signal: Any) -> None:
        for running, resources in self.admission.running():
            if running.id == request.id and running not in state.reserved_requests:
                self._ended(running, resources)

    def pauses_are(self, pauses: tuple[Pause, ...]) -> None:
        """Take the current pauses; called repeatedly while there are any, and once more after."""
        self._post(self._hold_and_resume, pauses)

    def _post(self, function: Callable[..., None], *args: Any) -> None:
        """Call a function in the main thread, soon."""
        self._posted.append((function, args))
        if self._pipe is not None:
            with contextlib.suppress(OSError):  # the pipe is full, so it will be read
                os.write(self._pipe[1], b"\0")
        elif getattr(self._consumer.pool, "is_green", False):
            # Giving a task to a full pool waits for a slot: no greenlet of the pool may do so.
            self._consumer.timer.call_after(0.0, self._do_posted)
        else:
            self._consumer.call_soon(self._do_posted)

    def _read(self) -> None:
        assert self._pipe is not None
        with contextlib.suppress(OSError):
            os.read(self._pipe[0], 4096)
        self._do_posted()

    def _do_posted(self) -> None:
        while True:
            try:
                function, args = self._posted.popleft()
            except IndexError:
                return
            _guarded(function, *args)

    # -- The main thread again -------------------------------------------------------------------

    def _proceed(self, resources: Resources, free: bool, queue_up: bool) -> None:
        """Give the pool the next delivery for some resources, if it may go and has a slot."""
        if not queue_up and self._slots() <= 0:
            self.dispatcher.found_no_slot(resources)
            return
        parked = self.admission.take(resources, monotonic(), free=free)
        if parked is not None:
            self.dispatcher.gone(resources)
            if not self._unpark(parked):  # another worker has it: the next delivery takes its turn
                self._post(self._proceed, resources, True, queue_up)
            elif parked.shared and self.admission.is_shared(resources):
                self._post(self._proceed, resources, free, False)  # and the readers behind it

    def _unpark(self, parked: Parked) -> bool:
        self._prefetch.widen(self._extra)
        if is_ours := self._is_ours(parked.request):
            self._to_pool(parked.request)
        else:
            self._ended(parked.request, parked.resources)
        return is_ours

    def _is_ours(self, request: Any) -> bool:
        """Return True if a parked request must still run here; drop it if another worker has it."""
        if request not in state.reserved_requests:
            return False
        if self._prefetch.keep(request):
            return True
        line = "%s was redelivered to another worker, and is dropped here"
        logger.info(line, request.id, extra=event("delivery_moved"))
        self._prefetch.drop(request)
        state.task_ready(request)
        return False

    def _hold_and_resume(self, pauses: tuple[Pause, ...]) -> None:
        """Hold back deliveries whose keys are paused now; let those go whose pause has ended."""

        def is_paused(resources: Resources) -> Pause | None:
            return covering(pauses, resources)

        before, self._pauses = self._pauses, pauses
        if {pause.token for pause in before} != {pause.token for pause in pauses}:
            for parked in self.admission.pause(is_paused):
                pause = is_paused(parked.resources)
                assert pause is not None
                self._reports.held_back(parked.request, parked.resources, pause)
            resumed = self.admission.resume(is_paused)
            if resumed:
                line = "%d tasks go on: their keys are no longer paused"
                logger.info(line, len(resumed), extra=event("key_resumed"))
            for parked in resumed:
                request = parked.request
                if self._is_ours(request):
                    # As if it had only just arrived: during the pause no holder was in its way.
                    receive(request.request_dict, request.content_type)
                    self(request)
        self._sweep()

    @property
    def _extra(self) -> int:
        """Number by which the prefetch window must be widened: 0 while the pool is full."""
        return 0 if self._full else self._memory.fitting

    def _sweep(self) -> None:
        """Handle revoked, expired and overdue deliveries; record whether the pool is full."""
        now = monotonic()
        slots = self._slots()
        self._full_since = None if slots > 0 else self._full_since or now
        part = self.admission.part()
        self._prefetch.renew(part, now)
        discard_revoked(self.admission, part)
        watched = self.dispatcher.watched
        overdue = (one for one in part if goes_now(one, watched.get(one.resources), now))
        for parked in islice(overdue, OVERDUE_PER_SLOT * max(0, slots)):
            if self.admission.go(parked, now):
                self._unpark(parked)
        for request, resources in self.admission.running():
            if request not in state.reserved_requests:
                self._ended(request, resources)
        self._prefetch.widen(self._extra)
        if self._full and self._prefetch.widens:
            gone = self.admission.take_back(len(self.admission) - self._prefetch.surplus)
            self._prefetch.give_back([parked.request for parked in gone])
        self._leave_room()
        self._memory.warn()


def _guarded(function: Callable[..., None], *args: Any) -> None:
    try:
        function(*args)
    except Exception:
        logger.exception("parking failed; trying again in 1 s", extra=FAILED)
