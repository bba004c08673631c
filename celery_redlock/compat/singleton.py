"""celery-singleton's interface: `Singleton`, `DuplicateTaskError` and `clear_locks`.

A task is published under a reservation, which lasts until its body has ended; the body also runs
under the lock.
"""

from __future__ import annotations

import logging
from typing import Any

from celery_redlock.compat.base import NEVER_EXPIRES, ReservedTask
from celery_redlock.protocol.errors import ConfigurationError, DuplicateTask
from celery_redlock.task import install

from ..protocol.texts import event

__all__ = ["DuplicateTaskError", "Singleton", "clear_locks", "install"]

logger = logging.getLogger("celery_redlock.task")


class DuplicateTaskError(DuplicateTask):
    """A task with the same key, `task_id`, is queued or runs."""


class Singleton(ReservedTask):
    """A task that is queued or runs once at a time per key: `@app.task(base=Singleton)`.

    A duplicate's `delay()` returns the result of the task that is queued, or runs.

    Attributes:
        unique_on: The arguments that make the key: one name, or a list; all of them if None.
        raise_on_duplicate: If true, a duplicate's `delay()` raises `DuplicateTaskError`. None: the
            app's setting `singleton_raise_on_duplicate` counts.
        lock_expiry: Seconds that a message's reservation lasts if nothing notices its end.
            None: the app's setting `singleton_lock_expiry`, else a day.

    Raises:
        ConfigurationError: When the task is made: an option is invalid.
    """

    abstract = True
    unique_on: str | list[str] | tuple[str, ...] | None = None
    raise_on_duplicate: bool | None = None
    lock_expiry: float | None = None

    @classmethod
    def _class_options(cls) -> dict[str, Any]:
        moved: dict[str, Any] = {"scope": "until_executed"}
        unique_on = cls.unique_on
        if unique_on:
            if not isinstance(unique_on, (str, list, tuple, set, frozenset)):
                raise ConfigurationError(
                    "unique_on must be the name of an argument or a list of such names; it is"
                    f" {unique_on!r}"
                )
            moved["key"] = [unique_on] if isinstance(unique_on, str) else list(unique_on)
        if cls.lock_expiry is not None:
            moved["reserve_ttl"] = cls.lock_expiry
        declared = super()._class_options()
        declared.pop("expiry")  # `lock_expiry` looks like an option of ours, `lock_*`
        return {**moved, **declared}

    @classmethod
    def on_bound(cls, app: Any) -> None:
        """Check the app's settings. Celery calls this when the task is bound to the app."""
        super().on_bound(app)
        for name in ("singleton_backend_class", "singleton_backend_kwargs"):
            if app.conf.get("redlock_nodes") is None and app.conf.get(name):
                raise ConfigurationError(
                    f"{name} is not carried over: remove it, and set redlock_nodes to the URLs of"
                    " one or more independent Redis masters"
                )

    def apply_async(
        self,
        args: Any = None,
        kwargs: Any = None,
        task_id: str | None = None,
        *others: Any,
        **options: Any,
    ) -> Any:
        """Publish the task, unless one with the same key is queued or runs.

        The arguments are Celery's.

        Returns:
            The result of the new task, or of the one that is queued or runs.

        Raises:
            DuplicateTaskError: It is a duplicate, and `raise_on_duplicate` is on.
        """
        conf = self.app.conf
        ttl = None
        if self.lock_expiry is None:
            ttl = conf.get("singleton_lock_expiry")
            ttl = NEVER_EXPIRES if ttl is None else ttl
        result, is_other = self.publish(ttl, args, kwargs, task_id, *others, **options)
        raises = self.raise_on_duplicate
        if raises is None:
            raises = conf.get("singleton_raise_on_duplicate")
        if raises and is_other:
            raise DuplicateTaskError(
                f"Attempted to queue a duplicate of task ID {result.id}", str(result.id)
            )
        return result


def clear_locks(app: Any) -> None:
    """Write a warning to the log, and do nothing else.

    A dead worker's locks are released by other processes, or expire. To delete those of a live
    worker would let a second body run.
    """
    logger.warning(
        "clear_locks() does nothing, because locks of dead workers end without it: remove it",
        extra=event("clear_locks_ignored"),
    )
