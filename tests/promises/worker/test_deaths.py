"""The death and the stop of a pool child; see scenarios.py for all endings.

The main process extends what its pool children hold and cannot extend themselves. That a stop and a
C call that keeps the GIL cost no lock is in `test_holding.py`.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import ExitStack

import pytest
import redis

from celery_redlock import LeaseLost
from tests.support.cluster import Cluster, steal
from tests.support.program import TTL, stopped
from tests.support.proxy import Proxy
from tests.support.wait import died, wait_until
from tests.support.worker import Worker


def test_child_is_killed_while_it_waits_for_a_lock(
    cluster: Cluster, worker: Worker, key: str
) -> None:
    """The child holds nothing, and the holder keeps its lock."""
    with cluster.redlock.lock(f"k:{key}") as lease:
        sent = cluster.send("patient", key)
        pid = wait_until(lambda: cluster.accepted_by(sent), 5.0, "a child has taken it")
        os.kill(pid, signal.SIGKILL)
        died(pid)
        assert cluster.state(sent) == "FAILURE"
        assert cluster.redlock.try_acquire(f"k:{key}") is None
        lease.ensure()
    cluster.free(key, within=0.0)


def test_lock_of_another_child_survives_the_death_of_a_child(
    cluster: Cluster, worker: Worker, key: str
) -> None:
    """Only locks of the dead child are released."""
    other = cluster.send("work", f"{key}-other", 3.0)
    cluster.entered(f"{key}-other")
    bystander = cluster.contend(f"{key}-other")
    cluster.send("work", key, 30)
    run = cluster.entered(key)
    os.kill(run.pid, signal.SIGKILL)
    died(run.pid)
    cluster.free(key)
    assert cluster.result(other) == {"retries": 0, "token": True}
    bystander.gets_it(since=lambda: cluster.runs(f"{key}-other", other)[0].end)


def test_ending_child_reads_the_answers_to_its_last_release(cluster: Cluster, key: str) -> None:
    """No task waits for those answers; the process reads them before it ends."""
    with ExitStack() as stack:
        fronts = [stack.enter_context(Proxy(node.port)) for node in cluster.nodes]
        conf = {"redlock_nodes": [front.url for front in fronts], "redlock_node_timeout": 3.0}
        with cluster.worker(
            "-c", "1", redlock_ttl=40.0, worker_max_tasks_per_child=1, **conf
        ) as worker:
            for front in fronts:
                front.mode, front.delay = "late", 0.3
            for number in range(2):
                cluster.result(cluster.send("work", f"{key}{number}", 0.0), 30.0)
            cluster.settled()
        assert "held when it died" not in worker.text


def test_child_that_dies_while_it_is_stopped_frees_its_locks(
    cluster: Cluster, worker: Worker, key: str
) -> None:
    """The locks of the task and of a block inside the body are kept, and then freed."""
    cluster.send("nested", key, 30.0)
    run = cluster.entered(key)
    contenders = [cluster.contend(key), cluster.contend(f"{key}:inner")]
    os.kill(run.pid, signal.SIGSTOP)
    time.sleep(3 * TTL)
    assert [contender.entered for contender in contenders] == [None, None]
    killed = time.monotonic()
    os.kill(run.pid, signal.SIGKILL)
    for contender in contenders:
        contender.gets_it(since=killed)


def test_stopped_child_learns_of_a_lost_lock_when_it_goes_on(
    cluster: Cluster, worker: Worker, key: str
) -> None:
    sent = cluster.send("short_ttl", key, 30.0)
    run = cluster.entered(key)
    with stopped(run.pid):
        steal(cluster, key)
        worker.said(f"process {run.pid} is stopped or busy and has not noticed", 5 * TTL)
    with pytest.raises(LeaseLost):
        cluster.result(sent)
    with redis.Redis(port=cluster.nodes[0].port) as client:
        assert client.get(f"redlock:k:{key}") == b"a thief"
