"""Report skipped and re-sent tasks; look up how another task ended."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

from celery import states
from celery.exceptions import Reject, SoftTimeLimitExceeded

from ..protocol.errors import NotAcquired
from ..protocol.texts import event
from ..protocol.values import Owner
from .revokes import was_revoked
from .signals import task_skipped

__all__ = [
    "comes_back",
    "end_of",
    "report_skipped",
    "state_of",
    "store_retry",
    "stored_end",
    "survives",
]

logger = logging.getLogger("celery_redlock.task")

RETRY_STORED = "redlock_retry_stored"
"""Attribute of a request for which Celery must not store state RETRY any more."""


def report_skipped(
    task: Any, task_id: Any, resource: str, holder: Owner | None, policy: str, where: str = "run"
) -> None:
    """Send `task_skipped`."""
    task_skipped.send(
        sender=task, resource=resource, task_id=task_id, holder=holder, where=where, policy=policy
    )


def store_retry(task: Any, request: Any, refusal: NotAcquired) -> None:
    """Store state RETRY before a message is sent again, and prevent that Celery stores it later.

    Celery would store it after the message was sent. By then the task may have ended elsewhere, and
    RETRY would hide its end forever.
    """
    from celery.app import trace  # imported here, because producers do not need it

    # Before Celery 5.7 a message has no `ignore_result` of its own.
    ignores = getattr(trace, "get_actual_ignore_result", lambda task, _request: task.ignore_result)
    if ignores(task, request) and not task.store_errors_even_if_ignored:
        return
    backend = task.backend
    if "mark_as_retry" not in vars(backend):
        backend.mark_as_retry = partial(_store_once, backend.mark_as_retry)
    try:
        backend.mark_as_retry(request.id, refusal, request=request)
    except SoftTimeLimitExceeded:
        raise
    except Exception as error:  # go on: RETRY is only a state in between
        logger.warning(
            "the state RETRY of %s[%s] could not be stored: %r",
            task.name,
            request.id,
            error,
            extra=event("retry_state_unstored"),
        )
    setattr(request, RETRY_STORED, True)


def _store_once(store: Any, *args: Any, request: Any = None, **given: Any) -> Any:
    return None if hasattr(request, RETRY_STORED) else store(*args, request=request, **given)


def state_of(task: Any, task_id: str) -> str | None:
    """Return the stored state of a task; None if the backend has no states to look up.

    Raises:
        Exception: There is no backend, or it is down; any error of the backend.
    """
    backend = task.backend
    if backend.as_uri() == "rpc://":
        return None  # its results are messages to the caller, which we must not read
    state: str = backend.get_state(task_id)
    return state


def end_of(task: Any, task_id: str, scope: str) -> str | None:
    """Return the final state of a task that reserved a key under `scope`.

    A revoked task counts as ended. Return None if no end is known, or the task must keep the key
    after its end.
    """
    if scope == "until_expired":
        return None
    if scope == "until_succeeded" and stored_end(task, task_id) == states.SUCCESS:
        return None
    return states.REVOKED if was_revoked(task_id) else stored_end(task, task_id)


def stored_end(task: Any, task_id: str) -> str | None:
    """Return the final state of a task from the result backend; None if it has none.

    For a task without results the backend is not asked, because a server that hangs would block the
    caller for minutes.
    """
    try:
        if task.ignore_result and not task.store_errors_even_if_ignored:
            return None
        state = state_of(task, task_id)
    except Exception:
        return None  # there is no backend, or it is down; or the task is unknown here
    return state if isinstance(state, str) and state in states.READY_STATES else None


def survives(task: Any) -> bool:
    """Return True if a task's message comes back when its worker or its process dies."""
    return bool(task.acks_late or getattr(task, "retry_on_worker_lost", False))


def comes_back(task: Any, state: str | None, retval: Any) -> bool:
    """Return True if a message whose delivery ended in this state will be delivered again."""
    if state == states.REJECTED:
        requeue = isinstance(retval, Reject) and getattr(retval, "requeue", False)
        return bool(task.acks_late and requeue)
    # No state: an exception ends the process. The main process notices, and releases the
    # reservation if the message is over.
    return state is None and survives(task)
