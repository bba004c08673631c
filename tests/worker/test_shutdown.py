"""A worker that is told to stop: its running bodies keep their locks to their end."""

from __future__ import annotations

import os
import signal

import pytest

from tests.support import wait_until
from tests.worker.harness import Cluster, died

pytestmark = pytest.mark.worker


def test_warm_shutdown(cluster: Cluster, key: str) -> None:
    """Held, and extended, for three times its ttl after the worker was told; then free."""
    with cluster.worker("-c", "2") as worker:
        sent = cluster.send("short_ttl", key, 3.0)
        cluster.entered(key)
        contender = cluster.contend(key)
        worker.terminate()
        worker.said("Warm shutdown")
        assert worker.ended() == 0
    run = cluster.runs(key, sent)[0]
    assert run.ended and run.end - run.begin >= 3.0
    assert contender.entered is not None and contender.entered - run.end < 1.0
    assert cluster.state(sent) == "SUCCESS"
    cluster.settled()


def test_worker_is_killed(cluster: Cluster, key: str) -> None:
    """Its children die with it, and nobody is left to free their locks: the ttl does."""
    with cluster.worker("-c", "2") as worker:
        cluster.send("short_ttl", key, 30.0)
        run = cluster.entered(key)
        contender = cluster.contend(key)
        os.kill(worker.process.pid, signal.SIGKILL)
        worker.ended()
        death = died(run.pid)
    wait_until(lambda: contender.entered, 3.0, "the contender has the lock")
    assert contender.entered is not None and contender.entered - death < 1.5  # the ttl is 1.0


def test_cold_shutdown(cluster: Cluster, key: str) -> None:
    with cluster.worker("-c", "2") as worker:
        cluster.send("work", key, 30.0)
        run = cluster.entered(key)
        contender = cluster.contend(key)
        os.kill(worker.process.pid, signal.SIGQUIT)
        contender.gets_it(since=died(run.pid))
        worker.ended()


def test_sigterm_to_the_whole_group(cluster: Cluster, key: str) -> None:
    """What systemd does by default: the children are told as well, and their bodies end."""
    with cluster.worker("-c", "2") as worker:
        cluster.send("work", key, 30.0)
        run = cluster.entered(key)
        contender = cluster.contend(key)
        os.killpg(worker.process.pid, signal.SIGTERM)
        contender.gets_it(since=died(run.pid))
        worker.ended()
