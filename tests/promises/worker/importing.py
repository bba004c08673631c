"""The app of a worker whose tasks report the modules they have loaded: see `test_loading.py`."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from celery import Celery, signals

from celery_redlock import SingletonTask
from tests.support.machine import end_with_parent

end_with_parent()

app = Celery("tests.promises.worker.importing")
app.conf.update(json.loads(os.environ["TEST_CONF"]))

_before: set[str] = set()


def ours() -> set[str]:
    return {name for name in sys.modules if name.partition(".")[0] == "celery_redlock"}


@signals.worker_before_create_process.connect
@signals.worker_ready.connect
def begin(**_signal: Any) -> None:
    """Before the first child of a pool is forked, or where nothing is forked, before any task."""
    _before.update(_before or ours())


@app.task(base=SingletonTask, lock_key="p:{key}", lock_scope="until_executed")
def publishes(key: str) -> None: ...


@app.task(base=SingletonTask, lock_key="k:{key}")
def tells(key: str) -> list[str]:
    """Return the modules loaded so far: by a refused delivery, and by another task's body."""
    # Where nobody takes it: billiard's child waits for up to 30 s, if it ends a task as its worker
    # stops, whether that has read of the end.
    publishes.apply_async((key,), queue=f"nobody-{key}")
    return sorted(ours() - _before) if _before else ["nothing was noted"]
