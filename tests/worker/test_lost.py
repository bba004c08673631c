"""A lease that is lost in mid-body: never quiet, and by default an exception in the body."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from celery_redlock import LeaseLost
from tests.support import wait_until
from tests.worker.harness import Cluster, Worker

pytestmark = pytest.mark.worker


@pytest.fixture(scope="module", params=["prefork", "threads"])
def worker(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Worker]:
    with cluster.worker("-c", "3", "-P", request.param) as worker:
        yield worker


def steal(cluster: Cluster, key: str) -> None:
    """What no program should do: on a majority the key is another's, in mid-body."""
    for node in cluster.nodes[:3]:
        with redis.Redis(port=node.port) as client:
            assert client.delete(f"redlock:k:{key}") == 1
            client.set(f"redlock:k:{key}", "a thief", px=20_000)


@pytest.mark.parametrize("kind", ["sleep", "loop"])
def test_lease_lost_is_raised_in_the_body(
    cluster: Cluster, worker: Worker, key: str, kind: str
) -> None:
    sent = cluster.send("short_ttl", key, 20.0, kind)
    cluster.entered(key)
    steal(cluster, key)
    with pytest.raises(LeaseLost, match=f"k:{key}: the lease is over"):
        cluster.result(sent)
    run = cluster.runs(key, sent)[0]
    assert run.ended and run.end - run.begin < 3.0
    worker.said(f"lost the lock k:{key} held by task {sent.id}")
    assert "ERROR/" in shown(worker, f"lost the lock k:{key}")
    (told,) = cluster.lines("lost", f"k:{key}")  # the listener
    assert told.detail == "refused"
    with redis.Redis(port=cluster.nodes[0].port) as client:  # the thief's key is not ours to free
        assert client.get(f"redlock:k:{key}") == b"a thief"
    cluster.settled()


def shown(worker: Worker, words: str) -> str:
    return next(line for line in worker.text.splitlines() if words in line)


def test_one_long_sleep_is_ended(cluster: Cluster, worker: Worker, key: str) -> None:
    """In the main thread of a prefork child, a signal ends it; other threads cannot be woken."""
    sent = cluster.send("one_sleep", key, 2.0)
    cluster.entered(key)
    steal(cluster, key)
    with pytest.raises(LeaseLost):
        cluster.result(sent)
    run = cluster.runs(key, sent)[0]
    if "ForkPoolWorker" in worker.text:
        assert run.end - run.begin < 1.8
    else:
        assert run.end - run.begin >= 2.0


def test_keys_deleted_on_a_majority_are_set_again(
    cluster: Cluster, worker: Worker, key: str
) -> None:
    """Gone, but nobody's: repaired before the deadline, so the body keeps its lock."""
    sent = cluster.send("short_ttl", key, 2.0)
    cluster.entered(key)
    for node in cluster.nodes[:2]:
        with redis.Redis(port=node.port) as client:
            assert client.delete(f"redlock:k:{key}") == 1
    contender = cluster.contend(key)
    assert cluster.result(sent) > 0.5
    contender.gets_it(since=lambda: cluster.runs(key, sent)[0].end)


def test_on_lost_log(cluster: Cluster, worker: Worker, key: str) -> None:
    sent = cluster.send("lost_log", key, 2.0)
    cluster.entered(key)
    steal(cluster, key)
    assert cluster.result(sent) is True  # ran to its end; current_lease().lost
    worker.said(f"lost the lock k:{key} held by task {sent.id}")
    assert cluster.runs(key)[0].end - cluster.runs(key)[0].begin >= 2.0


def test_on_lost_callable(cluster: Cluster, worker: Worker, key: str) -> None:
    sent = cluster.send("lost_told", key, 2.0)
    cluster.entered(key)
    steal(cluster, key)
    assert cluster.result(sent) is True
    (told,) = cluster.lines("told", f"k:{key}")
    assert told.detail is True
    assert told.at < cluster.runs(key)[0].end


def test_max_lifetime_ends_a_body_that_hangs(cluster: Cluster, worker: Worker, key: str) -> None:
    sent = cluster.send("hangs", key, 20.0)
    with pytest.raises(LeaseLost, match="max_lifetime"):
        cluster.result(sent)
    run = cluster.runs(key, sent)[0]
    assert 0.4 < run.end - run.begin < 3.0
    cluster.free(key)


def test_the_worker_is_unharmed(cluster: Cluster, worker: Worker, key: str) -> None:
    """After all that: no exception struck outside a body, every child takes tasks."""
    sent = [cluster.send("work", f"{key}{i}") for i in range(9)]
    for one in sent:
        assert cluster.result(one) == {"retries": 0, "token": True}
    assert "unrecoverable" not in worker.text.lower()
    assert "Traceback" not in worker.text.split("ready.")[0]
    wait_until(lambda: not cluster.client.hlen("unacked"), 5.0, "all are acknowledged")
