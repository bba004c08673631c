"""What a result backend knows of a task."""

from __future__ import annotations

from typing import Any

from celery import states

__all__ = ["has_ended", "state_of"]


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
    try:
        return state_of(task, task_id) in states.READY_STATES
    except Exception:
        return False  # there is none, or it is away
