"""Events for monitors: of whom, how often, and what a monitor makes of them; over fake nodes."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from celery.events.event import Event

from celery_redlock import ResourceHeld, SingletonTask
from celery_redlock.events import subscribe, unsubscribe
from celery_redlock.messages.headers import ATTEMPTS
from celery_redlock.protocol.values import Owner
from celery_redlock.worker import task_events
from tests.support.delivering import deliver, rob
from tests.support.fake_lock import FakeRedlock
from tests.support.wait import wait_until

OTHER = Owner("there", 1, task_id="other-id", task="other")


class Box:
    def __init__(self) -> None:
        self.sent: list[tuple[str, dict[str, Any]]] = []

    def send(self, name: str, /, **fields: Any) -> None:
        self.sent.append((name, fields))

    @property
    def names(self) -> list[str]:
        return [name for name, _fields in self.sent]


@pytest.fixture
def box() -> Iterator[Box]:
    box = Box()
    post: Any = box
    listener = task_events._Monitor(post)
    subscribe(listener)
    yield box
    unsubscribe(listener)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    clock = SimpleNamespace(now=1e9)
    monkeypatch.setattr(task_events, "time", SimpleNamespace(time=lambda: clock.now))
    return clock


def test_task_lock_waiting_event_is_sent_once_a_second_at_most(
    redlock: FakeRedlock, app: Any, box: Box, clock: Any
) -> None:
    lease = redlock.acquire("k", owner=OTHER)

    @app.task(name="work")
    def work() -> None:
        for _ in range(25):  # 2.5 seconds
            with pytest.raises(ResourceHeld):
                redlock.acquire("k")
            clock.now += 0.1
        redlock.release(lease)
        redlock.acquire("k")
        redlock.acquire("another")  # for which it has not waited

    deliver(work)
    assert box.names == ["task-lock-waiting"] * 3 + ["task-lock-acquired"]
    waited = [fields["waited"] for _name, fields in box.sent]
    assert waited == pytest.approx([0.0, 1.0, 2.0, 2.5], abs=0.11)
    assert {(fields["uuid"], fields["name"]) for _name, fields in box.sent} == {("the-id", "work")}
    assert box.sent[0][1]["holder"] == {
        **{"task_id": "other-id", "task": "other", "host": "there", "pid": 1}
    }


def test_task_lock_acquired_event_is_sent_for_a_task_that_was_parked(
    redlock: FakeRedlock, app: Any, box: Box
) -> None:
    @app.task(base=SingletonTask, name="charge", lock_key="k")
    def charge() -> None: ...

    deliver(charge)
    assert box.sent == []  # it has not waited
    deliver(charge, **{ATTEMPTS: {"since": time.time() - 50.0}})
    ((name, fields),) = box.sent
    assert (name, fields["uuid"], fields["resource"]) == ("task-lock-acquired", "the-id", "k")
    assert 50.0 <= fields["waited"] < 90.0


def test_loss_of_a_lock_sends_task_lock_lost(redlock: FakeRedlock, app: Any, box: Box) -> None:
    @app.task(base=SingletonTask, name="charge", lock_key="k", lock_on_lost="log")
    def charge() -> None:
        rob(redlock, "k")
        redlock.clock.advance(4.0)
        redlock.watchdog.tend()

    deliver(charge)
    ((name, fields),) = box.sent
    assert (name, fields["uuid"], fields["resource"]) == ("task-lock-lost", "the-id", "k")
    assert (fields["reason"], fields["held_for"]) == ("refused", 4.0)
    assert fields["name"] == "charge"
    assert fields["holder"]["task_id"] == "the-id"


def test_broker_that_is_away_delays_no_sender_of_task_events(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Events that cannot be kept are dropped, and the log reports it once."""
    asked, away = threading.Event(), threading.Event()

    def dispatcher(**_options: Any) -> Any:
        asked.set()
        away.wait(30.0)
        raise OSError("no broker")

    app: Any = SimpleNamespace(events=SimpleNamespace(default_dispatcher=dispatcher))
    post = task_events._Sender(app, "here")
    for _ in range(task_events.MAX_KEPT + 50):
        post.send("task-lock-waiting", uuid="one")
    assert asked.wait(30.0)
    assert post._events.qsize() <= task_events.MAX_KEPT
    away.set()
    wait_until(lambda: not post._events.qsize(), 30.0, "all are tried")
    said = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert [record.getMessage() for record in said] == [
        "events about waiting and lost locks could not be sent: OSError"
    ]


def test_monitor_reads_task_lock_events_as_states_that_outrank_started() -> None:
    """docs/signals.md promises it; so an event marks the end of the waiting."""
    state = Celery("monitor", set_as_current=False).events.State()
    seen = []
    for clock, name in enumerate(
        [
            *("task-received", "task-lock-waiting", "task-started", "task-lock-acquired"),
            *("task-lock-lost", "task-succeeded"),
        ]
    ):
        event = Event(name, hostname="here", uuid="one", clock=clock, local_received=time.time())
        state.event({**event, "name": "charge", "resource": "k"})
        seen.append(state.tasks["one"].state)
    assert seen == [
        *("RECEIVED", "LOCK-WAITING", "LOCK-WAITING", "LOCK-ACQUIRED", "LOCK-LOST", "SUCCESS")
    ]
