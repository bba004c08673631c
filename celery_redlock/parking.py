"""Parks deliveries of locked tasks in a worker's main process, until it is their turn.

It stands between Celery's consumer and the pool, asks the gate about every delivery of a locked
task, and has it told what becomes of those that went. A parked delivery stays unacknowledged, as
one with an ETA does: if this worker dies, the broker has it. The prefetch window is widened for it,
so that other tasks pass by.

Nothing that goes wrong in here stops a delivery: it goes to the pool, as it would without us.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from celery import signals
from celery.bootsteps import RUN  # type: ignore[attr-defined]
from celery.worker import state

from .attempts import ATTEMPTS
from .doorman import Doorman
from .driver import monotonic
from .errors import ResourceHeld, printable
from .gate import Gate, Parked
from .lease import Owner
from .lock import Redlock
from .monitor import WAITING, told
from .reservation import HEADER, Reservation
from .settings import read_settings
from .task import lock_of, resources_of

__all__ = ["Parking"]

logger = logging.getLogger("celery_redlock.parking")

T = TypeVar("T")

MOST = 1000
"""Deliveries for which the prefetch window is widened; more fill it, and are not asked for."""
LONGEST = 60.0
"""Seconds that a delivery is parked at most; and a quarter of the broker's visibility timeout. Then
it goes, meets the lock, and is sent again: the broker would give it to another worker otherwise."""
RIPE = 0.1
"""Seconds until a delivery may go that was sent again: its sender may still have to store the state
RETRY, which must not come after the state SUCCESS."""


class Parking:
    """Stands where the consumer gives requests to the pool: `consumer.on_task_request`.

    Args:
        consumer: Celery's.

    Attributes:
        tasks: The names of the tasks whose deliveries are parked.
        gate: Knows who may go.
        doorman: Waits for the nodes.
    """

    def __init__(self, consumer: Any) -> None:
        self._consumer = consumer
        self._to_pool: Callable[[Any], Any] = consumer.on_task_request
        self._app = consumer.app
        self._tells = read_settings(self._app).events
        self.tasks: set[str] = set()
        self._connection: Any = None
        self._thread = threading.get_ident()
        self._wire: tuple[int, int] | None = None
        self._posted: deque[tuple[Any, ...]] = deque()
        self._going: deque[Parked] = deque()
        self._busy = threading.local()
        self.gate = Gate(lambda resource: self.doorman.attend(resource))
        self.doorman = Doorman(Redlock.from_app(self._app), self.gate, self._let_go, self._sweep)
        transport = self._app.conf.get("broker_transport_options") or {}
        visible = transport.get("visibility_timeout")
        self._longest = min(LONGEST, visible / 4) if isinstance(visible, (int, float)) else LONGEST
        signals.task_revoked.connect(self._revoked, weak=False)
        signals.worker_shutting_down.connect(self._shutting_down, weak=False)
        signals.worker_shutdown.connect(self._shut_down, weak=False)

    # -- Celery's main thread --------------------------------------------------------------------

    def connected(self) -> None:
        """The consumer has connected to its broker."""
        consumer = self._consumer
        if consumer.connection is not self._connection:
            # What was parked came over another connection; the broker delivers it again.
            self._connection = consumer.connection
            self._thread = threading.get_ident()
            self.gate.clear()
            if consumer.hub is not None:
                if self._wire is None:
                    self._wire = os.pipe()
                    for end in self._wire:
                        os.set_blocking(end, False)
                consumer.hub.add_reader(self._wire[0], self._read)

    @property
    def open(self) -> bool:
        """Whether the prefetch window can be widened: else those parked would starve the others.

        That of a quorum queue's consumer cannot.
        """
        consumer = self._consumer
        amqp = consumer.connection.transport.driver_type == "amqp"
        return not (amqp and getattr(consumer, "qos_global", None) is False)

    def __call__(self, request: Any) -> Any:
        """A request is to go to the pool."""
        try:
            if not self._may_go(request):
                return None
        except Exception:
            logger.exception("%s[%s] is not parked", request.name, request.id)
        outermost = not getattr(self._busy, "going", False)
        self._busy.going = True
        try:
            return self._to_pool(request)
        finally:
            if outermost:
                self._busy.going = False
                self._go()

    def _may_go(self, request: Any) -> bool:
        task = request.task
        if task.name not in self.tasks or not self.open:
            return True
        try:
            resources = resources_of(task, request.args, request.kwargs)
        except Exception:
            return True  # the body's process says what is wrong
        attempts = request.request_dict.get(ATTEMPTS)
        attempts = attempts if isinstance(attempts, Mapping) else {}
        again = "waits" in attempts  # it has no ETA any more: let go at once, it would come at once
        if len(resources) != 1 or (not again and self._may_be_a_duplicate(request)):
            return True
        (resource,) = resources
        now = monotonic()
        since = attempts.get("since")
        since = since if isinstance(since, float) else time.time()
        self._watch(request, resource)
        if self.gate.arrive(
            request,
            resource,
            now,
            since=since,
            waits=again,
            ripe=now + RIPE if again else now,
            until=now + self._patience(task, since),
            widen=self._widen,
        ):
            return True
        # Its time has begun, though it has met no lock yet.
        request.request_dict[ATTEMPTS] = {**attempts, "since": since}
        here = self.gate.view(resource, now).flying
        if self._tells:
            self._tell(request, resource, since)
        logger.info(
            "%s waits (parked) for %s, which is at work %s",
            printable(f"{request.name}[{request.id}]"),
            printable(resource),
            "in this worker" if here else "elsewhere",
        )
        return False

    def _tell(self, request: Any, resource: str, since: float) -> None:
        """Tell monitors that it waits; once, for there may be thousands. Who holds it is told where
        that is known: if it is at work here."""
        flying = next((one for one, name in self.gate.flying() if name == resource), None)
        holder = None
        if flying is not None:
            owner = Owner(socket.gethostname(), flying.worker_pid or 0, flying.id, task=flying.name)
            holder = told(owner)
        waited = max(0.0, time.time() - since)
        request.send_event(WAITING, resource=printable(resource), holder=holder, waited=waited)

    def _may_be_a_duplicate(self, request: Any) -> bool:
        """Whether its task is reserved, and it is not known to have the reservation.

        Then it does not wait its turn: the body's process finds out, and skips it.
        """
        note = Reservation.of(request.request_dict.get(HEADER), request.id)
        if note is not None:
            return note.scope != "while_executing" and not (note.token or note.begun)
        lock = lock_of(request.task)
        return lock is not None and lock.options(self._app).scope != "while_executing"

    def _patience(self, task: Any, since: float) -> float:
        lock = lock_of(task)
        deadline = lock.options(self._app).retry_deadline if lock is not None else None
        if deadline is None:
            return self._longest
        return min(self._longest, max(RIPE, since + deadline - time.time()))

    def _widen(self) -> bool:
        qos = self._consumer.qos
        if self.gate.parked >= MOST:
            return False
        if self._consumer.hub is None and not hasattr(qos.set, "__redlock__"):
            qos.set = _until_it_is_so(qos)
        before = qos.value
        if qos.increment_eventually() <= before:
            return False
        if self._consumer.hub is not None:
            self._post()  # it tells the broker when it wakes up
        return True

    def _watch(self, request: Any, resource: str) -> None:
        """Have the gate told of its end. Attributes of the instance: its class has its own."""
        succeeded, failed, timed_out = request.on_success, request.on_failure, request.on_timeout

        def on_success(result: Any, **kwargs: Any) -> Any:
            self._landed(request, resource, conflict=_conflict(result))
            return succeeded(result, **kwargs)

        def on_failure(*args: Any, **kwargs: Any) -> Any:
            try:
                return failed(*args, **kwargs)
            finally:
                self._landed(request, resource, sure=False)

        def on_timeout(soft: bool, timeout: float) -> Any:
            try:
                return timed_out(soft, timeout)
            finally:
                if not soft:  # it is yet to be killed
                    self._landed(request, resource, sure=False)

        request.on_success, request.on_failure = on_success, on_failure
        request.on_timeout = on_timeout

    # -- in whichever thread Celery tells of it ---------------------------------------------------

    def _landed(self, request: Any, resource: str, **how: Any) -> None:
        try:
            self._let_in(self.gate.landed(request, resource, monotonic(), **how))
        except Exception:
            logger.exception("%s[%s]: its successor waits on", request.name, request.id)

    def _revoked(self, request: Any = None, **_signal: Any) -> None:
        for flying, resource in self.gate.flying():
            if flying.id == request.id and flying not in state.reserved_requests:
                self._landed(flying, resource, sure=False)

    def _let_in(self, parked: Iterable[Parked]) -> None:
        self._going.extend(parked)
        if not self._going:
            return
        if self._green or (self._consumer.hub is not None and not self._here):
            self._post()
        else:
            self._go()

    @property
    def _here(self) -> bool:
        return threading.get_ident() == self._thread

    @property
    def _green(self) -> bool:
        """Whether who gives a full pool something waits for a slot, and would never leave its own:
        so no greenlet of the pool may do it, nor the doorman.
        """
        return self._consumer.hub is None and getattr(self._consumer.pool, "is_green", False)

    # -- the doorman's thread ----------------------------------------------------------------------

    def _let_go(self, function: Callable[..., Iterable[Parked]], *args: Any) -> None:
        """Have `function` choose who goes, in the main thread."""
        self._posted.append((function, *args))
        if self._consumer.hub is None and not self._green:  # as Celery's own timer in its thread
            self._do_posted()
        else:
            self._post()

    def _post(self) -> None:
        if self._green:
            self._consumer.timer.call_after(0.0, self._do_posted)  # in a greenlet of its own
        elif self._wire is not None:
            with contextlib.suppress(OSError):  # it is full: it will be read
                os.write(self._wire[1], b"\0")

    # -- the main thread again ---------------------------------------------------------------------

    def _read(self) -> None:
        assert self._wire is not None
        with contextlib.suppress(OSError):
            os.read(self._wire[0], 4096)
        self._do_posted()

    def _do_posted(self) -> None:
        for function, *args in _taken(self._posted):
            try:
                self._going.extend(function(*args))
            except Exception:
                logger.exception("the gate stumbled")
        self._go()

    def _go(self) -> None:
        """Give the pool who may go; whoever ends in it meanwhile (solo) only adds to the row."""
        if getattr(self._busy, "going", False):
            return
        self._busy.going = True
        try:
            for parked in _taken(self._going):
                try:
                    self._give(parked)
                except Exception:  # the worker goes on; the broker keeps the message
                    logger.exception("%s cannot go to the pool", parked.request.id)
        finally:
            self._busy.going = False

    def _give(self, parked: Parked) -> None:
        if not self._running():
            return
        if parked.widened:
            self._consumer.qos.decrement_eventually()
        if parked.request in state.reserved_requests:
            self._to_pool(parked.request)

    def _running(self) -> bool:
        """Whether the worker still works; else what is parked goes back to the broker."""
        consumer = self._consumer
        running = consumer.blueprint.state == RUN
        return running and consumer.connection is self._connection

    def _sweep(self) -> list[Parked]:
        """Once in a while: the revoked, the expired, those that wait for too long, the lost."""
        for parked in self.gate.waiting():
            request = parked.request
            due = request.expires or request.id in state.revoked
            if due and request.revoked() and self.gate.withdraw(parked) and parked.widened:
                self._consumer.qos.decrement_eventually()
        going = self.gate.overdue(monotonic())
        for request, resource in self.gate.flying():
            if request not in state.reserved_requests:
                going += self.gate.landed(request, resource, monotonic(), sure=False)
        return going

    def _shutting_down(self, **_signal: Any) -> None:
        self.doorman.close()

    def _shut_down(self, **_signal: Any) -> None:
        self.doorman.close(wait=1.0)


def _until_it_is_so(qos: Any) -> Callable[[int], Any]:
    """The `set` of a prefetch window, which the consumer calls before it waits for messages.

    AMQP's waits for the broker's answer, and what is delivered meanwhile is parked, and widens the
    window further. Nobody would tell the broker before the consumer has waited for two seconds, in
    vain: the window is full of what is parked.
    """
    set_once = qos.set

    def set_it(count: int) -> Any:
        result = set_once(count)
        while qos.prev != qos.value:
            result = set_once(qos.value)
        return result

    set_it.__redlock__ = True  # type: ignore[attr-defined]
    return set_it


def _taken(row: deque[T]) -> Iterator[T]:
    """Each of a row, taken out of it; others may do the same."""
    with contextlib.suppress(IndexError):
        while True:
            yield row.popleft()


def _conflict(result: Any) -> bool:
    """Whether a body's result says that it met a held lock."""
    failed, value, *_ = result
    error = getattr(value, "exception", None) if failed else None
    error = getattr(error, "exc", None)
    if not isinstance(error, ResourceHeld):  # with the traceback around it
        error = getattr(error, "exc", None)
    return isinstance(error, ResourceHeld)
