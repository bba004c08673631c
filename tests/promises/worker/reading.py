"""The tasks of readers and writers: beside all others, where the nodes are Redis."""

from __future__ import annotations

import uuid

from celery import Task

from celery_redlock import locked
from tests.promises.worker.tasks import app, occupy

__all__ = ["app"]


@app.task(bind=True, acks_late=True, reject_on_worker_lost=True)
@locked("shared:<key>", shared=True, ttl=3)
def read(self: Task, key: str, seconds: float) -> str:
    occupy(self, f"read-{key}-{uuid.uuid4().hex[:8]}", seconds)
    return "read"


@app.task(bind=True)
@locked("shared:<key>", shared=True, on_conflict="skip", ttl=3)
def read_or_skip(self: Task, key: str, seconds: float) -> str:
    occupy(self, f"read-{key}-{uuid.uuid4().hex[:8]}", seconds)
    return "read"


@app.task(bind=True)
@locked("shared:<key>", ttl=3)
def write(self: Task, key: str, seconds: float) -> str:
    occupy(self, f"write-{key}", seconds)
    return "wrote"


@app.task(bind=True)
@locked("shared:<key>", on_conflict="replace", wait=5)
def write_instead(self: Task, key: str, seconds: float) -> str:
    occupy(self, f"write-{key}", seconds)
    return "wrote"
