"""Keep Celery's `autoretry_for` between the lock of a task and its body.

Celery wraps autoretry around the function that is passed to `app.task`. So it is outside of a lock
that `@locked` has put there, and inside of the lock of a `SingletonTask`. In the first case a
refused lock would be retried like a failure of the body (and a message never rejected); in the
second case it would end the task. This module puts it inside for all tasks: `on_conflict` and
`on_unavailable` decide on refusals, and `autoretry_for` on the errors of the body. The body's
`LeaseLost` is one of these errors.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

from celery.app import base, registry

from ..config.task_lock import TaskLock, lock_of

__all__ = ["is_inside", "keep_inside", "run_around", "wrap"]

Guards = Sequence[Callable[[Callable[[], Any]], Any]]

_taken: ContextVar[tuple[TaskLock, Guards] | None] = ContextVar("redlock_autoretry", default=None)
_inside: ContextVar[TaskLock | None] = ContextVar("redlock_inside_autoretry", default=None)


def wrap(put_lock_around: Callable[[TaskLock, Callable[..., Any]], Callable[..., Any]]) -> None:
    """Keep autoretry inside the lock of every task that has both. Idempotent.

    Args:
        put_lock_around: Function that takes a lock and a function, and returns the function under
            that lock.
    """
    for module in (base, registry):  # before Celery 5.7 both modules use it
        original: Any = getattr(module, "add_autoretry_behaviour", None)
        if original is not None and not hasattr(original, "__redlock__"):
            setattr(module, original.__name__, _with_lock_outside(original, put_lock_around))


def _with_lock_outside(
    original: Callable[..., Any], put_lock_around: Callable[..., Any]
) -> Callable[..., Any]:
    @functools.wraps(original)
    def add_autoretry_behaviour(task: Any, **options: Any) -> None:
        original(task, **options)
        lock = lock_of(task)
        if lock is not None and keep_inside(task, lock):
            around = getattr(task.run, "__redlock__", None)
            if around is not None:  # otherwise `SingletonTask.__call__` takes the lock
                task.run = put_lock_around(around, task.run)

    add_autoretry_behaviour.__redlock__ = True  # type: ignore[attr-defined]
    return add_autoretry_behaviour


def keep_inside(task: Any, lock: TaskLock) -> bool:
    """Make a task's autoretry call the body in the way that `run_around` prepares.

    Return False if the task has no autoretry, or this was done before.
    """
    run: Any = vars(task).get("_orig_run")
    if run is None or getattr(run, "redlock_guarded", False):
        return False

    @functools.wraps(run)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        taken = _taken.get()
        if taken is None or taken[0] is not lock:
            return run(*args, **kwargs)
        body = functools.partial(run, *args, **kwargs)
        for guard in taken[1]:
            body = functools.partial(guard, body)
        outside, before = _taken.set(None), _inside.set(lock)
        try:
            return body()
        finally:
            _inside.reset(before)
            _taken.reset(outside)

    guarded.redlock_guarded = True  # type: ignore[attr-defined]
    # Celery copies the signature of the function; this is that of a bound method, without `self`.
    task.run.__signature__ = inspect.signature(run)
    task._orig_run = guarded
    return True


def run_around(task: Any, lock: TaskLock, guards: Guards, body: Callable[[], Any]) -> Any:
    """Call a body, which may begin with autoretry, and return its result.

    Args:
        task: The task; None outside of tasks.
        lock: The lock that it runs under.
        guards: Functions that each call the function they are given. They are called inside of
            autoretry, the last one first.
        body: Function that calls the task's function, or its autoretry.
    """
    if "_orig_run" not in getattr(task, "__dict__", ()):
        for guard in guards:
            body = functools.partial(guard, body)
        return body()
    before = _taken.set((lock, guards))
    try:
        return body()
    finally:
        _taken.reset(before)


def is_inside(lock: TaskLock) -> bool:
    """Return True, once, if autoretry is calling a `@locked` function that already has its lock."""
    if _inside.get() is not lock:
        return False
    _inside.set(None)
    return True
