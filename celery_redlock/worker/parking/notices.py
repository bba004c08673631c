"""Report the deliveries that wait in this worker, and their resources: to log and task events.

Also detect that a delivery has ended, or was revoked.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Iterable
from typing import Any

from celery.worker import state

from ...locking.pauses import Pause
from ...messages.received import is_discarded, is_revoked
from ...protocol.names import plain
from ...protocol.texts import event, printable, shown
from ...protocol.values import Owner
from ..task_events import WAITING, holder_fields
from .admission import AdmissionQueue, Parked, Resources

__all__ = ["WaitReports", "discard_revoked", "on_end"]

logger = logging.getLogger("celery_redlock.parking")


class WaitReports:
    """Reports of the deliveries that wait in a worker; there is one object in each worker.

    Args:
        admission: The deliveries that are at work here.
        events: True if events are sent as well.
    """

    def __init__(self, admission: AdmissionQueue, *, events: bool) -> None:
        self._admission = admission
        self._events = events
        self._announced: set[str] = set()  # tokens of pauses

    def parked(self, request: Any, resources: Resources, since: float) -> None:
        """Report a parked delivery, and the delivery that holds its lock, if at work here."""
        what, is_start = _names_of(resources)
        # A body at work does not keep a start back.
        here = None if is_start else self._admission.first_at_work(resources)
        if self._events:
            holder = None
            if here is not None:
                pid = here.worker_pid or 0
                holder = holder_fields(Owner(socket.gethostname(), pid, here.id, task=here.name))
            waited = max(0.0, time.time() - since)
            fields = {"name": printable(request.name), "resource": what}
            request.send_event(WAITING, **fields, holder=holder, waited=waited)
        who = ""
        if here is not None:
            other = printable(f"{here.name}[{here.id}]")
            other = "another delivery of it" if here.id == request.id else other
            who = f", which {other} has or asks for here"
        self._log(request, "parked", resources, who)

    def held_back(self, request: Any, resources: Resources, pause: Pause) -> None:
        """Report a delivery that waits for a pause; once per pause also its author and reason."""
        if pause.token not in self._announced:
            self._announced.add(pause.token)
            logger.warning("%s; tasks of its keys wait", pause, extra=event("key_paused"))
        self._log(request, "paused", resources)

    def _log(self, request: Any, why: str, resources: Resources, who: str = "") -> None:
        what, is_start = _names_of(resources)
        name, start = printable(f"{request.name}[{request.id}]"), "a start of " if is_start else ""
        logger.info(
            "%s waits (%s) for %s%s%s", name, why, start, what, who, extra=event("task_waits", what)
        )


def _names_of(resources: Resources) -> tuple[str, bool]:
    """Return the names of resources for people; and True if they are a start, not a lock."""
    names = list(map(plain, resources))
    return printable(shown(names)), names != list(resources)


def discard_revoked(admission: AdmissionQueue, some: Iterable[Parked]) -> None:
    """Make Celery discard those of the parked that were revoked, or have expired."""
    now, revoked, stamps = time.time(), state.revoked, state.revoked_stamps
    for parked in some:
        request = parked.request
        due = (revoked and request.id in revoked) or (stamps and is_revoked(request))
        if not due and (expires := request.expires) is not None:
            due = expires.timestamp() <= now
        due = due or is_discarded(request)
        if due and request.revoked():
            admission.withdraw(parked)


def on_end(request: Any, over: Callable[[], object]) -> None:
    """Call `over` when a delivery has ended, in whichever way the pool reports it.

    The methods with which the pool reports are wrapped on this instance.
    """

    def then(method: Callable[..., Any], is_end: Callable[..., bool]) -> Callable[..., Any]:
        def tell(*args: Any, **kwargs: Any) -> Any:
            try:
                return method(*args, **kwargs)
            finally:
                if is_end(*args, **kwargs):
                    over()

        return tell

    request.on_success = then(request.on_success, lambda *_, **__: True)
    request.on_failure = then(request.on_failure, lambda *_, **__: True)
    # At the hard limit its process still has to be killed, and the pool may not report its end.
    request.on_timeout = then(request.on_timeout, lambda soft, timeout: not soft)
