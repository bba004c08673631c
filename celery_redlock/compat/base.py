"""The common base of both libraries' tasks: they are published under a reservation."""

from __future__ import annotations

from typing import Any

from celery.result import AsyncResult
from celery.utils import uuid

from celery_redlock.config.checks import DAY
from celery_redlock.task import SingletonTask

NEVER_EXPIRES = DAY
"""Seconds in place of "never expires", so that the reservation of a purged message does end."""


class ReservedTask(SingletonTask):
    """A task that is queued or runs once at a time per key."""

    abstract = True

    def publish(
        self,
        reserve_ttl: float | None,
        args: Any,
        kwargs: Any,
        task_id: str | None,
        *others: Any,
        **options: Any,
    ) -> tuple[AsyncResult[Any], bool]:
        """Publish the task as `apply_async` does, with a reservation of `reserve_ttl` seconds.

        Returns:
            The result of the new task, or of the one that is queued or runs; and True if it is the
            latter.
        """
        if reserve_ttl is not None:
            options["lock"] = {"reserve_ttl": reserve_ttl, **options.get("lock", {})}
        # The ids are compared, and on_duplicate="raise" is not used: in a canvas, whose ids are
        # promised to others, a duplicate is published and detected when it runs. There it must be
        # skipped, not fail.
        task_id = task_id or uuid()
        result = super().apply_async(args, kwargs, task_id, *others, **options)
        return result, result.id != task_id
