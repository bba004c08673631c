"""Deliveries that are parked: sending them, counting them, and seeing them go back."""

from __future__ import annotations

import contextlib
import json
import uuid
from typing import Any, cast

import psutil
import redis
from celery.result import AsyncResult

from tests.support.cluster import Cluster
from tests.support.wait import wait_until
from tests.support.worker import Worker

Sent = list["AsyncResult[Any]"]


def send(cluster: Cluster, task: str, key: str, count: int, *args: Any, **options: Any) -> Sent:
    options.setdefault("queue", "narrow")
    return [cluster.send(task, key, *args, **options) for _ in range(count)]


def flood(cluster: Cluster, key: str, count: int, queue: str) -> None:
    """Put so many messages of `work` into a queue, faster than they can be sent."""
    cluster.send("work", key, 0.0, queue="template")
    template = json.loads(cast(bytes, cluster.client.rpop("template")))
    template["properties"]["delivery_info"]["routing_key"] = queue
    with cluster.client.pipeline(transaction=False) as pipeline:
        for _ in range(count):
            template["headers"]["id"] = str(uuid.uuid4())
            template["properties"]["delivery_tag"] = str(uuid.uuid4())
            pipeline.lpush(queue, json.dumps(template))
        pipeline.execute()


def cut_off(cluster: Cluster, worker: Worker) -> None:
    """End the worker's connections to its broker, and wait until it knows."""
    lost = worker.text.count("Connection to broker lost")
    for end in psutil.Process(worker.process.pid).net_connections():
        if end.raddr and end.raddr.port == cluster.broker.port:
            with contextlib.suppress(redis.ResponseError):  # one that is just ending
                cluster.client.client_kill(f"127.0.0.1:{end.laddr.port}")
    wait_until(
        lambda: worker.text.count("Connection to broker lost") > lost, 10.0, "the worker knows"
    )


def all_done(cluster: Cluster, sent: Sent, key: str, timeout: float = 20.0) -> None:
    """Check that each has run once and succeeded."""
    assert {cluster.state(one, timeout) for one in sent} == {"SUCCESS"}
    runs = [run.task for run in cluster.runs(key)]
    assert sorted(runs) == sorted(one.id for one in sent)


def reserved(cluster: Cluster, sent: Sent) -> int:
    """Return how many of these are in a worker and have not begun."""
    answers = cluster.app.control.inspect(timeout=0.3).reserved() or {}
    found = {task["id"] for of_one in answers.values() for task in of_one}
    return len(found & {one.id for one in sent})


def parked(cluster: Cluster, sent: Sent, count: int) -> None:
    wait_until(lambda: reserved(cluster, sent) >= count, 10.0, f"{count} are parked")


def occupied(cluster: Cluster, worker: Worker, key: str) -> str:
    """Let a body of another key occupy the worker's only slot until the test ends it."""
    other = f"{key}-other"
    cluster.send("until_told_retry", other, queue=worker.queue)
    cluster.entered(other)
    return other


def done(cluster: Cluster, key: str) -> int:
    return len([run for run in cluster.runs(key) if run.end is not None])


def goes_back(cluster: Cluster, key: str, queue: str, *pool: str) -> None:
    """Check that parked deliveries go to another worker while a long body has the only slot."""
    with cluster.worker(*pool, "-c", "1", queue=queue) as first, contextlib.ExitStack() as held:
        held.enter_context(cluster.redlock.lock(f"k:{key}"))
        sent = send(cluster, "work", key, 20, 0.02, queue=queue)
        parked(cluster, sent, 20)
        other = occupied(cluster, first, key)
        with cluster.worker("-c", "1", queue=queue):
            first.said("parked tasks are back in their queues")
            held.close()
            wait_until(lambda: done(cluster, key) >= 15, 15.0, "15 of 20 have run")
            cluster.tell(other)
            all_done(cluster, sent, key)
            cluster.settled()
