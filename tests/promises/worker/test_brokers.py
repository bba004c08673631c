"""Quorum queues, which delay by whole seconds and count deliveries; and the same on every broker.

A part in `make test`, where there is a RabbitMQ; all of it in `make test-all`.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from kombu import Connection, Queue

from celery_redlock import ResourceHeld, Skipped
from tests.promises.worker.ending import Ending, play
from tests.promises.worker.parking import goes_back
from tests.promises.worker.reserving import declare, replace_and_restart
from tests.promises.worker.scenarios import played_on
from tests.support.brokers import ACKS, KINDS, cluster_on, kind_of, own_queue, settings_of
from tests.support.brokers import needs_quorum_queues as needs_quorum_queues
from tests.support.cluster import Cluster
from tests.support.monitor import Monitor
from tests.support.proxy import Proxy
from tests.support.wait import died, wait_until
from tests.support.worker import Worker, pool

pytestmark = pytest.mark.worker


@needs_quorum_queues
def test_contended_tasks_on_quorum_queues_all_run_once(
    cluster: Cluster, rabbitmq: str, key: str, tmp_path: Path
) -> None:
    """Acknowledged late and requeued without a delay, they would be dropped after 20 times."""
    settings = settings_of("topic", rabbitmq)
    with own_queue(cluster, tmp_path, {**settings, "task_acks_late": True}) as other:
        with other.worker("-c", "3") as worker:
            with cluster.redlock.lock(f"k:{key}"):
                sent = [other.send("work", key, 0.02) for _ in range(8)]
                # One that is refused twice has been in the same queue of delays before.
                worker.said("(held, attempt 2", 10.0)
            assert {other.state(one, 20.0) for one in sent} == {"SUCCESS"}
        assert worker.text.count(" waits (") < 80
    assert len(other.runs(key)) == 8


@needs_quorum_queues
def test_task_waiting_for_its_eta_is_sent_anew_before_the_broker_drops_it(
    cluster: Cluster, rabbitmq: str, key: str, tmp_path: Path
) -> None:
    """It was with two workers that ended; a third return would make the broker drop it."""
    settings = settings_of("direct", rabbitmq, x_delivery_limit=2)
    with own_queue(cluster, tmp_path, settings) as other, Connection(rabbitmq) as connection:
        with other.app.connection_for_write() as declaring:
            queue = other.app.amqp.queues[other.queue](declaring.default_channel)
            queue.declare()
        sent = other.send("work", key, countdown=3600.0)
        queue = other.app.amqp.queues[other.queue](connection.default_channel)
        for count in (0, 1):
            message = wait_until(queue.get, 5.0, "it is there")
            assert message.headers["x-delivery-count"] == count
            message.requeue()
        with other.worker("-c", "1") as worker:
            worker.said(f"work[{sent.id}] was sent again")
            wait_until(lambda: not other.queued(), 5.0, "the worker has it")
        message = wait_until(queue.get, 5.0, "it is there when the worker is dead")
        assert message.headers["id"] == sent.id
        assert message.headers["x-delivery-count"] <= 1
        message.ack()


@pytest.mark.slow
@needs_quorum_queues
def test_workers_survive_a_short_consumer_timeout(
    cluster: Cluster, key: str, tmp_path: Path
) -> None:
    """RabbitMQ closes the channel of a consumer that keeps a message too long.

    That ends a worker.
    """
    from tests.support.rabbitmq import missing, start_rabbitmq

    if missing():
        pytest.skip(missing())
    advanced = "{consumer_timeout, 4000}, {channel_tick_interval, 1000}"
    with start_rabbitmq(advanced) as url:
        settings = settings_of("direct", url) | {
            "broker_transport_options": {"visibility_timeout": 4, "confirm_publish": True},
            "redlock_retry_backoff": 60.0,
            "redlock_retry_backoff_max": 60.0,
        }
        with own_queue(cluster, tmp_path, settings) as other, other.worker("-c", "2") as worker:
            with cluster.redlock.lock(f"k:{key}"):
                sent = [other.send("work", key) for _ in range(5)]
                begun = time.monotonic()
                wait_until(lambda: time.monotonic() > begun + 12.0, 20.0, "three times that")
            assert {other.state(one, 20.0) for one in sent} == {"SUCCESS"}
            assert "PRECONDITION_FAILED" not in worker.text
            assert worker.process.poll() is None


def test_task_sent_again_by_a_worker_that_then_died_runs_once(
    cluster: Cluster, rabbitmq: str, key: str, tmp_path: Path
) -> None:
    """The broker has both messages: the unacknowledged old one is delivered first."""
    settings = settings_of("classic", rabbitmq) | {
        "task_acks_late": True,
        "worker_prefetch_multiplier": 1,  # it does not get the new one as well
        "redlock_node_timeout": 2.0,
    }
    with own_queue(cluster, tmp_path, settings) as other:
        with other.worker("-c", "1") as first:
            for node in cluster.nodes[:3]:
                node.pause()
            sent = other.send("work", key, 0.02, ignore_result=True)
            wait_until(lambda: other.accepted_by(sent), 10.0, "a pool child has begun with it")
            first.process.send_signal(signal.SIGSTOP)
            first.said(f"work[{sent.id}] waits (unavailable, attempt 1")
            wait_until(other.queued, 5.0, "it is sent again")
        for node in cluster.nodes[:3]:
            node.resume()
        with other.worker("-c", "1") as second:
            second.said(f"work[{sent.id}] is done: this was a second delivery of it")
    assert len(other.runs(key)) == 1


def test_rejected_task_goes_to_the_dead_letter_queue(
    cluster: Cluster, rabbitmq: str, key: str, tmp_path: Path
) -> None:
    dead = Queue(f"dead-{key}", routing_key=f"dead-{key}", durable=False)
    arguments = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": dead.name}
    queues = {key: {"exchange": key, "queue_arguments": arguments}}
    other = Cluster(
        cluster.nodes, cluster.broker, tmp_path, broker_url=rabbitmq, task_queues=queues
    )
    with Connection(rabbitmq) as connection, other.worker("-c", "1", queue=key) as worker:
        dead = dead(connection.default_channel)
        dead.declare()
        with cluster.redlock.lock(f"k:{key}"):
            sent = other.send("policy_reject", key, queue=key)
            message = wait_until(lambda: dead.get(no_ack=True), 10.0, "there is a dead letter")
        assert message.headers["id"] == sent.id
        (death,) = message.headers["x-death"]
        assert (death["reason"], death["queue"], death["count"]) == ("rejected", key, 1)
        assert other.result(other.send("policy_reject", key, queue=key)) == "ran"
        assert dead.get(no_ack=True) is None
        assert f"policy_reject[{sent.id}] is rejected" in worker.text
        dead.delete()
    other.close()


def test_free_tasks_overtake_parked_ones_over_amqp(
    cluster: Cluster, rabbitmq: str, key: str, tmp_path: Path
) -> None:
    """The window is widened when it is full, not when the worker happens to wake up."""
    other = Cluster(
        cluster.nodes,
        cluster.broker,
        tmp_path,
        broker_url=rabbitmq,
        worker_prefetch_multiplier=1,
        task_queues={key: {"exchange": key}},
    )
    with other.worker("-c", "2", queue=key):
        with cluster.redlock.lock(f"k:{key}"):
            waiting = [other.send("work", key, 0.0, queue=key) for _ in range(100)]
            passing = other.send("work", f"{key}-other", 0.0, queue=key)
            assert other.state(passing, 10.0) == "SUCCESS"
        assert {other.state(one, 20.0) for one in waiting} == {"SUCCESS"}
    other.close()


@pytest.mark.parametrize("kind", [kind_of(kind) for kind in KINDS[1:]])
def test_replaced_calls_do_not_run_after_a_restart_of_their_worker(
    cluster: Cluster, rabbitmq: str, key: str, tmp_path: Path, kind: str
) -> None:
    with own_queue(cluster, tmp_path, settings_of(kind, rabbitmq)) as other:
        tasks = declare(other.app, lambda *_args: None)
        replace_and_restart(other, tasks, key, queue=other.queue)


# -- the same on every broker ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def where(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, str, Cluster, Worker]]:
    kind, acks = request.param
    path = tmp_path_factory.mktemp(f"{kind}-{acks}")
    with (
        cluster_on(kind, request, path, task_acks_late=acks == "late") as cluster,
        cluster.worker("-c", "3") as worker,
    ):
        yield kind, acks, cluster, worker


ENDINGS = played_on("prefork", own=False)
EVERYWHERE = [
    pytest.param((kind, acks), id=f"{kind}-{acks}", marks=kind_of(kind).marks)
    for kind in KINDS
    for acks in ACKS
]
USUAL = [pytest.param(("topic", "late"), id="topic-late", marks=kind_of("topic").marks)]
"""The cases of `make test`."""
RARE = [
    pytest.param(*one.values, id=one.id, marks=[*one.marks, pytest.mark.slow])
    for one in EVERYWHERE
    if one.id != "topic-late"
]


@pytest.mark.parametrize("where", [*USUAL, *RARE], indirect=True)
def test_conflict_policies_act_alike_on_each_broker(
    where: tuple[str, str, Cluster, Worker], key: str
) -> None:
    _kind, _acks, cluster, worker = where
    with cluster.redlock.lock(f"k:{key}"):
        waits = [cluster.send(name, key) for name in ("work", "policy_wait", "conflict_retry")]
        skips = cluster.send("conflict_skip", key)
        raises = cluster.send("conflict_raise", key)
        gives_up = cluster.send("conflict_deadline", key)
        rejects = cluster.send("policy_reject", key)
        assert Skipped.of(cluster.result(skips)) is not None
        for one in (raises, gives_up):
            with pytest.raises(ResourceHeld):
                cluster.result(one, 15.0)
        worker.said(f"policy_reject[{rejects.id}] is rejected")
        worker.said(f"conflict_deadline[{gives_up.id}] gives up after")
        assert cluster.runs(key) == []
    assert {cluster.state(one, 20.0) for one in waits} == {"SUCCESS"}
    old = cluster.send("work", key, 30.0)
    cluster.entered(key, 4)
    new = cluster.send("policy_replace", key)
    assert cluster.result(new) == "ran"
    assert cluster.state(old) == "REVOKED"
    assert len(cluster.runs(key)) == 5
    cluster.settled()
    cluster.check(since=0.0)


@pytest.mark.slow
@pytest.mark.parametrize("where", EVERYWHERE, indirect=True)
def test_crowd_takes_turns_on_each_broker(
    where: tuple[str, str, Cluster, Worker], key: str
) -> None:
    _kind, _acks, cluster, _worker = where
    sent = [cluster.send("work", key, 0.02) for _ in range(30)]
    assert {cluster.state(one, 60.0) for one in sent} == {"SUCCESS"}
    assert len(cluster.runs(key)) == 30
    cluster.settled()
    cluster.check(since=0.0)


@pytest.fixture(scope="module")
def watched(where: tuple[str, str, Cluster, Worker]) -> Iterator[Monitor]:
    with Monitor(where[2]) as monitor:
        yield monitor


@pytest.mark.slow
@pytest.mark.parametrize("ending", ENDINGS, ids=str)
@pytest.mark.parametrize("where", EVERYWHERE[1:], indirect=True)  # the first: test_endings.py
def test_lock_is_free_after_each_ending_on_each_broker(
    where: tuple[str, str, Cluster, Worker], watched: Monitor, key: str, ending: Ending
) -> None:
    _kind, _acks, cluster, worker = where
    play(ending, cluster, watched, "prefork", worker, key)
    cluster.check(since=0.0)


@pytest.mark.slow
@pytest.mark.parametrize("acks", ACKS)
@pytest.mark.parametrize("kind", [kind_of(kind) for kind in KINDS[1:]])
def test_late_acknowledged_message_of_a_killed_worker_comes_back(
    cluster: Cluster, rabbitmq: str, key: str, tmp_path: Path, kind: str, acks: str
) -> None:
    """RabbitMQ gives it to another worker at once, which waits until the ttl has passed."""
    settings = settings_of(kind, rabbitmq) | {"task_acks_late": acks == "late"}
    with own_queue(cluster, tmp_path, settings) as other:
        with other.worker("-c", "1") as first:
            sent = other.send("short_ttl", key, 3.0)
            pid = other.entered(key).pid
            kill_main(first)
            died(pid)
        with other.worker("-c", "1"):
            if acks == "late":
                assert other.state(sent, 30.0) == "SUCCESS"
            other.settled()
        assert len(other.runs(key)) == 1 + (acks == "late")
        other.check(since=0.0)


def kill_main(worker: Worker) -> None:
    worker.process.kill()
    worker.ended()


@needs_quorum_queues
def test_parked_tasks_keep_no_slot_idle(
    cluster: Cluster, rabbitmq: str, key: str, tmp_path: Path
) -> None:
    """The window cannot be widened, and is no larger than the pool."""
    settings = settings_of("topic", rabbitmq)
    settings |= {"task_acks_late": True, "worker_prefetch_multiplier": 1}
    with (
        own_queue(cluster, tmp_path, settings) as other,
        other.worker("-P", "threads", "-c", "4") as worker,
    ):
        long = [f"{key}-long-{number}" for number in range(2)]
        sent = [other.send("until_told_retry", one) for one in long]
        for one in long:
            other.entered(one)
        with cluster.redlock.lock(f"k:{key}"):
            sent += [other.send("work", key, 0.02) for _ in range(2)]
            wait_until(lambda: worker.text.count("waits (parked)") >= 2, 10.0, "both are parked")
            free = other.send("work", f"{key}-free")
            assert other.state(free, 3.0) == "SUCCESS", "two slots are free"
        for one in long:
            other.tell(one)
        assert {other.state(one, 20.0) for one in sent} == {"SUCCESS"}
    assert len(other.runs(key)) == 2


@needs_quorum_queues
def test_parked_tasks_beside_rate_limited_ones_keep_no_slot_idle(
    cluster: Cluster, rabbitmq: str, key: str, tmp_path: Path
) -> None:
    """Celery counts tasks that wait for their rate in the prefetch window, too."""
    settings = {**settings_of("topic", rabbitmq), "worker_prefetch_multiplier": 2}
    with (
        own_queue(cluster, tmp_path, settings) as other,
        other.worker("-P", "threads", "-c", "2") as worker,
    ):
        slow = [other.send("once_a_minute") for _ in range(3)]
        assert other.state(slow[0]) == "SUCCESS"
        with cluster.redlock.lock(f"k:{key}"):
            sent = [other.send("work", key, 0.02) for _ in range(3)]
            wait_until(lambda: worker.text.count("waits (parked)") >= 2, 10.0, "two are parked")
            free = other.send("work", f"{key}-free")
            assert other.state(free, 3.0) == "SUCCESS", "both slots are free"
        assert {other.state(one, 20.0) for one in sent} == {"SUCCESS"}
        for one in slow[1:]:
            one.revoke()


# -- The prefetch window, set by threads that do not read the connection ---------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", [pool("gevent")])
def test_parked_tasks_go_back_over_amqp_when_the_pool_is_full(
    cluster: Cluster, rabbitmq: str, key: str, tmp_path: Path, name: str
) -> None:
    """With greenlets the timer's one returns it, while the main one reads the connection."""
    with own_queue(cluster, tmp_path, settings_of("classic", rabbitmq)) as other:
        goes_back(other, key, other.queue, "-P", name)


@pytest.mark.slow
def test_threads_go_on_after_each_cut_of_the_connection(
    cluster: Cluster, rabbitmq: str, key: str, tmp_path: Path
) -> None:
    """Celery restores its window in the pool's threads, and the main thread widens it."""
    port = urlsplit(rabbitmq).port
    assert port is not None
    settings = settings_of("classic", rabbitmq)
    settings["worker_enable_remote_control"] = False  # its queue may still be the cut connection's
    with Proxy(port) as proxy, own_queue(cluster, tmp_path, settings) as other:
        through = rabbitmq.replace(f":{port}/", f":{proxy.port}/")
        with other.worker("-P", "threads", "-c", "4", broker_url=through) as worker:
            for cut in range(1, 9):
                sent = [other.send("work", f"{key}-{cut}-{n % 6}", 0.1) for n in range(36)]
                other.entered(f"{key}-{cut}-0")
                proxy.reset()
                worker.said("Connection to broker lost")
                assert {other.state(one, 10.0) for one in sent} == {"SUCCESS"}, f"cut {cut}"
