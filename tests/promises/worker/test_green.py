"""gevent: a body is a greenlet, and all bodies of a worker share one native thread."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator

import pytest
import redis

from celery_redlock import LeaseLost
from tests.promises.worker.ending import GEVENT_ENDS_TASKS, VERSION
from tests.support.cluster import TASKS, Cluster, steal
from tests.support.machine import in_time
from tests.support.nodes import hung
from tests.support.wait import wait_until
from tests.support.worker import Worker, pool

NODE_TIMEOUT = 1.0
"""Seconds: so long that whoever waited for a node would stand out from a machine that is busy."""


@pytest.fixture(scope="module", params=[pool("gevent")])
def worker(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Worker]:
    conf = {"redlock_node_timeout": NODE_TIMEOUT}
    with cluster.worker("-c", "20", "-P", request.param, **conf) as worker:
        yield worker
        cluster.settled()


def runs_on(cluster: Cluster, key: str, bound: float) -> None:
    """The body of `key` was never kept from running for that long, in seconds."""
    at = [line.at for line in cluster.lines("alive", f"k:{key}")]
    for earlier, later in itertools.pairwise(at):
        in_time(earlier, later, bound, "another greenlet's turn")


# -- waiting stops nobody else -------------------------------------------------------------------


def test_greenlets_run_while_another_waits_for_a_lock(
    cluster: Cluster, worker: Worker, key: str
) -> None:
    with cluster.redlock.lock(f"k:{key}"):
        waiting = cluster.send("patient", key)
        wait_until(lambda: cluster.accepted_by(waiting), 5.0, "it has begun to wait")
        begin = time.monotonic()
        sent = [cluster.send("work", f"{key}{i}", 0.5) for i in range(10)]
        for one in sent:
            cluster.result(one)
        in_time(begin, time.monotonic(), 3.0, "ten bodies of 0.5 s, side by side,")
        assert cluster.runs(key) == []
    assert cluster.result(waiting) == "done"


def test_greenlets_run_while_another_waits_for_a_quorum(
    cluster: Cluster, worker: Worker, key: str
) -> None:
    """Nodes hang: an attempt takes the node timeout, and delays no other greenlet."""
    sent = cluster.send("work", key, 3.0)
    cluster.entered(key)
    with hung(cluster.nodes[:3]):
        waiting = cluster.send("unavailable_raise", f"{key}-other")
        assert cluster.state(waiting) == "FAILURE"
    assert cluster.result(sent) == {"retries": 0, "token": True}
    runs_on(cluster, key, NODE_TIMEOUT / 2)


def test_greenlet_does_not_share_the_lease_of_another(
    cluster: Cluster, worker: Worker, key: str
) -> None:
    """A greenlet that the body starts does not share it either: it has to wait."""
    assert cluster.result(cluster.send("in_a_thread", key)) == [
        "there is no current lease",
        "ResourceHeld",
    ]
    leases = [cluster.send("named", f"{key}{i}", 0.3) for i in range(10)]
    for i, one in enumerate(leases):
        assert cluster.result(one) == [f"k:{key}{i}"]


# -- extending -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [pytest.param("loop", marks=pytest.mark.slow), "gil"])
def test_greenlet_that_never_yields_loses_its_lock_with_an_error(
    cluster: Cluster, worker: Worker, key: str, kind: str
) -> None:
    """The watchdog is a greenlet as well, so the ttl passes. `test_sidecar.py` has the remedy."""
    logs, raises = cluster.send("lost_log", key, 1.5, kind), f"{key}-raises"
    assert cluster.result(logs) is True
    worker.said(f"lost the lock k:{key} held by {TASKS}.lost_log[{logs.id}]")
    sent = cluster.send("short_ttl", raises, 1.5, kind)
    with pytest.raises(LeaseLost, match="the lease is over"):
        cluster.result(sent)
    worker.said(f"lost the lock k:{raises} held by {TASKS}.short_ttl[{sent.id}]")
    assert worker.text.count(f"lost the lock k:{raises}") == 1


# -- losing --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sleep", pytest.param("one sleep", marks=pytest.mark.slow)])
def test_only_the_greenlet_whose_lease_is_lost_is_interrupted(
    cluster: Cluster, worker: Worker, key: str, kind: str
) -> None:
    others = [cluster.send("short_ttl", f"{key}{i}", 2.5, kind) for i in range(8)]
    sent = cluster.send("short_ttl", key, 20.0, kind)
    cluster.entered(key)
    steal(cluster, key)
    with pytest.raises(LeaseLost, match=f"k:{key}: the lease is over"):
        cluster.result(sent)
    run = cluster.runs(key, sent)[0]
    assert run.ended and run.end - run.begin < 3.0
    worker.said(f"lost the lock k:{key} held by {TASKS}.short_ttl[{sent.id}]")
    (told,) = cluster.lines("lost", f"k:{key}")
    assert told.detail == "refused"
    for i, one in enumerate(others):
        assert cluster.result(one) > 0.0
        (other,) = cluster.runs(f"{key}{i}", one)
        assert other.ended and other.end - other.begin >= 2.4
    with redis.Redis(port=cluster.nodes[0].port) as client:  # the thief's key is not ours to free
        assert client.get(f"redlock:k:{key}") == b"a thief"
    cluster.settled()


def test_interrupt_that_comes_too_late_strikes_no_greenlet(
    cluster: Cluster, worker: Worker, key: str
) -> None:
    """The body ends without ever having waited; its greenlet, and the others, do other work."""
    sent = cluster.send("short_ttl", key, 1.5, "loop")
    cluster.entered(key)
    steal(cluster, key)
    with pytest.raises(LeaseLost):  # by its return: nothing is left of its lease
        cluster.result(sent)
    worker.said(f"lost the lock k:{key} held by {TASKS}.short_ttl[{sent.id}]")
    after = [cluster.send("work", f"{key}{i}", 0.2) for i in range(20)]
    for one in after:
        assert cluster.result(one) == {"retries": 0, "token": True}


# -- endings -------------------------------------------------------------------------------------


def test_revoked_greenlet_frees_its_lock(cluster: Cluster, worker: Worker, key: str) -> None:
    if VERSION < GEVENT_ENDS_TASKS:
        pytest.skip("this Celery cannot end a task of gevent's")
    sent = cluster.send("work", key, 30.0)
    cluster.entered(key)
    contender = cluster.contend(key)
    cluster.app.control.revoke(sent.id, terminate=True)
    assert cluster.state(sent) == "REVOKED"
    contender.gets_it(since=lambda: cluster.runs(key, sent)[0].end)
    assert cluster.runs(key, sent)[0].ended


def test_greenlet_revoked_while_it_waits_holds_nothing(
    cluster: Cluster, worker: Worker, key: str
) -> None:
    """The holder keeps its lock."""
    if VERSION < GEVENT_ENDS_TASKS:
        pytest.skip("this Celery cannot end a task of gevent's")
    with cluster.redlock.lock(f"k:{key}") as lease:
        sent = cluster.send("patient", key)
        wait_until(lambda: cluster.accepted_by(sent), 5.0, "it has begun to wait")
        cluster.app.control.revoke(sent.id, terminate=True)
        worker.said(f"Terminating {sent.id}")  # it comes by another connection than tasks
        after = cluster.send("work", f"{key}-after")
        assert cluster.result(after) == {"retries": 0, "token": True}
        lease.ensure()
    cluster.free(key, within=0.0)
    assert cluster.runs(key) == []
