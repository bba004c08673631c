"""Pool children that are spawned, not forked: they inherit no memory, and are kept all the same."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from types import SimpleNamespace

import celery
import pytest
from celery.concurrency.prefork import TaskPool

from celery_redlock import Redlock
from celery_redlock.worker.startup import supervise
from tests.support.cluster import Cluster
from tests.support.program import TTL, stopped
from tests.support.wait import wait_until
from tests.support.worker import Worker

pytestmark = pytest.mark.skipif(
    celery.VERSION < (5, 7), reason="Celery has worker_pool_start_method from 5.7 on"
)


@pytest.fixture(scope="module")
def worker(cluster: Cluster) -> Iterator[Worker]:
    with cluster.worker("-c", "2", worker_pool_start_method="spawn") as worker:
        # Each child imports everything for itself; the worker is ready before they are.
        cluster.result(cluster.send("work", "the-first"), timeout=60.0)
        yield worker


def test_lock_of_a_dead_spawned_child_is_freed_at_once(
    cluster: Cluster, worker: Worker, key: str
) -> None:
    cluster.send("longer_ttl", key, 60.0)
    run = cluster.entered(key, timeout=30.0)
    contender = cluster.contend(key)
    killed = time.monotonic()
    os.kill(run.pid, signal.SIGKILL)
    contender.gets_it(since=killed)
    wait_until(lambda: f" of pid {run.pid} on " in worker.text, 5.0, "the worker says so")


def test_stopped_spawned_child_keeps_its_lock(cluster: Cluster, worker: Worker, key: str) -> None:
    sent = cluster.send("short_ttl", key, 4 * TTL)
    run = cluster.entered(key, timeout=30.0)
    contender = cluster.contend(key)
    with stopped(run.pid):
        time.sleep(3 * TTL)
        assert contender.entered is None
    assert cluster.result(sent) > 0.0  # seconds left, as the body itself sees it at its end
    contender.gets_it(since=lambda: cluster.runs(key, sent)[0].end)


def test_spawning_worker_without_a_shared_table_logs_a_warning(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    registry = SimpleNamespace(table=SimpleNamespace(address=None), own_process=False)
    redlock = SimpleNamespace(client=SimpleNamespace(registry=registry))
    monkeypatch.setattr(Redlock, "from_app", staticmethod(lambda _app: redlock))
    monkeypatch.setattr("celery_redlock.worker.startup._takes_locks", lambda _app: True)
    monkeypatch.setattr("billiard.get_start_method", lambda: "spawn")
    pool = TaskPool.__new__(TaskPool)
    supervise(SimpleNamespace(pool=pool, app=cluster.app))
    assert [line.partition(":")[0] for line in caplog.messages] == [
        "this worker spawns its pool children, and cannot see their leases"
    ]
