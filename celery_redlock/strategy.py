"""How deliveries of locked tasks come to be parked: Celery's own hook, `Task.Strategy`.

Celery gives every task a strategy, made anew whenever the worker has connected to its broker; ours
is Celery's own (or the user's), made after the consumer was told to ask us before it gives a
delivery to the pool.
"""

from __future__ import annotations

import contextlib
import logging
from typing import Any

from celery.utils.imports import instantiate

from .parking import Parking
from .settings import enabled
from .task import lock_of
from .waiting import parkable, set_at_work, waits

__all__ = ["begin"]

logger = logging.getLogger("celery_redlock.parking")


def begin(app: Any) -> None:
    """The main process, before its pool is forked: park deliveries of the tasks of `app`."""
    set_at_work(False)
    conf = app.conf
    if not conf.get("redlock_parking", True) or not enabled(conf):
        return
    if conf.get("worker_disable_prefetch", False):
        return  # what is parked would count as what is at work
    for task in app.tasks.values():
        if _parks(task):
            if not isinstance(task.Strategy, _Strategy):
                task.Strategy = _Strategy(task.Strategy)
            set_at_work(True)


def _parks(task: Any) -> bool:
    lock = lock_of(task)
    return lock is not None and parkable(lock.options(task.app))


class _Strategy:
    """Makes a task's handler of messages: `Task.Strategy`.

    Args:
        previous: What it was.
    """

    def __init__(self, previous: Any) -> None:
        self._previous = previous

    def __call__(self, task: Any, app: Any, consumer: Any, **options: Any) -> Any:
        parking: Parking | None = None
        try:
            parking = _parking_of(consumer)
            parking.tasks.add(task.name)
            parking.connected()
        except Exception:
            logger.exception("deliveries are not parked")
        handler = instantiate(self._previous, task, app, consumer, **options)

        def receive(message: Any, *args: Any, **kwargs: Any) -> Any:
            with contextlib.suppress(Exception):
                if parking is not None and parking.open and waits(message.headers):
                    message.headers["eta"] = None  # the gate knows better when it may go
            return handler(message, *args, **kwargs)

        return receive


def _parking_of(consumer: Any) -> Parking:
    parking = consumer.on_task_request
    if not isinstance(parking, Parking):
        parking = consumer.on_task_request = Parking(consumer)
    return parking
