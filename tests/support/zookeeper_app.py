"""Tasks whose locks are in ZooKeeper. A body writes its pid into a file, and waits for another."""

from __future__ import annotations

import os
import time
from pathlib import Path

from celery import Celery

from celery_redlock import SingletonTask

app = Celery("zookeeper_app")
app.conf.update(
    broker_url=os.environ.get("ZOOKEEPER_APP_BROKER", "memory://"),
    result_backend=os.environ.get("ZOOKEEPER_APP_BROKER", "cache+memory://"),
    redlock_nodes=[os.environ.get("ZOOKEEPER_APP_NODES", "zookeeper://127.0.0.1:1?ttl=5")],
    redlock_retry_backoff=0.2,
    redlock_retry_backoff_max=0.5,
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    worker_prefetch_multiplier=1,
    broker_connection_retry_on_startup=True,
)


@app.task(base=SingletonTask, lock_key="<key>")
def work(key: str, begun: str, end: str, how: str = "") -> int:
    """Write our pid, wait, and end in some way."""
    with open(begun, "a") as file:
        file.write(f"{os.getpid()}\n")
    while not Path(end).exists():
        time.sleep(0.02)
    if how == "raise":
        raise ValueError(how)
    return os.getpid()
