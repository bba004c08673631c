"""Signals of locks: a log line for a long wait, an alarm for a lost lock.

In this directory, with a Redis on this machine (for more than one see orders.py):

    celery -A signals worker --loglevel INFO     # in one terminal
    python signals.py                            # in another

Receivers are called in the process of the event. In a worker with child processes that is mostly a
child, so counts must be gathered from all of them, as celery_redlock.metrics does.
"""

from __future__ import annotations

import os
import time
from typing import Any

from celery import Celery
from celery.utils.log import get_task_logger

from celery_redlock import LeaseLost, SingletonTask, Skipped
from celery_redlock.signals import lock_acquired, lock_lost, lock_released, task_skipped

BROKER = os.environ.get("CELERY_BROKER_URL", "redis://localhost:6379/0")

app = Celery("signals", broker=BROKER, backend=BROKER)
app.conf.redlock_nodes = os.environ.get("REDLOCK_NODES", "redis://localhost:6379/1").split(",")

logger = get_task_logger(__name__)


@app.task(base=SingletonTask, lock_key="report:<report_id>")
def rebuild(report_id: int, seconds: float = 0.7) -> str:
    """Take a while. Further calls wait meanwhile."""
    time.sleep(seconds)
    return f"report {report_id} is rebuilt"


@app.task(base=SingletonTask, lock_key="report:<report_id>", lock_on_conflict="skip")
def refresh(report_id: int) -> str:
    """Be skipped while the report is rebuilt."""
    return f"report {report_id} is fresh"


@lock_acquired.connect
def note_long_waits(sender: Any = None, waited: float = 0.0, **more: Any) -> None:
    """Log long waits; `waited` is the whole time that the task has waited, in all places."""
    if waited > 0.2:
        logger.info("%s has waited %.1f s for %s", sender.name, waited, more["resource"])


@lock_released.connect(sender=rebuild)  # only for this task
def note_times(held_for: float = 0.0, held: bool = True, **more: Any) -> None:
    """Log the time of a lock; `held` is False if it was lost before."""
    logger.info("%s was locked for %.1f s, to the end: %s", more["resource"], held_for, held)


@lock_lost.connect
def page_somebody(loss: LeaseLost | None = None, **more: Any) -> None:
    """Raise an alarm. The thread that extends all leases calls this, so it must be quick."""
    if loss is not None:
        logger.critical("LOST %s after %.1f s: %s", loss.resource, loss.held_for, loss.reason)


@task_skipped.connect
def note_skipped(sender: Any = None, holder: Any = None, where: str = "", **more: Any) -> None:
    """Log a task that is not run or, if `where` is "publish", not even sent."""
    logger.info("%s is skipped (%s): %s has it", sender.name, where, holder)


if __name__ == "__main__":
    first, second = rebuild.delay(7), rebuild.delay(7)
    time.sleep(0.2)
    skipped = refresh.delay(7)
    print(first.get(timeout=60))
    print(second.get(timeout=60))
    print("skipped" if Skipped.of(skipped.get(timeout=60)) else "ran")
