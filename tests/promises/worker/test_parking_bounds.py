"""Effects of parking on others: a worker with a free slot always finds a free key."""

from __future__ import annotations

import contextlib
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import redis

from celery_redlock.worker.parking.prefetch import RETURN_S
from tests.promises.worker.parking import (
    all_done,
    done,
    flood,
    goes_back,
    occupied,
    parked,
    send,
)
from tests.support.cluster import Cluster
from tests.support.machine import in_time
from tests.support.wait import wait_until
from tests.support.worker import pool


def test_1200_parked_tasks_of_one_key_delay_no_other(cluster: Cluster, key: str) -> None:
    """All of them are parked, none is returned, and a few are checked at a time."""
    with cluster.worker("-c", "2", queue="flood") as worker, cluster.redlock.lock(f"k:{key}"):
        flood(cluster, key, 1200, "flood")
        wait_until(
            lambda: (cluster.client.llen("flood"), cluster.client.hlen("unacked")) == (0, 1200),
            30.0,
            "all are parked",
        )
        for number in range(3):
            sent = time.monotonic()
            cluster.result(cluster.send("work", f"{key}-{number}", 0.0, queue="flood"))
            (run,) = cluster.runs(f"{key}-{number}")
            in_time(sent, run.begin, 1.0, "until one of another key begins")
        assert worker.text.count(" waits (held") <= 4, "most never met the lock"
        worker.kill()
    cluster.client.delete("unacked", "unacked_index")


def test_messages_beyond_the_memory_are_sent_again_a_few_at_a_time(
    cluster: Cluster, key: str
) -> None:
    """They do not fill the pool, so other tasks pass them; none is lost."""
    conf = {"redlock_parking_memory": 65_536, "redlock_retry_backoff_max": 30.0}
    with cluster.worker("-c", "2", queue="beyond", **conf) as worker:
        with cluster.redlock.lock(f"k:{key}"):
            sent = send(cluster, "work", key, 24, 0.0, queue="beyond")
            other = cluster.send("work", f"{key}-other", 0.0, queue="beyond")
            worker.said("take more memory than redlock_parking_memory allows (65536 bytes)")
            assert cluster.client.llen("beyond") >= 4, "it takes no more than its ordinary window"
            assert cluster.state(other, 15.0) == "SUCCESS"
        all_done(cluster, sent, key, 40.0)
        again = worker.text.count(" waits (held")
        assert again <= 100
        assert "back in their queues" not in worker.text


def test_all_tasks_behind_a_stuck_holder_fail_soon_after_their_deadline(
    cluster: Cluster, key: str
) -> None:
    """Each of the many goes to the pool once more, and is refused for good."""
    with cluster.worker("-c", "2", queue="stuck") as worker, cluster.redlock.lock(f"k:{key}"):
        sent = send(cluster, "conflict_deadline", key, 60, 0.0, queue="stuck")
        began = time.monotonic()
        assert {cluster.state(one, 20.0) for one in sent} == {"FAILURE"}
        in_time(began, time.monotonic(), 15.0, "until all have failed")
        assert worker.text.count(" gives up after ") == len(sent)
        assert worker.text.count(" waits (held") <= 4, "most met the lock when it was too late"


def test_tasks_with_a_deadline_stay_parked_while_their_key_changes_hands(
    cluster: Cluster, key: str
) -> None:
    options = {"tests.promises.worker.tasks.conflict_deadline": {"lock_retry_deadline": 2.0}}
    with cluster.worker("-c", "2", queue="moving", task_annotations=options) as worker:
        sent = send(cluster, "conflict_deadline", key, 40, 0.1, queue="moving")
        all_done(cluster, sent, key, 40.0)
        # A few go to the pool just as another gets the key; without the rule it was fourteen.
        assert worker.text.count(" waits (held") <= 10, "no holder was there for two seconds"


def test_worker_without_a_slot_keeps_no_key_from_another(cluster: Cluster, key: str) -> None:
    """It may keep its ordinary prefetch window, as without locks: four, and one."""
    with cluster.worker("-c", "1", queue="shared") as full:
        other = occupied(cluster, full, key)
        with cluster.worker("-c", "1", queue="shared"):
            sent = send(cluster, "work", key, 20, 0.05, queue="shared")
            wait_until(lambda: done(cluster, key) >= 15, 15.0, "15 of 20 have run")
            cluster.tell(other)
            all_done(cluster, sent, key)
            cluster.settled()


def test_parked_tasks_go_back_when_the_pool_is_full(cluster: Cluster, key: str) -> None:
    goes_back(cluster, key, "back")


def test_warm_shutdown_gives_parked_tasks_back_at_once(cluster: Cluster, key: str) -> None:
    """However long the running bodies take; no task is lost."""
    held = contextlib.ExitStack()
    held.enter_context(cluster.redlock.lock(f"k:{key}"))
    with held, cluster.worker("-c", "2", queue="stops") as worker:
        other = f"{key}-other"
        cluster.send("until_told_retry", other, queue="stops")
        cluster.entered(other)
        sent = send(cluster, "work", key, 12, queue="stops")
        parked(cluster, sent, 12)
        worker.terminate()
        told = time.monotonic()
        wait_until(lambda: cluster.client.llen("stops") == 12, 10.0, "all are in the queue again")
        assert time.monotonic() - told < 2.0, "they are back within two seconds"
        assert worker.process.poll() is None, "its last body still runs"
        cluster.tell(other)
        assert worker.ended() == 0
        assert cluster.client.llen("stops") == 12
        with cluster.worker("-c", "2", queue="stops"):
            parked(cluster, sent, 11)
            held.close()
            all_done(cluster, sent, key)
            cluster.settled()


def test_stopping_worker_keeps_nothing_in_its_socket(cluster: Cluster, key: str) -> None:
    """Its last BRPOP waits at the broker for up to a second, and takes messages sent meanwhile."""
    with contextlib.ExitStack() as held, cluster.worker("-c", "2", queue="pops") as worker:
        held.enter_context(cluster.redlock.lock(f"k:{key}"))
        other = f"{key}-other"
        cluster.send("until_told_retry", other, queue="pops")
        cluster.entered(other)
        sent = send(cluster, "work", key, 1, queue="pops")
        parked(cluster, sent, 1)
        another = held.enter_context(ThreadPoolExecutor(1))
        popped = another.submit(cluster.client.brpop, "pops", 20)
        time.sleep(1.2)  # it asks anew each second: the other is the first in line now
        worker.terminate()
        name, message = popped.result()
        time.sleep(0.3)  # it has read what came at once
        cluster.client.rpush(name, message)
        sent += send(cluster, "work", key, 1, queue="pops")
        wait_until(lambda: cluster.client.llen("pops") == len(sent), 3.0, "it has given it back")
        assert worker.process.poll() is None, "its last body still runs"
        cluster.tell(other)
        assert worker.ended() == 0
    with cluster.worker("-c", "2", queue="pops"):
        all_done(cluster, sent, key)


def test_full_worker_leaves_tasks_it_cannot_run_to_the_broker(cluster: Cluster, key: str) -> None:
    """A purge removes them, as without locks."""
    with cluster.worker("-c", "1", queue="purged"):
        sent = send(cluster, "until_told_retry", key, 40, queue="purged")
        cluster.entered(key)
        wait_until(
            lambda: cluster.client.llen("purged") >= 34, 10.0, "all but a few are in the queue"
        )
        assert cluster.client.delete("purged") == 1
        cluster.tell(key)
        cluster.settled()
        ran = {run.task for run in cluster.runs(key)}
        assert len([one for one in sent if one.id in ran]) <= 6


def test_most_urgent_parked_task_goes_first(cluster: Cluster, key: str) -> None:
    """On Redis the smallest priority number is the most urgent."""
    with cluster.worker("-c", "2", queue="urgent"), contextlib.ExitStack() as held:
        held.enter_context(cluster.redlock.lock(f"k:{key}"))
        sent = send(cluster, "work", key, 10, 0.01, queue="urgent", priority=6)
        parked(cluster, sent, 10)
        (urgent,) = send(cluster, "work", key, 1, 0.01, queue="urgent", priority=0)
        parked(cluster, [*sent, urgent], 11)
        held.close()
        all_done(cluster, [*sent, urgent], key)
        assert urgent.id in [run.task for run in cluster.runs(key)][:2]


def scores(cluster: Cluster) -> dict[str, float]:
    """When each unacknowledged message counts as delivered; seconds since 1970."""
    with redis.Redis(port=cluster.broker.port) as client:
        pairs: Any = client.zrange("unacked_index", 0, -1, withscores=True)
    return {tag.decode(): at for tag, at in pairs}


def test_parked_tasks_of_a_killed_worker_return_within_a_minute(cluster: Cluster, key: str) -> None:
    """Redis returns messages after the visibility timeout, an hour.

    The parked ones are due sooner.
    """
    with cluster.redlock.lock(f"k:{key}"), cluster.worker("-c", "2", queue="dies") as worker:
        sent = send(cluster, "work", key, 20, queue="dies")
        parked(cluster, sent, 20)

        def soon() -> bool:
            dates = scores(cluster).values()
            return len(dates) == 20 and max(dates) <= time.time() + RETURN_S - 3600

        wait_until(soon, 5.0, "all are due within a minute of its death")
        worker.kill()
        # A minute later, by the clock of the broker's index; another worker looks at its start.
        with redis.Redis(port=cluster.broker.port) as client:
            for tag, at in scores(cluster).items():
                client.zadd("unacked_index", {tag: at - RETURN_S - 1.0})
        assert cluster.client.llen("dies") == 0
    with cluster.worker("-c", "2", queue="dies"):
        all_done(cluster, sent, key, 30.0)
        cluster.settled()


@pytest.mark.parametrize(
    "name",
    [
        pool("prefork"),
        pytest.param(*pool("gevent").values, marks=[*pool("gevent").marks, pytest.mark.slow]),
    ],
)
def test_parked_tasks_given_to_another_worker_are_dropped_here(
    cluster: Cluster, key: str, name: str
) -> None:
    """They run there once, as after a long pause of ours, and none waits for a slot here.

    They leave the prefetch window, which is 8 here, so the worker goes on; and a delivery behind
    them has the turn of the first at once.
    """
    arguments = ("-P", name, "-c", "2")
    with cluster.worker(*arguments, queue="given") as worker, contextlib.ExitStack() as held:
        held.enter_context(cluster.redlock.lock(f"k:{key}"))
        sent = send(cluster, "work", key, 60, 0.01, queue="given")
        parked(cluster, sent, 60)
        with redis.Redis(port=cluster.broker.port) as client:
            client.delete("unacked", "unacked_index")  # given away, and acknowledged there
        begin = time.monotonic()
        held.close()
        left = "was redelivered to another worker"
        wait_until(lambda: worker.text.count(left) == 60, 10.0, "they are left to it")
        in_time(begin, time.monotonic(), 4.0, "to leave 60 of them")  # one at a time: 6 s
        assert len(cluster.runs(key)) == 0
        cluster.result(cluster.send("work", key, 0.01, queue="given"))
