"""Periodic tasks, from as many beats as you like: each tick is sent once, each task runs alone.

In this directory, with a Redis on this machine (for more than one see orders.py):

    celery -A beat beat --loglevel INFO -s first.schedule     # in one terminal
    celery -A beat beat --loglevel INFO -s second.schedule    # in another: a file of its own
    celery -A beat worker --loglevel INFO                     # in a third

Then kill either beat: the other goes on.
"""

from __future__ import annotations

import os
import time

from celery import Celery
from celery.schedules import crontab
from celery.utils.log import get_task_logger

from celery_redlock import locked

BROKER = os.environ.get("CELERY_BROKER_URL", "redis://localhost:6379/0")

# Ticks are claimed for app and entry: the app's name must be the same in all its beats.
app = Celery("beat", broker=BROKER)
# With nodes, beats claim their ticks there; redlock_beat = False would switch that off.
app.conf.redlock_nodes = os.environ.get("REDLOCK_NODES", "redis://localhost:6379/1").split(",")
app.conf.redlock_ttl = 10.0
app.conf.beat_schedule = {
    "close the books": {"task": "beat.close_books", "schedule": crontab()},  # each full minute
    "fetch mail": {"task": "beat.fetch_mail", "schedule": 2.0},
    "rebuild index": {"task": "beat.rebuild_index", "schedule": 2.0},  # and takes 5 s
}

logger = get_task_logger(__name__)


@app.task
def close_books() -> None:
    """Run at a due time that all beats share: it is sent for 12:00 once, by the first beat."""
    logger.info("books are closed")


@app.task
def fetch_mail() -> None:
    """Run every two seconds, counted from the last run, whichever beat sent that."""
    logger.info("mail is fetched")


# The beats' claim does not make a tick wait for the last run; the task's own lock does. The
# template has no argument, so there is one index; without on_conflict="skip" the runs would queue.
@app.task
@locked("index", on_conflict="skip")
def rebuild_index() -> None:
    """Take longer than the interval: the ticks that come meanwhile are skipped."""
    logger.info("index: begin")
    time.sleep(5.0)
    logger.info("index: end")
