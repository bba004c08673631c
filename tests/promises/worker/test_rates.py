"""A rate: in any window as many bodies of a key start as it says, whatever becomes of them."""

from __future__ import annotations

import json
import time
from typing import Any

import redis

from celery_redlock import Skipped
from tests.promises.worker.paced import STARTS, WINDOW, crowded, starts
from tests.promises.worker.parking import parked
from tests.support.cluster import Cluster
from tests.support.monitor import Monitor
from tests.support.wait import wait_until
from tests.support.worker import Worker

MINUTE = 60.0
"""Seconds within which all is done, on however busy a machine."""


def started(cluster: Cluster, key: str, count: int) -> list[float]:
    """Wait for so many starts; when they were."""
    wait_until(lambda: len(starts(cluster, key)) >= count, MINUTE, f"{count} bodies have started")
    return starts(cluster, key)


def test_rate_holds_in_every_window_over_two_workers(
    cluster: Cluster, worker: Worker, key: str
) -> None:
    """Each window is filled: waiting tasks start as soon as they may."""
    with cluster.worker("-c", "2"):
        sent = [cluster.send("paced", key) for _ in range(9)]
        for one in sent:
            assert cluster.result(one, MINUTE) == [f"pace:{key}", "", False]
        cluster.settled()
    times = starts(cluster, key)
    assert len(times) == 9
    assert crowded(times) == []
    # Two at once, in each window; a second for each of the four hand-offs, and for a busy machine.
    assert 4 * WINDOW <= times[-1] - times[0] < 4 * (WINDOW + 1.0) + 4.0


ENDINGS = {
    "return": ("paced", "return"),
    "error": ("paced", "raise"),
    "retry": ("paced", "retry"),
    "kill": ("paced", "SIGKILL"),
    "reject": ("paced_late", "reject"),
    "requeue": ("paced_late", "requeue"),
    "kill, delivered again": ("paced_late", "SIGKILL"),
}


def test_start_counts_under_a_rate_however_its_body_ends(
    cluster: Cluster, worker: Worker, key: str
) -> None:
    for name, (task, then) in ENDINGS.items():
        cluster.send(task, f"{key}-{name}", then)
        started(cluster, f"{key}-{name}", 1)
        for _ in range(2):
            cluster.send("paced", f"{key}-{name}")
    again = {"retry": 1, "requeue": 1, "kill, delivered again": 1}
    for name in ENDINGS:
        times = started(cluster, f"{key}-{name}", 3 + again.get(name, 0))
        assert crowded(times) == [], name
    cluster.settled()


def test_terminated_body_counts_as_a_start(cluster: Cluster, worker: Worker, key: str) -> None:
    for name, limit in (("revoked", None), ("limited", 1.0)):
        one = cluster.send("paced", f"{key}-{name}", "return", 60.0, time_limit=limit)
        started(cluster, f"{key}-{name}", 1)
        if limit is None:
            one.revoke(terminate=True)
        for _ in range(2):
            cluster.send("paced", f"{key}-{name}")
        assert cluster.state(one, MINUTE) in ("REVOKED", "FAILURE")
    for name in ("revoked", "limited"):
        assert crowded(started(cluster, f"{key}-{name}", 3)) == [], name


def test_body_longer_than_the_window_of_a_rate_holds_up_no_other(
    cluster: Cluster, worker: Worker, key: str
) -> None:
    """Its start leaves the window; the slots of the pool are another matter."""
    long = cluster.send("paced", key, "return", MINUTE)
    rest = [cluster.send("paced", key) for _ in range(3)]
    for one in rest:
        cluster.result(one, MINUTE)
    assert crowded(starts(cluster, key)) == []
    cluster.tell(key)
    assert cluster.result(long, MINUTE)


def test_task_revoked_or_expired_before_its_start_does_not_count(
    cluster: Cluster, worker: Worker, key: str
) -> None:
    assert cluster.result(cluster.send("paced_rarely", key))
    revoked = [cluster.send("paced_rarely", key) for _ in range(3)]
    expired = cluster.send("paced_rarely", key, expires=1.0)
    for one in revoked:
        worker.said(f"paced_rarely[{one.id}] waits (parked)")
    for one in revoked:
        one.revoke()
    for one in (*revoked, expired):
        assert cluster.state(one, MINUTE) == "REVOKED"
    assert cluster.result(cluster.send("paced_rarely", key), MINUTE)
    times = starts(cluster, key)
    assert (len(times), crowded(times, 1, 5.0)) == (2, [])
    for node in cluster.nodes:  # what is left of it there is of bodies that began
        with redis.Redis(port=node.port) as client:
            names = client.keys(f"redlock:pace:{key}#start*")
            left = b" ".join(value for name in names if (value := client.get(name)))
            assert not any(one.id.encode() in left for one in (*revoked, expired))


def test_tasks_over_their_rate_are_parked_and_not_polled(
    cluster: Cluster, worker: Worker, monitor: Monitor, key: str
) -> None:
    """They wait a minute without requests to the nodes, and an operator sees how long it is."""
    assert cluster.result(cluster.send("paced_slowly", key))
    sent = [cluster.send("paced_slowly", key) for _ in range(5)]
    parked(cluster, sent, 5)
    assert cluster.result(cluster.send("paced", f"{key}-other"))
    worker.said(f"waits (parked) for a start of pace:{key}")

    def next_in() -> list[float]:
        found = [wait for wait in _waits(cluster) if wait["resource"] == f"pace:{key}"]
        return [wait["next_in"] for wait in found if wait["next_in"] is not None]

    wait_until(lambda: len(next_in()) == 5, MINUTE, "it is known when the next may start")
    assert all(0.0 < seconds < 62.0 for seconds in next_in())
    before = len(monitor.about(f"pace:{key}#start"))
    time.sleep(3.0)  # in which it would be looked at five times
    assert len(monitor.about(f"pace:{key}#start")) - before <= 1
    for one in sent:
        one.revoke()
    assert {cluster.state(one, MINUTE) for one in sent} == {"REVOKED"}


def _waits(cluster: Cluster) -> list[dict[str, Any]]:
    answers = cluster.app.control.inspect(timeout=1.0)._request("redlock") or {}
    return [wait for answer in answers.values() for wait in answer["waits"]]


def test_duplicate_of_a_queued_task_with_a_rate_does_not_start(
    cluster: Cluster, worker: Worker, key: str
) -> None:
    """The task has a reservation beside its rate, freed when its body may start."""
    assert cluster.result(cluster.send("paced_once", key))
    queued = cluster.send("paced_once", key)
    worker.said(f"paced_once[{queued.id}] waits (held")
    assert Skipped.of(cluster.result(cluster.send("paced_once", key), MINUTE)) is not None
    assert cluster.result(queued, MINUTE)
    times = starts(cluster, key)
    assert (len(times), crowded(times, 1, 5.0)) == (2, [])


def test_task_over_its_rate_with_policy_skip_is_skipped(
    cluster: Cluster, worker: Worker, key: str
) -> None:
    results = [cluster.result(cluster.send("paced_skip", key)) for _ in range(STARTS + 1)]
    assert [Skipped.of(one) is None for one in results] == [True] * STARTS + [False]
    assert f"{STARTS} starts" not in json.dumps(results[:STARTS])
    worker.said(f"pace:{key} has its 2 starts of the last 1 s (2/s); the next in")


def test_lost_quorum_starts_no_task_and_forgets_no_start(
    cluster: Cluster, worker: Worker, key: str
) -> None:
    first = [cluster.send("paced", key) for _ in range(STARTS)]
    for one in first:
        cluster.result(one)
    stopped = cluster.nodes[:3]
    for node in stopped:
        node.pause()
    try:
        waiting = cluster.send("paced", key)
        worker.said("waits (unavailable", MINUTE)
        assert len(starts(cluster, key)) == STARTS
    finally:
        for node in stopped:
            node.resume()
    assert cluster.result(waiting, MINUTE)
    times = starts(cluster, key)
    assert crowded(times) == []


def test_oracle_of_rates_finds_a_window_with_one_start_too_many() -> None:
    assert crowded([0.0, 0.1, WINDOW - 0.01, 5.0]) == [WINDOW - 0.01]
