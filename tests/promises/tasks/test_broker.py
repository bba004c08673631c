"""Facts of the broker for a waiting message: how it is delayed, and how long it may be kept."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from amqp.exceptions import AccessRefused
from celery import Celery
from celery.app.amqp import Queues
from celery.app.task import Context
from celery.exceptions import Reject, Retry
from kombu import Exchange, Queue
from kombu.exceptions import OperationalError

from celery_redlock.messages import conflict
from celery_redlock.messages.broker import (
    UNACKNOWLEDGED_S,
    delayed_by_broker,
    has_quorum_queues,
    max_unacknowledged_s,
    may_be_dropped,
    resend_options,
    without_delays,
)
from tests.support.delivering import deliver
from tests.support.names import Log, Patch

pytest.importorskip("celery.utils.quorum_queues", reason="Celery 5.4 has no quorum queues")
ZEROS = "0." * 26
DELAYED = {"exchange": "celery_delayed_delivery", "routing_key": f"{ZEROS}1.1.feed.eu"}
"""Delivery info of a message that was delayed for three seconds."""


def queue(name: str, kind: str, key: str = "", **arguments: Any) -> Queue:
    return Queue(name, Exchange(f"x-{name}", kind), key or name, queue_arguments=arguments)


@pytest.fixture
def rabbit() -> Iterator[Celery]:
    """An app with a quorum queue of each kind; nothing connects."""
    rabbit = Celery("rabbit", broker="amqp://127.0.0.1:1//", set_as_current=False)
    quorum = {"x-queue-type": "quorum"}
    rabbit.conf.task_queues = [
        queue("topic", "topic", **quorum),
        queue("feed", "topic", "feed.#", **quorum, **{"x-delivery-limit": 5}),
        queue("direct", "direct", **quorum, **{"x-delivery-limit": -1}),
    ]
    rabbit.conf.task_default_queue = "topic"
    yield rabbit
    rabbit.close()


def came(exchange: str, routing_key: str, **more: Any) -> Any:
    return Context({"delivery_info": {"exchange": exchange, "routing_key": routing_key}, **more})


@pytest.mark.parametrize(
    ("exchange", "key", "back"),
    [
        ("x-topic", "topic", "topic"),
        ("x-feed", "feed.eu", "feed.eu"),  # which the default queue does not get
        ("", "topic", "topic"),
        ("", "feed", "feed.#"),
        (DELAYED["exchange"], DELAYED["routing_key"], "feed.eu"),
    ],
)
@pytest.mark.parametrize("countdown", [0.1, 0.9, 1.0, 1.1, 2.0])
def test_message_on_rabbitmq_is_delayed_whole_seconds_and_returns_to_its_queue(
    rabbit: Celery, exchange: str, key: str, back: str, countdown: float
) -> None:
    when = resend_options(rabbit, came(exchange, key), countdown)
    seconds = "1.0" if countdown > 1.0 else "0.1"
    assert when["routing_key"] == f"{ZEROS}{seconds}.{back}"
    assert when["exchange"].name == "celery_delayed_27"
    assert not {"countdown", "eta"} & set(when)


@pytest.mark.parametrize("exchange", ["x-direct", ""])
def test_delayed_message_of_a_direct_exchange_names_its_queue(
    rabbit: Celery, exchange: str
) -> None:
    request = came(exchange, "direct")
    assert not delayed_by_broker(rabbit, request)
    assert resend_options(rabbit, request, 0.3) == {"countdown": 0.3, "queue": "direct"}


def test_delay_without_quorum_queues_is_a_plain_countdown(app: Celery) -> None:
    for request in (came("", "celery"), came("celery", "celery"), Context()):
        assert resend_options(app, request, 0.3) == {"countdown": 0.3}


def test_traces_of_a_delay_in_x_death_are_not_sent_on() -> None:
    """RabbitMQ 3 would take them for a circle, and drop the message."""
    ours = {"queue": "celery_delayed_0", "reason": "expired"}
    theirs = {"queue": "dead", "reason": "rejected"}
    assert without_delays({"x-death": [ours, {"queue": "b_celery_delayed_3"}], "a": 1}) == {"a": 1}
    assert without_delays({"x-death": [ours, theirs]}) == {"x-death": [theirs]}
    for headers in (None, {}, {"x-death": "forged"}, {"x-death": [None, 5]}):
        assert without_delays(headers) == (headers or {})


@pytest.mark.parametrize(
    ("queue", "count", "last"),
    [
        *[("topic", 0, False), ("topic", 18, False), ("topic", 19, True), ("topic", 99, True)],
        *[("feed", 3, False), ("feed", 4, True), ("direct", 99, False), ("unknown", 19, True)],
        ("topic", "19", False),
    ],
)  # fmt: skip
def test_last_delivery_before_the_broker_drops_a_message_is_detected(
    rabbit: Celery, queue: str, count: Any, last: bool
) -> None:
    request = came("", queue, **{"x-delivery-count": count})
    assert may_be_dropped(rabbit, request) is last


def test_time_unacknowledged_is_the_least_of_consumer_and_visibility_timeouts(
    rabbit: Celery,
) -> None:
    assert max_unacknowledged_s(rabbit) == UNACKNOWLEDGED_S == 1800.0
    rabbit.amqp.queues.add(queue("slow", "direct", **{"x-consumer-timeout": 90_000}))
    rabbit.amqp.queues.add(queue("slower", "direct", **{"x-consumer-timeout": 95_000}))
    assert max_unacknowledged_s(rabbit) == 90.0
    rabbit.conf.broker_transport_options = {"visibility_timeout": 40}
    assert max_unacknowledged_s(rabbit) == 40.0
    rabbit.conf.broker_transport_options = {"visibility_timeout": "forged"}
    assert max_unacknowledged_s(rabbit) == 90.0


@pytest.mark.parametrize("asked", [max_unacknowledged_s, has_quorum_queues])
def test_queues_of_an_app_are_walked_once(rabbit: Celery, monkeypatch: Patch, asked: Any) -> None:
    """Both facts are needed with every delivery, and an app may have a thousand queues."""
    walks: list[str] = []

    class Counted(Queues):
        def __iter__(self) -> Any:
            walks.append("iter")
            return super().__iter__()

        def values(self) -> Any:
            walks.append("values")
            return super().values()

    monkeypatch.setattr(rabbit.amqp, "queues_cls", Counted)
    assert len({asked(rabbit) for _ in range(5)}) == 1
    assert len(walks) == 1


def test_queue_added_by_a_worker_is_seen(rabbit: Celery) -> None:
    """`app.control.add_consumer` adds it by `select_add`."""
    rabbit.conf.task_queues = [queue("plain", "direct")]
    assert not has_quorum_queues(rabbit)
    arguments = {"x-queue-type": "quorum", "x-consumer-timeout": 90_000}
    assert max_unacknowledged_s(rabbit) == UNACKNOWLEDGED_S
    rabbit.amqp.queues.select_add("added", queue_arguments=arguments)
    assert has_quorum_queues(rabbit)
    assert max_unacknowledged_s(rabbit) == 90.0


# -- what is sent again ---------------------------------------------------------------------------


def test_retry_pause_is_at_most_a_quarter_of_the_visibility_timeout(
    app: Any, busy: Any, sent: list[Any]
) -> None:
    app.conf.broker_transport_options = {"visibility_timeout": 8.0}
    task = busy(lock_retry_backoff=50.0)
    for _ in range(100):
        deliver(task)
    assert 1.5 < max(again.options["countdown"] for again in sent) <= 2.0


BREAKS = [
    OperationalError("away"),
    AttributeError(
        "'NoneType' object has no attribute 'client'"
    ),  # kombu's, of a broken connection
    AccessRefused("ACCESS_REFUSED"),
    RuntimeError("Retry limit exceeded"),  # Celery's, of a result backend that is away
    TypeError("'NoneType' object is not iterable"),
]


@pytest.fixture
def error() -> Exception:
    """Return the exception that sending raises, unless a test overrides this."""
    return BREAKS[0]


@pytest.fixture
def failing(monkeypatch: Patch, app: Any, error: Exception) -> list[int]:
    """Make sending fail as often as the returned list says, without time spent on attempts."""
    left = [10**6]

    def send(*_args: Any, **_options: Any) -> None:
        left[0] -= 1
        if left[0] >= 0:
            raise error

    monkeypatch.setattr("celery.canvas.Signature.apply_async", send)
    monkeypatch.setattr(conflict, "SEND_PATIENCE_S", 0.05)
    return left


@pytest.mark.parametrize("error", BREAKS, ids=repr)
def test_failed_publication_of_a_retry_is_tried_again(
    failing: list[int], error: Exception, busy: Any, monkeypatch: Patch, caplog: Log
) -> None:
    monkeypatch.setattr(conflict, "SEND_PATIENCE_S", 5.0)
    failing[0] = 2
    result, _info = deliver(busy())
    assert isinstance(result, Retry)
    assert failing == [-1]
    assert caplog.text.count(f"cannot be sent again ({error!r})") == 1


def test_unsendable_retry_goes_back_to_the_broker_unless_that_would_drop_it(
    failing: list[int], busy: Any
) -> None:
    late = busy(acks_late=True)
    came = {"exchange": "", "routing_key": "celery"}
    result, _info = deliver(late, delivery_info=came)
    assert isinstance(result, Reject) and result.requeue
    result, info = deliver(late, delivery_info=came, **{"x-delivery-count": 19})
    assert isinstance(result, OperationalError)
    assert info.state == "FAILURE"
    assert isinstance(
        deliver(busy())[0], OperationalError
    )  # acknowledged: the broker has it no more
