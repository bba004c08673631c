"""Reservations on real workers: taken when a task is published, freed at every ending."""

from __future__ import annotations

import pytest

from celery_redlock.config.checks import SCOPES
from tests.promises.worker.reserving import Reservations
from tests.support.cluster import Cluster
from tests.support.monitor import Monitor
from tests.support.wait import wait_until
from tests.support.worker import Worker

RESERVING = [scope for scope in SCOPES if scope != "while_executing"]
KEPT = ("until_expired", "until_succeeded")
"""After a success."""


@pytest.mark.parametrize("scope", RESERVING)
def test_reserved_call_is_not_published_twice(
    cluster: Cluster, worker: Worker, reservations: Reservations, key: str, scope: str
) -> None:
    task = reservations.tasks[scope]
    first = task.apply_async((key,), countdown=2.0)
    assert reservations.of(key) == first.id
    second = task.delay(key)
    assert second.id == first.id
    cluster.result(first)
    cluster.settled()
    assert len(cluster.runs(key)) == 1
    if scope in KEPT:
        assert reservations.of(key) == first.id
        assert task.delay(key).id == first.id
    else:
        reservations.freed(key)
        third = task.delay(key)
        assert third.id != first.id
        cluster.result(third)


@pytest.mark.parametrize(
    ("scope", "while_running"),
    [
        ("until_executing", "free"),
        ("until_executed", "held"),
        ("until_and_while_executing", "free"),
        ("until_succeeded", "held"),
        ("until_expired", "held"),
    ],
)
def test_scope_decides_between_lock_and_reservation_while_the_body_runs(
    cluster: Cluster,
    worker: Worker,
    reservations: Reservations,
    key: str,
    scope: str,
    while_running: str,
) -> None:
    first = reservations.tasks[scope].delay(key, 30.0)
    cluster.entered(key)
    assert bool(reservations.tokens(key)) == (while_running == "held")
    locked = cluster.redlock.holder(f"k:{key}")
    assert (locked is None) == (scope == "until_executing")
    cluster.tell(key)
    cluster.result(first)
    if scope not in KEPT:
        reservations.freed(key)


@pytest.mark.parametrize("then", ["raise", "retry", "ignore", "reject", "_exit", "SystemExit"])
def test_every_end_of_a_body_frees_its_reservation(
    cluster: Cluster, worker: Worker, reservations: Reservations, key: str, then: str
) -> None:
    names = ("until_executed", "until_executed_late")
    sent = {f"{key}-{name}": reservations.tasks[name] for name in names}
    sent = {one: task.delay(one, 0.1, then) for one, task in sent.items()}
    for one in sent:
        cluster.entered(one)
    for one, result in sent.items():
        reservations.freed(one, 8.0)
        if then == "retry":
            assert cluster.result(result)["retries"] == 3
            assert len(cluster.runs(one)) == 4


def test_retry_keeps_its_reservation(
    cluster: Cluster, worker: Worker, reservations: Reservations, monitor: Monitor, key: str
) -> None:
    first = reservations.until_executed.delay(key, 0.05, "retry")
    for turn in range(1, 4):
        cluster.entered(key, turn)
        holder = reservations.of(key)
        assert holder == first.id or len(cluster.runs(key)) == 4
    assert cluster.result(first)["retries"] == 3
    reservations.freed(key)
    assert len(cluster.runs(key)) == 4
    assert monitor.deleted(f"k:{key}#reserved") == 1  # never in between


@pytest.mark.parametrize("scope", RESERVING)
def test_replacing_task_has_the_reservation_of_its_predecessor(
    cluster: Cluster, worker: Worker, reservations: Reservations, key: str, scope: str
) -> None:
    held = scope in ("until_executed", *KEPT)
    sent = reservations.tasks[scope].delay(key, 1.0 if held else 0.2, "replace")
    cluster.entered(key, 2)
    if held:
        reservations.kept(key, sent)
    cluster.tell(key)
    assert cluster.result(sent)["token"] is not None
    assert len(cluster.runs(key)) == 2
    if scope not in KEPT:
        reservations.freed(key)


def test_message_that_waits_for_its_lock_keeps_its_reservation(
    cluster: Cluster, worker: Worker, reservations: Reservations, key: str
) -> None:
    """Sent again for its lock, it is the same message."""
    with cluster.redlock.lock(f"k:{key}"):
        sent = reservations.until_executed.delay(key, 0.1)
        worker.said(f"until_executed[{sent.id}] waits (held, attempt 1")
        reservations.kept(key, sent)
        # Written when the message is out, and nobody waits for that.
        wait_until(lambda: reservations.left(key) > 3000.0, 5.0, "it is made to last")
        assert reservations.until_executed.delay(key).id == sent.id
    assert cluster.result(sent)["retries"] == 0
    reservations.freed(key)
