"""The subject of a test: a resource by its name, or a task with its arguments; and its lock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from celery import Task, _state
from celery.canvas import Signature
from celery.local import Proxy

from ..config.task_lock import lock_of
from ..locking.redlock import Redlock
from ..messages.reservation import RESERVING
from ..protocol.names import RESERVED_SUFFIX, Limit, checked_names
from ..protocol.texts import shown

_celery_state: Any = _state  # the type stubs lack most of it

__all__ = ["Target", "target_of"]


@dataclass(frozen=True)
class Target:
    """A resource that may be locked, and its lock.

    Attributes:
        redlock: The lock whose nodes are asked.
        names: The resource's name; several names if the task locks several.
        limit: The number of holders that each of them may have at a time.
        reserves: True if its task may reserve it.
    """

    redlock: Redlock
    names: tuple[str, ...]
    limit: Limit = 1
    reserves: bool = False

    def __str__(self) -> str:
        return shown(self.names)

    @property
    def reserved_names(self) -> tuple[str, ...]:
        """The names of its reservation."""
        return tuple(name + RESERVED_SUFFIX for name in self.names)


def target_of(what: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Target:
    """Return the target of `what`, called with these arguments.

    `what` is a resource's name (on the current app's nodes), a task, a signature, or a function
    under `@locked`.

    Raises:
        TypeError: It is none of these, or takes no lock.
    """
    if isinstance(what, Signature):
        what, args, kwargs = what.type, (*what.args, *args), {**what.kwargs, **kwargs}
    if isinstance(what, (str, list, tuple)):
        if args or kwargs:
            raise TypeError(f"{what!r} is a resource, which takes no arguments; give the task")
        return Target(Redlock.from_app(_celery_state.get_current_app()), checked_names(what))
    if isinstance(what, Proxy):
        what = what._get_current_object()
    if isinstance(what, Task):
        lock, task, function, app = lock_of(what), what, what.run, what.app
    else:
        lock, task = getattr(what, "__redlock__", None), None
        function = getattr(what, "__wrapped__", what)
        app = _celery_state.get_current_app()
    if lock is None:
        raise TypeError(
            f"{getattr(what, 'name', what)!r} takes no lock: give a resource's name, a task that is"
            " a SingletonTask or @locked, or a signature of one"
        )
    options = lock.options(app)
    call = task, function, args, kwargs
    names, limit = lock.resources(*call), lock.limit(options, *call)
    return Target(Redlock.from_app(app), names, limit, options.scope in RESERVING)
