"""Messages whose route names no queue: kombu returns a message on Redis to that route."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from celery.exceptions import Reject, Retry
from kombu.exceptions import OperationalError
from kombu.transport.virtual import Channel
from redis.client import Pipeline

from celery_redlock.messages import conflict
from celery_redlock.messages.broker import can_be_returned
from celery_redlock.protocol.errors import RedlockError
from tests.support.delivering import Ran, Received, _parking, deliver
from tests.support.names import Patch

FORGED = [
    {"exchange": "", "routing_key": ["x"]},
    {"exchange": "", "routing_key": 1.5},
    {"exchange": None, "routing_key": {"x": "y"}},
    {"exchange": ["x"], "routing_key": "celery"},
    {"exchange": 7, "routing_key": None},
]
NOWHERE = [{"exchange": "", "routing_key": ""}, {"exchange": None, "routing_key": None}, {}]
GENUINE = [
    {"exchange": "", "routing_key": "celery"},
    {"exchange": None, "routing_key": "celery"},
    {"exchange": "celery", "routing_key": "celery"},
    {"exchange": "fanout", "routing_key": ""},
]


@pytest.mark.parametrize("acks_late", [False, True])
@pytest.mark.parametrize("info", FORGED, ids=str)
def test_message_with_a_forged_route_fails_at_once_and_is_not_requeued(
    busy: Any, sent: list[Any], info: Any, acks_late: bool
) -> None:
    result, account = deliver(busy(acks_late=acks_late), delivery_info=info)
    assert sent == []
    assert isinstance(result, RedlockError) and "no text" in str(result)
    assert account.state == "FAILURE"


@pytest.mark.parametrize("info", NOWHERE + GENUINE, ids=str)
def test_message_without_a_route_is_sent_again_to_the_queue_of_its_task(
    busy: Any, sent: list[Any], info: Any
) -> None:
    assert isinstance(deliver(busy(acks_late=True), delivery_info=info)[0], Retry)
    assert len(sent) == 1


@pytest.mark.parametrize("info", NOWHERE + GENUINE, ids=str)
def test_message_is_requeued_while_the_broker_is_away_only_if_it_names_its_queue(
    busy: Any, monkeypatch: Patch, info: Any
) -> None:
    def send(*_args: Any, **_options: Any) -> None:
        raise OperationalError("away")

    monkeypatch.setattr("celery.canvas.Signature.apply_async", send)
    monkeypatch.setattr(conflict, "SEND_PATIENCE_S", 0.0)
    result, _account = deliver(busy(acks_late=True), delivery_info=info)
    assert isinstance(result, Reject if info in GENUINE else OperationalError)


@pytest.mark.parametrize("info", FORGED + NOWHERE + GENUINE, ids=str)
def test_message_is_parked_only_if_it_names_its_queue(ran: Ran, info: Any) -> None:
    request = Received(ran.task("while_executing"), {})
    request.request_dict["delivery_info"] = info
    assert _parking(ran.app)._park(request) is (info in GENUINE)


@pytest.mark.parametrize("info", FORGED + NOWHERE[:2] + GENUINE, ids=str)
def test_kombu_and_redis_take_back_only_messages_that_name_their_queue(info: Any) -> None:
    """With other messages they raise, or drop them."""
    channel: Any = Channel.__new__(Channel)
    exchange = SimpleNamespace(lookup=lambda _table, _exchange, key, _default: {key})
    channel.typeof = lambda name: {"celery": exchange, "fanout": exchange}[name]
    channel.get_table = lambda _name: []
    try:
        queues = channel._lookup(info["exchange"], info["routing_key"])
        Pipeline(None, {}, False, None).execute_command("LPUSH", *queues)
        packed = bool(queues) and all(isinstance(one, str) for one in queues)
    except TypeError:
        packed = False
    assert can_be_returned({"delivery_info": info}) is packed
