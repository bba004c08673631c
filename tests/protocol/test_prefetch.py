"""The prefetch window: Celery's own count and the parked deliveries, as one number."""

from __future__ import annotations

import contextlib
import math
from queue import Empty
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from amqp import Channel, spec
from amqp.serialization import loads
from celery import VERSION, Celery
from celery.worker.request import Request
from kombu import Queue
from kombu.common import QoS
from kombu.utils.eventio import poll

from celery_redlock.worker.parking import prefetch as module
from celery_redlock.worker.parking.admission import Parked
from celery_redlock.worker.parking.prefetch import LOOP_S, RENEWED_AT_ONCE, Prefetch


class Consumer:
    """A consumer with a window on a broker that records what it is sent."""

    def __init__(
        self, driver: str = "redis", app: Any = None, window: int = 8, rabbitmq: str = "3.13.7"
    ):
        self.told: list[int] = []
        self.connection = SimpleNamespace(
            transport=SimpleNamespace(driver_type=driver),
            qos_semantics_matches_spec=driver != "amqp" or rabbitmq >= "4",  # kombu 5.7
        )
        self.app = app or Celery("shop", set_as_current=False)
        self.pool = SimpleNamespace(is_green=False)
        self.hub: object = object()
        self.task_consumer = SimpleNamespace(channel=SimpleNamespace(qos=None))
        self.window = window
        self.qos: Any = None
        self.connection_errors: Any = ()
        self.timer: Any = None
        self.task_buckets: Any = {}
        self.connect()

    def connect(self) -> None:
        """Set up the window as `celery.worker.consumer.tasks` does."""
        self.qos = QoS(lambda prefetch_count: self.told.append(prefetch_count), self.window)
        self.qos.prev = self.window

    def loop(self) -> int:
        """Update the window as the consumer's loop does, and return the broker's last number."""
        if self.qos.prev != self.qos.value:
            self.qos.update()
        return self.told[-1] if self.told else self.window


@pytest.fixture
def consumer() -> Consumer:
    return Consumer()


@pytest.fixture
def prefetch(consumer: Consumer) -> Prefetch:
    prefetch = Prefetch(consumer)
    prefetch.connected()
    return prefetch


@pytest.mark.parametrize("blocks", [True, False])
def test_blocking_worker_loop_returns_soon_to_look_at_its_window(
    consumer: Consumer, blocks: bool
) -> None:
    """Nothing else wakes the loop of a green pool, or of a transport like SQLAlchemy."""
    waited: list[float | None] = []
    consumer.connection.drain_events = lambda timeout=None: waited.append(timeout)
    consumer.hub = None if blocks else object()
    Prefetch(consumer).connected()
    for timeout in (2.0, 0.1, None):
        consumer.connection.drain_events(timeout=timeout)
    assert waited == [LOOP_S if blocks else 2.0, 0.1, None]


def test_broker_is_seldom_sent_a_new_window_while_many_are_parked(
    consumer: Consumer, prefetch: Prefetch
) -> None:
    for parked in (*range(801), *range(799, -1, -1)):
        prefetch.widen(parked)
        assert parked <= consumer.loop() - 8 <= parked * 9 / 8
    assert consumer.told[-1] == 8
    assert len(consumer.told) < 160


def test_celery_may_set_its_prefetch_count_anew(consumer: Consumer, prefetch: Prefetch) -> None:
    """Celery sets it after a reconnect, when it restores the window step by step."""
    prefetch.widen(20)
    consumer.loop()
    consumer.qos.value = 4
    consumer.qos.set(4)
    assert consumer.told[-1] == 24
    prefetch.widen(0)
    assert consumer.loop() == 4
    consumer.qos.value = 8
    consumer.qos.set(8)
    assert consumer.told[-1] == 8, "it has not shrunk for good"


def test_delivery_parked_while_the_broker_answers_is_added_to_the_window(
    consumer: Consumer, prefetch: Prefetch
) -> None:
    """AMQP's client handles deliveries while it waits for the answer."""
    more = iter([2, 3])

    def tell(prefetch_count: int) -> None:
        consumer.told.append(prefetch_count)
        for extra in more:
            prefetch.widen(extra)
            break

    consumer.qos.callback = tell
    prefetch.connected()
    prefetch.widen(1)
    consumer.loop()
    assert consumer.told == [9, 10, 11]


@pytest.mark.parametrize(
    ("driver", "kind", "detect", "rabbitmq", "widens"),
    [
        pytest.param(
            *("amqp", "quorum", True, "3.13.7", False),
            marks=pytest.mark.skipif(VERSION < (5, 5), reason="Celery 5.4 does not look for them"),
        ),
        ("amqp", "quorum", False, "3.13.7", True),
        ("amqp", "classic", True, "3.13.7", True),
        ("amqp", "classic", True, "4.3.5", False),
        ("redis", "quorum", True, "", True),
    ],
)
def test_half_of_a_window_that_cannot_be_changed_may_be_parked(
    driver: str, kind: str, detect: bool, rabbitmq: str, widens: bool
) -> None:
    app = Celery("shop", broker=f"{driver}://127.0.0.1:1//", set_as_current=False)
    app.conf.task_queues = [Queue("q", queue_arguments={"x-queue-type": kind})]
    app.conf.worker_detect_quorum_queues = detect
    consumer = Consumer(driver, app, rabbitmq=rabbitmq)
    prefetch = Prefetch(consumer)
    prefetch.connected()
    assert prefetch.widens is widens
    assert prefetch.most == (math.inf if widens else 4)
    prefetch.widen(3)
    assert consumer.loop() == (11 if widens else 8)


@pytest.mark.parametrize(("window", "is_full"), [(0, False), (2, True), (3, False)])
def test_window_that_cannot_be_widened_is_full_by_all_waiting_messages(
    window: int, is_full: bool
) -> None:
    consumer = Consumer("amqp", window=window, rabbitmq="4.0.0")
    prefetch = Prefetch(consumer)
    prefetch.connected()
    with_an_eta = Request.__new__(Request)
    entries = [SimpleNamespace(args=args) for args in [(with_an_eta,), ("another's",), ()]]
    queue = [SimpleNamespace(entry=entry) for entry in entries]
    consumer.timer = SimpleNamespace(schedule=SimpleNamespace(queue=queue))
    consumer.task_buckets = {"limited": SimpleNamespace(contents=[object()]), "other": None}
    assert prefetch.is_full(over=False) is is_full
    assert prefetch.most == (1 if window else math.inf)


@pytest.mark.parametrize("window", [8, 0])
def test_window_is_full_when_it_must_not_be_wider_for_what_exceeds_memory(
    window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Acknowledged messages at work are not in it. Without a window any message is too much."""
    consumer = Consumer(window=window)
    prefetch = Prefetch(consumer)
    prefetch.connected()
    prefetch.widen(3)
    reserved = [SimpleNamespace(acknowledged=number < 2) for number in range(12)]
    monkeypatch.setattr(module.state, "reserved_requests", reserved)
    monkeypatch.setattr(module.state, "active_requests", [r for r in reserved if r.acknowledged])
    assert not prefetch.is_full(over=False)
    assert prefetch.is_full(over=True) is (window == 0)
    reserved.append(SimpleNamespace(acknowledged=False))
    assert prefetch.is_full(over=True)


class Wire:
    """An AMQP connection that only the main loop may read."""

    confirm_publish = False

    def __init__(self) -> None:
        self.channels: dict[int, Any] = {}
        self._used_channel_ids: list[int] = []
        self.windows: list[int] = []

    def _get_free_channel_id(self) -> int:
        return 1

    def frame_writer(self, _type: int, _channel: int, method: Any, args: bytes, _body: Any) -> None:
        assert method == spec.Basic.Qos
        (_size, count, a_global), _end = loads("lBb", args, 0)
        assert a_global
        self.windows.append(count)

    def drain_events(self, **_timeout: Any) -> None:
        raise AssertionError("two that read one connection take each other's answers")


def test_prefetch_count_over_amqp_is_sent_without_waiting_for_the_answer() -> None:
    """Celery sets it from threads of the pool, too, while the main thread reads."""
    consumer, wire = Consumer("amqp"), Wire()
    channel = Channel(wire)
    consumer.task_consumer.channel = channel
    consumer.qos.callback = lambda prefetch_count: channel.basic_qos(0, prefetch_count, True)
    prefetch = Prefetch(consumer)
    prefetch.connected()
    prefetch.widen(3)
    consumer.loop()
    assert wire.windows == [11]
    channel.dispatch_method(spec.Basic.QosOk, b"", None)
    consumer.qos.increment_eventually()
    consumer.loop()
    assert wire.windows == [11, 12]


# -- A Redis broker -------------------------------------------------------------------------------


class RedisQoS:
    """kombu's record of unacknowledged messages on Redis.

    `down` is the error that makes it fail.
    """

    unacked_index_key = "unacked_index"
    visibility_timeout = 3600.0

    def __init__(self) -> None:
        self.down: Exception | None = None
        self.dated: list[list[str]] = []
        self.channel = SimpleNamespace(conn_or_acquire=lambda: contextlib.nullcontext(self))

    def zadd(self, _key: str, dates: dict[str, float], **_options: Any) -> int:
        if self.down is not None:
            raise self.down
        self.dated.append(list(dates))
        return len(dates)


@pytest.fixture
def broker(consumer: Consumer) -> RedisQoS:
    consumer.task_consumer.channel.qos = RedisQoS()
    return consumer.task_consumer.channel.qos  # type: ignore[no-any-return]


def parked(*tags: str) -> list[Parked]:
    requests = [SimpleNamespace(message=SimpleNamespace(delivery_tag=tag)) for tag in tags]
    return [Parked(request, ("r",), 1, False, 0.0, 0.0, (0.0, 0.0, 0)) for request in requests]


def test_parked_delivery_is_renewed_at_once_and_then_every_15_seconds(
    prefetch: Prefetch, broker: RedisQoS
) -> None:
    (a, b) = parked("a", "b")
    for now, some in ((0.0, [a]), (0.25, [a, b]), (0.5, [b, a]), (15.0, [b, a]), (15.25, [a, b])):
        prefetch.renew(some, now)
    assert broker.dated == [["a"], ["b"], ["a"], ["b"]]


def test_many_parked_deliveries_are_renewed_in_several_sweeps(
    prefetch: Prefetch, broker: RedisQoS
) -> None:
    many = parked(*map(str, range(5 * RENEWED_AT_ONCE // 2)))
    for sweep in range(4):
        prefetch.renew(many, sweep / 4)
    assert [len(tags) for tags in broker.dated] == [RENEWED_AT_ONCE] * 2 + [RENEWED_AT_ONCE // 2]


def test_failed_renewal_of_parked_deliveries_is_repeated_and_logged_once(
    prefetch: Prefetch, broker: RedisQoS, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise a worker killed within 15 s would strand them for the visibility timeout."""
    caplog.set_level("INFO")
    some = parked("a", "b")
    broker.down = ConnectionError("connection reset by peer")
    for now in (100.0, 100.25, 100.5, 100.75):
        prefetch.renew(some, now)
    prefetch.renew([], 100.9)  # which proves nothing about the broker
    broker.down = None
    prefetch.renew(some, 101.0)
    assert broker.dated == [["a", "b"]]
    failed, again = [record.getMessage() for record in caplog.records]
    assert "connection reset by peer" in failed
    assert "again" in again
    prefetch.renew(some, 101.25)
    assert len(broker.dated) == 1, "every 15 s, as before"
    broker.down = ConnectionError("another outage")
    prefetch.renew(some, 117.0)
    assert "another outage" in caplog.text


@pytest.mark.parametrize("outcome", ["a message", "none", "no answer"])
def test_stopping_worker_reads_its_last_pop_without_its_poller(
    consumer: Consumer, prefetch: Prefetch, outcome: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop that has died has closed the poller by which kombu's transport for Redis reads."""
    monkeypatch.setattr("celery_redlock.worker.parking.prefetch.LAST_POP_S", 0.05)
    poller = poll()
    poller.close()
    told: list[str] = []

    def pop() -> None:
        told.append("read")
        channel._in_poll = None
        if outcome == "none":
            raise Empty

    channel: Any = consumer.task_consumer.channel
    channel.qos = SimpleNamespace(unacked_index_key="index")
    channel._in_poll = SimpleNamespace(can_read=lambda timeout: outcome != "no answer")
    channel.handlers = {"BRPOP": pop}
    consumer.connection.connection_errors = ()
    consumer.connection.drain_events = lambda timeout: poller.poll(timeout)
    consumer.task_consumer.cancel = lambda: told.append("cancelled")
    message = SimpleNamespace(reject_log_error=lambda *_, **__: told.append("back"))
    prefetch.stop([Mock(id="parked", message=message)])
    assert told == ["cancelled", "back"] + ["read"] * (outcome != "no answer")
