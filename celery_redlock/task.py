"""`SingletonTask` and `@locked`: declare the key and the options of a task's lock, wrap its body.

A delivery by a worker acquires its lock in `delivery.py`, and the signal handlers of `endings.py`
release it after every ending that Python survives. Plain calls and eager calls acquire it in
`run.py`, and release it when they return.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from types import CoroutineType, MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from celery import Task, _state
from celery.local import PromiseProxy, Proxy

from .config.checks import OnDuplicate, Scope
from .config.declared import (
    given_to_all,
    is_celery_builtin,
    keep_task_class,
    refuse_other_base,
    refuse_second_lock,
    refuse_unread,
)
from .config.options import (
    TASK,
    Key,
    LimitOption,
    OnConflict,
    OnDeadline,
    OnLost,
    OnUnavailable,
)
from .config.task_lock import TaskLock, never_awaited
from .keys.resolver import Templates
from .keys.signature import CallSignature
from .messages import autoretry
from .protocol.errors import ConfigurationError
from .worker.install import install, load

__all__ = ["SingletonTask", "install", "locked"]

if TYPE_CHECKING:
    from celery.result import AsyncResult
    from typing_extensions import Unpack

    from .config.typed import LockOptions, PublishOptions

    BaseTask = Task[..., Any]
else:
    BaseTask = Task

F = TypeVar("F")

_celery_state: Any = _state  # its stubs lack most of it

_NEEDS_PREFIX = frozenset(TASK) - {"retry_backoff", "retry_backoff_max", "shared"}
"""Options that are misspelt if a task class has them without `lock_`. Three are left out, because
Celery has them, too: it sets `shared` on the tasks of a pool child that was spawned."""


_FOREIGN_OPTIONS = {
    "once": "celery_redlock.compat.once.QueueOnce",
    "unique_on": "celery_redlock.compat.singleton.Singleton",
    "raise_on_duplicate": "celery_redlock.compat.singleton.Singleton",
}
"""Options of libraries that we replace (compat/), which our own task class does not read."""


class SingletonTask(BaseTask):
    """A task whose body runs once at a time per key.

    Options are class attributes or keywords of `app.task`, with `lock_` before their names.
    docs/settings.md explains each of them.

        @app.task(base=SingletonTask, lock_key="order:<order_id>", lock_on_conflict="skip")
        def charge(order_id, amount): ...

    Raises:
        ConfigurationError: When the task is made, if an option is unknown or cannot work.
    """

    # For type checkers, without values: a value here would hide the app's setting.
    lock_key: Key
    lock_ttl: float
    lock_wait: float
    lock_retry_backoff: float
    lock_retry_backoff_max: float
    lock_retry_deadline: float | None
    lock_max_lifetime: float | None
    lock_fencing: bool
    lock_scope_name: str | None
    lock_limit: LimitOption
    lock_shared: bool
    lock_rate: str | None
    lock_burst: int | None
    lock_scope: Scope
    lock_reserve_ttl: float | None
    lock_on_duplicate: OnDuplicate
    lock_hold_for: float
    lock_on_conflict: OnConflict
    lock_on_deadline: OnDeadline
    lock_on_unavailable: OnUnavailable
    lock_on_lost: OnLost
    lock_progress_timeout: float | None

    if TYPE_CHECKING:

        def apply_async(
            self,
            args: tuple[Any, ...] | None = ...,
            kwargs: dict[str, Any] | None = ...,
            task_id: str | None = ...,
            *others: Any,
            **options: Unpack[PublishOptions],
        ) -> AsyncResult[Any]: ...

    __module__ = "celery_redlock"

    abstract = True
    redlock: TaskLock | None = TaskLock({})

    def __init_subclass__(cls, **kwargs: Any) -> None:
        keep_task_class(cls)
        super().__init_subclass__(**kwargs)
        cls._set_lock()
        call = inspect.getattr_static(cls, "__call__")
        if call is not vars(SingletonTask)["__call__"] and call not in _under_lock:
            cls.__call__ = _put_under_lock(call)  # type: ignore[method-assign]

    @classmethod
    def annotate(cls) -> None:
        """Set the attributes from `task_annotations`, including the options of the lock."""
        super().annotate()
        try:
            cls._set_lock(given_to_all(cls.app))
        except ConfigurationError as error:
            raise ConfigurationError(f"{error} (from task_annotations)") from None

    @classmethod
    def _set_lock(cls, for_all: Mapping[str, Any] = MappingProxyType({})) -> None:
        """Read and check the options of this class.

        Args:
            for_all: The attributes that `task_annotations` gives to all tasks.
        """
        if is_celery_builtin(cls):
            cls.redlock = None
            return
        task = getattr(cls, "name", None) or f"{cls.__module__}.{cls.__qualname__}"
        refuse_other_base(task, cls)
        for name, value in vars(cls).items():
            misspelt = name in _NEEDS_PREFIX or name.startswith("redlock_")
            if misspelt and not (inspect.isroutine(value) or isinstance(value, property)):
                right = "lock_" + name.removeprefix("redlock_")
                raise ConfigurationError(f"{task}: on a SingletonTask it is {right}, not {name}")
            if name in _FOREIGN_OPTIONS and not any(hasattr(base, name) for base in cls.__bases__):
                shim = _FOREIGN_OPTIONS[name]
                if cls.__module__ != shim.rpartition(".")[0]:
                    raise ConfigurationError(
                        f"{task}: nothing reads {name}: it is an option of {shim}; give the task"
                        " that base, or write lock_... options (docs/migrating.md)"
                    )
        try:
            cls.redlock = TaskLock(cls._class_options(), "lock_", for_all)
        except ConfigurationError as error:
            # Name the task: it is made when its app is finalized, far from its source.
            raise ConfigurationError(f"{task}: {error}") from None
        run = inspect.getattr_static(cls, "run")
        if run is not inspect.getattr_static(BaseTask, "run"):
            plain = isinstance(run, staticmethod)
            cls.redlock.check(task, run.__func__ if plain else run, bound=not plain)

    @classmethod
    def _class_options(cls) -> dict[str, Any]:
        """Return the options that the class and its bases declare, by name, without prefix."""
        own: dict[str, Any] = {}
        for base in reversed(cls.__mro__):
            for name, value in vars(base).items():
                if not name.startswith("lock_"):
                    continue
                if name[5:] not in TASK and inspect.isfunction(value):
                    continue  # a user's own method
                own[name[5:]] = value.__func__ if isinstance(value, staticmethod) else value
        return own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        own = _own.get(None)
        if own is not None and own.task is not self:
            own = None
        if own is not None and own.next is not None:
            return own.next(*args, **kwargs)
        request, loaded = self.request_stack.top, load()
        # For a delivery and an eager call Celery's tracer has pushed the request already; for any
        # other call `Task.__call__` pushes one.
        traced = loaded.first_call(request) or (
            request is not None and request.is_eager and not request.called_directly
        )
        call: Any = super().__call__
        if traced and getattr(call, "__func__", None) is BaseTask.__call__:
            call = self.run
        if own is not None:
            own.next, call = call, own.call
        if self.redlock is None:  # the task is one of Celery's own
            return call(*args, **kwargs)
        body = functools.partial(call, *args, **kwargs)
        result = loaded.run(self.redlock, self, request, self.run, body)
        if type(result) is CoroutineType:
            raise never_awaited(self.name, result)
        return result


@dataclass(eq=False)
class _OwnCall:
    """A call of a task whose class has a `__call__` of its own.

    Attributes:
        task: The task.
        call: That `__call__`.
        next: The call that it reaches by `super()`, if it does. It takes no lock, because it runs
            under the lock already.
    """

    task: Any
    call: Callable[..., Any]
    next: Callable[..., Any] | None = None


_own: ContextVar[_OwnCall] = ContextVar("redlock_own_call")
_under_lock: weakref.WeakSet[Any] = weakref.WeakSet()


def _put_under_lock(call: Any) -> Callable[..., Any]:
    """Put the lock around a `__call__` that comes before ours and may never call ours.

    Many classes have one that only calls `run`, for example in an application's context.
    """

    @functools.wraps(call)
    def locked_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound = call.__get__(self, type(self))
        if type(self).__call__ is not locked_call:  # a subclass has called it by `super()`
            return bound(*args, **kwargs)
        before = _own.set(_OwnCall(self, bound))
        try:
            return SingletonTask.__call__(self, *args, **kwargs)
        finally:
            _own.reset(before)

    _under_lock.add(locked_call)
    return locked_call


def locked(*keys: str | Sequence[str] | None, **options: Unpack[LockOptions]) -> Callable[[F], F]:
    """Run a function, or the task made of it, once at a time per key.

    The decorator works under and over `@app.task` and `@shared_task`:

        @app.task
        @locked("order:<order_id>", ttl=30.0, on_conflict="skip")
        def charge(order_id, amount): ...

    Args:
        *keys: A template over the arguments: `"order:<order_id>"` or `"order:{order_id}"`. With
            several templates all of their keys are locked, or none. A list of arguments' names
            means the task's name and these arguments; nothing means its name and all arguments.
        **options: The options, by their names in docs/settings.md, without a prefix: `key` (for a
            function that makes the key), `scope`, `ttl`, `on_conflict` and so on.

    Raises:
        ConfigurationError: When decorating, if an option is unknown or cannot work, or the
            function is async.
    """
    lock = TaskLock({**_key_option(keys, options), **options})

    def decorate(target: F) -> F:
        if issubclass(type(target), Proxy):  # `isinstance` would make the task of the proxy
            _lock_proxy(lock, target)
        elif isinstance(target, Task):
            _lock_task(lock, target)
        elif inspect.isclass(target) or not callable(target):
            raise ConfigurationError(
                f"@locked decorates a function or a task, not {target!r}; for a task class use"
                " SingletonTask as its base"
            )
        else:
            _check(lock, target)
            return _put_lock_around(lock, target)  # type: ignore[return-value]
        return target

    return decorate


def _key_option(keys: Sequence[Any], options: LockOptions) -> LockOptions:
    """Return the option `key` from the positional arguments of `@locked`."""
    if not keys or keys == (None,):
        return {}
    if "key" in options:
        raise ConfigurationError(f"@locked has its key twice: {keys[0]!r} and key=...")
    if len(keys) == 1 and isinstance(keys[0], (list, tuple)):
        return {"key": keys[0]}
    for key in keys:
        if not isinstance(key, str):
            raise ConfigurationError(
                f"@locked takes a template, not {key!r}: write @locked() for a lock on the task's"
                " name and all its arguments, and @locked(key=...) for a function that makes the"
                " key"
            )
    return {"key": keys[0] if len(keys) == 1 else Templates(keys)}


def _put_lock_around(lock: TaskLock, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` under a lock. Only a call shows if it is the body of a task."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if autoretry.is_inside(lock):
            return function(*args, **kwargs)
        task = _celery_state._task_stack.top
        if task is None or getattr(task.run, "__redlock__", None) is not lock:
            task = None  # it is called as a function, perhaps by another task
        request = task.request_stack.top if task is not None else None
        body = functools.partial(function, *args, **kwargs)
        result = load().run(lock, task, request, function, body)
        if type(result) is CoroutineType:
            raise never_awaited(function.__qualname__, result)
        return result

    wrapper.__redlock__ = lock  # type: ignore[attr-defined]
    CallSignature.made_for(wrapper, function)
    return wrapper


def _check(lock: TaskLock, function: Callable[..., Any]) -> None:
    name = f"{function.__module__}.{function.__qualname__}"
    refuse_second_lock(name, function)
    lock.check(name, function)


def _lock_task(lock: TaskLock, task: Any) -> None:
    """Put a lock around an existing task's body; the task stays the same object."""
    if getattr(task.run, "__redlock__", None) is not lock:
        autoretry.keep_inside(task, lock)
        _check(lock, task.run)
        task.run = _put_lock_around(lock, task.run)
        lock.apps.add(task.app)
        lock.names.add(task.name)
        lock.check_app(task.app, task.name)
        refuse_unread(task)


def _lock_proxy(lock: TaskLock, proxy: Any) -> None:
    """Put a lock around a task that does not exist yet.

    Celery makes it when the app is finalized. Its function exists, and is checked now.
    """
    made_from = _proxy_source(proxy)
    function: Any = made_from.get("fun")
    if function is not None:
        _check(lock, function)
    if type(proxy) is PromiseProxy:
        proxy.__then__(lambda: _lock_task(lock, proxy._get_current_object()))
        return

    def lock_in(app: Any) -> None:
        name = made_from["name"] or app.gen_task_name(function.__name__, function.__module__)
        _lock_task(lock, app.tasks[name])

    # A shared task is made once per app, by finalizers that run in no fixed order. The entries of
    # `_pending` run after all of them, and their errors are raised; a signal would swallow them.
    _celery_state.connect_on_app_finalize(
        lambda app: app._pending.append(PromiseProxy(functools.partial(lock_in, app)))
    )
    for app in _celery_state._get_active_apps():
        if app.finalized:
            lock_in(app)


def _proxy_source(proxy: Any) -> Mapping[str, Any]:
    """Return the parts from which Celery makes a proxy's task: its function `fun`, maybe `name`."""
    if type(proxy) is PromiseProxy:
        try:
            return {"fun": object.__getattribute__(proxy, "_Proxy__args")[0]}
        except AttributeError:
            return {}  # the task exists already
    return inspect.getclosurevars(object.__getattribute__(proxy, "_Proxy__local")).nonlocals


# A process that can take locks must also connect the handlers that release them.
install()
autoretry.wrap(_put_lock_around)
