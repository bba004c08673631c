"""The policy `replace` on real workers.

There are never two bodies at once, which the module's oracle sees to after every test.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from celery_redlock import Skipped
from tests.promises.worker.ending import GEVENT_ENDS_TASKS, VERSION
from tests.support.cluster import TASKS, Cluster
from tests.support.machine import in_time
from tests.support.wait import wait_until
from tests.support.worker import Worker, often, pool


@pytest.fixture(scope="module")
def worker(cluster: Cluster) -> Iterator[Worker]:
    """A prefork worker with three children."""
    with cluster.worker("-c", "3") as worker:
        yield worker


@pytest.fixture(scope="module")
def threads(cluster: Cluster) -> Iterator[Worker]:
    """A worker that cannot terminate a task."""
    with cluster.worker("-P", "threads", "-c", "2", queue="threads") as worker:
        yield worker


@pytest.mark.parametrize(
    ("task", "arguments", "dies_after"),
    [
        ("work", (30.0,), 0.0),
        ("tidy", (30.0, 1.0), 1.0),  # it takes its time to exit
        (
            "longer_ttl",
            (3.0, "one call"),
            0.3,
        ),  # it cannot be interrupted before its C call returns
    ],
)
def test_policy_replace_runs_once_the_revoked_holder_is_dead(
    cluster: Cluster, worker: Worker, key: str, task: str, arguments: tuple[float, ...],
    dies_after: float,
) -> None:  # fmt: skip
    old = cluster.send(task, key, *arguments)
    cluster.entered(key)
    begin = time.monotonic()
    new = cluster.send("policy_replace", key)
    assert cluster.result(new) == "ran"
    assert cluster.state(old) == "REVOKED"
    assert cluster.state(new) == "SUCCESS"
    first, second = cluster.runs(key)
    assert (first.task, second.task) == (old.id, new.id)
    assert first.end < second.begin
    assert second.begin - begin > dies_after
    in_time(first.end, second.begin, 1.0, "from the old one's end to the new one's begin")
    worker.said(f"policy_replace[{new.id}] replaces task {old.id}")
    cluster.settled()


def test_policy_replace_runs_once_a_killed_holder_is_dead(
    cluster: Cluster, worker: Worker, key: str
) -> None:
    """The holder goes on for longer than the new task waits: only its death releases its lock."""
    old = cluster.send("stubborn", key, 60.0, 60.0)
    pid = cluster.entered(key).pid
    new = cluster.send("policy_replace", key)
    worker.said(f"policy_replace[{new.id}] replaces task {old.id}")
    worker.said(f"Terminating {TASKS}.stubborn[{old.id}]")
    os.kill(pid, signal.SIGKILL)
    assert cluster.result(new) == "ran"
    assert cluster.state(old) == "REVOKED"
    first, second = cluster.runs(key)
    assert (first.pid, first.ended) == (pid, False)
    in_time(first.end, second.begin, 1.0, "from the old one's death to the new one's begin")


def test_policy_replace_ends_the_holder_and_no_other_task_with_its_id(
    cluster: Cluster, worker: Worker, key: str
) -> None:
    """Any publisher can run a task under the id of another, and then replace it."""
    forged = cluster.send("work", key, 60.0)
    cluster.entered(key)
    cluster.send("work", f"{key}-victim", 60.0, task_id=forged.id)
    cluster.entered(f"{key}-victim")
    assert cluster.result(cluster.send("policy_replace", key)) == "ran"
    assert not cluster.runs(f"{key}-victim")[0].ended
    cluster.tell(f"{key}-victim")
    wait_until(lambda: cluster.runs(f"{key}-victim")[0].ended, 10.0, "the victim ends well")
    assert cluster.runs(key)[0].end < cluster.runs(f"{key}-victim")[0].end
    cluster.settled()


def test_policy_replace_waits_for_a_stubborn_holder_no_longer_than_wait(
    cluster: Cluster, worker: Worker, key: str
) -> None:
    old = cluster.send("stubborn", key, 60.0, 2.0)
    cluster.entered(key)
    skipped = Skipped.of(cluster.result(cluster.send("policy_replace_skip", key)))
    assert skipped is not None
    assert old.id in skipped["holder"]
    # A body that swallows its termination and returns is a success for Celery.
    meta = cluster.app.backend.get_task_meta
    succeeded = lambda: meta(old.id, cache=False)["status"] == "SUCCESS"  # noqa: E731
    wait_until(succeeded, 5.0, "it succeeds, after all")
    assert len(cluster.runs(key)) == 1


def test_second_of_two_tasks_that_replace_a_holder_replaces_the_first(
    cluster: Cluster, worker: Worker, key: str
) -> None:
    old = cluster.send("tidy", key, 30.0, 1.5)
    cluster.entered(key)
    one, two = (cluster.send("policy_replace", key, 60.0) for _ in range(2))
    assert cluster.state(old, 15.0) == "REVOKED"

    def replaced() -> tuple[Any, Any] | None:
        """Return the replaced task and its replacement, once there is one."""
        for first, second in ((one, two), (two, one)):
            if f"policy_replace[{second.id}] replaces task {first.id}" in worker.text:
                return first, second
        return None

    first, second = wait_until(replaced, 15.0, "one replaces the other")
    assert cluster.state(first, 15.0) == "REVOKED"
    cluster.tell(key)  # not before: a task that ends by itself is not replaced
    assert cluster.state(second, 15.0) == "SUCCESS"
    cluster.settled()


@pytest.mark.parametrize("kind", [pool("threads")])
def test_policy_replace_waits_for_the_end_where_a_pool_terminates_no_task(
    cluster: Cluster, threads: Worker, key: str, kind: str
) -> None:
    """Where `wait` is shorter, it waits for so long."""
    old = cluster.send("work", key, 2.0, queue="threads")
    cluster.entered(key)
    skipped = cluster.send("policy_replace_skip", key, queue="threads")
    assert Skipped.of(cluster.result(skipped)) is not None
    new = cluster.send("policy_replace", key, queue="threads")
    assert cluster.result(new) == "ran"
    assert cluster.state(old) == "SUCCESS"
    assert len(cluster.runs(key)) == 2


@pytest.mark.parametrize("kind", [often("gevent")])
def test_policy_replace_ends_a_greenlet(cluster: Cluster, key: str, kind: str) -> None:
    if VERSION < GEVENT_ENDS_TASKS:
        pytest.skip("this Celery cannot end a task of gevent's")
    with cluster.worker("-P", kind, "-c", "3", queue=kind):
        old = cluster.send("work", key, 30.0, queue=kind)
        cluster.entered(key)
        assert cluster.result(cluster.send("policy_replace", key, queue=kind)) == "ran"
        assert cluster.state(old) == "REVOKED"
        cluster.settled()  # a gevent worker before Celery 5.7 acknowledges late
