"""Send messages of locked tasks that wait in a worker again, before their broker drops them.

A quorum queue counts how often a message comes back to it, and drops it after a number of times
(20 in RabbitMQ 4). With a direct exchange a worker holds a message until its ETA, and gives it back
when it ends. So a task that waits for its lock is returned by one worker after the other during
deployments, though its body never ran. A message that still waits for its ETA cannot have begun.
So the count, whose purpose is to stop a body that kills its workers, may begin again.
"""

from __future__ import annotations

import logging
import time
from datetime import datetime, timezone
from typing import Any

from celery.utils.imports import instantiate

from ..config.task_lock import lock_of
from ..messages.broker import has_quorum_queues, may_be_dropped, queue_of, without_delays
from ..protocol.texts import event, printable

__all__ = ["begin"]

logger = logging.getLogger("celery_redlock.worker")

MIN_WAIT_S = 1.0
"""Seconds to its ETA below which a message is not sent again: it is about to run."""


def begin(app: Any) -> None:
    """Check the messages of the locked tasks of `app` when a worker receives them."""
    if not has_quorum_queues(app):
        return
    for task in app.tasks.values():
        if lock_of(task) is not None and not isinstance(task.Strategy, _Strategy):
            task.Strategy = _Strategy(task.Strategy)


class _Strategy:
    """Factory of a task's message handler (`Task.Strategy`), around the previous one."""

    def __init__(self, previous: Any) -> None:
        self._previous = previous

    def __call__(self, task: Any, app: Any, consumer: Any, **options: Any) -> Any:
        handler = instantiate(self._previous, task, app, consumer, **options)

        def receive(message: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                if _waits(message) and _resend(app, message):
                    return None
            except Exception:
                logger.exception(
                    "%s: one of its messages could not be renewed, and the broker may drop it",
                    task.name,
                    extra=event("delivery_not_renewed"),
                )
            return handler(message, *args, **kwargs)

        return receive


def _waits(message: Any) -> bool:
    eta = (message.headers or {}).get("eta")
    if not isinstance(eta, str):
        return False
    due = datetime.fromisoformat(eta.replace("Z", "+00:00"))
    due = due if due.tzinfo is not None else due.replace(tzinfo=timezone.utc)
    return due.timestamp() > time.time() + MIN_WAIT_S


def _resend(app: Any, message: Any) -> bool:
    """Send a message to its queue again, if it is time, and acknowledge the old one."""
    request = {**message.headers, "delivery_info": message.delivery_info}
    queue = queue_of(app, request)
    if queue is None or not may_be_dropped(app, request):
        return False
    with app.connection_for_write() as connection:
        # The old message is acknowledged only after the broker has confirmed the new one.
        connection.transport_options = {**connection.transport_options, "confirm_publish": True}
        connection.Producer(auto_declare=False).publish(
            message.body,
            exchange="",
            routing_key=queue.name,
            headers=without_delays(message.headers),
            content_type=message.content_type,
            content_encoding=message.content_encoding,
            **{
                name: message.properties[name]
                for name in ("correlation_id", "delivery_mode", "priority", "reply_to")
                if name in message.properties
            },
        )
    message.ack()
    logger.info(
        "%s was sent again: it waits, and %s would drop it at its next return",
        printable(f"{message.headers.get('task')}[{message.headers.get('id')}]"),
        printable(queue.name),
        extra=event("delivery_renewed"),
    )
    return True
