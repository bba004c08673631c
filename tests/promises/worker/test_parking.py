"""A hot key: those that wait are parked in the main process, out of the way of others."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping

import pytest

from tests.promises.worker.parking import Sent, all_done, cut_off, parked, send
from tests.support.cluster import Cluster
from tests.support.machine import in_time
from tests.support.wait import wait_until
from tests.support.worker import Worker, often, pool


@pytest.fixture(scope="module")
def narrow(cluster: Cluster) -> Iterator[Worker]:
    """A worker with one slot."""
    with cluster.worker("-c", "1", queue="narrow") as worker:
        yield worker


@pytest.fixture(scope="module")
def two(cluster: Cluster, narrow: Worker) -> Iterator[None]:
    """Two workers on one queue."""
    with cluster.worker("-c", "2", queue="narrow"):
        yield


def retries(states: Mapping[str, list[str]], sent: Sent) -> int:
    """Return how often these were sent again."""
    return sum(states.get(one.id, []).count("RETRY") for one in sent)


def test_free_tasks_overtake_twenty_parked_ones(cluster: Cluster, narrow: Worker, key: str) -> None:
    """One slot, and twenty waiting tasks, more than the worker would fetch.

    Each is sent again once.
    """
    with cluster.states() as states:
        with cluster.redlock.lock(f"k:{key}"):
            sent = send(cluster, "work", key, 20, 0.01)
            others = [cluster.send("work", f"{key}{i}", 0.0, queue="narrow") for i in range(10)]
            assert {cluster.state(one) for one in others} == {"SUCCESS"}
            parked(cluster, sent, 20)  # as an operator sees them
            assert cluster.runs(key) == []
        all_done(cluster, sent, key)
    assert retries(states, sent) == 1  # the first, which met the lock
    assert all(states[one.id][-1] == "SUCCESS" for one in sent)


def test_tasks_of_one_key_in_one_worker_follow_each_other(
    cluster: Cluster, narrow: Worker, key: str
) -> None:
    """They come at once, with an ETA, rate-limited or acknowledged late; none is refused."""
    with cluster.states() as states:
        sent = send(cluster, "work", key, 4, 0.05)
        sent += send(cluster, "work", key, 4, 0.01, countdown=0.1)
        sent += send(cluster, "limited", key, 4)
        sent += send(cluster, "late", key, 4, 0.01)
        all_done(cluster, sent, key)
    assert retries(states, sent) == 0


def test_parked_tasks_of_many_keys_freed_at_once_do_not_wait_for_a_poll(
    cluster: Cluster, narrow: Worker, key: str
) -> None:
    """The worker has one slot: the end of any body lets the next one go, whatever its key is."""
    names = [f"{key}-{number}" for number in range(60)]
    leases = [cluster.redlock.acquire(f"k:{name}") for name in names]
    sent = [cluster.send("work", name, 0.0, queue="narrow") for name in names]
    parked(cluster, sent, 60)
    released = time.monotonic()
    for lease in leases:
        cluster.redlock.release(lease)
    assert {cluster.state(one, 40.0) for one in sent} == {"SUCCESS"}
    last = max(cluster.runs(name)[0].begin for name in names)
    in_time(released, last, 4.0, "from the release to the last start")  # 0.3 s; by looks: 16 s


def test_parked_tasks_can_be_revoked_and_expire(cluster: Cluster, narrow: Worker, key: str) -> None:
    with cluster.redlock.lock(f"k:{key}"):
        kept, revoked = send(cluster, "work", key, 2)
        (expired,) = send(cluster, "work", key, 1, expires=2.5)
        (stamped,) = send(cluster, "work", key, 1, stamped_headers=["who"], who=key)
        parked(cluster, [kept, revoked], 2)
        for one in (revoked, stamped):
            narrow.said(f"work[{one.id}] waits (parked) for k:{key}")
        revoked.revoke()
        cluster.app.control.revoke_by_stamped_headers({"who": [key]})
        assert cluster.state(revoked) == "REVOKED"
        assert cluster.state(stamped) == "REVOKED"
        assert cluster.state(expired) == "REVOKED"
    assert cluster.state(kept) == "SUCCESS"
    assert [run.task for run in cluster.runs(key)] == [kept.id]
    cluster.settled()


def test_countdown_of_a_retry_is_kept_after_parking(
    cluster: Cluster, narrow: Worker, key: str
) -> None:
    """The task had to wait for its lock before."""
    with cluster.redlock.lock(f"k:{key}"):
        (sent,) = send(cluster, "work", key, 1, 0.0, "retry")
        parked(cluster, [sent], 1)
    assert cluster.result(sent)["retries"] == 3
    runs = cluster.runs(key)
    gaps = [two.begin - one.begin for one, two in itertools.pairwise(runs)]
    assert min(gaps) >= 0.1


@pytest.mark.parametrize("name", [pool("gevent")])
def test_full_pool_of_one_greenlet_does_not_wait_for_itself(
    cluster: Cluster, key: str, name: str
) -> None:
    """A body that ends in the only greenlet lets the next one go, and must leave it for that."""
    with cluster.worker("-P", name, "-c", "1", queue=f"full-{name}"):
        sent = send(cluster, "work", key, 10, 0.02, queue=f"full-{name}")
        all_done(cluster, sent, key)
        cluster.settled()


def test_parked_tasks_run_after_a_hard_time_limit(cluster: Cluster, key: str) -> None:
    with cluster.worker("-c", "1", queue="limited") as worker:
        first = cluster.send("work", key, 30.0, time_limit=1.5, queue="limited")
        cluster.entered(key)
        sent = [cluster.send("work", key, queue="limited") for _ in range(2)]
        worker.said(f"work[{sent[1].id}] waits (parked) for k:{key}")
        assert cluster.state(first) == "FAILURE"
        for one in sent:
            assert cluster.result(one, 5.0)
        assert "Pool callback raised" not in worker.text


def test_two_workers_take_turns_without_polling(cluster: Cluster, two: None, key: str) -> None:
    """They run back to back. Except for the first of each, few meet a held lock."""
    with cluster.states() as states:
        sent = send(cluster, "work", key, 40, 0.02)
        all_done(cluster, sent, key)
    assert retries(states, sent) <= 20  # 2 to 6, 11 once on a busy machine; polling has hundreds
    assert all(states[one.id][-1] == "SUCCESS" for one in sent)
    cluster.settled()


def test_parked_tasks_are_not_lost_with_their_connection(cluster: Cluster, key: str) -> None:
    """The broker delivers parked messages again, and none of them runs twice.

    All are parked, for 11 s and more. A message that is just being fetched may count as delivered
    with the broker; kombu looks for such messages when it connects, and then every 100 s.
    """
    conf = {"broker_transport_options": {"visibility_timeout": 60}}
    with cluster.worker("-c", "2", queue="cut", **conf) as worker:
        with cluster.redlock.lock(f"k:{key}"):
            sent = send(cluster, "work", key, 10, 0.01, queue="cut")
            parked(cluster, sent, 10)
            cut_off(cluster, worker)
        all_done(cluster, sent, key)


@pytest.mark.parametrize("name", [pool("threads"), pool("solo"), often("gevent")])
def test_tasks_are_parked_in_every_pool(cluster: Cluster, key: str, name: str) -> None:
    """By their settings they would wait in their slots, and for an hour before a retry."""
    conf = {"redlock_wait": 30.0, "redlock_retry_backoff": 3600, "redlock_retry_backoff_max": 3600}
    conf["redlock_node_timeout"] = 3.0  # nor may a busy machine make it an hour
    with cluster.states() as states, cluster.worker("-P", name, "-c", "4", queue=name, **conf):
        with cluster.redlock.lock(f"k:{key}"):
            sent = send(cluster, "work", key, 10, 0.01, queue=name)
            wait_until(lambda: retries(states, sent), 10.0, "the first has met the lock")
            other = cluster.send("work", f"{key} other", queue=name)
            assert cluster.state(other) == "SUCCESS"
        all_done(cluster, sent, key)
        cluster.settled()
    assert retries(states, sent) <= 10


def test_tasks_wait_without_a_quorum_as_if_not_parked(
    cluster: Cluster, narrow: Worker, key: str
) -> None:
    send(cluster, "work", key, 1, 4.0)
    cluster.entered(key)
    sent = send(cluster, "work", key, 3, 0.1)
    parked(cluster, sent, 3)
    with cluster.states() as states:
        for node in cluster.nodes[:3]:
            node.pause()
        wait_until(lambda: retries(states, sent) >= 1, 15.0, "one was sent again")
        for node in cluster.nodes[:3]:
            node.resume()
        assert {cluster.state(one, 30.0) for one in sent} == {"SUCCESS"}
