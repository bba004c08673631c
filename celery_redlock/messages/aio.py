"""Publish from a coroutine without blocking its event loop."""

from __future__ import annotations

import asyncio
import contextvars
import logging
from functools import partial
from typing import Any

from celery import Task
from celery.result import AsyncResult

from ..protocol.texts import event

__all__ = ["redlock_publish"]

logger = logging.getLogger("celery_redlock.task")


async def redlock_publish(
    task: Task[..., Any],
    args: tuple[Any, ...] | None = None,
    kwargs: dict[str, Any] | None = None,
    **options: Any,
) -> AsyncResult[Any]:
    """Publish a task as `apply_async` does, in a thread: kombu blocks, and so does a reservation.

    If the coroutine is cancelled meanwhile, the thread still goes on, so there is never a
    reservation without its message. If publishing fails after the cancellation, it is logged.

    Args:
        task: Any task, with a lock or without.
        args, kwargs, options: As for `apply_async`.

    Raises:
        DuplicateTask: As from `apply_async`, like every other error of it.
        TypeError: `task` is not a task.
    """
    if not hasattr(task, "apply_async"):
        raise TypeError(f"redlock_publish takes a task, and not {task!r}: its name is not enough")
    publish = partial(task.apply_async, args, kwargs, **options)
    context = contextvars.copy_context()
    publishing = asyncio.get_running_loop().run_in_executor(None, context.run, publish)
    try:
        return await asyncio.shield(publishing)
    except asyncio.CancelledError:
        publishing.add_done_callback(partial(_log_failure, task.name))
        raise


def _log_failure(name: str, published: asyncio.Future[AsyncResult[Any]]) -> None:
    if not published.cancelled() and (error := published.exception()) is not None:
        logger.error(
            "%s was not published, and the coroutine that asked for it had been cancelled: %s",
            name,
            error,
            exc_info=error,
            extra=event("publication_failed"),
        )
