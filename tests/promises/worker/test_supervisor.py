"""The main process extends what its pool children hold and cannot extend themselves.

That a stop and a C call that keeps the GIL cost no lock is in `test_holding.py`.
"""

from __future__ import annotations

import os
import signal
import time

import pytest
import redis

from celery_redlock import LeaseLost
from tests.support.cluster import Cluster, steal
from tests.support.program import TTL, stopped
from tests.support.worker import Worker


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
