"""The Celery applications of the benchmarks: what they have in common."""

from __future__ import annotations

import os
from typing import Any

from celery import Celery

__all__ = ["application"]


def application(name: str, **conf: Any) -> Celery:
    """Return an application for the broker and the nodes of the environment."""
    app = Celery(name, broker=os.environ["BENCH_BROKER"])
    app.conf.update(
        task_ignore_result=True,
        broker_connection_retry=False,  # a worker whose benchmark was killed ends with its broker
        broker_connection_retry_on_startup=False,
        redlock_nodes=os.environ["BENCH_NODES"].split(),
        **conf,
    )
    return app
