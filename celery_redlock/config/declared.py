"""Refuses options of a lock that nothing would read.

`lock_ttl` is read on a `SingletonTask`, and `@locked` reads what it is called with. On any other
task such an option is an attribute like another: the task would run without the lock, or without
the ttl, that stands in its source. So tasks are looked at when they are bound to their app.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Mapping
from typing import Any

from celery.app.task import Task
from celery.utils.functional import firstmethod

from ..protocol.errors import ConfigurationError
from .options import TASK
from .task_lock import TaskLock

__all__ = ["given_to_all", "refuse_second_lock", "refuse_unread", "wrap"]

NEAR, NEAR_AS_LONG = 0.8, 0.66
"""How like an option's name one must be to be that name misspelt (`tll` is as long as `ttl`).
Others are the user's own."""

_annotate_any: Any = firstmethod("annotate_any")  # type: ignore[arg-type]  # its stubs are wrong


def refuse_unread(task: Any, for_all: Mapping[str, Any] | None = None) -> None:
    """Refuse options on a task that reads none.

    Args:
        task: A task or its class.
        for_all: What `task_annotations` gives to every task: defaults of those that read them. Only
            `@locked` ones would seem to; the others take no lock anyway.

    Raises:
        ConfigurationError: There is one; names it, the task, and what to write instead.
    """
    kind = task if inspect.isclass(task) else type(task)
    if isinstance(getattr(kind, "redlock", None), TaskLock):
        if _is_locked(task.run):
            raise ConfigurationError(
                f"{_name(task)} is a SingletonTask and @locked: a task has one lock. Give the"
                " options of @locked to the task (lock_key, lock_ttl, ...) and take @locked away,"
                " or take another base"
            )
        return  # it has checked its options
    locked = _is_locked(task.run)
    for base in kind.__mro__:
        for name, value in vars(base).items():
            option = _meant(name)
            if option is None or _is_method(base, value):
                continue
            if not locked and for_all and name in for_all and for_all[name] == value:
                continue
            raise ConfigurationError(_refusal(task, name, option, locked))


def refuse_second_lock(name: str, function: Any) -> None:
    """Refuse to lock what `@locked` has locked already: which key would be the task's?

    Raises:
        ConfigurationError: It is locked.
    """
    if _is_locked(function):
        raise ConfigurationError(
            f"{name} is @locked twice: a task has one lock. Keep one of the two; several keys stand"
            " in one @locked('a:<x>', 'b:<y>')"
        )


def given_to_all(app: Any) -> Mapping[str, Any]:
    """What the `task_annotations` of an app say of every task (`"*"`)."""
    given: Mapping[str, Any] | None = _annotate_any(app.annotations)
    return given or {}


def wrap(task_class: Any = Task) -> None:
    """Look at every task when it is bound to an app. Again is nothing."""
    original = task_class.bind.__func__
    if getattr(original, "__redlock__", False):
        return

    @functools.wraps(original)
    def bind(cls: Any, app: Any) -> Any:
        if not cls.__bound__:
            refuse_unread(cls)  # annotations are set next, and may hide what was declared
        bound = original(cls, app)
        refuse_unread(cls, given_to_all(app))
        return bound

    bind.__redlock__ = True  # type: ignore[attr-defined]
    task_class.bind = classmethod(bind)


def _is_locked(function: Any) -> bool:
    return isinstance(getattr(function, "__redlock__", None), TaskLock)


def _name(task: Any) -> str:
    return getattr(task, "name", None) or f"{task.__module__}.{task.__qualname__}"


def _meant(name: str) -> str | None:
    """The option that an attribute's name means, without prefix; None for one of the user's own."""
    prefix, _, rest = name.partition("_")
    if prefix not in ("lock", "redlock"):
        return None
    near = difflib.get_close_matches(rest, TASK, n=1, cutoff=NEAR)
    near += difflib.get_close_matches(
        rest, [n for n in TASK if len(n) == len(rest)], 1, NEAR_AS_LONG
    )
    return near[0] if near else None


def _is_method(base: Any, value: Any) -> bool:
    """Whether it is of a class's body; a function that `@app.task` is given is an option."""
    return hasattr(type(value), "__get__") and "_decorated" not in vars(base)


def _refusal(task: Any, name: str, option: str, locked: bool) -> str:
    if locked:
        return (
            f"{_name(task)}: nothing reads {name}, as the task is @locked: write"
            f" @locked(..., {option}=...). From task_annotations, a SingletonTask alone takes"
            f" lock_{option}; redlock_... settings are the defaults of all tasks"
        )
    return (
        f"{_name(task)}: nothing reads {name}, as the task takes no lock: give it"
        f" base=SingletonTask and lock_{option}=..., or put @locked(..., {option}=...) over its"
        " function. If it is no option of celery_redlock, give it another name"
    )
