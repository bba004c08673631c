"""An app whose workers show their metrics. Imported by them only; settings: `tasks.py`."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from celery import Celery
from prometheus_client import Gauge

from celery_redlock import SingletonTask, metrics
from tests.support.machine import end_with_parent

NAME = "tests.promises.worker.metering"

end_with_parent()

app = Celery(NAME)
app.conf.update(json.loads(os.environ["TEST_CONF"]))
metrics.install(port=0)

ALIVE = Gauge("test_alive", "The program's own: who is at work", multiprocess_mode="livesum")


@app.task(base=SingletonTask, lock_key="k:{key}")
def meet(key: str, path: str, count: int) -> int:
    """Waits until so many are at work at the same time; which process this is."""
    ALIVE.set(1)
    Path(path, key).touch()
    while len(os.listdir(path)) < count:
        time.sleep(0.005)
    return os.getpid()


@app.task(base=SingletonTask, lock_key="k:{key}", lock_on_conflict="skip", lock_wait=0.0)
def skips(key: str) -> None:
    pass
