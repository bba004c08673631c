"""`SingletonTask` and `@locked`: key, lock, run; and what a task does that cannot have its lock.

The lock is taken in the process that runs the body, right before it: only there can a task still
be sent away (`Retry`, `Ignore` and `Reject` raised there are honoured, what a `task_prerun`
receiver raises is not). It is given back by the signal handlers of `worker.py`, after every ending
that Python survives; here only around plain calls.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import random
import socket
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from celery import Task, _state
from celery.exceptions import Reject, Retry
from celery.local import PromiseProxy, Proxy

from .errors import ConfigurationError, NotAcquired, QuorumUnavailable, ResourceHeld
from .hold import HeldLease, Unlocked, release_leftovers
from .interrupt import Interruptible
from .key import KeyMaker
from .lease import Owner
from .lock import Redlock
from .settings import TASK, TaskOptions, check_task_options, read_settings, resolve

__all__ = [
    "ATTEMPTS",
    "STAMP",
    "SingletonTask",
    "Skipped",
    "TaskLock",
    "lock_of",
    "locked",
    "new_stamp",
    "resource_of",
]

if TYPE_CHECKING:
    BaseTask = Task[..., Any]
else:
    BaseTask = Task

F = TypeVar("F")

_celery_state: Any = _state  # its stubs lack most of it

logger = logging.getLogger("celery_redlock.task")

STAMP = "redlock_stamp"
"""Request header: names this delivery; put there by this worker's main process, see worker.py."""
ATTEMPTS = "redlock_attempts"
"""Message header: how often a task was sent again for want of its lock, and since when."""
LEASE = "redlock_lease"
"""Attribute of a request: the lock its delivery runs under."""

COUNTDOWN = 0.1
"""Seconds before a task is delivered again, at least: delivered at once it may overtake the worker
that still writes state RETRY over its SUCCESS (seen: 9 of 60)."""
PREDECESSOR = 2.0
"""Seconds to wait for a predecessor that has published us and is about to end."""


class Skipped(dict[str, Any]):
    """What a task returns that was skipped since another held its lock. A dict, to be stored.

    `Skipped.of(result)` finds it again in a result that went through a backend.
    """

    def __init__(self, resource: str, holder: str) -> None:
        super().__init__(celery_redlock="skipped", resource=resource, holder=holder)

    @classmethod
    def of(cls, result: object) -> Skipped | None:
        """The marker, if `result` is one; else None."""
        if isinstance(result, dict) and result.get("celery_redlock") == "skipped":
            return cls(str(result.get("resource", "")), str(result.get("holder", "")))
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self["resource"], self["holder"])


class TaskLock:
    """How a task is locked: its key and its own options. Made when the task is declared.

    Args:
        own: The options given to the task, by name, without prefix.
        prefix: What the user wrote before each of these names, for errors.
    """

    def __init__(self, own: Mapping[str, Any], prefix: str = "") -> None:
        self._own = check_task_options(own, prefix)
        self._keys: dict[tuple[str, bool], KeyMaker] = {}
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
        KeyMaker(name, function, self._own.get("key"), bound=bound)

    def resource(
        self, task: Any, function: Callable[..., Any], args: Sequence[Any], kwargs: Any
    ) -> str:
        """The resource that a call excludes others from."""
        bound = task is not None and bool(args) and args[0] is task
        name = task.name if task is not None else f"{function.__module__}.{function.__qualname__}"
        maker = self._keys.get((name, bound))
        if maker is None:
            maker = KeyMaker(name, function, self._own.get("key"), bound=bound)
            self._keys[name, bound] = maker
        return maker(args[1:] if bound else args, kwargs)

    def options(self, app: Any) -> TaskOptions:
        """All options of the task on `app`."""
        options = self._options.get(app)
        if options is None:
            options = self._options[app] = resolve(self._own, read_settings(app))
        return options

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
        resource = self.resource(task, function, args, kwargs)
        if not app.conf.get("redlock_enabled", True):
            with Unlocked(resource):
                return body()
        options = self.options(app)
        held = HeldLease(
            Redlock.from_app(app), resource, options.ttl, options.wait, options.max_lifetime
        )
        if options.on_lost == "raise":
            block = Interruptible(held.loss)
            held.on_lost = lambda _held: block.strike()
            body = functools.partial(block.run, body)
        elif callable(options.on_lost):
            held.on_lost = options.on_lost
        request = task.request_stack.top if task is not None else None
        if _delivered(request):
            return _Delivery(task, request, held, options).run(body)
        try:  # not `with`: a time limit may strike between taking the lock and owing to free it
            held.__enter__()
            return body()
        finally:
            held.__exit__(None, None, None)


class _Delivery:
    """One delivery of a message by a worker: its lock, and what it does without."""

    def __init__(self, task: Any, request: Any, held: HeldLease, options: TaskOptions) -> None:
        self._task = task
        self._request = request
        self._options = options
        self._held = held
        held.owner = Owner(
            socket.gethostname(),
            os.getpid(),
            task_id=request.id or "",
            retries=request.retries or 0,
            stamp=_own_stamp(request),
        )
        release_leftovers()
        setattr(request, LEASE, held)  # from here on, the signal handlers release it

    def run(self, body: Callable[[], Any]) -> Any:
        try:
            try:
                self._held.acquire()
            except ResourceHeld as refusal:
                if not self._predecessor(refusal):
                    raise
                self._held.acquire(wait=PREDECESSOR)
        except ResourceHeld as refusal:
            return self._conflict(refusal)
        except QuorumUnavailable as refusal:
            if self._options.on_unavailable == "run":
                logger.warning("%s runs WITHOUT its lock: %s", self._name, refusal)
                lease: HeldLease = Unlocked(self._held.resource)
                setattr(self._request, LEASE, lease)
                with lease:
                    return body()
            if self._options.on_unavailable == "raise":
                raise
            return self._later("unavailable", refusal)
        # Counted from the next conflict: a retry of the user's would carry the count along.
        for name in (ATTEMPTS, STAMP):
            (self._request.headers or {}).pop(name, None)
        return body()

    @property
    def _name(self) -> str:
        return f"{self._task.name}[{self._request.id}]"

    def _predecessor(self, refusal: ResourceHeld) -> bool:
        """Whether the holder is the one that published us: a chain link, or our last try.

        Its message is sent before its lock is freed, so it is about to end.
        """
        owner = refusal.holder.owner if refusal.holder else None
        if owner is None or not owner.task_id:
            return False
        if owner.task_id == self._request.id:
            return owner.retries < (self._request.retries or 0)
        return bool(owner.task_id == self._request.parent_id)

    def _conflict(self, refusal: ResourceHeld) -> Any:
        if self._options.on_conflict == "raise":
            raise refusal
        if self._options.on_conflict == "skip":
            logger.info("%s is skipped: %s", self._name, refusal)
            return Skipped(self._held.resource, str(refusal.holder))
        return self._later("held", refusal)

    def _later(self, why: str, refusal: NotAcquired) -> Any:
        """Send the message again, later, with the same id and none of the user's retries spent.

        Raises:
            Retry: It is sent.
            NotAcquired: It has been tried for too long.
        """
        options = self._options
        attempts = _attempts(self._request)
        count = attempts[why] = attempts[why] + 1
        waited = time.time() - attempts["since"]
        if options.retry_deadline is not None and waited >= options.retry_deadline:
            logger.error("%s gives up after %.1f s: %s", self._name, waited, refusal)
            raise refusal
        ceiling = min(options.retry_backoff_max, options.retry_backoff * 2.0 ** min(count - 1, 60))
        countdown = max(COUNTDOWN, random.uniform(0, ceiling))  # full jitter
        logger.log(
            logging.WARNING if why == "unavailable" else logging.INFO,
            "%s waits (%s, attempt %d, next in %.1f s): %s",
            self._name,
            why,
            count,
            countdown,
            refusal,
        )
        headers = {**(self._request.headers or {}), ATTEMPTS: attempts}
        headers.pop(STAMP, None)
        # Not self.retry(): that would spend the retries of the user.
        again = self._task.signature_from_request(
            self._request, countdown=countdown, retries=self._request.retries, headers=headers
        )
        try:
            again.apply_async()
        except Exception as error:
            # The broker is away. With late acknowledgement the message can go back to it;
            # otherwise the task must fail, for all to see, or it would be lost without a word.
            if self._task.acks_late:
                raise Reject(error, requeue=True) from error
            raise
        raise Retry(str(refusal), exc=refusal, when=countdown, sig=again)  # type: ignore[arg-type]


def lock_of(task: Any) -> TaskLock | None:
    """How a task is locked, or None."""
    lock = getattr(task, "redlock", None)
    if lock is None:
        lock = getattr(getattr(task, "run", None), "__redlock__", None)
    return lock if isinstance(lock, TaskLock) else None


def resource_of(task: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """The resource that a message with these arguments locks; None if its task takes no lock."""
    lock = lock_of(task)
    return lock.resource(task, task.run, args, kwargs) if lock is not None else None


class SingletonTask(BaseTask):
    """A task whose body runs once at a time per key.

    Options are class attributes or keywords of `app.task`: `lock_key`, `lock_ttl`, `lock_wait`,
    `lock_on_conflict`, `lock_on_unavailable`, `lock_retry_backoff`, `lock_retry_backoff_max`,
    `lock_retry_deadline`, `lock_max_lifetime`, `lock_on_lost`; see the table of options.

    Raises:
        ConfigurationError: When the task is made, if an option is unknown or cannot work.
    """

    abstract = True
    redlock: TaskLock = TaskLock({})

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        own = {}
        for base in reversed(cls.__mro__):
            for name, value in vars(base).items():
                if not name.startswith("lock_"):
                    continue
                if name[5:] not in TASK and inspect.isfunction(value):
                    continue  # a method of the user's own
                own[name[5:]] = value.__func__ if isinstance(value, staticmethod) else value
        cls.redlock = TaskLock(own, "lock_")
        run = inspect.getattr_static(cls, "run")
        if run is not inspect.getattr_static(BaseTask, "run"):
            plain = isinstance(run, staticmethod)
            name = getattr(cls, "name", None) or f"{cls.__module__}.{cls.__qualname__}"
            cls.redlock.check(name, run.__func__ if plain else run, bound=not plain)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        request = self.request_stack.top
        if request is not None and (_delivered(request) or _eager(request)):
            # As the tracer would do it itself, were it not for this __call__.
            def body() -> Any:
                return self.run(*args, **kwargs)
        else:

            def body() -> Any:
                return super(SingletonTask, self).__call__(*args, **kwargs)

        return self.redlock.run(self, self.app, self.run, body, args, kwargs)


def locked(key: str | None = None, **options: Any) -> Callable[[F], F]:
    """Run a function, or the task made of it, once at a time per key.

    Works under and over `@app.task` and `@shared_task`.

    Args:
        key: A template over the arguments: `"order:<order_id>"` or `"order:{order_id}"`. None: the
            task's name and all its arguments.
        **options: `ttl`, `wait`, `on_conflict`, `on_unavailable`, `retry_backoff`,
            `retry_backoff_max`, `retry_deadline`, `max_lifetime`, `on_lost`; see the table of
            options.

    Raises:
        ConfigurationError: When decorating, if an option is unknown or cannot work, or the
            function is async.
    """
    if key is not None and not isinstance(key, str):
        raise ConfigurationError(
            f"@locked takes a template, not {key!r}: write @locked() for a lock on the task's name"
            " and all its arguments"
        )
    lock = TaskLock({"key": key, **options} if key is not None else options)

    def decorate(target: F) -> F:
        if issubclass(type(target), Proxy):
            _lock_proxy(lock, target)
        elif isinstance(target, Task):
            _lock_task(lock, target)
        elif inspect.isclass(target) or not callable(target):
            raise ConfigurationError(
                f"@locked decorates a function or a task, not {target!r}; for a task class use"
                " SingletonTask as its base"
            )
        else:
            return _wrap(lock, target)  # type: ignore[return-value]
        return target

    return decorate


def _wrap(lock: TaskLock, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, under a lock. Whose task it is, is seen when it is called."""
    name = f"{function.__module__}.{function.__qualname__}"
    lock.check(name, function)

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        task = _celery_state._task_stack.top
        if task is None or getattr(task.run, "__redlock__", None) is not lock:
            task = None  # called as a function, perhaps by another task
        app = task.app if task is not None else _celery_state.get_current_app()
        return lock.run(task, app, function, lambda: function(*args, **kwargs), args, kwargs)

    wrapper.__redlock__ = lock  # type: ignore[attr-defined]
    # Celery's check of arguments at publish does not look behind __wrapped__.
    wrapper.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    return wrapper


def _lock_task(lock: TaskLock, task: Any) -> None:
    """Put a lock around an existing task's body; the task stays the same object."""
    if getattr(task.run, "__redlock__", None) is not lock:
        task.run = _wrap(lock, task.run)


def _lock_proxy(lock: TaskLock, proxy: Any) -> None:
    """The same for a task that is yet to be made.

    Celery makes it when the app is finalized; but its function is known, and checked, now.
    """
    made_from = _behind(proxy)
    function: Any = made_from.get("fun")
    if function is not None:
        lock.check(f"{function.__module__}.{function.__qualname__}", function)
    if type(proxy) is PromiseProxy:
        proxy.__then__(lambda: _lock_task(lock, proxy._get_current_object()))
        return

    def finalized(app: Any, **_signal: Any) -> None:
        name = made_from["name"] or app.gen_task_name(function.__name__, function.__module__)
        _lock_task(lock, app.tasks[name])

    # A shared task is made once per app, by finalizers that are called in no certain order.
    _celery_state.connect_on_app_finalize(
        lambda app: app.on_after_finalize.connect(
            lambda sender, **_signal: finalized(sender), weak=False
        )
    )
    for app in _celery_state._get_active_apps():
        if app.finalized:
            finalized(app)


def _behind(proxy: Any) -> Mapping[str, Any]:
    """What a task that is yet to be made will be made from: its function, and perhaps a name."""
    if type(proxy) is PromiseProxy:
        try:
            return {"fun": object.__getattribute__(proxy, "_Proxy__args")[0]}
        except AttributeError:
            return {}  # it is made already
    return inspect.getclosurevars(object.__getattribute__(proxy, "_Proxy__local")).nonlocals


def _delivered(request: Any) -> bool:
    """Whether this is the body's first call in a delivery by a worker: not a plain or nested one"""
    return (
        request is not None
        and not request.called_directly
        and not request.is_eager
        and not hasattr(request, LEASE)
    )


def _eager(request: Any) -> bool:
    return request.is_eager and not request.called_directly


def _own_stamp(request: Any) -> str:
    """The stamp of this delivery, if this worker put it there; others' travel in headers."""
    stamp = request.get(STAMP)
    if isinstance(stamp, str) and stamp.startswith(_WORKER):
        return stamp
    return new_stamp()


def new_stamp() -> str:
    """A name for one delivery, that this worker and its pool children know as their own."""
    return f"{_WORKER}.{os.urandom(8).hex()}"


_WORKER = os.urandom(8).hex()


def _attempts(request: Any) -> dict[str, Any]:
    """How often this message was sent again, from its headers: foreign input, not trusted far."""
    given = request.get(ATTEMPTS)
    given = given if isinstance(given, Mapping) else {}
    now = time.time()
    since = given.get("since")
    attempts: dict[str, Any] = {
        "since": min(since, now) if isinstance(since, (int, float)) else now
    }
    for why in ("held", "unavailable"):
        count = given.get(why)
        attempts[why] = max(0, count) if type(count) is int else 0
    return attempts


# The handlers that release are part of the lock: whoever can take one has them connected.
from .worker import install  # noqa: E402

install()
