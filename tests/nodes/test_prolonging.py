"""Reservations on a node that is slow for their producer, and fast for the workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from celery import Celery
from kombu.utils.uuid import uuid

from celery_redlock import Redlock, SingletonTask
from celery_redlock.messages.headers import RESERVATION
from celery_redlock.messages.reservation import Reservation, claim_of, free
from celery_redlock.protocol import quorum
from celery_redlock.protocol.values import Query
from celery_redlock.server import LocalServer, start_servers
from tests.support.proxy import Proxy
from tests.support.wait import wait_until

KEYS = [f"redlock:order:{number}#reserved" for number in range(10)]


@pytest.fixture(scope="module")
def servers() -> Iterator[list[LocalServer]]:
    with start_servers(3) as started:
        yield started


class Stage:
    """A producer whose way to the last node is slow, and workers that free what they begin."""

    def __init__(self, servers: list[LocalServer], proxy: Proxy, workers: Redlock) -> None:
        self.workers = workers
        self.slow = redis.Redis.from_url(servers[-1].url)
        self._app = Celery("producer", broker="memory://", set_as_current=False)
        self._app.conf.update(
            redlock_nodes=[servers[0].url, servers[1].url, proxy.url],
            redlock_restart_guard="off",
            redlock_node_timeout=1.0,
            task_default_queue=uuid(),
        )

        @self._app.task(
            base=SingletonTask,
            name="sync",
            shared=False,
            lock_key="order:<order_id>",
            lock_scope="until_executing",
        )
        def sync(order_id: int) -> None: ...

        self.task: Any = sync
        self.producer = Redlock.from_app(self._app)
        self.producer.connect()

    def close(self) -> None:
        self.producer.close()
        self.slow.close()
        self._app.close()

    def messages(self) -> list[Any]:
        found = []
        with self._app.connection_for_read() as connection:
            queue = connection.SimpleQueue(self._app.conf.task_default_queue)
            while queue.qsize():
                found.append(queue.get_nowait())
                found[-1].ack()
        return found

    def begin(self) -> None:
        """Free the reservation of each message that is queued, as a worker does."""
        for message in self.messages():
            note = Reservation.of(message.headers[RESERVATION], message.headers["id"])
            assert note is not None
            free(self.workers, claim_of(self.workers, note), 1.0)

    def arrived(self) -> None:
        """Wait until the slow node has had all that the producer wrote so far."""
        query = Query(("nothing",), 3)
        driver = self.producer.client.driver
        for _ in range(2):  # requests written by then, and those that followed
            ballot = driver.run(lambda now: quorum.peek([query], now, 10.0))
            assert ballot.yes == 3

    def left(self) -> list[float]:
        """Return the seconds left of each reservation on the slow node; negative if it has none."""
        return [self.slow.pttl(key) / 1000 for key in KEYS]


@pytest.fixture(params=[0.02, 0.2])
def stage(
    request: pytest.FixtureRequest,
    servers: list[LocalServer],
    lock_over: Callable[..., Redlock],
) -> Iterator[Stage]:
    for server in servers:
        with redis.Redis.from_url(server.url) as node:
            node.flushall()
    with Proxy(int(servers[-1].url.rpartition(":")[2].split("/")[0]), delay=request.param) as proxy:
        stage = Stage(servers, proxy, lock_over(servers, restart_guard="off"))
        stage.arrived()  # it is connected to all of them
        proxy.mode = "slow"
        yield stage
        stage.close()


def test_freed_reservation_stays_freed_on_a_node_that_is_slow_for_its_producer(
    stage: Stage,
) -> None:
    for number in range(len(KEYS)):
        stage.task.delay(number)
        stage.begin()
    stage.arrived()
    wait_until(lambda: max(stage.left()) < 0, 5.0, "all are freed", seen=stage.left)


def test_reservation_of_a_queued_message_lasts_on_a_node_slow_for_its_producer(
    stage: Stage,
) -> None:
    for number in range(len(KEYS)):
        stage.task.delay(number)
    wait_until(lambda: min(stage.left()) > 3000.0, 5.0, "all are made to last", seen=stage.left)
    stage.begin()
    wait_until(lambda: max(stage.left()) < 0, 5.0, "all are freed", seen=stage.left)
