"""Every ending that a worker does not survive, or needs settings of its own for."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from tests.promises.worker.ending import VERSION, Ending, play
from tests.promises.worker.scenarios import POOLS, params
from tests.support.cluster import Cluster
from tests.support.machine import brief
from tests.support.monitor import Monitor
from tests.support.nodes import hung
from tests.support.worker import often

ENDINGS = [
    pytest.param(name, *given.values, marks=[*often(name).marks, *given.marks])
    for name in POOLS
    for given in params(name, own=True)
]


@pytest.fixture(autouse=True)
def _nothing_left(cluster: Cluster) -> Iterator[None]:
    """Delete the messages that a worker was given and did not end."""
    yield
    cluster.client.flushdb()


@pytest.mark.parametrize(("pool", "ending"), ENDINGS, ids=str)
def test_lock_is_free_after_each_ending_that_its_worker_does_not_survive(
    cluster: Cluster, monitor: Monitor, key: str, pool: str, ending: Ending
) -> None:
    play(ending, cluster, monitor, pool, None, key)


# -- Workers of one process whose first body is struck by misfortune -------------------------------

ONE_PROCESS = [often(name) for name in ("threads", "solo", "gevent")]


@pytest.mark.parametrize("name", ONE_PROCESS)
def test_lock_is_free_at_the_end_of_a_body_in_a_cold_shutdown(
    cluster: Cluster, name: str, key: str
) -> None:
    """The body is ended, or runs on: either way the lock is free at its end and not before."""
    if name == "gevent" and VERSION < (5, 5):
        pytest.skip("Celery 5.4 drops its greenlets without a word to them: the ttl frees")
    with cluster.worker("-P", name, "-c", "5") as worker:
        sent = cluster.send("work", key, 3.0)
        cluster.entered(key)
        contender = cluster.contend(key)
        os.kill(worker.process.pid, signal.SIGQUIT)
        contender.gets_it(since=lambda: cluster.runs(key, sent)[0].end)
        worker.ended()


@pytest.mark.parametrize("name", ONE_PROCESS)
def test_lock_is_free_after_a_body_raises_system_exit(
    cluster: Cluster, name: str, key: str
) -> None:
    """In pools where that ends the worker, and in others."""
    with cluster.worker("-P", name, "-c", "5"):
        sent = cluster.send("work", key, 0.5, "SystemExit")
        cluster.entered(key)
        contender = cluster.contend(key)
        contender.gets_it(since=lambda: cluster.runs(key, sent)[0].end)
        assert cluster.runs(key, sent)[0].ended


@pytest.mark.parametrize("name", ONE_PROCESS)
def test_loss_before_the_first_extension_reaches_the_body_in_time(
    cluster: Cluster, name: str, key: str
) -> None:
    """The body is interrupted in time, whatever must be connected first."""
    with cluster.worker("-P", name, "-c", "5"):
        sent = cluster.send("punctual", key, 20.0, "sleep")
        begun = cluster.entered(key).begin
        with hung(cluster.nodes[:3]):
            reason, late, lost = cluster.result(sent)
    assert (reason, lost) == ("expired", True)
    assert late >= 0.0
    # It was 0.4 where the first extension waited for connections.
    brief(late, 0.3, "to be told after its deadline", since=begun)
