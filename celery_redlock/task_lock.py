"""How a task is locked: its key, its options, and what is done around its body.

`SingletonTask` and `@locked` (`task.py`) each make one of these when a task is declared.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from .arrival import Arrival
from .attempts import short_id
from .delivery import first_call
from .errors import ConfigurationError
from .hold import HeldLease, Unlocked
from .interrupt import Interruptible
from .keys import Keys
from .lease import shown
from .lock import Redlock
from .options import TASK, TaskOptions
from .settings import (
    check_deadline,
    check_locking,
    check_reserving,
    check_several,
    check_task_options,
    enabled,
    read_settings,
    resolve,
)
from .waiting import parks

__all__ = ["TaskLock", "lock_of", "resource_of", "resources_of"]

OF_CALL = ("scope", "on_duplicate", "reserve_ttl")
"""Options that one call can be given: `apply_async(..., lock={...})`."""


class TaskLock:
    """How a task is locked: its key and its own options. Made when the task is declared.

    Args:
        own: The options given to the task, by name, without prefix.
        prefix: What the user wrote before each of these names, for errors.
        for_all: What `task_annotations` gives to every task, by the names that the user wrote: a
            task need not read what was not meant for it.
    """

    def __init__(
        self,
        own: Mapping[str, Any],
        prefix: str = "",
        for_all: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self._own = check_task_options(own, prefix)
        self._meant = {n: value for n, value in self._own.items() if prefix + n not in for_all}
        self._prefix = prefix
        self._several = False
        self._keys: dict[tuple[str, bool, Callable[..., Any]], Keys] = {}
        self._options: weakref.WeakKeyDictionary[Any, TaskOptions] = weakref.WeakKeyDictionary()

    def check(self, name: str, function: Callable[..., Any], *, bound: bool = False) -> None:
        """Check the key against a signature.

        Raises:
            ConfigurationError: The template does not fit, or the function cannot be locked.
        """
        if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
            raise ConfigurationError(
                f"{name} is an async function: Celery would call it and keep the coroutine, and"
                " the lock would be freed before its body has run; make it a plain function that"
                " calls asyncio.run()"
            )
        check_reserving(self._own, self._prefix)
        try:
            check_locking(self._meant, self._prefix)
        except ConfigurationError as error:
            raise ConfigurationError(f"{name}: {error}") from None
        if self._keys_of(name, function, bound).several:
            self._several = True
            check_several(self._own, self._prefix)

    def resources(
        self, task: Any, function: Callable[..., Any], args: Sequence[Any], kwargs: Any
    ) -> tuple[str, ...]:
        """The resources that a call excludes others from."""
        bound = task is not None and bool(args) and args[0] is task
        name = task.name if task is not None else f"{function.__module__}.{function.__qualname__}"
        return self._keys_of(name, function, bound)(args[1:] if bound else args, kwargs)

    def resource(
        self, task: Any, function: Callable[..., Any], args: Sequence[Any], kwargs: Any
    ) -> str:
        """The same as one name, for people; where it is one, that is it."""
        return shown(self.resources(task, function, args, kwargs))

    def _keys_of(self, name: str, function: Callable[..., Any], bound: bool) -> Keys:
        keys = self._keys.get((name, bound, function))
        if keys is None:
            own = self._own
            scope = own.get("scope_name")
            keys = Keys(name, function, own.get("key"), bound=bound, scope=scope)
            self._keys[name, bound, function] = keys
        return keys

    @property
    def scope(self) -> str:
        """From when to when a key is taken, as declared; no app's settings are needed for it."""
        return str(self._own.get("scope", TASK["scope"].default))

    def options(self, app: Any) -> TaskOptions:
        """All options of the task on `app`."""
        options = self._options.get(app)
        if options is None:
            options = resolve(self._own, read_settings(app))
            if self._several:
                check_several({"fencing": options.fencing}, "redlock_")
            check_deadline(self._meant, options, self._prefix)
            self._options[app] = options
        return options

    def options_of_call(self, app: Any, given: Any) -> TaskOptions:
        """The options of one call, which was given `lock={...}`.

        Raises:
            ConfigurationError: One of them cannot be given to a call, or cannot work.
        """
        if not isinstance(given, Mapping):
            raise ConfigurationError(
                f"lock= takes a mapping, such as {{'scope': 'until_executed'}}, not {given!r}"
            )
        for name in given:
            if name not in OF_CALL:
                raise ConfigurationError(
                    f"lock={{{name!r}: ...}}: a call can be given {', '.join(OF_CALL)}; declare"
                    " the others with the task"
                )
        if given.get("scope") == "until_executing" != self.scope:
            raise ConfigurationError(
                "lock={'scope': 'until_executing'}: the body would run without the lock that its"
                " task is declared with, and no message can be trusted to say so; declare the scope"
                " with the task, or give the call 'until_and_while_executing'"
            )
        own = check_task_options({**self._own, **given})
        check_reserving({"scope": own.get("scope"), **given}, "")
        # The app's settings are not read again: that takes longer than to publish the task.
        return replace(self.options(app), **{name: own[name] for name in given})

    def run(
        self,
        task: Any,
        app: Any,
        function: Callable[..., Any],
        body: Callable[[], Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Run `body` under the lock of this call."""
        resources = self.resources(task, function, args, kwargs)
        if not enabled(app.conf):
            with Unlocked(resources):
                return body()
        options = self.options(app)
        request = task.request_stack.top if task is not None else None
        delivered = first_call(request)
        # Where those that wait are parked, none waits in its pool slot unless it asks for that.
        parked = delivered and parks(request, options, resources) and "wait" not in self._own
        held = HeldLease(
            Redlock.from_app(app),
            resources,
            options.ttl,
            0.0 if parked else options.wait,
            options.max_lifetime,
            fencing=options.fencing,
            limit=options.limit,
        )
        held.task = task.name if task is not None else ""
        if task is not None and not delivered:  # a delivery says more of itself
            held.owner = replace(held._redlock._owner, task=short_id(task.name))
        if options.on_lost == "raise":
            block = Interruptible(held.loss, held._lost_unawares)
            held.on_lost = lambda _held: block.strike()
            body = functools.partial(block.run, body)
        elif callable(options.on_lost):
            held.on_lost = options.on_lost
        if delivered:
            redlock = held._redlock
            return Arrival(task, request, redlock, resources, options).run(held, body)
        if options.scope == "until_executing":  # which excludes no body from another
            with Unlocked(resources, held._redlock):
                return body()
        try:  # not `with`: a time limit may strike between taking the lock and owing to free it
            held.__enter__()
            return body()
        finally:
            held.__exit__(None, None, None)


def lock_of(task: Any) -> TaskLock | None:
    """How a task is locked, or None."""
    lock = getattr(task, "redlock", None)
    if lock is None:
        lock = getattr(getattr(task, "run", None), "__redlock__", None)
    return lock if isinstance(lock, TaskLock) else None


def resources_of(task: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[str, ...]:
    """The resources that a message with these arguments locks; none if its task takes no lock."""
    lock = lock_of(task)
    return lock.resources(task, task.run, args, kwargs) if lock is not None else ()


def resource_of(task: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """The same as one name, for people; None if its task takes no lock."""
    return shown(resources_of(task, args, kwargs)) or None
