"""The result of a duplicate, where it is published, and at run time if it was published anyway."""

from __future__ import annotations

import pytest
from celery import group
from celery.result import AsyncResult

from celery_redlock import DuplicateTask, Skipped
from tests.promises.worker.reserving import Reservations, replace_and_restart
from tests.support.cluster import TASKS, Cluster
from tests.support.machine import in_time
from tests.support.wait import wait_until
from tests.support.worker import Worker


def test_call_after_the_result_was_read_is_no_duplicate(
    cluster: Cluster, worker: Worker, reservations: Reservations, key: str
) -> None:
    backend, seen = cluster.app.backend, set()
    for _ in range(10):
        ident = reservations.until_executed.delay(key).id

        def done(ident: str = ident) -> bool:
            return bool(backend.get_task_meta(ident, cache=False)["status"] == "SUCCESS")

        wait_until(done, 10.0, "the result is there", every=0.0005)
        seen.add(ident)
    assert len(seen) == 10
    reservations.freed(key)


def test_last_call_of_a_burst_runs_behind_those_that_it_replaced(
    cluster: Cluster, worker: Worker, reservations: Reservations, key: str
) -> None:
    task, replace = reservations.until_executed, {"on_duplicate": "replace"}
    burst = [task.apply_async((key,), countdown=1.0, lock=replace) for _ in range(3)]
    cluster.result(burst[-1])
    assert [cluster.state(one) for one in burst[:-1]] == ["REVOKED"] * 2
    assert [run.task for run in cluster.runs(key)] == [burst[-1].id]
    reservations.freed(key)


def test_replaced_calls_do_not_run_after_a_restart_of_their_worker(
    cluster: Cluster, reservations: Reservations, key: str
) -> None:
    replace_and_restart(cluster, reservations.tasks, key, queue=key)


@pytest.mark.parametrize(
    "scope", ["until_executing", "until_executed", "until_and_while_executing", "until_expired"]
)
def test_message_whose_reservation_is_that_of_another_call_is_skipped(
    cluster: Cluster, worker: Worker, reservations: Reservations, key: str, scope: str
) -> None:
    """The message was replaced, and its worker did not receive the revoke."""
    task = reservations.tasks[scope]
    first = task.apply_async((key,), queue="parked")
    reservations.forget(key)
    second = task.apply_async((key,), queue="parked")
    assert second.id != first.id
    reservations.lasts(key)  # until then the second message may yet fail to be sent
    cluster.unpark(1)
    skipped = Skipped.of(cluster.result(first))
    assert skipped is not None and second.id in skipped["holder"]
    reservations.kept(key, second)
    cluster.unpark()
    assert Skipped.of(cluster.result(second)) is None
    assert [run.task for run in cluster.runs(key)] == [second.id]


@pytest.mark.parametrize("scope", ["until_executed", "until_and_while_executing"])
def test_lost_reservation_never_lets_bodies_overlap(
    cluster: Cluster, worker: Worker, reservations: Reservations, key: str, scope: str
) -> None:
    """All nodes forget it, again and again: more calls are queued, but bodies never overlap."""
    task = reservations.tasks[scope]
    sent = []
    for _ in range(6):
        sent.append(task.apply_async((key, 0.1), queue="parked"))
        reservations.forget(key)
    cluster.unpark()
    for one in sent:
        cluster.state(one, 20.0)
    assert len({one.id for one in sent}) == len(sent)
    assert len(cluster.runs(key)) >= 1  # the oracle has seen to it that none overlapped


def test_message_sent_by_name_is_a_duplicate_at_run_time(
    cluster: Cluster, worker: Worker, reservations: Reservations, key: str
) -> None:
    """Messages of `send_task`, another language or a beat have no reservation."""
    first = reservations.until_executed.delay(key, 0.5)
    cluster.entered(key)
    second = AsyncResult(cluster.send("until_executed", key).id, app=cluster.app)
    skipped = Skipped.of(cluster.result(second))
    assert skipped is not None and first.id in skipped["holder"]
    cluster.result(first)
    reservations.freed(key)
    third = cluster.send("until_executed", key, 1.0)
    cluster.entered(key, 2)
    reservations.kept(key, third)
    assert reservations.until_executed.delay(key).id == third.id
    cluster.tell(key)
    cluster.result(third)
    reservations.freed(key)


def test_on_duplicate_raise_raises_at_run_time(
    cluster: Cluster, worker: Worker, reservations: Reservations, key: str
) -> None:
    task = reservations.until_executed
    first = task.delay(key, 0.5)
    cluster.entered(key)
    member = task.s(key).set(lock={"on_duplicate": "raise"})
    (second,) = group([member], app=cluster.app).apply_async().results
    with pytest.raises(DuplicateTask, match="is reserved by") as raised:
        cluster.result(second)
    assert raised.value.task_id == first.id
    cluster.result(first)


def test_scope_until_and_while_executing_allows_one_queued_and_one_running(
    cluster: Cluster, worker: Worker, reservations: Reservations, key: str
) -> None:
    task = reservations.until_and_while_executing
    first = task.delay(key, 30.0)
    cluster.entered(key)
    second = task.delay(key)
    third = task.delay(key)
    assert first.id != second.id == third.id
    cluster.tell(key)
    cluster.result(first)
    cluster.result(second, 20.0)
    reservations.freed(key)
    assert [run.task for run in cluster.runs(key)] == [first.id, second.id]


def test_retry_has_the_scope_of_its_call(
    cluster: Cluster, worker: Worker, reservations: Reservations, key: str
) -> None:
    plain, reserving = reservations.while_executing, {"scope": "until_executed"}
    first = plain.apply_async((key, 0.05, "retry"), lock=reserving)
    for turn in (1, 2):  # of four
        cluster.entered(key, turn)
        wait_until(lambda: cluster.runs(key)[-1].ended, 3.0, "the body has ended")
        reservations.kept(key, first)
    cluster.result(first)
    reservations.freed(key)
    task = reservations.until_executed
    second = task.apply_async((f"{key}-2", 0.05, "retry"), lock={"scope": "while_executing"})
    cluster.entered(f"{key}-2", 3)
    assert not reservations.tokens(f"{key}-2")
    cluster.result(second)


def test_lock_with_hold_for_is_kept_for_its_minimum(
    cluster: Cluster, worker: Worker, key: str
) -> None:
    """The minimum counts from the grant; after a retry it does not apply."""
    first = cluster.send("holding_for", key, "retry")
    assert cluster.result(first) == 1
    one, two = cluster.runs(key)
    # The retry did not find it kept; it may have come before the first try had ended.
    assert f"holding_for[{first.id}] waits (held" not in worker.text
    left = wait_until(lambda: cluster.redlock.holder(f"k:{key}"), 1.0, "it is kept").expires_in
    assert left is not None and left <= 1.0
    second = cluster.send("holding_for", key)
    assert cluster.result(second) == 0
    one, two = cluster.runs(key)[-2:]
    # Counted from the grant, and one body begins a moment after it.
    assert two.begin - one.begin > 0.8
    in_time(one.begin, two.begin, 3.0, "from one body to the next")
    assert f"{TASKS}.holding_for[{second.id}] waits" in worker.text
