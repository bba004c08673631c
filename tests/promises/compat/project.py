"""The code of celery-once's and celery-singleton's READMEs, with the import changed.

Their tasks sleep for seconds; here they sleep until they are woken, so that no test races them.
"""

from __future__ import annotations

import os
import time
from functools import partial
from types import SimpleNamespace
from typing import Any

from celery import Celery

from celery_redlock.compat.once import QueueOnce
from celery_redlock.compat.singleton import Singleton

WAKE = "TEST_WAKE"
"""A file; while it is not there, tasks sleep."""


def sleep(seconds: float) -> None:
    end = time.monotonic() + seconds
    while not os.path.exists(os.environ[WAKE]) and time.monotonic() < end:
        time.sleep(0.005)


def define_once(celery: Any) -> SimpleNamespace:
    """Define the tasks of celery-once."""

    @celery.task(base=QueueOnce)
    def slow_task():
        sleep(30)
        return "Done!"

    @celery.task(base=QueueOnce)
    def example(time):
        sleep(time)
        return time

    @celery.task(base=QueueOnce)
    def fails():
        sleep(30)
        raise ValueError("as asked")

    @celery.task(base=QueueOnce, once={"graceful": True})
    def graceful_task():
        sleep(30)
        return "Done!"

    @celery.task(base=QueueOnce)
    def slow_add(a, b):
        sleep(30)
        return a + b

    @celery.task(base=QueueOnce, once={"keys": ["a"]})
    def slow_add_a(a, b):
        sleep(30)
        return a + b

    @celery.task(base=QueueOnce, once={"keys": []})
    def slow_add_none(a, b):
        sleep(30)
        return a + b

    @celery.task(base=QueueOnce, once={"timeout": 60 * 60 * 10})
    def long_running_task():
        sleep(60 * 60 * 3)

    @celery.task(base=QueueOnce, once={"unlock_before_run": True})
    def unlocked_task():
        sleep(30)
        return "Done!"

    class ContextQueueOnce(QueueOnce):
        """A task class as in the README, for Flask."""

        def __call__(self, *args, **kwargs):
            os.environ["CONTEXT"] = "inside"
            try:
                return super().__call__(*args, **kwargs)
            finally:
                del os.environ["CONTEXT"]

    @celery.task(base=ContextQueueOnce)
    def example_task(value):
        return os.environ["CONTEXT"]

    return SimpleNamespace(**locals())


def define_singleton(celery_app: Any) -> SimpleNamespace:
    """Define the tasks of celery-singleton."""
    app = celery_app

    @celery_app.task(base=Singleton)
    def do_stuff(*args, **kwargs):
        sleep(4)
        return "I just woke up"

    @app.task(base=Singleton, unique_on=["username"])
    def do_something(username, otherarg=None):
        sleep(5)

    @app.task(base=Singleton, unique_on="username")
    def do_something_named(username, otherarg=None):
        sleep(5)

    @app.task(base=Singleton, raise_on_duplicate=True)
    def do_something_raising(username):
        sleep(5)

    @app.task(base=Singleton, raise_on_duplicate=False)
    def do_something_quietly(username):
        sleep(5)

    @app.task(base=Singleton, lock_expiry=1, lock_ttl=1)
    def runs_for_12_seconds():
        sleep(12)

    return SimpleNamespace(**locals())


def define(app: Celery) -> SimpleNamespace:
    """Define all of them, and one task that is neither's."""

    mine = SimpleNamespace(task=partial(app.task, shared=False))  # not of the tests' other apps

    @mine.task()
    def sink(results: Any) -> Any:
        return results

    return SimpleNamespace(once=define_once(mine), singleton=define_singleton(mine), sink=sink)
