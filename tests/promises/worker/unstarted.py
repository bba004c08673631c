"""Endings of messages whose body never begins: nothing may be taken for them."""

from __future__ import annotations

import json
import uuid
from typing import Any

from celery.result import AsyncResult

from tests.promises.worker.ending import NOBODY, Ending, Row, Stage
from tests.support.cluster import TASKS

POOLS = ("prefork", "threads", "solo", "gevent")
"""All that are supported; gevent where it is installed."""
ONE_PROCESS = POOLS[1:]
"""Pools whose bodies run in the main process."""


def _nothing(stage: Stage, state: str) -> Row:
    message = stage.over(state, runs=0)
    assert not stage.monitor.taken(f"k:{stage.key}")
    _works(stage)
    return Row(None, NOBODY, stage.overlaps(), message)


def _works(stage: Stage) -> None:
    """The worker takes its next task, and that one its lock."""
    next_one = stage.cluster.send("work", stage.key)
    assert stage.cluster.result(next_one) == {"retries": 0, "token": True}


def revoked(stage: Stage, ending: Ending) -> Row:
    stage.sent = stage.cluster.send("work", stage.key, countdown=1.0)
    stage.cluster.app.control.revoke(stage.sent.id)
    stage.worker.said(f"Tasks flagged as revoked: {stage.sent.id}")
    return _nothing(stage, "REVOKED")


def expired(stage: Stage, ending: Ending) -> Row:
    stage.sent = stage.cluster.send("work", stage.key, countdown=1.0, expires=0.1)
    return _nothing(stage, "REVOKED")


def _send(stage: Stage, name: str, body: Any, **options: Any) -> None:
    """A message that no `send_task` would make."""
    stage.sent = AsyncResult(uuid.uuid4().hex, app=stage.cluster.app)
    headers = {"id": stage.sent.id, "task": f"{TASKS}.{name}", "lang": "py", "retries": 0}
    with stage.cluster.app.amqp.producer_pool.acquire() as producer:
        producer.publish(body, routing_key=stage.cluster.queue, exchange="", headers=headers,
                         correlation_id=stage.sent.id, **options)  # fmt: skip


def unknown(stage: Stage, ending: Ending) -> Row:
    _send(stage, "no_such_task", [[stage.key], {}, {}], serializer="json")
    stage.worker.said("Received unregistered task")
    return _nothing(stage, "FAILURE")


def undecodable(stage: Stage, ending: Ending) -> Row:
    _send(stage, "work", b"\x00garbage", content_type="application/x-nothing",
          content_encoding="binary")  # fmt: skip
    stage.worker.said("Refusing to deserialize")
    return _nothing(stage, "PENDING")


def mismatched(stage: Stage, ending: Ending) -> Row:
    """Arguments that its body does not take, nor its key's template."""
    stage.sent = stage.cluster.app.send_task(f"{TASKS}.work", args=(), kwargs={"no_key": 1})
    return _nothing(stage, "FAILURE")


def deduplicated(stage: Stage, ending: Ending) -> Row:
    """The message of a task that has succeeded is delivered again: Celery sees it, and no hook."""
    stage.sent = stage.cluster.send("late", stage.key, 0.05)
    assert stage.cluster.result(stage.sent) == 1
    taken = stage.monitor.taken(f"k:{stage.key}")
    again(stage)
    stage.worker.said("Task already completed successfully")
    message = stage.over("SUCCESS", runs=1)
    assert stage.monitor.taken(f"k:{stage.key}") == taken
    _works(stage)
    return Row(None, NOBODY, stage.overlaps(), message)


def again(stage: Stage) -> None:
    """Put the task's message into the queue again, with the mark that a broker sets on it."""
    client = stage.cluster.client
    stage.cluster.send("late", stage.key, 0.05, task_id=stage.sent.id, queue=stage.key)
    message = json.loads(client.lpop(stage.key))
    message["properties"]["delivery_info"] = {
        "exchange": "",
        "routing_key": "celery",
        "redelivered": True,
    }
    client.lpush("celery", json.dumps(message))


ENDINGS = (
    Ending("revoked before it starts", played=revoked, pools=POOLS, seldom=ONE_PROCESS),
    Ending("expired before it starts", played=expired, pools=POOLS, seldom=ONE_PROCESS),
    Ending("`worker_deduplicate_successful_tasks` hit", played=deduplicated,
           worker={"worker_deduplicate_successful_tasks": True}),
    Ending("unknown task", played=unknown),
    Ending("message that cannot be read", played=undecodable),
    Ending("arguments that do not fit", played=mismatched, pools=POOLS),
)  # fmt: skip
