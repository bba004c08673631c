"""Notify monitors, such as Flower, of tasks that wait for a lock, have got it, or have lost it.

The events are `task-lock-waiting` and `task-lock-lost`, if `redlock_events` is set; and
`task-lock-acquired` when a task that was reported as waiting has its lock. Celery's view of events
(and Flower's) takes them for states, which outrank STARTED: without the last one, a task would be
shown as waiting until its end.

A separate thread sends them, because an event may have to wait for the broker, and a lock must not.
Events that cannot be sent are dropped, and so is a second event of one task within a second.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections import OrderedDict
from typing import Any

from celery import _state

from ..events import Ask, Listener, subscribe
from ..messages.headers import ATTEMPTS, attempts_of, short_id
from ..protocol.errors import LeaseLost
from ..protocol.texts import event, printable
from ..protocol.values import Holder, Owner

__all__ = ["WAITING", "begin", "holder_fields"]

logger = logging.getLogger("celery_redlock.monitor")

_celery_state: Any = _state  # the type stubs lack most of it

WAITING, ACQUIRED, LOST = "task-lock-waiting", "task-lock-acquired", "task-lock-lost"

EVENT_INTERVAL_S = 1.0
"""Minimum seconds between two events of one waiting task: it may try many times a second."""
MAX_KEPT = 1000
"""Events that are kept while the broker is away, and tasks whose last event is remembered."""
LOG_INTERVAL_S = 60.0
"""Minimum seconds between two lines in the log while events cannot be sent."""


def begin(app: Any, hostname: str) -> None:
    """Start sending a worker's events, in this process and those forked from it.

    Monitors know the worker by `hostname`.
    """
    subscribe(_Monitor(_Sender(app, hostname)))


def holder_fields(owner: Owner | None) -> dict[str, Any] | None:
    """Return a lock's holder in the form for an event: without its token."""
    if owner is None:
        return None
    texts = {"task_id": owner.task_id, "task": owner.task, "host": owner.host}
    return {**{name: printable(text) for name, text in texts.items()}, "pid": owner.pid}


class _Monitor(Listener):
    """Listener that reports events of bodies, in their process; `consumer.py` reports parking."""

    def __init__(self, sender: _Sender) -> None:
        self._sender = sender
        self._last_events: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def held(self, resource: str, holder: object) -> None:
        request = _delivery()
        if request is None:
            return
        now = time.time()
        first, last = self._last_events.pop(
            request.id, (min(now, attempts_of(request)["since"]), 0.0)
        )
        due = not 0.0 <= now - last < EVENT_INTERVAL_S
        self._last_events[request.id] = first, now if due else last
        if len(self._last_events) > MAX_KEPT:
            self._last_events.popitem(last=False)
        if due:
            self._sender.send(
                WAITING,
                **_of(request.id, request.task, resource),
                holder=holder_fields(holder.owner if isinstance(holder, Holder) else None),
                waited=now - first,
            )

    def acquire_finished(self, ask: Ask) -> None:
        request = _delivery()
        if request is None or ask.lease is None:
            return
        now = time.time()
        first, _last = self._last_events.pop(request.id, (None, 0.0))
        if first is None and request.get(ATTEMPTS) and ask.owner.task_id == short_id(request.id):
            first = attempts_of(request)["since"]  # it was parked, or has been sent again
        if first is not None:
            said = _of(request.id, request.task, ask.resource)
            self._sender.send(ACQUIRED, **said, waited=now - first)

    def lost(self, loss: LeaseLost) -> None:
        if loss.owner is not None and loss.owner.task_id:
            self._sender.send(
                LOST,
                **_of(loss.owner.task_id, loss.owner.task, str(loss.resource)),
                holder=holder_fields(loss.owner),
                reason=loss.reason,
                held_for=loss.held_for,
            )


def _of(task_id: str, task: str | None, resource: str) -> dict[str, Any]:
    """Return the fields that each event has: the task, by id and name, and the resource."""
    name = {"name": printable(task)} if task else {}
    return {"uuid": task_id, **name, "resource": printable(resource)}


def _delivery() -> Any:
    """Return the task that runs in this thread, if monitors know it."""
    task = _celery_state._task_stack.top
    request = task.request_stack.top if task is not None else None
    known = request is not None and request.id is not None and not request.is_eager
    return request if known else None


class _Sender:
    """Sender of events, in a thread of this process that the first event starts."""

    def __init__(self, app: Any, hostname: str) -> None:
        self._app = app
        self._hostname = hostname
        self._forked()
        os.register_at_fork(after_in_child=self._forked)

    def _forked(self) -> None:
        self._lock = threading.RLock()  # a signal handler may interrupt us, and take a lock itself
        self._thread: threading.Thread | None = None
        self._events: queue.SimpleQueue[tuple[str, dict[str, Any]]] = queue.SimpleQueue()
        self._next_log = 0.0

    def send(self, name: str, /, **fields: Any) -> None:
        """Queue an event to be sent soon. Never waits, never raises."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="celery_redlock monitor", daemon=True
                )
                self._thread.start()
        if self._events.qsize() < MAX_KEPT:
            self._events.put((name, {"timestamp": time.time(), **fields}))
        else:
            logger.debug("%s of %s is dropped", name, fields["uuid"])

    def _run(self) -> None:
        while True:
            name, fields = self._events.get()
            try:
                with self._app.events.default_dispatcher(hostname=self._hostname) as dispatcher:
                    dispatcher.send(name, retry=False, **fields)
            except Exception as error:  # its text may quote the broker's URL
                if time.monotonic() >= self._next_log:
                    self._next_log = time.monotonic() + LOG_INTERVAL_S
                    kind = type(error).__name__
                    logger.warning(
                        "events about waiting and lost locks could not be sent: %s",
                        kind,
                        extra=event("events_unsent"),
                    )
