"""celery-once's interface: `QueueOnce` and `AlreadyQueued`.

A task is published under a reservation, which lasts until its body has ended, or with
`unlock_before_run` until it begins. Without `unlock_before_run` the body also runs under the lock.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from celery import states
from celery.result import EagerResult

from celery_redlock.compat.base import NEVER_EXPIRES, ReservedTask
from celery_redlock.config.task_lock import resource_of
from celery_redlock.locking.redlock import Redlock
from celery_redlock.messages.reservation import free_in
from celery_redlock.protocol.errors import ConfigurationError, DuplicateTask
from celery_redlock.task import install

__all__ = ["AlreadyQueued", "QueueOnce", "install"]

DEFAULT_TIMEOUT = 3600.0
"""Seconds; celery-once's default."""
TASK_OPTIONS = ("keys", "graceful", "timeout", "unlock_before_run")
CALL_OPTIONS = ("graceful", "timeout")


class AlreadyQueued(DuplicateTask):
    """A task with the same key is queued, or runs.

    Attributes:
        countdown: Seconds until its reservation ends by itself. It is extended while that task
            runs, and released when that task has ended.
        message: The same in words.
        task_id: The id of that task.
    """

    def __init__(self, countdown: float, task_id: str = "", *, resource: str | None = None) -> None:
        self.message = f"Expires in {countdown} seconds"
        super().__init__(self.message, task_id, resource=resource)
        # The arguments from which it is rebuilt after pickling, or by a result backend.
        self.args = (countdown, task_id)
        self.countdown = countdown

    def __str__(self) -> str:
        return self.message


def _checked(once: Any, known: Iterable[str], what: str) -> Mapping[str, Any]:
    if not isinstance(once, Mapping):
        raise ConfigurationError(f"{what} must be a mapping; it is {once!r}")
    for name in once:
        if name not in known:
            raise ConfigurationError(f"{what} knows no {name!r}; there are: {', '.join(known)}")
    keys = once.get("keys")
    if isinstance(keys, str) or not isinstance(keys, Iterable | None):
        raise ConfigurationError(
            f"{what}: keys must be a list of names of arguments, such as ['order_id'];"
            f" it is {keys!r}"
        )
    return once


def _ttl(timeout: float | None) -> float:
    return NEVER_EXPIRES if timeout is None else timeout


class QueueOnce(ReservedTask):
    """A task that is queued or runs once at a time per key: `@app.task(base=QueueOnce)`.

    `once`, as an attribute of the class or a keyword of `app.task`:

    - `keys`: the arguments that make the key, by name; all of them if it is not given.
    - `graceful`: a duplicate's `apply_async` returns a result whose value is None, and does not
      raise.
    - `timeout`: seconds that a message's reservation lasts if nothing notices its end; None for a
      day.
    - `unlock_before_run`: the reservation ends when the body begins.

    `apply_async(once={...})` takes `graceful` and `timeout` for one call.

    Raises:
        ConfigurationError: When the task is made: `once` has an unknown entry or an invalid value.
    """

    abstract = True
    once: Mapping[str, Any] = {"graceful": False, "unlock_before_run": False}

    @classmethod
    def _class_options(cls) -> dict[str, Any]:
        once = _checked(cls.once, TASK_OPTIONS, "once")
        moved: dict[str, Any] = {
            "scope": "until_executing" if once.get("unlock_before_run") else "until_executed",
        }
        if once.get("keys") is not None:
            # keys=[]: one key for the whole task, with its name as a template without arguments.
            name = getattr(cls, "name", None) or f"{cls.__module__}.{cls.__name__}"
            moved["key"] = list(once["keys"]) or re.sub(r"([{}<>])", r"\1\1", name)
        if "timeout" in once:
            moved["reserve_ttl"] = _ttl(once["timeout"])
        return {**moved, **super()._class_options()}

    @classmethod
    def on_bound(cls, app: Any) -> None:
        """Check the app's settings. Celery calls this when the task is bound to the app."""
        super().on_bound(app)
        _settings(app)

    def apply_async(
        self,
        args: Any = None,
        kwargs: Any = None,
        task_id: str | None = None,
        *others: Any,
        **options: Any,
    ) -> Any:
        """Publish the task, unless one with the same key is queued or runs.

        The arguments are Celery's, and `once`, with `graceful` and `timeout` for this call.

        Returns:
            The result of the new task. For a graceful duplicate: a result in state REJECTED, whose
            value is None.

        Raises:
            AlreadyQueued: It is a duplicate, and not graceful.
            ConfigurationError: `once` has an unknown entry.
        """
        given = {
            "timeout": _settings(self.app).get("default_timeout", DEFAULT_TIMEOUT),
            **self.once,
            **_checked(options.pop("once", {}), CALL_OPTIONS, "apply_async(once=...)"),
        }
        ttl = _ttl(given["timeout"])
        result, is_other = self.publish(ttl, args, kwargs, task_id, *others, **options)
        if not is_other:
            return result
        if given.get("graceful"):
            return EagerResult(None, None, states.REJECTED)  # type: ignore[arg-type]
        resource = resource_of(self, args or (), kwargs or {}) or ""
        left = free_in(Redlock.from_app(self.app), resource)
        raise AlreadyQueued(ttl if left is None else left, str(result.id), resource=resource)


def _settings(app: Any) -> Mapping[str, Any]:
    """Return `app.conf.ONCE["settings"]`; raise an error for a setting that is not supported."""
    conf = app.conf.get("ONCE") or {}
    settings: Mapping[str, Any] = conf.get("settings") or {}
    if settings.get("blocking"):
        raise ConfigurationError(
            "ONCE['settings']['blocking'] is not carried over: publishing a task never waits for"
            " another one's end; remove it, and where a task must run later give it"
            " lock_scope='while_executing', which waits its turn in the worker"
        )
    return settings
