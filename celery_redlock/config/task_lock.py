"""The lock of a task: its key and its options.

`SingletonTask` and `@locked` (`task.py`) each make one `TaskLock` when a task is declared.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import CoroutineType, MappingProxyType
from typing import TYPE_CHECKING, Any

from celery.app.task import Context, Task

from ..keys.resolver import Headers, Keys, is_failure, is_plain, keys_of
from ..protocol.errors import ConfigurationError
from ..protocol.texts import counted, printable, shown
from .checks import count
from .failure import key_arguments, unpack
from .fitting import fit, node_elsewhere
from .options import TASK, Settings, TaskOptions
from .settings import check_given, check_together, read_settings, resolve

if TYPE_CHECKING:
    from ..protocol.names import Limit

_SET_BY_CELERY = ("lang", "task", "argsrepr", "kwargsrepr", "compression")
"""Headers that Celery sets, besides those that are attributes of its `Context`."""
PER_CALL = ("scope", "on_duplicate", "reserve_ttl")
"""Options that can be given to a single call: `apply_async(..., lock={...})`."""


class TaskLock:
    """The lock of a task: its key and its own options. Made when the task is declared.

    Args:
        own: The options given to the task, by name, without prefix.
        prefix: The prefix that the user wrote before each of these names, for errors.
        for_all: The options that `task_annotations` gives to every task, by the names that the user
            wrote. They were not given to this task alone, so it need not read them.

    Attributes:
        misfit: A warning about calls for which the key function fails; "" if there are none.
        apps: The apps that have a task with this lock.
        names: The names of the tasks with this lock.
        published_on: The apps on which a message was published, so that its options were checked.
    """

    def __init__(
        self,
        own: Mapping[str, Any],
        prefix: str = "",
        for_all: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.own: dict[str, Any] = check_given(own, TASK, prefix)
        check_together(self.own, {}, prefix)
        self._explicit = {n: value for n, value in self.own.items() if prefix + n not in for_all}
        self._prefix = prefix
        self._several = False
        self.misfit = ""
        self.apps: weakref.WeakSet[Any] = weakref.WeakSet()
        self.names: set[str] = set()
        self.published_on: weakref.WeakSet[Any] = weakref.WeakSet()
        self._keys: dict[tuple[str, bool, bool, Callable[..., Any]], Keys] = {}
        self._options: weakref.WeakKeyDictionary[Any, TaskOptions] = weakref.WeakKeyDictionary()
        self._nodes: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    def check(self, name: str, function: Callable[..., Any], *, bound: bool = False) -> None:
        """Check the key against a signature, and the options against each other.

        Raises:
            ConfigurationError: They do not fit, or the function cannot be locked.
        """
        if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
            raise ConfigurationError(
                f"{name} is an async function: Celery would call it and keep the coroutine, and"
                " the lock would be freed before its body has run; make it a plain function that"
                " calls asyncio.run()"
            )
        if inspect.isgeneratorfunction(function):
            raise ConfigurationError(
                f"{name} is a generator function: a call only makes the generator, and the lock"
                " would be freed before its body has run; make it a plain function"
            )
        keys = self._keys_of(name, function, bound)
        self.misfit = keys.misfit
        self._several = keys.several or self._several
        if "limit" in self.own:
            self._check_limit(name, keys, self.own["limit"])
        try:
            check_together(self.own, self._explicit, self._prefix, several=self._several)
        except ConfigurationError as error:
            raise ConfigurationError(f"{name}: {error}") from None

    def resources(
        self,
        task: Any,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Any,
        headers: Headers | None = None,
    ) -> tuple[str, ...]:
        """Return the names of the resources that a call excludes others from.

        Args:
            task: The task; None if the function is not a task's.
            function: Its function.
            args: The positional arguments of the call.
            kwargs: The keyword arguments.
            headers: Function that returns a header of the call's message by its name; None for a
                plain call.

        Raises:
            ConfigurationError: No key can be made of the arguments.
            TypeError: They do not fit the function.
        """
        _name, keys, args, kwargs = self._bind_call(task, function, args, kwargs)
        if self.own.get("key") is None:
            args = key_arguments(args)
        return keys(args, kwargs, headers)

    def limit(
        self,
        options: TaskOptions,
        task: Any,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Any,
        headers: Headers | None = None,
    ) -> Limit:
        """Return the limit of each resource of a call.

        Raises:
            ConfigurationError: The user's limit function failed, or did not return a limit.
        """
        limit: Any = options.limit
        if isinstance(limit, int):
            return limit
        from ..protocol.names import paired  # imported here: most programs have no limit

        name, keys, args, kwargs = self._bind_call(task, function, args, kwargs)
        names = keys.in_order(args, kwargs, headers)
        if callable(limit):
            limit = _call_limit(name, limit, keys.arguments(args, kwargs), names)
        return paired(names, limit)[1]

    def _check_limit(self, name: str, keys: Keys, limit: Any) -> None:
        """Refuse limits that do not fit the keys, or a function that does not fit the arguments."""
        p, of = self._prefix, f"{name}: {self._prefix}limit"
        if isinstance(limit, tuple) and keys.count not in (None, len(limit)):
            raise ConfigurationError(
                f"{of} is {list(limit)}, {counted(len(limit), 'number')}, and the task has"
                f" {counted(keys.count or 0, 'key')}: give one number for each key, in"
                f" their order, or {p}limit=3 for 3 of each"
            )
        if not callable(limit):
            return
        if not is_plain(limit):
            raise ConfigurationError(
                f"{of}, {_name_of(limit)}, is async, or a generator; give a plain function"
            )
        parameters = keys.signature.parameters.values()
        wanted = [p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
        wanted = [name for name in wanted if name != "self"]  # the task may be bound later
        more = any(p.kind is p.VAR_KEYWORD for p in parameters)
        try:
            taken = inspect.signature(limit)
            (taken.bind_partial if more else taken.bind)(**dict.fromkeys(wanted))
        except ValueError:  # some callables written in C have no known signature
            pass
        except TypeError as error:
            raise ConfigurationError(
                f"{of}, {_name_of(limit)}, cannot be called with the arguments of the task by their"
                f" names ({', '.join(wanted)}): {error}; let it take what it does not need by **_"
            ) from None

    def _bind_call(
        self, task: Any, function: Callable[..., Any], args: Sequence[Any], kwargs: Any
    ) -> tuple[str, Keys, Sequence[Any], Any]:
        """Return a task's name, its keys, and the arguments of a call without the task itself."""
        first = args[0] if args else None
        if task is None and isinstance(first, Task) and lock_of(first) is self:
            task = first  # a `__call__` that only calls `run` hides the task from Celery's stack
        bound = task is not None and first is task
        args = unpack(task, args[1:] if bound else args)
        if task is not None:
            name = task.name
        elif len(self.names) == 1:
            (name,) = self.names
        else:
            name = f"{function.__module__}.{function.__qualname__}"
        keys = self._keys_of(name, function, bound)
        more = kwargs.keys() - keys.signature.parameters.keys()
        if more and task is not None and _has_own_call(type(task)):
            # Such a class may add arguments in `apply_async` and remove them in `__call__`. The
            # lock of a SingletonTask is outside of its `__call__`, that of @locked inside.
            if lock_of(type(task)) is self and not hasattr(function, "__redlock__"):
                keys = self._keys_of(name, function, bound, more=True)
            elif all(p.kind is not p.VAR_KEYWORD for p in keys.signature.parameters.values()):
                kwargs = {name: kwargs[name] for name in kwargs if name not in more}
        return name, keys, args, kwargs

    def _keys_of(
        self, name: str, function: Callable[..., Any], bound: bool, more: bool = False
    ) -> Keys:
        keys = self._keys.get((name, bound, more, function))
        if keys is None:
            own = self.own
            scope = own.get("scope_name")
            keys = keys_of(name, function, own.get("key"), bound=bound, more=more, scope=scope)
            for header in keys.headers:
                if hasattr(Context, header) or header in _SET_BY_CELERY or header[:8] == "redlock_":
                    raise ConfigurationError(
                        f"{name}: the lock key names the header {header!a}, which Celery or"
                        " celery_redlock itself sets: name one that you give with headers={...}"
                    )
            self._keys[name, bound, more, function] = keys
        return keys

    @property
    def scope(self) -> str:
        """The declared scope: from when to when a key is taken. It needs no app's settings."""
        return str(self.own.get("scope", TASK["scope"].default))

    @property
    def has_wait(self) -> bool:
        """True if it was declared with a `wait`, so that a delivery waits in its pool slot."""
        return "wait" in self.own

    def options(self, app: Any, settings: Settings | None = None) -> TaskOptions:
        """Return all options of the task on `app`; they are combined at the first call.

        Args:
            app: The app.
            settings: Its settings, if the caller has read them.

        Raises:
            ConfigurationError: A setting cannot work, or the task's options contradict the app's.
        """
        options = self._options.get(app)
        if options is None:
            settings = settings or read_settings(app)
            options = self._resolve(settings, settings.nodes[0] if settings.nodes else None)
            if settings.nodes:
                self._nodes[app] = settings.nodes[0]
            self._options[app] = options
        return options

    def check_app(self, app: Any, name: str) -> None:
        """Refuse options that the store of an app cannot keep, before a message is published.

        Args:
            app: The app. Its settings may change later, so nothing is kept of them.
            name: The name of the task, for the error.

        Raises:
            ConfigurationError: It lacks a capability that one of them needs, or a setting cannot
                work.
        """
        if node := node_elsewhere(app):
            try:
                self._resolve(read_settings(app, nodes=False), node)
            except ConfigurationError as error:
                raise ConfigurationError(f"{name}: {error}") from None

    def _resolve(self, settings: Settings, node: Any) -> TaskOptions:
        options = resolve(self.own, settings)
        if node is not None:
            options = self._fit(options, node)
        check_together(vars(options), self._explicit, self._prefix, several=self._several)
        return options

    def _fit(self, options: TaskOptions, node: Any) -> TaskOptions:
        own_ttl = "ttl" in self.own
        return fit(options, node, self._prefix, several=self._several, own_ttl=own_ttl)

    def options_of_call(self, app: Any, given: Any) -> TaskOptions:
        """Return the options of one call with `lock={...}`.

        Raises:
            ConfigurationError: One of them cannot be given to a call, or cannot work.
        """
        if not isinstance(given, Mapping):
            raise ConfigurationError(
                f"lock= takes a mapping, such as {{'scope': 'until_executed'}}, not {given!r}"
            )
        for name in given:
            if name not in PER_CALL:
                raise ConfigurationError(
                    f"lock={{{name!r}: ...}}: a call can be given {', '.join(PER_CALL)}; declare"
                    " the others with the task"
                )
        if given.get("scope") == "until_executing" != self.scope:
            raise ConfigurationError(
                "lock={'scope': 'until_executing'}: the body would run without the lock that its"
                " task is declared with, and no message can be trusted to say so; declare the scope"
                " with the task, or give the call 'until_and_while_executing'"
            )
        checked = check_given(given, TASK, "")
        check_together({**self.own, **checked}, checked, "")
        # The app's settings are not read again: that takes longer than to publish the task.
        options = self.options(app).replace(**checked)
        if "scope" in checked and app in self._nodes:
            self._fit(options, self._nodes[app])
        return options


def _call_limit(
    name: str, limit: Callable[..., Any], arguments: Mapping[str, Any], names: Sequence[str]
) -> tuple[int, ...]:
    """Return the limit of each of some names, from the user's function.

    Raises:
        ConfigurationError: The function failed, or did not return a limit.
    """
    what = f"the limit of {name}, which {_name_of(limit)} makes,"
    try:
        made = limit(**arguments)
    except BaseException as error:
        if not is_failure(error):
            raise
        raise ConfigurationError(
            f"{what} raised {type(error).__name__}; it is called with the arguments of the task by"
            " their names, and returns a whole number"
        ) from error
    each = made if isinstance(made, (list, tuple)) else (made,) * len(names)
    try:
        return tuple(map(count, each))
    except ValueError as error:
        raise ConfigurationError(
            f"{what} {error}, or a list of such, one for each key; it is {made!r:.100} for"
            f" {shown(names)}: return 1 where one body at a time may run"
        ) from None


def _name_of(function: Any) -> str:
    return printable(getattr(function, "__qualname__", None) or repr(function))


def lock_of(task: Any) -> TaskLock | None:
    """Return the lock of a task, or None."""
    lock = getattr(task, "redlock", None)
    if lock is None:
        lock = getattr(getattr(task, "run", None), "__redlock__", None)
    return lock if isinstance(lock, TaskLock) else None


def _has_own_call(kind: type) -> bool:
    """Return True if a task's class, or a base of it, has a `__call__` that is not Celery's."""
    return any(
        "__call__" in vars(base) and base.__module__ not in ("celery.app.task", "celery_redlock")
        for base in kind.__mro__[:-1]
    )


def resources_of(
    task: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    headers: Headers | None = None,
) -> tuple[str, ...]:
    """Return the resources of a message with these arguments; none if its task takes no lock."""
    lock = lock_of(task)
    return lock.resources(task, task.run, args, kwargs, headers) if lock is not None else ()


def resource_of(task: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """Return the resources as one text, for people; None if the task takes no lock."""
    return shown(resources_of(task, args, kwargs)) or None


def never_awaited(name: str, result: CoroutineType[Any, Any, Any]) -> ConfigurationError:
    """Return the error for a function that returned a coroutine, and close the coroutine."""
    result.close()
    return ConfigurationError(
        f"{name} returned a coroutine, which nobody awaits: its work has not run, and its lock is"
        " free again; call asyncio.run() in it"
    )
