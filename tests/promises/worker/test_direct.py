"""Without a worker: plain calls and eager tasks take the same lock, on real servers."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery

from celery_redlock import (
    QuorumUnavailable,
    Redlock,
    ResourceHeld,
    current_lease,
    locked,
)
from celery_redlock.server import LocalServer
from tests.support.machine import in_time


@pytest.fixture
def app(servers: list[LocalServer]) -> Iterator[Celery]:
    app = Celery("direct", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.redlock_nodes = [server.url for server in servers]
    app.conf.redlock_wait = 0.0
    yield app
    Redlock.from_app(app).close()
    app.close()


@pytest.fixture
def other(servers: list[LocalServer]) -> Iterator[Redlock]:
    other = Redlock([server.url for server in servers], ttl=30.0)
    yield other
    other.close()


@pytest.fixture
def charge(app: Celery, other: Redlock) -> Any:
    @app.task(shared=False)
    @locked("order:<order_id>", ttl=1.0)
    def charge(order_id: int, then: str = "") -> str:
        assert other.try_acquire(f"order:{order_id}") is None
        if then == "raise":
            raise KeyError(order_id)
        return current_lease().resource

    return charge


def test_plain_call_waits_for_its_lock(app: Celery, charge: Any, other: Redlock) -> None:
    app.conf.redlock_wait = 5.0
    lease = other.acquire("order:1")
    timer = threading.Timer(0.2, other.release, (lease,))
    begin = time.monotonic()
    timer.start()
    assert charge(1) == "order:1"
    end = time.monotonic()
    assert end - begin >= 0.2
    in_time(begin, end, 3.0, "to wait for 0.2 s")
    timer.join()


def test_map_and_starmap_lock_each_call(app: Celery, charge: Any, other: Redlock) -> None:
    assert charge.map([1, 1, 2])() == ["order:1", "order:1", "order:2"]
    assert charge.starmap([(1,), (2,)])() == ["order:1", "order:2"]
    lease = other.acquire("order:2")
    with pytest.raises(ResourceHeld):
        charge.map([1, 2])()
    assert other.release(lease)
    assert other.release(other.acquire("order:1"))


def test_an_eager_call_without_its_server_says_so_and_names_the_fixture() -> None:
    app = Celery("shop", broker="memory://", set_as_current=False)
    app.conf.update(redlock_nodes=["redis://127.0.0.1:1"], redlock_wait=0.01)

    @app.task(shared=False)
    @locked("order:<order_id>")
    def charge(order_id: int) -> None: ...

    said = "the Redis that holds the locks does not answer (127.0.0.1:1: Error 111 connecting"
    result = charge.apply(args=(7,))
    assert isinstance(result.result, QuorumUnavailable) and said in str(result.result)
    assert str(result.result).endswith("in a test, the fixture fake_redlock takes locks in memory")
    assert result.result.resource == "order:7" and result.result.votes
    with pytest.raises(QuorumUnavailable, match="order:7: 1 of 1 node did not vote"):
        charge(7)  # a plain call may be one of a program that serves
    Redlock.from_app(app).close()
