"""Reservations on real workers: taken when a task is published, freed at every ending."""

from __future__ import annotations

import json
from typing import Any

import pytest

from celery_redlock import DuplicateTask, Skipped
from celery_redlock.config.checks import SCOPES
from tests.promises.worker.reserving import Reservations
from tests.support.cluster import Cluster
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


# -- Kept on success, free on failure: early and late acknowledged ---------------------------------

NAMES = ("until_succeeded", "until_succeeded_late")
FAILS = ("raise", "ignore", "reject", "SystemExit", "_exit", "SIGKILL")
TTL = {"reserve_ttl": 5.0}
"""Longer than all that is looked at meanwhile, and short enough to see its end."""


def test_success_keeps_the_reservation_for_its_ttl(
    cluster: Cluster, worker: Worker, reservations: Reservations, key: str
) -> None:
    """Duplicates get the result of the success; then another call may be published."""
    task = reservations.until_succeeded
    first = task.apply_async((key,), lock=TTL)
    assert cluster.result(first)
    wait_until(lambda: reservations.left(key) < 5.1, 5.0, "it is kept for its ttl")
    again = task.apply_async((key,), lock={**TTL, "on_duplicate": "existing"})
    assert again.id == first.id
    with pytest.raises(DuplicateTask) as refused:
        task.apply_async((key,), lock={**TTL, "on_duplicate": "raise"})
    assert refused.value.task_id == first.id
    unreserved = cluster.send("until_succeeded", key)  # published past it
    assert Skipped.of(cluster.result(unreserved)) is not None
    wait_until(lambda: not reservations.tokens(key), 15.0, "its ttl is over")
    last = task.apply_async((key,), lock=TTL)
    assert last.id != first.id
    assert cluster.result(last)
    assert len(cluster.runs(key)) == 2


def test_retry_keeps_the_reservation_and_its_success_does_too(
    cluster: Cluster, worker: Worker, reservations: Reservations, key: str
) -> None:
    first = {name: reservations.tasks[name].delay(f"{key}-{name}", 0.05, "retry") for name in NAMES}
    for name in NAMES:
        cluster.entered(f"{key}-{name}")
        assert reservations.tasks[name].delay(f"{key}-{name}").id == first[name].id
    for name in NAMES:
        assert cluster.result(first[name])["retries"] == 3
        reservations.kept(f"{key}-{name}", first[name])


def test_failed_body_frees_an_until_succeeded_reservation(
    cluster: Cluster, worker: Worker, reservations: Reservations, key: str
) -> None:
    """A message delivered again keeps it, and succeeds: with late acks, after a death."""
    sent: dict[tuple[str, str], Any] = {}
    for then in FAILS:
        for name in NAMES:
            task = reservations.tasks[name]
            sent[name, then] = task.delay(f"{key}-{name}-{then}", 0.05, then)
    for (name, then), first in sent.items():
        one = f"{key}-{name}-{then}"
        cluster.entered(one, timeout=30.0)
        comes_back = name.endswith("_late") and then in ("SystemExit", "_exit", "SIGKILL")
        if comes_back:
            cluster.entered(one, 2, timeout=30.0)
            assert cluster.result(first, 30.0)
            reservations.kept(one, first)
        else:
            reservations.freed(one, 15.0)
    again = reservations.until_succeeded.delay(f"{key}-until_succeeded-raise")
    assert again.id != sent["until_succeeded", "raise"].id
    assert cluster.result(again)


def test_revoked_expired_or_limited_task_frees_an_until_succeeded_reservation(
    cluster: Cluster, worker: Worker, reservations: Reservations, key: str
) -> None:
    task = reservations.until_succeeded
    revoked = task.apply_async((f"{key}-revoked",), countdown=3.0)
    worker.said(f"until_succeeded[{revoked.id}] received")
    revoked.revoke()
    expired = task.apply_async((f"{key}-expired",), countdown=1.0, expires=0.5)
    ended = task.apply_async((f"{key}-ended", 30.0))
    limited = task.apply_async((f"{key}-limited", 30.0), time_limit=1.0)
    cluster.entered(f"{key}-ended")
    ended.revoke(terminate=True)
    for name in ("revoked", "expired", "ended", "limited"):
        reservations.freed(f"{key}-{name}", 15.0)
    assert cluster.state(expired) == "REVOKED"
    assert cluster.state(limited) == "FAILURE"


def test_skipped_task_has_not_succeeded_and_frees_its_reservation(
    cluster: Cluster, worker: Worker, reservations: Reservations, key: str
) -> None:
    """It is skipped because another program holds its lock, and ends in state SUCCESS."""
    with cluster.redlock.lock(f"k:{key}"):
        sent = reservations.until_succeeded_skip.delay(key)
        assert Skipped.of(cluster.result(sent)) is not None
    reservations.freed(key)
    assert cluster.result(reservations.until_succeeded_skip.delay(key))["retries"] == 0


def test_second_delivery_of_a_success_frees_nothing(
    cluster: Cluster, worker: Worker, reservations: Reservations, key: str
) -> None:
    """The same message is delivered again, by a broker that has no acknowledgement of it."""
    sent = reservations.until_succeeded_late.apply_async((key,), queue="parked")
    message = json.loads(cluster.client.lindex("parked", 0))
    cluster.unpark()
    assert cluster.result(sent)
    cluster.settled()
    reservations.kept(key, sent)
    message["properties"]["delivery_info"]["redelivered"] = True
    cluster.client.lpush("celery", json.dumps(message))
    worker.said(f"until_succeeded_late[{sent.id}] is done: this was a second delivery of it")
    cluster.settled()
    reservations.kept(key, sent)
    assert len(cluster.runs(key)) == 1
