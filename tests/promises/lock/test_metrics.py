"""Each metric moves for its cause, on real servers."""

from __future__ import annotations

import socket
import urllib.request
from collections.abc import Callable, Iterator

import pytest
import redis
from celery import Celery
from celery.concurrency.prefork import TaskPool
from prometheus_client import CollectorRegistry

from celery_redlock import QuorumUnavailable, Redlock, ResourceHeld
from celery_redlock.metrics import Metrics, install
from celery_redlock.protocol.values import Owner
from tests.support.names import Locks, Log, Servers
from tests.support.nodes import hung
from tests.support.wait import wait_until

LONG = 30.0
CHARGE = Owner("web-1", 42, "id", task="shop.charge")


@pytest.fixture
def installed() -> Iterator[Metrics]:
    installed = install(CollectorRegistry())
    yield installed
    installed.close()


@pytest.fixture
def lock(servers: Servers, lock_over: Locks) -> Locks:
    def make(**options: float) -> Redlock:
        made = lock_over(servers[:3], **options)
        made.connect(LONG)
        return made

    return make


@pytest.fixture
def value(installed: Metrics) -> Callable[..., float]:
    def value(name: str, **labels: str) -> float:
        return installed.registry.get_sample_value(f"celery_redlock_{name}", labels) or 0.0

    return value


def test_metrics_count_a_lock_that_is_granted_and_released(
    lock: Locks, value: Callable[..., float]
) -> None:
    with lock().lock("r", owner=CHARGE) as lease:
        assert value("acquire_total", task="shop.charge", outcome="acquired") == 1
        assert value("acquire_duration_seconds_count", task="shop.charge") == 1
        assert value("hold_seconds_count", task="shop.charge") == 0
        wait_until(lambda: lease.remaining() < 29.99, LONG, "some time has passed")
    assert value("hold_seconds_count", task="shop.charge") == 1
    assert 0 < value("hold_seconds_sum", task="shop.charge") < LONG
    assert value("acquire_total", task="shop.charge", outcome="held") == 0


def test_metrics_count_a_lock_that_another_holds(lock: Locks, value: Callable[..., float]) -> None:
    redlock = lock()
    redlock.acquire("r")
    with pytest.raises(ResourceHeld):
        redlock.acquire("r", wait=0.1)
    # A call, however many attempts it has made; and no time until it was granted, for it was not.
    assert value("acquire_total", task="", outcome="held") == 1
    assert value("acquire_total", task="", outcome="acquired") == 1
    assert value("acquire_duration_seconds_count", task="") == 1


def test_metrics_count_a_missing_quorum_and_its_node_errors(
    lock: Locks, value: Callable[..., float], servers: Servers
) -> None:
    redlock = lock()
    for server in servers[:2]:
        server.pause()
    with pytest.raises(QuorumUnavailable):
        redlock.acquire("r")
    assert value("acquire_total", task="", outcome="unavailable") == 1
    for node in redlock.nodes[:2]:
        assert value("node_errors_total", node=node, kind="timeout") >= 1
    assert value("node_errors_total", node=redlock.nodes[2], kind="timeout") == 0


def test_metrics_count_extensions_that_succeed(lock: Locks, value: Callable[..., float]) -> None:
    with lock(ttl=2.0).lock("r"):
        wait_until(lambda: value("extend_total", task="", outcome="extended"), LONG, "an extension")


def test_metrics_count_failed_extensions_and_the_loss(
    lock: Locks, value: Callable[..., float], servers: Servers
) -> None:
    with lock(ttl=1.0).lock("r"), hung(servers[:3]):
        wait_until(
            lambda: value("lost_total", task="", reason="expired"), LONG, "the lease is lost"
        )
        assert value("extend_total", task="", outcome="failed") >= 1
    assert value("lost_total", task="", reason="expired") == 1
    assert value("hold_seconds_count", task="") == 1


def test_metrics_count_a_stolen_lease_as_refused(
    lock: Locks, value: Callable[..., float], admins: list[redis.Redis]
) -> None:
    with lock(ttl=1.0).lock("r"):
        for client in admins[:3]:
            client.set("redlock:r", "another's", px=20_000)
        wait_until(lambda: value("lost_total", task="", reason="refused"), LONG, "it is lost")
    assert value("lost_total", task="", reason="expired") == 0


def served(address: str) -> str:
    with urllib.request.urlopen(address, timeout=LONG) as answer:
        text: str = answer.read().decode()
        return text


class Consumer:
    """A worker that is ready, as Celery's signal brings it."""

    def __init__(self, pool: object = None) -> None:
        self.app = Celery(set_as_current=False)
        self.pool = pool


def test_worker_of_one_process_serves_its_metrics(
    installed: Metrics, lock: Locks, caplog: Log
) -> None:
    caplog.set_level("INFO", "celery_redlock.metrics")
    installed.begin(Consumer(), 0, "127.0.0.1")
    with lock().lock("r"):
        (said,) = caplog.messages
        text = served(said.removeprefix("metrics are served on "))
    assert 'celery_redlock_acquire_total{outcome="acquired",task=""} 1.0' in text


def test_port_taken_for_metrics_is_logged_and_stops_nothing(
    installed: Metrics, caplog: Log
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        installed.begin(Consumer(), port, "127.0.0.1")
    assert f"metrics cannot be served on 127.0.0.1:{port}" in caplog.text


def test_prefork_worker_without_a_metrics_directory_logs_a_warning(
    installed: Metrics, caplog: Log
) -> None:
    installed.begin(Consumer(object.__new__(TaskPool)), 0, "127.0.0.1")
    assert "set PROMETHEUS_MULTIPROC_DIR to an empty directory" in caplog.text
