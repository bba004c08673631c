"""Signal handlers that release a task's lock and reservation at every ending.

In the process that runs the body, `task_postrun` comes after every ending that Python survives, in
every pool, after the result is stored and the user's hooks have run. `task_success`,
`task_failure` and `task_retry` come earlier, and release as well; a second release does nothing. A
worker's main process releases the reservation of a message whose body never begins.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from celery import Task, signals, states
from celery.exceptions import Retry, TimeLimitExceeded

from ..config.settings import enabled
from ..config.task_lock import lock_of
from ..locking.done_mark import mark_done
from ..locking.redlock import Redlock
from ..protocol.errors import NotAcquired
from .consume import note_of, reserved_delivery_of
from .delivery import lease_of
from .headers import RESERVATION, header_of, is_redelivered, mark_copy, receive
from .received import hold
from .reservation import Reservation, free_soon
from .results import comes_back

__all__ = ["end", "over", "received", "refused", "release"]


def _request_of(task: Any) -> Any:
    """Return the request that a task runs for in this thread, or None."""
    stack = getattr(task, "request_stack", None)
    return stack.top if stack is not None else None


def release(
    sender: Any = None,
    signal: Any = None,
    state: str | None = None,
    retval: Any = None,
    einfo: Any = None,
    **_signal: Any,
) -> None:
    """Release the lock, in the body's process, because this delivery is over."""
    request = _request_of(sender)
    held = lease_of(request)
    delivery = reserved_delivery_of(request)
    if delivery is None:
        return
    if einfo is not None:
        delivery.einfo = einfo
    if signal is signals.task_postrun and delivery.einfo is not None:
        # Drop the frames of the traceback: all handlers here have seen them, and the main process
        # reads only the text. With the frames a failure or a retry has 40 to 100 kB, and billiard
        # writes more than 16 kB in two pieces: a soft time limit, or the loss of the broker,
        # between the two would stop this pool slot or the whole worker for good (see
        # docs/operating.md).
        delivery.einfo.tb = None
    if held is None:
        return
    if signal is signals.task_success:  # after other endings work may be left to do
        mark_done(held)
    again = signal is signals.task_retry
    if signal is signals.task_postrun:
        again = state == states.RETRY or comes_back(sender, state, retval)
    delivery.unlock(held, again)


def end(sender: Any = None, state: str | None = None, retval: Any = None, **_signal: Any) -> None:
    """Release the reservation, in the body's process, because this delivery is over."""
    request = _request_of(sender)
    delivery = reserved_delivery_of(request)
    if delivery is not None:
        delivery.end(state, retval)
    else:  # its body did not begin
        note = note_of(request)
        if note is not None and not comes_back(sender, state, retval):
            _free(sender.app, note)
    if isinstance(retval, Retry) and isinstance(retval.exc, NotAcquired):
        # The two exceptions and their frames refer to each other: with Celery's copy of the frames
        # half a megabyte would stay until a full garbage collection.
        retval.__traceback__ = retval.exc.__traceback__ = None


def over(sender: Any = None, request: Any = None, **_signal: Any) -> None:
    """Release the reservation, in the main process, of a message that was revoked or has expired.

    This is also called if the body's process has died, so that no handler ran there.
    """
    if request is None:
        request = _request_of(sender)
    note = note_of(request)
    if note is not None and reserved_delivery_of(request) is None:
        _free(sender.app, note)


def refused(sender: Any = None, message: Any = None, **_signal: Any) -> None:
    """Release the reservation, in the main process, of a message that no task can handle.

    The message is unreadable, or its task is unknown.
    """
    headers = getattr(message, "headers", None)
    if isinstance(headers, Mapping):
        note = Reservation.of(header_of(headers, RESERVATION), headers.get("id"))
        if note is not None:
            _free(sender.app, note)


def _free(app: Any, note: Reservation) -> None:
    """Release the reservation of a message that is over."""
    if note.token and note.scope != "until_expired" and enabled(app.conf):
        free_soon(Redlock.from_app(app), note)


def received(request: Any = None, **_signal: Any) -> None:
    """Note, in the main process, when and how a message came; keep its reservation alive.

    Mark it as a copy if it is running here already. After a lost connection a worker may receive
    its own message again, and begin with it only when the first delivery has ended and released the
    lock. Then nothing else would show that it is a copy.
    """
    lock = lock_of(request.task)
    if lock is None:
        return
    receive(request.request_dict, request.content_type)
    header, options = header_of(request.request_dict, RESERVATION), lock.options(request.task.app)
    note = Reservation.of(header, request.id, options, confirmed=True)
    again = is_redelivered(request.delivery_info)
    if note is not None and note.token and note.scope != "until_expired":
        hold(request, note)
        if again or request.task.acks_late:
            _free_unsignalled(request, note, again)
    if not again:
        return
    from celery.worker import state  # imported here, because producers do not need it

    at_work = (other for other in tuple(state.active_requests) if other is not request)
    if any(_same_message(other, request) for other in at_work):
        mark_copy(request.request_dict)


def _same_message(one: Any, other: Any) -> bool:
    """Return True if two requests are deliveries of one message: an id can be used by several."""
    return bool(one.id == other.id and one.name == other.name and one.body == other.body)


def _free_unsignalled(request: Any, note: Reservation, again: bool) -> None:
    """Release a reservation if Celery acknowledges the message without a usable signal.

    Before Celery 5.7 that happens in two cases: a body raises SystemExit, which Celery cannot store
    as a result; or it is killed at the hard time limit, where `task_failure` does not name the
    request. In any version it happens when a message that comes `again` is known to be done
    (`worker_deduplicate_successful_tasks`). If the process of its first body died just before it
    released the reservation, nobody else has.
    """
    on_failure, on_success, app = request.on_failure, request.on_success, request.app

    def failed(info: Any, *outcome: Any, **more: Any) -> Any:
        unsignalled = _is_time_limit(info)
        try:
            return on_failure(info, *outcome, **more)
        except BaseException:
            unsignalled = True
            raise
        finally:
            if unsignalled and request.acknowledged:
                _free(app, note)

    def succeeded(outcome: Any, **more: Any) -> Any:
        result = on_success(outcome, **more)
        if again and not outcome[0] and note.scope != "until_succeeded":
            _free(app, note)
        return result

    request.on_failure, request.on_success = failed, succeeded


def _is_time_limit(info: Any) -> bool:
    """Return True if a body was killed at its hard time limit, and Celery gives no request."""
    cause = getattr(info, "exception", None)
    cause = getattr(cause, "exc", cause)  # billiard wraps it, with its traceback
    return isinstance(cause, TimeLimitExceeded) and not hasattr(Task, "retry_on_worker_lost")
