"""Every ending that a prefork worker survives; see scenarios.py for what they are."""

from __future__ import annotations

import time

import pytest

from tests.promises.worker.ending import Ending, play
from tests.promises.worker.scenarios import params, played_on
from tests.promises.worker.table import measure
from tests.support.cluster import Cluster
from tests.support.monitor import Monitor
from tests.support.wait import wait_until
from tests.support.worker import Worker, handlers_raised_nothing


@pytest.mark.parametrize("ending", params("prefork", own=False), ids=str)
def test_lock_is_free_after_each_ending_in_prefork(
    cluster: Cluster, worker: Worker, monitor: Monitor, key: str, ending: Ending
) -> None:
    play(ending, cluster, monitor, "prefork", worker, key)


@pytest.mark.slow
@pytest.mark.parametrize("store", ["postgresql", "etcd"])
def test_endings_free_the_lock_over_postgresql_and_etcd_too(store: str) -> None:
    """`make endings STORE=...` plays all of them."""
    assert None not in measure("prefork", played_on("prefork", own=False), store).values()


def test_lock_is_free_for_others_between_two_tries(
    cluster: Cluster, worker: Worker, key: str
) -> None:
    sent = cluster.send("work", key, 0.4, "retry")
    cluster.entered(key)
    cluster.contend(key).gets_it(since=lambda: cluster.runs(key, sent)[0].end)
    assert cluster.result(sent) == {"retries": 3, "token": True}
    assert len(cluster.runs(key, sent)) == 4
    contender = next(run for run in cluster.runs(key) if run.task == "contender")
    assert cluster.runs(key, sent)[-1].begin > contender.end  # the first retry may be faster


def test_soft_time_limit_while_waiting_for_the_lock_fails_the_task(
    cluster: Cluster, worker: Worker, key: str
) -> None:
    with cluster.redlock.lock(f"k:{key}"):
        sent = cluster.send("patient", key, soft_time_limit=0.3)
        assert cluster.state(sent) == "FAILURE"
        assert cluster.runs(key, sent) == []
    cluster.free(key, within=0.0)
    again = cluster.send("patient", key)
    assert cluster.result(again) == "done"


def test_soft_time_limit_at_any_moment_leaves_no_lock_held(cluster: Cluster, key: str) -> None:
    """Interrupted while it acquires, in the body or while it releases: no lock stays held.

    A task that is interrupted in Celery's own code, outside of its body, never has a result. A
    child that is interrupted between two tasks dies. One that is interrupted while it reports the
    end of a task may leave a worker that does nothing any more (shown with Celery alone). So this
    test has a worker of its own, and only checks that the locks are free.
    """
    limits = [0.001 + 0.0004 * i for i in range(40)]
    with cluster.worker("-c", "3", queue="struck") as worker:
        for i, limit in enumerate(limits):
            cluster.send("work", f"{key}{i}", 0.004, soft_time_limit=limit, queue="struck")
        until = time.monotonic() + 20.0  # and then it does nothing any more
        last = f"{key}{len(limits) - 1}"
        wait_until(lambda: cluster.runs(last) or time.monotonic() > until, 30.0, "all have run")
        assert "SoftTimeLimitExceeded" in worker.text
        for i in range(len(limits)):
            cluster.free(f"{key}{i}")
        handlers_raised_nothing(worker)
