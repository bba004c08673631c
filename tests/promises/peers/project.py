"""The tasks of these tests, for the sender and the workers alike.

A reservation is taken where a task is published: a sender that knows only names would take none.
"""

from __future__ import annotations

import os
import time
import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from celery import Celery, Task

from celery_redlock import SingletonTask, current_lease
from tests.support.bodies import VARIABLE, note

SHORT = 1.0
"""Seconds; a ttl that a test can see the end of."""


def occupy(task: Any, key: str, seconds: float, log: str) -> None:
    """Run a body from `enter` to `exit`, with signs of life between, until the test ends it."""
    run = uuid.uuid4().hex[:8]
    end = time.monotonic() + seconds
    told = Path(f"{log or os.environ[VARIABLE]}.{key}")
    note("enter", f"k:{key}", task.request.id, run, log)
    try:
        while time.monotonic() < end and not told.exists():
            note("alive", f"k:{key}", task.request.id, run, log)
            time.sleep(0.005)
    finally:
        note("exit", f"k:{key}", task.request.id, run, log)


def define(app: Celery, log: str = "") -> SimpleNamespace:
    """Make the tasks on an app.

    Args:
        app: Of a worker, or of a sender.
        log: Where its bodies write; what the environment says if empty.
    """

    class Whole(SingletonTask):
        """A task with one call at a time from its publication to its end."""

        abstract = True
        lock_scope = "until_executed"

    def work(self: Task, key: str, seconds: float = 0.05) -> str:
        occupy(self, key, seconds, log)
        return "done"

    def task(function: Any, name: str, **options: Any) -> Any:
        return app.task(base=Whole, bind=True, name=f"peers.{name}", shared=False, **options)(
            function
        )

    keyed = {"lock_key": "k:{key}"}
    made = SimpleNamespace(
        work=task(work, "work", **keyed),
        brief=task(work, "brief", lock_ttl=SHORT, **keyed),
        late=task(work, "late", acks_late=True, **keyed),
    )

    def tries(self: Task, key: str) -> int:
        occupy(self, key, 0.1, log)
        if self.request.retries < 2:
            raise self.retry(countdown=0.3)
        return self.request.retries

    made.tries = task(tries, "tries", **keyed)

    def call(self: Task, mark: str, a: Any, b: Any = 2) -> str:
        """Return the key, made of the name and all arguments; `mark` tells tests apart."""
        return current_lease().resource

    made.call = task(call, "call")

    def tick(self: Task) -> None:
        occupy(self, "beaten", 0.02, log)

    made.tick = task(tick, "tick", lock_key="k:beaten")

    @app.task(name="peers.sink", shared=False)
    def sink(result: Any) -> Any:
        return result

    made.sink = sink
    return made
