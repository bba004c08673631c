"""A process of its own keeps what a worker holds: nothing that happens to the worker stops it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from celery_redlock import ConfigurationError, Redlock
from tests.support.cluster import Cluster
from tests.support.wait import died, wait_until
from tests.support.worker import Worker, often, pool

pytestmark = pytest.mark.worker

TTL = 1.0
"""Of `short_ttl`; seconds."""
LONGER_TTL = 4.0
"""Of `longer_ttl`: on a busy machine a helper may be kept waiting for a second."""
POOLS = ("solo", "threads", "prefork", "gevent")


@pytest.fixture(params=[often(name) for name in POOLS])
def worker(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Worker]:
    with cluster.worker("-P", request.param, "-c", "2", redlock_keeper="process") as worker:
        yield worker


def helpers_of(worker: Worker) -> list[psutil.Process]:
    return [
        process
        for process in psutil.Process(worker.process.pid).children()
        if "celery_redlock.keepalive.sidecar" in process.cmdline()
    ]


def helper_of(worker: Worker) -> psutil.Process:
    (helper,) = helpers_of(worker)
    return helper


def test_a_killed_worker_frees_its_locks_at_once(
    cluster: Cluster, worker: Worker, key: str
) -> None:
    """Its ttl is half a minute."""
    helper = helper_of(worker)
    cluster.send("work", key, 30.0)
    run = cluster.entered(key)
    contender = cluster.contend(key)
    worker.process.kill()
    contender.gets_it(since=died(run.pid))
    died(helper.pid, 1.5)


@pytest.mark.parametrize("name", [pool("gevent")])
def test_a_greenlet_that_computes_keeps_its_lock(cluster: Cluster, key: str, name: str) -> None:
    with cluster.worker("-P", name, "-c", "2", redlock_keeper="process") as worker:
        lets_nothing_else_run(cluster, worker, key, "loop")


def test_a_c_call_that_keeps_the_gil_keeps_its_lock(
    cluster: Cluster, worker: Worker, key: str
) -> None:
    lets_nothing_else_run(cluster, worker, key, "gil")


def lets_nothing_else_run(cluster: Cluster, worker: Worker, key: str, kind: str) -> None:
    """Run a body for longer than its ttl; it keeps its lock to its end."""
    sent = cluster.send("longer_ttl", key, 1.5 * LONGER_TTL, kind)
    cluster.entered(key)
    contender = cluster.contend(key)
    assert cluster.result(sent) > 0.0
    contender.gets_it(since=cluster.runs(key, sent)[0].end)
    assert "lost the lock" not in worker.text


def test_a_killed_helper_is_replaced_and_nothing_is_lost(
    cluster: Cluster, worker: Worker, key: str
) -> None:
    # Only a main process apart from the body's can start another while the body keeps the GIL.
    apart = len(psutil.Process(worker.process.pid).children()) > 1
    sent = cluster.send("longer_ttl", key, 5.0, "gil" if apart else "sleep")
    cluster.entered(key)
    first = helper_of(worker)
    first.kill()
    worker.said("starting another")
    wait_until(lambda: [h.pid for h in helpers_of(worker)] not in ([], [first.pid]), 5.0, "it is")
    assert cluster.result(sent) > 0.0
    cluster.send("work", key, 30.0)
    run = cluster.entered(key, 2)
    contender = cluster.contend(key)
    worker.process.kill()
    contender.gets_it(since=died(run.pid))


def test_a_helper_is_small_and_ends_with_its_worker(cluster: Cluster, worker: Worker) -> None:
    helper = helper_of(worker)
    assert helper.memory_full_info().uss < 25 * 2**20
    os.killpg(worker.process.pid, signal.SIGTERM)  # a warm shutdown; all of the group are told
    worker.ended()
    died(helper.pid, 1.0)


def test_a_helper_imports_no_celery() -> None:
    modules = (
        "celery_redlock.keepalive.sidecar, celery_redlock.keepalive.supervisor,"
        " celery_redlock.stores.redis.driver, sys"
    )
    code = f"import {modules}; print(*{{name.split('.')[0] for name in sys.modules}})"
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert not {"celery", "kombu", "billiard"} & set(output.stdout.split())


def test_a_program_of_its_own_can_have_a_helper_too(cluster: Cluster, key: str) -> None:
    code = f"""
import ctypes, os, time
from celery_redlock import Redlock
nodes = {[node.url for node in cluster.nodes]!r}
redlock = Redlock(nodes, ttl={LONGER_TTL}, keeper="process", restart_guard="off")
with redlock.lock("k:{key}") as lease:
    ctypes.PyDLL(None).usleep({int(1.5 * LONGER_TTL * 1e6)})
    lease.ensure()
    print("still held", flush=True)
    time.sleep(30)
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
    ) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "still held\n"
        contender = cluster.contend(key)
        program.kill()
        contender.gets_it(since=died(program.pid))


def test_nodes_that_another_process_cannot_be_told_are_refused(cluster: Cluster) -> None:
    with pytest.raises(ConfigurationError, match="give URLs"):
        Redlock([{"host": "127.0.0.1", "credential_provider": object()}], keeper="process")
