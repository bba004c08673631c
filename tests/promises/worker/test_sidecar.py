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
from tests.support.beside import Beside
from tests.support.cluster import Cluster
from tests.support.wait import died, wait_until
from tests.support.worker import Worker, often, pool

LONGER_TTL = 4.0
"""Ttl of `longer_ttl`, in seconds: on a busy machine a helper may have to wait for a second."""
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


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(*pool("gevent").values, "gil", marks=pool("gevent").marks),
        pytest.param(
            *pool("gevent").values, "loop", marks=[*pool("gevent").marks, pytest.mark.slow]
        ),
        *(pytest.param(name, "gil", marks=pytest.mark.slow) for name in POOLS if name != "gevent"),
    ],
)
def test_body_that_lets_nothing_else_run_keeps_its_lock_with_a_sidecar(
    cluster: Cluster, key: str, name: str, kind: str
) -> None:
    """It keeps it beyond its ttl, to its end. Prefork and threads are in `test_holding.py` as well.

    A helper is small, and ends with its worker.
    """
    with cluster.worker("-P", name, "-c", "2", redlock_keeper="process") as worker:
        helper = helper_of(worker)
        sent = cluster.send("longer_ttl", key, 1.25 * LONGER_TTL, kind)
        cluster.entered(key)
        contender = cluster.contend(key)
        assert cluster.result(sent) > 0.0
        contender.gets_it(since=cluster.runs(key, sent)[0].end)
        assert "lost the lock" not in worker.text
        assert helper.memory_full_info().uss < 25 * 2**20
        os.killpg(
            worker.process.pid, signal.SIGTERM
        )  # a warm shutdown; the signal reaches the whole group
        worker.ended()
        died(helper.pid, 1.0)


def test_pool_child_silent_in_a_c_call_is_killed_by_the_sidecar(cluster: Cluster, key: str) -> None:
    with cluster.worker("-c", "1", redlock_keeper="process") as worker:
        sent = cluster.send("silent", key, 30.0, "gil")
        run = cluster.entered(key)
        worker.said(f"sidecar] killing process {run.pid}: its work under the lock k:{key}")
        cluster.free(key)
        assert cluster.state(sent) == "FAILURE"


def test_killed_sidecar_is_replaced_and_frees_the_locks_of_a_killed_worker(
    cluster: Cluster, worker: Worker, key: str
) -> None:
    """No lock is lost meanwhile, and all are free at once in the end: the ttl is half a minute.

    A sidecar extends every third of the ttl. When it is killed, at least two thirds are left for
    the other to start and extend: 6 s of 9 s. A process starts in 3 s on a very busy machine.
    """
    # Only a main process apart from the body's can start another while the body keeps the GIL.
    apart = len(psutil.Process(worker.process.pid).children()) > 1
    seconds, kind = (10.0, "gil") if apart else (2.0, "sleep")
    sent = cluster.send("nine_seconds_ttl", key, seconds, kind)
    cluster.entered(key)
    first = helper_of(worker)
    first.kill()
    worker.said("starting another")
    wait_until(lambda: [h.pid for h in helpers_of(worker)] not in ([], [first.pid]), 5.0, "it is")
    assert cluster.result(sent) > 0.0
    second = helper_of(worker)
    cluster.send("work", key, 30.0)
    run = cluster.entered(key, 2)
    contender = cluster.contend(key)
    worker.process.kill()
    contender.gets_it(since=died(run.pid))
    died(second.pid, 1.5)


def test_sidecar_imports_no_celery() -> None:
    modules = (
        "celery_redlock.keepalive.sidecar, celery_redlock.keepalive.supervisor,"
        " celery_redlock.stores.driver, sys"
    )
    code = f"import {modules}; print(*{{name.split('.')[0] for name in sys.modules}})"
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert not {"celery", "kombu", "billiard"} & set(output.stdout.split())


def test_program_without_celery_can_have_a_sidecar(cluster: Cluster, key: str) -> None:
    code = f"""
import ctypes, os, time
from celery_redlock import Redlock
nodes = {[node.url for node in cluster.nodes]!r}
redlock = Redlock(nodes, ttl={LONGER_TTL}, keeper="process", restart_guard="off")
with redlock.lock("k:{key}") as lease:
    ctypes.PyDLL(None).usleep({int(1.25 * LONGER_TTL * 1e6)})
    lease.ensure()
    print("still held", flush=True)
    time.sleep(30)
"""
    with Beside("-c", code) as program:
        assert program.line() == "still held"
        contender = cluster.contend(key)
        program.kill()
        contender.gets_it(since=died(program.pid))


def test_node_options_that_a_sidecar_cannot_receive_are_refused(cluster: Cluster) -> None:
    with pytest.raises(ConfigurationError, match="give URLs"):
        Redlock([{"host": "127.0.0.1", "credential_provider": object()}], keeper="process")
