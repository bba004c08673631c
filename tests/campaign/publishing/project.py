"""The app of the campaign of the publishing side: what producers call, and workers run.

It is the app of `tests.campaign.worker.project`, with its accounts of messages, and with tasks of
its own. A body writes `enter` and `exit`, with the number of the call that it is for. With
TEST_PLANTED, a bug is planted into the library (`mutants.py`): only here, and never without being
asked.
"""

from __future__ import annotations

import os
import time
from typing import Any

from celery import Task
from celery.signals import before_task_publish, task_revoked

from celery_redlock import SingletonTask, locked
from tests.campaign.worker.project import app, pen

if os.environ.get("TEST_PLANTED"):
    from tests.campaign.publishing import mutants

    mutants.plant(os.environ["TEST_PLANTED"])

KEPT = 2.0
"""Seconds for which a key is reserved that is kept reserved when a body has ended."""
HEADER = "redlock_reservation"


def what_of(name: str, key: str) -> str:
    """Return what a call asks for: the task's short name and its key."""
    return f"{name.rpartition('.')[2]}:{key}"


def occupy(task: Task, key: str, number: str, seconds: float) -> None:
    """Run for some seconds, and write when that began and ended."""
    what = what_of(task.name, key)
    pen.write("enter", task.request.id, number, what)
    time.sleep(seconds)
    pen.write("exit", task.request.id, number, what)


@app.task(base=SingletonTask, bind=True, lock_key="debounced:{key}",
          lock_scope="until_and_while_executing", lock_on_duplicate="replace")  # fmt: skip
def debounced(self: Task, key: str, number: str, seconds: float) -> None:
    """The newest call runs, and takes the place of those that are queued."""
    occupy(self, key, number, seconds)


@app.task(base=SingletonTask, bind=True, lock_key="settled:{key}", acks_late=True,
          lock_scope="until_and_while_executing", lock_on_duplicate="replace")  # fmt: skip
def settled(self: Task, key: str, number: str, seconds: float) -> None:
    """The same, acknowledged late."""
    occupy(self, key, number, seconds)


@app.task(base=SingletonTask, bind=True, lock_key="begun:{key}",
          lock_scope="until_executing", lock_on_duplicate="replace")  # fmt: skip
def begun(self: Task, key: str, number: str, seconds: float) -> None:
    """The same, without a lock."""
    occupy(self, key, number, seconds)


@app.task(base=SingletonTask, bind=True, lock_key="once:{key}", lock_scope="until_executed")
def once(self: Task, key: str, number: str, seconds: float) -> None:
    """Run, as a task of which one may be queued or at work."""
    occupy(self, key, number, seconds)


@app.task(base=SingletonTask, bind=True, lock_key="surely:{key}", lock_scope="until_executed",
          acks_late=True)  # fmt: skip
def surely(self: Task, key: str, number: str, seconds: float) -> None:
    """The same, acknowledged late."""
    occupy(self, key, number, seconds)


@app.task(base=SingletonTask, bind=True, lock_key="succeeded:{key}",
          lock_scope="until_succeeded", lock_reserve_ttl=KEPT)  # fmt: skip
def succeeded(self: Task, key: str, number: str, seconds: float) -> None:
    """Run, as a task of which one may be queued within so many seconds of the end of a body."""
    occupy(self, key, number, seconds)


@app.task(base=SingletonTask, bind=True, lock_key="expired:{key}", lock_scope="until_expired",
          lock_reserve_ttl=KEPT)  # fmt: skip
def expired(self: Task, key: str, number: str, seconds: float) -> None:
    """Run, as a task of which one may be queued within so many seconds of the time it may start."""
    occupy(self, key, number, seconds)


@app.task(base=SingletonTask, bind=True, lock_key="plain:{key}")
def plain(self: Task, key: str, number: str, seconds: float) -> None:
    """Waits its turn; every call runs."""
    occupy(self, key, number, seconds)


@app.task(bind=True)
def failing(self: Task, key: str, number: str, seconds: float) -> None:
    """Fails, and is called with an error callback."""
    occupy(self, key, number, seconds)
    raise ValueError("as asked")


@app.task
@locked("plain:<key>")
def compensate(request: Any, exc: Any, traceback: Any, key: str, number: str) -> None:
    """An error callback of Celery's newer kind, with the key of `plain`."""
    for kind in ("enter", "exit"):
        pen.write(kind, "", number, what_of("compensate", key))


@before_task_publish.connect
def out(sender: Any = None, headers: Any = None, body: Any = None, **_signal: Any) -> None:
    """Write which message is about to leave, and whether it has a reservation."""
    args = body[0] if isinstance(body, tuple) else ()
    if len(args) == 3:
        reserved = bool((headers.get(HEADER) or {}).get("token"))
        pen.write(
            "out", headers["id"], args[1], what_of(str(sender), args[0]), "", None, 0.0, reserved
        )


@task_revoked.connect
def revoked(request: Any = None, **_signal: Any) -> None:
    """Write that a worker has discarded a message because it was revoked."""
    pen.write("revoked", request.id)
