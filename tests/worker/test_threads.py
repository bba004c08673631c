"""Pools that are one process: Python survives nearly every ending, and the same handlers free.

What only greenlets do is in `test_green.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.worker.harness import Cluster, Worker, pool
from tests.worker.test_endings import ends

pytestmark = pytest.mark.worker


POOLS = [pool(name) for name in ("threads", "solo", "gevent", "eventlet")]


@pytest.fixture(scope="module", params=POOLS)
def worker(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Worker]:
    with cluster.worker("-c", "3", "-P", request.param) as worker:
        yield worker
        cluster.settled()  # or the next worker would wait for what this one did not acknowledge


def test_success(cluster: Cluster, worker: Worker, key: str) -> None:
    sent = ends(cluster, key, "return")
    assert cluster.result(sent) == {"retries": 0, "token": True}
    cluster.settled()
    assert len(cluster.runs(key, sent)) == 1


def test_exception(cluster: Cluster, worker: Worker, key: str) -> None:
    sent = ends(cluster, key, "raise")
    with pytest.raises(ValueError, match="as asked"):
        cluster.result(sent)
    cluster.settled()
    assert len(cluster.runs(key, sent)) == 1


@pytest.mark.parametrize("then", ["retry", "retry at once"])
def test_retry(cluster: Cluster, worker: Worker, key: str, then: str) -> None:
    sent = cluster.send("work", key, 0.02, then)
    assert cluster.result(sent) == {"retries": 3, "token": True}
    assert sent.state == "SUCCESS"
    assert len(cluster.runs(key, sent)) == 4
    cluster.settled()
    cluster.free(key)


def test_requeue(cluster: Cluster, worker: Worker, key: str) -> None:
    sent = ends(cluster, key, "requeue", task="late")
    assert cluster.result(sent) == 2
    cluster.settled()


def test_a_crowd_takes_turns(cluster: Cluster, worker: Worker, key: str) -> None:
    sent = [cluster.send(way, key, 0.02) for way in ("under", "over", "work") for _ in range(4)]
    for one in sent:
        cluster.result(one, timeout=30.0)
    assert len(cluster.runs(key)) == len(sent)
    cluster.settled()
    cluster.free(key)


def test_a_body_of_three_times_its_ttl_keeps_its_lock(
    cluster: Cluster, worker: Worker, key: str
) -> None:
    sent = cluster.send("short_ttl", key, 3.0, "loop")
    cluster.entered(key)
    contender = cluster.contend(key)
    assert 0.5 < cluster.result(sent) <= 1.0
    contender.gets_it(since=lambda: cluster.runs(key, sent)[0].end)


def test_nesting(cluster: Cluster, worker: Worker, key: str) -> None:
    assert cluster.result(cluster.send("factorial", key, 5)) == 120
    cluster.free(key, within=0.0)
