"""`doctor` finds reservations whose message is gone, and no others."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from celery import Celery

from celery_redlock import Redlock, SingletonTask
from celery_redlock.doctor import reservations
from celery_redlock.doctor.report import Finding
from celery_redlock.doctor.reservations import examine_reservations
from celery_redlock.protocol.values import Owner
from celery_redlock.server import LocalServer
from tests.tools.cli.clinic import put

RESERVED = "redlock:order:1#reserved"
ID = "8c1f02d0-7a"
MESSAGE = json.dumps({"headers": {"id": ID}})


class Stage:
    """A reserved key of a task, its broker, and a worker that answers."""

    def __init__(self, redlock: Redlock, servers: list[LocalServer]) -> None:
        self.redlock, self.urls = redlock, [server.url for server in servers]
        self.nodes = [redis.Redis.from_url(url) for url in self.urls]
        broker = servers[0].url.rsplit("/", 1)[0] + "/5"
        self.broker = redis.Redis.from_url(broker)
        self.broker.flushdb()
        self.app = Celery("shop", broker=broker, set_as_current=False)
        self.known: Any = {"worker": {}}
        asked = SimpleNamespace(query_task=lambda *_ids: self.known)
        self.app.control.inspect = lambda **_: asked

        @self.app.task(
            base=SingletonTask,
            name="shop.charge",
            shared=False,
            lock_key="order:{order_id}",
            lock_scope="until_executed",
        )
        def charge(order_id: int) -> None: ...

    def reserve(self, age: float = 100.0) -> None:
        owner = Owner("web-1", 4242, ID, task="shop.charge")
        put(self.nodes, RESERVED, owner.token(f"{7:032x}", time.time() - age))

    def found(self) -> list[Finding]:
        return list(examine_reservations(self.redlock, self.app, 1.0))


@pytest.fixture
def stage(
    redlock: Redlock, servers: list[LocalServer], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Stage]:
    monkeypatch.setattr(reservations, "PAUSE_S", 0.0)
    stage = Stage(redlock, servers)
    yield stage
    stage.app.close()
    for client in (*stage.nodes, stage.broker):
        client.flushdb()
        client.close()


def test_reservation_whose_message_is_gone_is_found_with_the_command_that_frees_it(
    stage: Stage,
) -> None:
    stage.reserve()
    (found,) = stage.found()
    assert (found.level, found.where, found.check) == ("warning", "order:1", "leaks")
    assert "celery redlock release KEY --reservation" in found.fix


def test_reservation_of_a_queued_message_is_not_reported(stage: Stage) -> None:
    stage.reserve()
    stage.broker.rpush("celery", MESSAGE)
    assert stage.found() == []


def test_reservation_of_a_message_that_a_worker_has_fetched_is_not_reported(stage: Stage) -> None:
    stage.reserve()
    stage.broker.hset("unacked", "tag", MESSAGE)
    assert stage.found() == []


def test_young_reservation_is_not_reported(stage: Stage) -> None:
    stage.reserve(age=5.0)
    assert stage.found() == []


def test_reservation_that_a_worker_knows_is_not_reported(stage: Stage) -> None:
    stage.reserve()
    stage.known = {"worker": {ID: ["active", {}]}}
    assert stage.found() == []


def assert_unknown(stage: Stage, why: str, fix: str) -> None:
    (found,) = stage.found()
    assert (found.level, found.where, found.check) == ("unchecked", "order:1", "leaks")
    assert found.what.startswith("unknown whether 1 reserved for more than 30 s still have")
    assert found.what.endswith(why) and fix in found.fix


def test_leaks_are_unchecked_if_no_worker_answers_about_a_reservation(stage: Stage) -> None:
    stage.known = None
    assert stage.found() == []  # without an old reservation there is nothing to know
    stage.reserve()
    assert_unknown(stage, ": no worker answered within 1 s", "start a worker")


def test_leaks_are_unchecked_if_the_broker_of_a_reservation_is_not_redis(stage: Stage) -> None:
    stage.app.conf.update(broker_url="memory://", redlock_nodes=stage.urls)
    stage.reserve()
    assert_unknown(stage, ": only the queues of a Redis broker can be read", "broker's own tools")


def test_reservation_of_a_task_that_holds_its_lock_is_not_reported(stage: Stage) -> None:
    stage.reserve()
    owner = Owner("web-1", 4242, ID, task="shop.charge")
    put(stage.nodes, "redlock:order:1", owner.token(f"{8:032x}", time.time()))
    assert stage.found() == []


def test_queue_with_many_messages_is_not_read(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reservations, "MAX_MESSAGES", 2)
    stage.reserve()
    stage.broker.rpush("celery", "{}", "{}", "{}")
    assert_unknown(stage, ": the queues have more than 2 messages", "look again")
