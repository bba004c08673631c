"""Tasks of a worker in the ZooKeeper campaign: bodies that rely on the holders' locks."""

from __future__ import annotations

import os
import random
import threading
from functools import cache, partial
from pathlib import Path
from typing import TextIO

from celery import Celery

from celery_redlock import Redlock, SingletonTask, current_lease
from tests.campaign.worker.zookeeper_holder import expire, rely

EXPIRES = 0.1
"""The part of the bodies that end the session of their process."""

app = Celery("zookeeper_tasks")
app.conf.update(
    broker_url=os.environ.get("CAMPAIGN_BROKER", "memory://"),
    redlock_nodes=[os.environ.get("CAMPAIGN_NODES", "zookeeper://127.0.0.1:1?ttl=5")],
    redlock_retry_backoff=0.2,
    redlock_retry_backoff_max=1.0,
    task_ignore_result=True,
    worker_prefetch_multiplier=1,
    broker_connection_retry_on_startup=True,
)


@cache
def log_of(pid: int) -> TextIO:
    """Return the log of a process. It stays open: a session may be ended after its body."""
    return Path(os.environ["CAMPAIGN_LOGS"], f"body-{pid}.log").open("a", buffering=1)


@app.task(base=SingletonTask, name="body", lock_key="<name>", lock_fencing=True)
def body(name: str, seconds: float) -> None:
    """Rely on the lock for a while; some bodies end the session that it is in."""
    choose, log = random.Random(), log_of(os.getpid())
    if choose.random() < EXPIRES:
        expiring = partial(expire, Redlock.from_app(app), log)
        threading.Timer(choose.uniform(0.0, seconds), expiring).start()
    rely(current_lease(), name, seconds, log)
