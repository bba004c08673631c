"""Whatever becomes of a message, its reservation is freed; unless the message comes back."""

from __future__ import annotations

import functools
import json
import os
import signal
from typing import Any

import pytest
import redis
from celery import Task

from celery_redlock import SingletonTask
from tests.promises.worker.reserving import Reservations
from tests.support.cluster import TASKS, Cluster
from tests.support.monitor import Monitor
from tests.support.wait import died, wait_until
from tests.support.worker import Worker, often

LONG = {"reserve_ttl": 600.0}
"""Options of a reservation that must not end by itself."""
RESERVED: Any = {
    "base": SingletonTask,
    "shared": False,
    "lock_key": "k:{key}",
    "lock_scope": "until_executed",
}
POOLS = [often(name) for name in ("threads", "solo", "gevent")]


def nothing(key: str) -> None:
    """A body that no worker runs."""


def test_message_that_never_starts_frees_its_reservation(
    cluster: Cluster, worker: Worker, reservations: Reservations, key: str
) -> None:
    ends(cluster, worker, reservations, key)


@pytest.mark.parametrize("pool", POOLS)
def test_reservation_is_freed_in_every_pool(
    cluster: Cluster, reservations: Reservations, key: str, pool: str
) -> None:
    with cluster.worker("-P", pool, "-c", "3", queue=pool) as worker:
        ends(cluster, worker, reservations, key, queue=pool)
        bodies = ("return", "raise", "retry", "ignore")
        sent = {
            then: reservations.until_executed.apply_async((f"{key}-{then}", 0.1, then), queue=pool)
            for then in bodies
        }
        for then in bodies:
            cluster.entered(f"{key}-{then}")
            reservations.freed(f"{key}-{then}")
        assert cluster.result(sent["retry"])["retries"] == 3


def ends(
    cluster: Cluster, worker: Worker, reservations: Reservations, key: str, **options: Any
) -> None:
    """Revoked, expired, unknown to the worker, not fit for it: all at once."""
    task = reservations.until_executed

    def send(name: str, task: Any = task, **more: Any) -> Any:
        return task.apply_async((f"{key}-{name}",), lock=LONG, **options, **more)

    revoked = send("revoked", countdown=1.5)

    def heard() -> bool:  # a worker may be ready before it listens
        cluster.app.control.revoke(revoked.id)
        return f"Tasks flagged as revoked: {revoked.id}" in worker.text

    wait_until(heard, 5.0, "the worker knows what is revoked", every=0.05)
    send("expired", countdown=0.5, expires=0.1)
    send("unknown", cluster.app.task(name="no.such", **RESERVED)(nothing))
    send("unreadable", serializer="pickle")
    sent = reservations.until_expired.apply_async((f"{key}-stays",), expires=0.1, countdown=0.5,
                                                  lock=LONG, **options)  # fmt: skip
    for name in ("revoked", "expired", "unknown", "unreadable"):
        reservations.freed(f"{key}-{name}", 10.0)
    worker.said(f"Discarding revoked task: {TASKS}.until_expired[{sent.id}]")
    reservations.kept(f"{key}-stays", sent)
    assert not any(cluster.runs(f"{key}-{name}") for name in ("revoked", "expired", "stays"))


def test_reservation_is_freed_though_the_nodes_closed_their_connections(
    cluster: Cluster, worker: Worker, reservations: Reservations, key: str
) -> None:
    """The main process seldom asks the nodes, and notices it only by what it writes."""

    def unknown(name: str) -> None:
        cluster.app.task(name="no.such", **RESERVED)(nothing).apply_async((name,), lock=LONG)
        reservations.freed(name, 5.0)

    unknown(f"{key}-before")  # from here on it is connected
    for node in cluster.nodes:
        with redis.Redis.from_url(node.url) as client:
            client.execute_command("CLIENT", "KILL", "TYPE", "normal")
    unknown(f"{key}-after")


def test_body_that_dies_frees_its_reservation_unless_it_comes_back(
    cluster: Cluster, worker: Worker, reservations: Reservations, key: str
) -> None:
    early = reservations.until_executed.delay(f"{key}-early", 30.0)
    late = reservations.until_executed_late.delay(f"{key}-late", 30.0)
    for end, sent in (("early", early), ("late", late)):
        run = cluster.entered(f"{key}-{end}")
        reservations.kept(f"{key}-{end}", sent)
        # Otherwise Celery, not yet aware that the child has it, gives it to another one.
        wait_until(functools.partial(cluster.accepted_by, sent), 5.0, "it is known to have begun")
        os.kill(run.pid, signal.SIGKILL)
    reservations.freed(f"{key}-early", 2.0)
    worker.said(
        f"freed k:{key}-early#reserved, which {TASKS}.until_executed[{early.id}]"
    )  # it does not wait for Celery
    cluster.entered(f"{key}-late", 2)
    reservations.kept(f"{key}-late", late)
    assert reservations.until_executed_late.delay(f"{key}-late").id == late.id
    cluster.tell(f"{key}-late")
    reservations.freed(f"{key}-late", 5.0)
    assert cluster.state(early) == "FAILURE"
    assert cluster.state(late) == "SUCCESS"


@pytest.mark.skipif(not hasattr(Task, "retry_on_worker_lost"), reason="of Celery 5.7")
def test_message_sent_again_by_the_main_process_keeps_its_reservation(
    cluster: Cluster, worker: Worker, reservations: Reservations, key: str
) -> None:
    task = reservations.until_executed_sent_again
    sent = task.delay(key, 30.0, "each takes its time")
    os.kill(cluster.entered(key).pid, signal.SIGKILL)
    cluster.entered(key, 2)
    # What the dead child held may be freed a moment later: the next extension sets it again.
    wait_until(lambda: reservations.of(key) == sent.id, 5.0, "it is still that task's")
    assert task.delay(key).id == sent.id
    cluster.tell(key)
    assert cluster.result(sent)["retries"] == 1
    reservations.freed(key)


def test_rejected_message_frees_its_reservation_and_a_requeued_one_keeps_it(
    cluster: Cluster, worker: Worker, reservations: Reservations, monitor: Monitor, key: str
) -> None:
    task = reservations.until_executed_late
    task.delay(f"{key}-dead-letter", 0.05, "reject")
    cluster.entered(f"{key}-dead-letter")
    reservations.freed(f"{key}-dead-letter")
    sent = task.delay(f"{key}-requeued", 1.0, "requeue")
    cluster.entered(f"{key}-requeued", 2)
    reservations.kept(f"{key}-requeued", sent)
    cluster.tell(f"{key}-requeued")
    cluster.result(sent)
    reservations.freed(f"{key}-requeued")
    assert monitor.deleted(f"k:{key}-requeued#reserved") == 1  # not in between
    # Acknowledged early, nothing comes back.
    reservations.until_executed.delay(f"{key}-early", 0.05, "requeue")
    cluster.entered(f"{key}-early")
    reservations.freed(f"{key}-early")


def test_dead_worker_leaves_a_reservation_no_longer_than_its_lock(
    cluster: Cluster, reservations: Reservations, key: str
) -> None:
    """With early acknowledgement the message is gone; with late, it comes back."""
    reservations.until_executed.apply_async((f"{key}-early", 30.0), queue=key)
    reservations.until_executed_late.apply_async((f"{key}-late", 30.0), queue=key)
    # The sender's last requests may otherwise come behind the body's first. They leave a lock's ttl
    # alone, but this worker's is far shorter than the sender's.
    for end in ("early", "late"):
        reservations.lasts(f"{key}-{end}", everywhere=True)
    with cluster.worker("-c", "2", queue=key, redlock_ttl=1.0) as worker:
        cluster.entered(f"{key}-early")
        cluster.entered(f"{key}-late")
        wait_until(lambda: reservations.left(f"{key}-early") <= 1.0, 2.0, "it has the lock's ttl")
        worker.process.kill()
        died(worker.process.pid)
        reservations.freed(f"{key}-early", 2.0)
        assert reservations.of(f"{key}-late")


def test_message_deduplicated_by_celery_leaves_no_reservation(
    cluster: Cluster, reservations: Reservations, key: str
) -> None:
    """With `worker_deduplicate_successful_tasks` no hook of any kind runs."""
    conf = {"worker_deduplicate_successful_tasks": True}
    with cluster.worker("-c", "1", queue=key, **conf) as worker:
        task = reservations.until_executed_late
        first = task.apply_async((key,), queue=key)
        cluster.result(first)
        reservations.freed(key)
        task.apply_async((key,), task_id=first.id, queue=f"{key}-copy")
        reservations.kept(key, first)
        message = json.loads(cluster.client.lpop(f"{key}-copy"))
        message["properties"]["delivery_info"].update(routing_key=key, redelivered=True)
        cluster.client.lpush(key, json.dumps(message))
        worker.said("Task already completed successfully")
        reservations.freed(key)
    assert len(cluster.runs(key)) == 1
