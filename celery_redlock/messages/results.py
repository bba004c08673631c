"""What is known of the end of a task: to a result backend, and of what was revoked here."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

from celery import states
from celery.app.control import Control

__all__ = ["end_of", "has_ended", "note_revokes", "state_of", "was_terminated"]

MANY = 10_000
"""Tasks revoked by this process that it remembers."""

_revoked: OrderedDict[str, bool] = OrderedDict()
"""By id, the tasks that this process has revoked, and whether it asked for their bodies' end. The
workers are yet to hear of it, and none may be there to."""


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


def has_ended(task: Any, task_id: str) -> bool:
    """Whether the result backend knows that a task has come to its end."""
    return _stored_end(task, task_id) is not None


def end_of(task: Any, task_id: str) -> str | None:
    """The state in which a task has ended, or will without a body; None if it is not known to."""
    return states.REVOKED if task_id in _revoked else _stored_end(task, task_id)


def _stored_end(task: Any, task_id: str) -> str | None:
    """The state in which a task has ended, as the result backend knows; None if it does not."""
    try:
        state = state_of(task, task_id)
    except Exception:
        return None  # there is none, or it is away
    return state if isinstance(state, str) and state in states.READY_STATES else None


def was_terminated(task_id: str) -> bool:
    """Whether this process has asked for the end of a task's body."""
    return _revoked.get(task_id, False)


def note_revokes() -> None:
    """Remember what `app.control.revoke` of this process revokes. Again is nothing."""
    original = Control.revoke
    if getattr(original, "__redlock__", False):
        return

    @functools.wraps(original)
    def revoke(
        self: Any,
        task_id: Any,
        destination: Any = None,
        terminate: bool = False,
        *rest: Any,
        **options: Any,
    ) -> Any:
        reply = original(self, task_id, destination, terminate, *rest, **options)
        if destination is None:
            several = isinstance(task_id, Iterable) and not isinstance(task_id, str)
            for one in task_id if several else (task_id,):
                _revoked[str(one)] = bool(terminate) or _revoked.get(str(one), False)
            while len(_revoked) > MANY:
                _revoked.popitem(last=False)
        return reply

    revoke.__redlock__ = True  # type: ignore[attr-defined]
    Control.revoke = revoke  # type: ignore[method-assign]
