"""What is told of a task that was skipped or sent again; what is known of the end of another."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

from celery import states
from celery.exceptions import SoftTimeLimitExceeded

from ..protocol.errors import NotAcquired
from ..protocol.values import Owner
from .revokes import was_revoked
from .signals import task_skipped

__all__ = ["end_of", "state_of", "store_retry", "stored_end", "tell_skipped"]

logger = logging.getLogger("celery_redlock.task")

RETRY_STORED = "redlock_retry_stored"
"""Attribute of a request: Celery is not to store state RETRY for it any more."""


def tell_skipped(
    task: Any, task_id: Any, resource: str, holder: Owner | None, policy: str, where: str = "run"
) -> None:
    """Send `task_skipped`."""
    task_skipped.send(
        sender=task, resource=resource, task_id=task_id, holder=holder, where=where, policy=policy
    )


def store_retry(task: Any, request: Any, refusal: NotAcquired) -> None:
    """Store state RETRY, before a message is sent again.

    Celery stores it afterwards. By then the task may have ended elsewhere, and RETRY would hide its
    end for ever: that is left out.
    """
    from celery.app import trace  # of no use to producers

    # Before Celery 5.7 a message cannot say that its result is ignored.
    told = getattr(trace, "get_actual_ignore_result", lambda task, _request: task.ignore_result)
    if told(task, request) and not task.store_errors_even_if_ignored:
        return
    backend = task.backend
    if "mark_as_retry" not in vars(backend):
        backend.mark_as_retry = partial(_store_once, backend.mark_as_retry)
    try:
        backend.mark_as_retry(request.id, refusal, request=request)
    except SoftTimeLimitExceeded:
        raise
    except Exception as error:  # what it becomes in the end will be stored, or not, by then
        logger.warning("%s[%s]: cannot store RETRY: %r", task.name, request.id, error)
    setattr(request, RETRY_STORED, True)


def _store_once(store: Any, *args: Any, request: Any = None, **given: Any) -> Any:
    return None if hasattr(request, RETRY_STORED) else store(*args, request=request, **given)


def state_of(task: Any, task_id: str) -> str | None:
    """The state that is stored for a task; None where none can be looked at.

    Raises:
        Exception: There is no backend, or it is away: whatever it raises.
    """
    backend = task.backend
    if backend.as_uri() == "rpc://":
        return None  # its results are messages to the caller: not ours to look at
    state: str = backend.get_state(task_id)
    return state


def end_of(task: Any, task_id: str, scope: str) -> str | None:
    """The state in which a task has ended, or will without a body, that reserved a key by a scope.

    None if it is not known to, or is to keep the key all the same.
    """
    if scope == "until_expired":
        return None
    if scope == "until_succeeded" and stored_end(task, task_id) == states.SUCCESS:
        return None
    return states.REVOKED if was_revoked(task_id) else stored_end(task, task_id)


def stored_end(task: Any, task_id: str) -> str | None:
    """The state in which a task has ended, as the result backend knows; None if it does not.

    One that stores no results is not asked: a server that hangs would keep its caller for minutes.
    """
    try:
        if task.ignore_result and not task.store_errors_even_if_ignored:
            return None
        state = state_of(task, task_id)
    except Exception:
        return None  # there is none, or it is away; or no such task is known here
    return state if isinstance(state, str) and state in states.READY_STATES else None
