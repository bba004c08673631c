"""Tasks that start by a rate, and the oracle that counts their starts."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from celery import Celery, Task
from celery.exceptions import Reject

from celery_redlock import SingletonTask, current_lease
from tests.support.bodies import VARIABLE, note, read

if TYPE_CHECKING:  # workers import this, and would take longer for it than for all else
    from tests.support.cluster import Cluster

STARTS, WINDOW = 2, 1.0
"""Rate of `paced`: starts within a window, and the window in seconds."""


def declare(app: Celery, name: str) -> None:
    """Make the tasks of an app that workers run."""

    def task(called: str, **options: Any) -> None:
        given = {"lock_key": "pace:{key}", "lock_rate": "2/s", **options}
        # Not shared: an app of another test would have to expect locks of a minute.
        app.task(base=SingletonTask, bind=True, shared=False, name=f"{name}.{called}", **given)(
            _body
        )

    task("paced")
    task("paced_late", acks_late=True, reject_on_worker_lost=True)
    task("paced_skip", lock_on_conflict="skip")
    task("paced_once", lock_rate="1/5s", lock_scope="until_and_while_executing")
    task("paced_rarely", lock_rate="1/5s")
    task("paced_slowly", lock_rate="1/1m")


def _body(self: Task, key: str, then: str = "return", seconds: float = 0.0) -> Any:
    """Write a start. Bodies of a key may overlap: only the starts count."""
    note("start", f"pace:{key}", self.request.id)
    first = sum(one.task == self.request.id for one in _starts(os.environ[VARIABLE], key)) == 1
    told, until = f"{os.environ[VARIABLE]}.{key}", time.monotonic() + seconds
    while first and time.monotonic() < until and not os.path.exists(told):
        time.sleep(0.01)
    if then == "raise":
        raise ValueError("as asked")
    if then == "retry" and first:
        raise self.retry(countdown=0)
    if then == "SIGKILL" and first:
        os.kill(os.getpid(), signal.SIGKILL)
    if then in ("reject", "requeue") and first:
        raise Reject("as asked", requeue=then == "requeue")
    lease = current_lease()
    lease.ensure(3600.0)
    return [lease.resource, lease.token, lease.lost]


def _starts(path: str, key: str) -> list[Any]:
    return [one for one in read(path) if (one.kind, one.resource) == ("start", f"pace:{key}")]


def starts(cluster: Cluster, key: str) -> list[float]:
    """Return when bodies of a key have started, by one clock."""
    return sorted(one.at for one in cluster.lines("start", f"pace:{key}"))


def crowded(times: Sequence[float], most: int = STARTS, window: float = WINDOW) -> list[float]:
    """Return the span of each group of more than `most` starts that fits into a window."""
    spans = (last - first for first, last in zip(times, times[most:], strict=False))
    return [span for span in spans if span < window]
