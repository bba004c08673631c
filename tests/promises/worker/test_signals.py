"""Signals and events of locks, as real workers send them: which, from where, with what."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.bodies import Line
from tests.support.cluster import TASKS, Cluster, steal
from tests.support.wait import wait_until
from tests.support.worker import Worker

LONG = 30.0
"""Seconds to wait for what must come."""


@pytest.fixture(scope="module")
def worker(cluster: Cluster) -> Iterator[Worker]:
    conf = {"test_hears": True, "redlock_events": True}
    with cluster.worker("-c", "2", "-E", **conf) as worker:
        yield worker
        assert "Signal handler" not in worker.text


def told(cluster: Cluster, name: str, key: str, count: int = 1) -> Line:
    """The n-th signal of a name about a key, once it has come."""

    def of() -> list[Line]:
        return cluster.lines(name, f"k:{key}")

    wait_until(lambda: len(of()) >= count, LONG, f"{name} of {key}")
    return of()[count - 1]


# -- signals ---------------------------------------------------------------------------------------


def test_signals_of_a_lock_around_a_body_come_in_order_from_its_process(
    cluster: Cluster, worker: Worker, key: str
) -> None:
    """Each has the task as its sender."""
    sent = cluster.send("short_ttl", key, 1.2)
    cluster.result(sent, LONG)
    task = f"{TASKS}.short_ttl"
    acquired, extended, released = (
        told(cluster, f"lock_{what}", key) for what in ("acquired", "extended", "released")
    )
    assert acquired.at < extended.at < released.at
    (run,) = cluster.runs(key)
    for line in (acquired, extended, released):
        assert (line.task, line.pid) == (task, run.pid)
        assert line.detail["owner"] == [sent.id, task, run.pid]
    assert acquired.at < run.begin and run.end < released.at
    assert (acquired.detail["attempts"], released.detail["held"]) == (1, True)
    assert 0.0 <= acquired.detail["waited"] < LONG
    assert 1.2 < released.detail["held_for"] < LONG
    assert cluster.lines("lock_contended", f"k:{key}") == []


def test_signal_of_a_lock_freed_for_a_killed_process_comes_once(
    cluster: Cluster, worker: Worker, key: str
) -> None:
    """The main process releases the lock and sends the signal, once."""
    sent = cluster.send("work", key, 0.3, "SIGKILL")
    run = cluster.entered(key)
    released = told(cluster, "lock_released", key)
    assert released.pid == worker.process.pid
    assert released.task == f"{TASKS}.work"
    assert released.detail["owner"] == [sent.id, f"{TASKS}.work", run.pid]
    assert released.detail["held"] is True
    assert 0.3 < released.detail["held_for"] < LONG
    cluster.free(key, within=LONG)
    assert len(cluster.lines("lock_released", f"k:{key}")) == 1


# -- events, and what is told by both -------------------------------------------------------------


class Watch:
    """A receiver of the events that `celery events` would show."""

    def __init__(self, cluster: Cluster) -> None:
        self.seen: list[dict[str, Any]] = []
        self.state = cluster.app.events.State()
        self._connection = cluster.app.connection_for_read()
        self._receiver = cluster.app.events.Receiver(
            self._connection, handlers={"*": self._see}, node_id=f"test-{os.getpid()}"
        )
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._ready.wait(LONG)
        # It has subscribed, but a broker may take a moment to accept it.
        with cluster.app.events.default_dispatcher() as dispatcher:
            wait_until(lambda: dispatcher.send("test-hello") or self.seen, LONG, "it is told")

    def _see(self, event: dict[str, Any]) -> None:
        self.seen.append(dict(event))
        self.state.event(event)

    def _run(self) -> None:
        with self._receiver.consumer_context(wakeup=False) as (connection, _channel, _consumers):
            self._ready.set()
            while not self._receiver.should_stop:
                try:
                    connection.drain_events(timeout=0.2)
                except TimeoutError:
                    continue

    def close(self) -> None:
        self._receiver.should_stop = True
        self._thread.join(LONG)
        self._connection.close()

    def of(self, kind: str, task_id: str) -> list[dict[str, Any]]:
        return [one for one in self.seen if one["type"] == kind and one.get("uuid") == task_id]

    def wait(self, kind: str, task_id: str) -> dict[str, Any]:
        wait_until(lambda: self.of(kind, task_id), LONG, f"{kind} of {task_id}")
        return self.of(kind, task_id)[0]


@pytest.fixture(scope="module")
def watch(cluster: Cluster, worker: Worker) -> Iterator[Watch]:
    watch = Watch(cluster)
    yield watch
    watch.close()


def test_monitors_see_a_task_that_waits_in_its_pool_slot(
    cluster: Cluster, worker: Worker, watch: Watch, key: str
) -> None:
    first = cluster.send("fenced", key)  # until the test ends it
    run = cluster.entered(key)
    sent = cluster.send("policy_wait", key)
    event = watch.wait("task-lock-waiting", sent.id)
    assert event["resource"] == f"k:{key}"
    assert {**event["holder"], "host": ""} == {
        **{"task_id": first.id, "task": f"{TASKS}.fenced", "host": "", "pid": run.pid}
    }
    assert event["waited"] >= 0.0
    assert event["name"] == f"{TASKS}.policy_wait"
    assert event["hostname"] == watch.wait("task-received", sent.id)["hostname"]
    assert "token" not in str(event)
    cluster.tell(key)
    assert watch.wait("task-lock-acquired", sent.id)["waited"] > 0.0
    assert watch.of("task-lock-acquired", first.id) == []  # it has not waited
    cluster.result(sent, LONG)
    watch.wait("task-succeeded", sent.id)
    assert watch.state.tasks[sent.id].state == "SUCCESS"


def test_monitors_see_a_parked_task_once(
    cluster: Cluster, worker: Worker, watch: Watch, key: str
) -> None:
    """When the task runs, the signal has the whole time that it has waited."""
    first = cluster.send("fenced", key)
    run = cluster.entered(key)
    sent = cluster.send("work", key)
    event = watch.wait("task-lock-waiting", sent.id)
    assert event["resource"] == f"k:{key}"
    assert event["name"] == f"{TASKS}.work"
    assert event["holder"]["task_id"] == first.id
    assert event["holder"]["pid"] == run.pid
    assert watch.state.tasks[sent.id].state == "LOCK-WAITING"
    cluster.tell(key)
    acquired = watch.wait("task-lock-acquired", sent.id)
    assert acquired["resource"] == f"k:{key}"
    assert acquired["waited"] >= event["waited"]
    cluster.result(sent, LONG)
    watch.wait("task-succeeded", sent.id)
    assert len(watch.of("task-lock-waiting", sent.id)) == 1
    assert told(cluster, "lock_acquired", key, 2).detail["waited"] > 0.0


def test_signals_and_events_of_a_lost_lock_name_its_reason(
    cluster: Cluster, worker: Worker, watch: Watch, key: str
) -> None:
    """A signal in its process, and an event for monitors."""
    sent = cluster.send("short_ttl", key, 20.0)
    run = cluster.entered(key)
    steal(cluster, key)
    lost, released = told(cluster, "lock_lost", key), told(cluster, "lock_released", key)
    for line in (lost, released):
        assert (line.task, line.pid) == (f"{TASKS}.short_ttl", run.pid)
        assert line.detail["owner"] == [sent.id, f"{TASKS}.short_ttl", run.pid]
    assert lost.detail["reason"] == "refused"
    assert lost.detail["held_for"] > 0.0
    assert released.detail["held"] is False
    event = watch.wait("task-lock-lost", sent.id)
    assert (event["resource"], event["reason"]) == (f"k:{key}", "refused")
    assert event["name"] == f"{TASKS}.short_ttl"
    assert event["held_for"] > 0.0
    assert (event["holder"]["task_id"], event["holder"]["pid"]) == (sent.id, run.pid)
    assert event["hostname"] == watch.wait("task-received", sent.id)["hostname"]
