"""A lease that is lost in mid-body: never quiet, and by default an exception in the body."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest
import redis

from celery_redlock import LeaseLost
from tests.support.cluster import TASKS, Cluster, steal
from tests.support.machine import brief, in_time
from tests.support.wait import wait_until
from tests.support.worker import Worker, often

pytestmark = pytest.mark.worker

PUNCTUAL = 0.05
"""Seconds after its deadline within which a body is told."""


POOLS = [often(name) for name in ("prefork", "threads", "solo", "gevent")]


@pytest.fixture(scope="module", params=POOLS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def worker(cluster: Cluster, name: str) -> Iterator[Worker]:
    with cluster.worker("-c", "3", "-P", name) as worker:
        yield worker


def interruptible(name: str, kind: str) -> None:
    """Skip what no exception can be raised in; `test_green.py` has what happens then."""
    if name == "gevent" and kind == "loop":
        pytest.skip("a greenlet is struck when it waits")
    if name == "threads" and kind in ("recv", "one sleep"):
        pytest.skip("only the main thread can be woken")


@pytest.mark.parametrize("kind", ["sleep", "loop", "one sleep", "recv"])
def test_lease_lost_is_raised_in_the_body(
    cluster: Cluster, worker: Worker, name: str, key: str, kind: str
) -> None:
    interruptible(name, kind)
    sent = cluster.send("short_ttl", key, 20.0, kind)
    cluster.entered(key)
    steal(cluster, key)
    with pytest.raises(LeaseLost, match=f"k:{key}: the lease is over"):
        cluster.result(sent)
    run = cluster.runs(key, sent)[0]
    assert run.ended
    in_time(run.begin, run.end, 3.0, "a body whose lock was lost at once")
    worker.said(f"lost the lock k:{key} held by task {sent.id}")
    line = shown(worker, f"lost the lock k:{key}")
    assert "ERROR/" in line
    (told,) = cluster.lines("loss", f"k:{key}")  # the listener
    task, task_id, host, pid, held_for, reason, votes = told.detail
    assert (task, task_id, pid) == (f"{TASKS}.short_ttl", sent.id, run.pid)
    assert host == socket.gethostname()
    assert 0.0 < held_for < 10.0
    assert reason == "refused"
    assert votes[:3] == ["no"] * 3
    assert f"held by task {sent.id} of pid {pid} on {host} ({task}), after" in line
    assert f"{held_for:.1f} s: refused (" in line
    for node in cluster.nodes:
        assert f"127.0.0.1:{node.port} " in line
    with redis.Redis(port=cluster.nodes[0].port) as client:  # the thief's key is not ours to free
        assert client.get(f"redlock:k:{key}") == b"a thief"
    cluster.settled()


@pytest.mark.parametrize("kind", ["sleep", "loop", "recv"])
def test_a_majority_gone_for_longer_than_the_ttl(
    cluster: Cluster, worker: Worker, name: str, key: str, kind: str
) -> None:
    """Told at the deadline: within 50 ms, unless the machine itself was busy elsewhere.

    Of three bodies the first counts, side by side or, on solo, one after the other.
    """
    interruptible(name, kind)
    tries, count = (3, 1) if name == "solo" else (1, 3)
    lates: list[float] = []
    begin = time.monotonic()
    for again in range(tries):
        lates += told_late(cluster, f"{key}{again}", kind, count)
        if min(lates) < PUNCTUAL:
            break
    assert min(lates) >= 0.0
    brief(min(lates), PUNCTUAL, f"to be told, in {lates},", since=begin)


def told_late(cluster: Cluster, key: str, kind: str, count: int) -> list[float]:
    """Bodies that lose a majority: seconds after their deadlines when they are told."""
    sent = [cluster.send("punctual", f"{key}{i}", 20.0, kind) for i in range(count)]
    for i in range(count):
        cluster.entered(f"{key}{i}")
    for node in cluster.nodes[:3]:
        node.pause()
    try:
        told = [cluster.result(one) for one in sent]
    finally:
        for node in cluster.nodes[:3]:
            node.resume()
    assert [reason for reason, _late, _lost in told] == ["expired"] * count
    assert all(lost for _reason, _late, lost in told)
    for i in range(count):
        (loss,) = cluster.lines("loss", f"k:{key}{i}")
        assert loss.detail[-1][:3] == ["silent"] * 3
        cluster.free(f"{key}{i}", within=5.0)
    return [late for _reason, late, _lost in told]


def shown(worker: Worker, words: str) -> str:
    return next(line for line in worker.text.splitlines() if words in line)


def test_one_long_sleep_is_ended(cluster: Cluster, worker: Worker, name: str, key: str) -> None:
    """In the main thread a signal ends it, and a hub a greenlet's; threads cannot be woken."""
    sent = cluster.send("one_sleep", key, 2.0 if name == "threads" else 20.0)
    cluster.entered(key)
    steal(cluster, key)
    with pytest.raises(LeaseLost):
        cluster.result(sent)
    run = cluster.runs(key, sent)[0]
    if name != "threads":
        in_time(run.begin, run.end, 3.0, "a sleep whose lock was lost at once")
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
    assert cluster.result(sent) > 0.0
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
    assert run.end - run.begin > 0.4
    in_time(run.begin, run.end, 3.0, "a body of 0.5 s at most")
    cluster.free(key)


def test_the_worker_is_unharmed(cluster: Cluster, worker: Worker, key: str) -> None:
    """After all that: no exception struck outside a body, every child takes tasks."""
    sent = [cluster.send("work", f"{key}{i}") for i in range(9)]
    for one in sent:
        assert cluster.result(one) == {"retries": 0, "token": True}
    assert "unrecoverable" not in worker.text.lower()
    assert "Traceback" not in worker.text.split("ready.")[0]
    wait_until(lambda: not cluster.client.hlen("unacked"), 5.0, "all are acknowledged")


def test_a_body_that_lost_its_lease_in_a_c_call_and_then_returns_has_not_succeeded(
    cluster: Cluster, worker: Worker, name: str, key: str
) -> None:
    """Nothing of ours could run meanwhile; so it is asked at the end."""
    if name == "prefork":
        pytest.skip("the worker's main process extends it")
    sent = cluster.send("short_ttl", key, 3.0, "gil")
    with pytest.raises(LeaseLost, match=f"k:{key}: the lease is over"):
        cluster.result(sent)
    # Where threads take turns, the watchdog may have its turn first, and end the body.
    assert cluster.runs(key, sent)[0].ended or name == "threads"
