"""Forged messages: what a worker does with them, and what it shows of its secrets.

Whoever may write to the broker can run any task with any arguments. More than that he cannot: lock
options come from the decorated code, and a lock that another delivery holds is neither freed nor
stolen nor left behind.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis

from celery_redlock.server import LocalServer
from tests.promises.worker.reserving import Reservations
from tests.support.cluster import READY, TASKS, Cluster
from tests.support.nodes import TOKEN
from tests.support.wait import wait_until
from tests.support.worker import Worker


@pytest.fixture(scope="module", params=["prefork", pytest.param("threads", marks=pytest.mark.slow)])
def worker(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Worker]:
    accepted = {"accept_content": ["json", "pickle"]}
    cluster.app.conf.update(accepted)
    with cluster.worker("-c", "3", "-P", request.param, **accepted) as worker:
        yield worker


def publish(
    cluster: Cluster, key: str, headers: dict[str, Any], embed: dict[str, Any] | None = None
) -> None:
    """A message as no producer of Celery's makes it."""
    task_id = str(uuid.uuid4())
    body = ([key], {"seconds": 0.02}, {"callbacks": None, "errbacks": None, "chain": None,
                                       "chord": None, **(embed or {})})  # fmt: skip
    with cluster.app.producer_or_acquire() as producer:
        producer.publish(
            body,
            exchange="",
            routing_key="celery",
            serializer="json",
            headers={"lang": "py", "task": f"{TASKS}.work", "id": task_id, "root_id": task_id,
                     "parent_id": None, "group": None, "retries": 0, "argsrepr": "", **headers},
            correlation_id=task_id,
        )  # fmt: skip


HUGE = 10**4000
FORGED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "lock options": (
        {"lock_ttl": 1e9, "lock_key": "other", "redlock_ttl": 1e9, "ttl": 0, "key": "other",
         "lock_on_unavailable": "run", "redlock_enabled": False, "redlock_nodes": []}, {}),
    "a lease": ({"redlock_lease": "mine"}, {}),
    "a lease in the body": ({}, {"redlock_lease": {"token": "mine"}}),
    "a stamp": ({"redlock_stamp": "0" * 16}, {"redlock_stamp": "0" * 16}),
    "attempts of no type": ({"redlock_attempts": ["held"]}, {}),
    "attempts of wrong types": ({"redlock_attempts": {"held": "x", "since": {}}}, {}),
    "huge attempts": ({"redlock_attempts": {"held": HUGE, "unavailable": -HUGE}}, {}),
    "attempts in the future": ({"redlock_attempts": {"since": 1e300, "held": 10**9}}, {}),
    "eager": ({"is_eager": True}, {"is_eager": True}),
    "called directly": ({"called_directly": True}, {"called_directly": True}),
    "protected": ({"_protected": 7}, {"_protected": 7}),
    "headers that are none": ({"headers": "none"}, {}),
    "retries that are none": ({"retries": "many"}, {}),
    "huge retries": ({"retries": HUGE}, {}),
    "negative retries": ({"retries": -HUGE}, {}),
    "replaced": ({"replaced_task_nesting": 5, "parent_id": "x"}, {}),
    "a long id": ({"id": "i" * 1_000_000}, {}),
    "a long stranger of a parent": ({"parent_id": "p" * 1_000_000}, {}),
    "an id that looks like a token": ({"id": "s|h|1|t|0|task|0|n"}, {}),
    "an id for terminals": ({"id": "\x1b[2J\n\u202e"}, {}),
    "a deadline long ago": ({"redlock_attempts": {"since": -1e11}}, {}),
}  # fmt: skip

FAILS = {"eager", "headers that are none", "a deadline long ago"}
"""Forgeries that harm only the task they ask for."""


@pytest.mark.parametrize("name", FORGED)
def test_forged_message_takes_its_turn_and_changes_no_lock(
    cluster: Cluster, worker: Worker, key: str, name: str
) -> None:
    headers, embed = FORGED[name]
    holder = cluster.send("work", key, 30.0)
    cluster.entered(key)
    before = cluster.redlock.holder(f"k:{key}")
    publish(cluster, key, headers, embed)
    wait_until(lambda: cluster.client.llen("celery") == 0, 10, "the worker has taken it")
    begin = time.monotonic()
    while time.monotonic() < begin + 0.2:  # whatever it is up to
        lease = cluster.redlock.holder(f"k:{key}")
        assert lease is not None
        assert lease.digest == before.digest
        assert lease.expires_in <= 30.0
    cluster.tell(key)
    assert cluster.result(holder)["retries"] == 0
    if name not in FAILS:
        cluster.entered(key, count=2)  # behind the holder: the oracle looks for overlaps
    cluster.settled(timeout=10.0)
    cluster.free(key, within=3.0)
    assert cluster.redlock.holder("other") is None
    # Nothing of the worker is broken by it.
    assert cluster.result(cluster.send("work", key))["token"] is True
    assert worker.process.poll() is None


def test_forged_reservation_takes_the_lock_from_no_body(
    cluster: Cluster, worker: Worker, reservations: Reservations, key: str
) -> None:
    """It does not keep the key for as long as it claims either, nor stop the worker.

    It does not claim that its body has begun, because it would then be parked.
    """
    forged = {"resources": [f"k:{key}"], "scope": "until_executing", "on_duplicate": "skip",
              "ttl": 60.0}  # fmt: skip
    holder = cluster.send("work", key, 0.4)
    cluster.entered(key)
    publish(cluster, key, {"redlock_reservation": forged})
    without_end = {**forged, "scope": "until_expired", "ttl": 10**400}
    publish(cluster, key, {"redlock_reservation": without_end})
    cluster.entered(key, count=3)  # one behind the other: the oracle looks for overlaps
    assert cluster.result(holder)["retries"] == 0
    cluster.settled(timeout=10.0)
    cluster.free(key, within=3.0)
    reservations.freed(key)
    assert "Traceback" not in worker.text.rpartition(holder.id)[2]


# -- Secrets

CANARY = "s3cr3t-c4n4ry"


@contextmanager
def guarded(tmp_path: Path) -> Iterator[Cluster]:
    """Five nodes that ask for the password; a worker's settings hold it."""
    with ExitStack() as stack:
        nodes = [stack.enter_context(LocalServer(password=CANARY)) for _ in range(5)]
        broker = stack.enter_context(LocalServer())
        cluster = Cluster(nodes, broker, tmp_path)
        stack.callback(cluster.close)
        yield cluster


@contextmanager
def overheard(broker: LocalServer) -> Iterator[list[str]]:
    """All that anybody publishes on the broker: Celery's events, results that are ready."""
    heard: list[str] = []
    stop = threading.Event()
    with redis.Redis(port=broker.port) as client, client.pubsub() as pubsub:
        pubsub.psubscribe("*")
        pubsub.get_message(timeout=2.0)

        def listen() -> None:
            while not stop.is_set():
                message = pubsub.get_message(timeout=0.1)
                if message is not None:
                    heard.append(repr(message))

        thread = threading.Thread(target=listen)
        thread.start()
        try:
            yield heard
        finally:
            stop.set()
            thread.join(5.0)


def stored(broker: LocalServer) -> list[str]:
    """All that is kept on the broker: results with their tracebacks, messages that wait."""
    with redis.Redis(port=broker.port) as client:
        return [f"{key!r} {client.dump(key)!r}" for key in client.scan_iter()]


def search(texts: dict[str, list[str]]) -> None:
    for where, found in texts.items():
        assert found, f"nothing is in {where}: the test is void"
        for text in found:
            assert CANARY not in text, where
            assert not TOKEN.search(text), where


@pytest.mark.parametrize("serializer", [pytest.param("json", marks=pytest.mark.slow), "pickle"])
def test_worker_shows_no_password_and_no_token(tmp_path: Path, key: str, serializer: str) -> None:
    with guarded(tmp_path) as cluster, overheard(cluster.broker) as heard:
        conf = {"result_serializer": serializer, "accept_content": ["json", "pickle"]}
        cluster.app.conf.update(conf)
        with cluster.worker("-c", "2", "-l", "DEBUG", "-E", **conf) as worker:
            lost = cluster.send("short_ttl", key, 20.0)
            cluster.entered(key)
            for task in ("conflict_retry", "conflict_skip", "conflict_raise"):
                cluster.send(task, key)
            worker.said("is skipped")
            for node in cluster.nodes[:3]:
                with redis.Redis(port=node.port, password=CANARY) as client:
                    client.set(f"redlock:k:{key}", "a thief", px=1000)
            assert cluster.state(lost) == "FAILURE"  # LeaseLost
            for node in cluster.nodes[:3]:
                node.pause()
            failed = cluster.send("unavailable_raise", f"{key}-2")
            cluster.send("conflict_retry", f"{key}-3")
            cluster.send("unavailable_run", f"{key}-4")
            assert cluster.state(failed, 20.0) == "FAILURE"
            worker.said("waits (unavailable")
            worker.said("WITHOUT its lock", timeout=15.0)
            for node in cluster.nodes[:3]:
                node.kill()
            cluster.send("conflict_retry", f"{key}-5")
            worker.said("is unreachable", timeout=15.0)
            for node in cluster.nodes[:3]:
                node.password = "another"
                node.start()
            worker.said("refuses us: AUTH", timeout=15.0)
            cluster.send("work", f"{key}-6", 20.0, "_exit")
            results = stored(cluster.broker)
            search({"the log": [worker.text], "events": heard, "results": results})
            assert "QuorumUnavailable" in worker.text and "LeaseLost" in worker.text


@pytest.mark.parametrize(
    "wrong",
    [
        {"redlock_nodes": [f"redis://:{CANARY}@h:1/0", f"redis://:{CANARY}@h:1/0"]},
        {"redlock_nodes": [f"redis://:{CANARY}@h:1/0"], "redlock_ttl": "x"},
    ],
    ids=["twice", "another option"],
)
def test_refused_worker_does_not_log_the_password(cluster: Cluster, wrong: dict[str, Any]) -> None:
    worker = Worker(cluster, ("-c", "1", "-l", "DEBUG"), wrong)
    try:
        assert worker.ended(READY) != 0
        assert "celery_redlock: " in worker.text
        search({"the log": [worker.text]})
    finally:
        worker.kill()


def test_wrong_password_of_a_node_is_logged_when_a_worker_starts(cluster: Cluster) -> None:
    """The worker starts: a minority of nodes that refuse us costs nothing."""
    with LocalServer(password="another") as other:
        wrong = f"redis://:{CANARY}@127.0.0.1:{other.port}/0"
        nodes = [wrong, *(node.url for node in cluster.nodes[1:3])]
        with cluster.worker("-c", "1", redlock_nodes=nodes) as worker:
            worker.said(f"node 127.0.0.1:{other.port} refuses us: AUTH")
            assert cluster.result(cluster.send("add", 1, 2)) == 3
            search({"the log": [worker.text]})
