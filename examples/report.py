"""A report of which only one rebuild runs at a time; a second request meanwhile is skipped.

In this directory, with a Redis on this machine (for more than one see orders.py):

    celery -A report worker --loglevel INFO     # in one terminal
    python report.py                            # in another
"""

from __future__ import annotations

import os
import time

from celery import Celery
from celery.utils.log import get_task_logger

from celery_redlock import SingletonTask, Skipped, current_lease

BROKER = os.environ.get("CELERY_BROKER_URL", "redis://localhost:6379/0")

app = Celery("report", broker=BROKER, backend=BROKER)
app.conf.redlock_nodes = os.environ.get("REDLOCK_NODES", "redis://localhost:6379/1").split(",")

logger = get_task_logger(__name__)


@app.task(
    base=SingletonTask,
    lock_key="report:<report_id>",  # without it: the task's name and all its arguments
    lock_on_conflict="skip",  # the default is "retry"; another choice is "raise"
    lock_wait=0.0,  # waiting is useless: the report is being made
    lock_ttl=2.0,  # short, so that it is free soon after a crash; extended while the task runs
)
def rebuild(report_id: int, pages: int = 6) -> str:
    """Rebuild a report, page by page."""
    lease = current_lease()
    for page in range(1, pages + 1):
        # LeaseLost without enough time for a page: another task may be writing it already.
        lease.ensure(0.5)
        time.sleep(0.5)
        logger.info("report %s, page %d; %.1f s left", report_id, page, lease.remaining())
    return f"report {report_id} has {pages} pages"


if __name__ == "__main__":
    asked = [rebuild.delay(7), rebuild.delay(7), rebuild.delay(7, pages=8), rebuild.delay(8)]
    for request in asked:
        result = request.get(timeout=60)
        skipped = Skipped.of(result)  # not None if the task was skipped
        print(f"skipped, {skipped['resource']} is being made" if skipped else result)
