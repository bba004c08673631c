"""Published from a coroutine: over fake nodes, and a broker in memory; and bodies that are one."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from kombu import Producer

from celery_redlock import ConfigurationError, DuplicateTask, SingletonTask, locked, redlock_publish
from tests.support.delivering import RESERVED, Box, deliver
from tests.support.fake_lock import FakeRedlock
from tests.support.names import Log, Patch


class Broker:
    """A broker that takes or refuses a message when the test lets it."""

    def __init__(self, patch: Patch) -> None:
        self.asked, self.go = threading.Event(), threading.Event()
        self.error: Exception | None = None
        self._publish = Producer.publish
        patch.setattr(Producer, "publish", lambda *args, **options: self._take(args, options))

    def _take(self, args: Any, options: Any) -> Any:
        self.asked.set()
        assert self.go.wait(20.0)
        if self.error is not None:
            raise self.error
        return self._publish(*args, **options)


@pytest.fixture
def broker(monkeypatch: Patch) -> Broker:
    return Broker(monkeypatch)


async def asked_for(task: Any, broker: Broker) -> asyncio.Task[Any]:
    """A publication that the broker has been asked for, and has not made."""
    asked = asyncio.create_task(redlock_publish(task, (1,)))
    while not broker.asked.is_set():  # and this loop goes on meanwhile
        await asyncio.sleep(0.001)
    return asked


async def cancelled_while_asked_for(task: Any, broker: Broker) -> None:
    asked = await asked_for(task, broker)
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    broker.go.set()


async def test_redlock_publish_refuses_the_name_of_a_task() -> None:
    with pytest.raises(TypeError, match="takes a task, and not 'shop"):
        await redlock_publish("shop.charge", (1,))  # type: ignore[arg-type]


async def test_redlock_publish_sends_as_apply_async_does_without_blocking_the_loop(
    redlock: FakeRedlock, charge: Any, box: Box, broker: Broker
) -> None:
    asked = await asked_for(charge, broker)
    broker.go.set()
    sent = await asked
    again = await redlock_publish(charge, kwargs={"order_id": 1}, queue="another")
    assert again.id == sent.id, "it is the one that is queued"
    with pytest.raises(DuplicateTask):
        await redlock_publish(charge, (1,), lock={"on_duplicate": "raise"})
    assert redlock.tokens(RESERVED) == {box.header()["token"]}


def test_cancelled_redlock_publish_leaves_no_reservation_without_its_message(
    redlock: FakeRedlock, charge: Any, box: Box, broker: Broker
) -> None:
    asyncio.run(cancelled_while_asked_for(charge, broker))  # which waits for the thread
    assert redlock.tokens(RESERVED) == {box.header()["token"]}


def test_failed_publication_after_cancellation_is_logged(
    redlock: FakeRedlock, charge: Any, box: Box, broker: Broker, caplog: Log
) -> None:
    broker.error = OSError("the broker is away")
    asyncio.run(cancelled_while_asked_for(charge, broker))
    assert f"{charge.name} was not published" in caplog.text
    assert "the broker is away" in caplog.text
    assert box.messages() == []
    assert redlock.tokens(RESERVED) == {None}


def test_body_that_returns_a_coroutine_is_refused(app: Any, redlock: FakeRedlock) -> None:
    async def work() -> None:
        raise AssertionError("it runs")

    def body() -> Any:  # as of a decorator that does not know what it decorates
        return work()

    singleton = app.task(name="one", base=SingletonTask)(body)
    decorated = app.task(name="two")(locked("k")(body))
    for task in (singleton, decorated):
        with pytest.raises(ConfigurationError, match=r"returned a coroutine.*asyncio\.run"):
            task()
        result, _info = deliver(task)
        assert isinstance(result, ConfigurationError)
