"""How a task is locked: its key and its options.

`SingletonTask` and `@locked` (`task.py`) each make one of these when a task is declared.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from ..keys.resolver import Keys
from ..protocol.errors import ConfigurationError
from ..protocol.values import shown
from .options import TASK, TaskOptions
from .settings import (
    check_deadline,
    check_locking,
    check_reserving,
    check_several,
    check_task_options,
    read_settings,
    resolve,
)

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
        self.own = check_task_options(own, prefix)
        self._meant = {n: value for n, value in self.own.items() if prefix + n not in for_all}
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
        check_reserving(self.own, self._prefix)
        try:
            check_locking(self._meant, self._prefix)
        except ConfigurationError as error:
            raise ConfigurationError(f"{name}: {error}") from None
        if self._keys_of(name, function, bound).several:
            self._several = True
            check_several(self.own, self._prefix)

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
            own = self.own
            scope = own.get("scope_name")
            keys = Keys(name, function, own.get("key"), bound=bound, scope=scope)
            self._keys[name, bound, function] = keys
        return keys

    @property
    def scope(self) -> str:
        """From when to when a key is taken, as declared; no app's settings are needed for it."""
        return str(self.own.get("scope", TASK["scope"].default))

    @property
    def waits(self) -> bool:
        """Whether `wait` was declared with it: then a delivery waits in its pool slot."""
        return "wait" in self.own

    def options(self, app: Any) -> TaskOptions:
        """All options of the task on `app`."""
        options = self._options.get(app)
        if options is None:
            options = resolve(self.own, read_settings(app))
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
        own = check_task_options({**self.own, **given})
        check_reserving({"scope": own.get("scope"), **given}, "")
        # The app's settings are not read again: that takes longer than to publish the task.
        return replace(self.options(app), **{name: own[name] for name in given})


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
