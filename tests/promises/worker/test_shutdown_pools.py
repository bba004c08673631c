"""Workers of one process whose first body is struck by misfortune: each test has its own worker.

How they end otherwise is in scenarios.py.
"""

from __future__ import annotations

import os
import signal

import pytest

from tests.promises.worker.ending import VERSION
from tests.support.cluster import Cluster
from tests.support.machine import brief
from tests.support.nodes import hung
from tests.support.worker import often

ALL = [often(name) for name in ("threads", "solo", "gevent")]


@pytest.mark.parametrize("name", ALL)
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
    cluster.client.flushdb()  # what it was given and did not end is not for the next test


@pytest.mark.parametrize("name", ALL)
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
    cluster.client.flushdb()


@pytest.mark.parametrize("name", ALL)
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
