"""Results: of a task that was skipped; and what is known of the end of another."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

from celery import states
from celery.app.control import Control

from ..protocol.values import Owner
from .signals import task_skipped

__all__ = ["Skipped", "end_of", "note_revokes", "state_of", "stored_end", "was_terminated"]

MAX_REVOKED = 10_000
"""Tasks revoked by this process that it remembers: about two megabytes."""

_revoked: OrderedDict[str, bool] = OrderedDict()
"""By id, the tasks that this process has revoked, and whether it asked for their bodies' end. The
workers are yet to hear of it, and none may be there to."""


class Skipped(dict[str, Any]):
    """What a task returns that was skipped because another held its lock. A dict, to be stored.

    `Skipped.of(result)` finds it again in a result that went through a backend.
    """

    __module__ = "celery_redlock"

    def __init__(self, resource: str, holder: str) -> None:
        super().__init__(celery_redlock="skipped", resource=resource, holder=holder)

    @classmethod
    def of(cls, result: object) -> Skipped | None:
        """The marker, if `result` is one; else None."""
        if isinstance(result, dict) and result.get("celery_redlock") == "skipped":
            resource, holder = result.get("resource"), result.get("holder")
            return cls(*(one if isinstance(one, str) else "" for one in (resource, holder)))
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self["resource"], self["holder"])


def tell_skipped(
    task: Any, task_id: Any, resource: str, holder: Owner | None, policy: str, where: str = "run"
) -> None:
    """Send `task_skipped`."""
    task_skipped.send(
        sender=task, resource=resource, task_id=task_id, holder=holder, where=where, policy=policy
    )


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


def end_of(task: Any, task_id: str) -> str | None:
    """The state in which a task has ended, or will without a body; None if it is not known to."""
    return states.REVOKED if task_id in _revoked else stored_end(task, task_id)


def stored_end(task: Any, task_id: str) -> str | None:
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
            while len(_revoked) > MAX_REVOKED:
                _revoked.popitem(last=False)
        return reply

    revoke.__redlock__ = True  # type: ignore[attr-defined]
    Control.revoke = revoke  # type: ignore[method-assign]
