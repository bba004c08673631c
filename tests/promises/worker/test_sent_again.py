"""A message that is sent again for want of its lock carries everything that the first one did.

Over real brokers. It is received and refused in this process, by Celery's own request and tracer.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery, _state
from celery.app.trace import trace_task_ret
from celery.worker.request import Request
from kombu import Exchange, Queue
from kombu.utils.uuid import uuid

from celery_redlock import Redlock, SingletonTask
from celery_redlock.messages.endings import received
from celery_redlock.messages.headers import ATTEMPTS
from celery_redlock.server import LocalServer
from tests.support.delivering import redlock  # noqa: F401
from tests.support.fake_lock import FakeRedlock
from tests.support.names import Patch

CALLBACK = {"task": "other", "args": [1], "kwargs": {}, "options": {}, "subtask_type": None,
            "immutable": False}  # fmt: skip
CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "what monitors show": {"argsrepr": "('***',)", "kwargsrepr": "{}", "shadow": "other name"},
    "how it is written": {"serializer": "pickle", "compression": "gzip"},
    "by another name": {"compression": "application/x-bz2"},
    "limits": {"time_limit": 50, "soft_time_limit": 40, "expires": 600, "retries": 2},
    "whose it is": {"root_id": "r", "parent_id": "p", "group_id": "g", "group_index": 3,
                    "replaced_task_nesting": 1, "task_id": "mine", "origin": "there"},
    "what comes next": {"link": [CALLBACK], "link_error": [CALLBACK], "chain": [CALLBACK],
                        "chord": CALLBACK},
    "result": {"ignore_result": True, "reply_to": "replies", "correlation_id": "mine"},
    "result kept": {"ignore_result": False},
    "stamps": {"stamped_headers": ["tenant"], "tenant": "acme"},
    "headers": {"headers": {"trace": "abc", "nested": {"a": [1]}}},
    "properties": {"priority": 3, "delivery_mode": 1, "app_id": "shop", "type": "order",
                   "message_id": "m", "timestamp": 1700000000},
    "queue": {"queue": "second"},
    "exchange": {"exchange": "x-third", "routing_key": "k.third"},
}  # fmt: skip
ACCEPTED = ["json", "pickle"]
MAY_DIFFER = {"eta", "expiration", "delivery_tag", "delivery_info", "application_headers", ATTEMPTS}
"""When it may start; what the broker itself writes; our own count of refusals."""
TWICE = {"origin", "argsrepr", "kwargsrepr"}
"""Headers that Celery writes among the properties as well, where they are given as options."""


@pytest.fixture(scope="module", params=["redis", "rabbitmq"])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "redis":
        with LocalServer() as server:
            yield server.url
        return
    yield request.getfixturevalue("rabbitmq")


@pytest.fixture
def shop(url: str, redlock: FakeRedlock, monkeypatch: Patch) -> Iterator[Celery]:  # noqa: F811
    monkeypatch.setattr(_state, "_on_app_finalizers", set())
    monkeypatch.setattr(_state, "_apps", weakref.WeakSet())
    monkeypatch.setattr(Redlock, "from_app", staticmethod(lambda app: redlock))
    app = Celery("shop", broker=url, backend="cache+memory://", set_as_current=False)
    run = uuid()[:8]
    app.conf.update(
        redlock_nodes=["redis://127.0.0.1:1/0"], redlock_wait=0, task_default_queue=f"first-{run}",
        accept_content=ACCEPTED,
        task_queues=[
            Queue(f"first-{run}"),
            Queue("second"),
            Queue("third", Exchange("x-third"), "k.third"),
        ],
    )  # fmt: skip
    yield app
    app.close()


def receive(app: Celery) -> Any:
    """Return the only message in the queues of the app."""
    found: list[Any] = []
    with app.connection_for_read() as connection, connection.channel() as channel:
        for queue in app.amqp.queues.values():
            bound = queue(channel)
            bound.declare()
            while (message := bound.get(accept=ACCEPTED)) is not None:
                message.ack()
                found.append(message)
    (message,) = found
    return message


def contents(message: Any) -> dict[str, Any]:
    """Return what a message says, without what may differ."""
    way = {name: message.delivery_info.get(name) for name in ("exchange", "routing_key")}
    parts = {"headers": message.headers, "properties": message.properties, "way": way}
    said = {
        f"{part} {name}": value
        for part, values in parts.items()
        for name, value in values.items()
        if name not in MAY_DIFFER and not (part == "properties" and name in TWICE)
    }
    said |= {"type": message.content_type, "encoding": message.content_encoding}
    return {**said, "body": message.decode()}


@pytest.mark.parametrize("call", CALLS, ids=[name.replace(" ", "_") for name in CALLS])
def test_message_sent_again_equals_the_first_one(
    shop: Celery,
    redlock: FakeRedlock,  # noqa: F811
    call: str,
) -> None:
    @shop.task(name="charge", base=SingletonTask, lock_key="k", shared=False)
    def charge(*_args: Any, **_kwargs: Any) -> None: ...

    @shop.task(name="other", shared=False)
    def other(*_args: Any) -> None: ...

    redlock.acquire("k")
    for queue in shop.amqp.queues.values():
        with shop.connection_for_write() as connection:
            queue(connection.default_channel).declare()
    charge.apply_async((1, "4111"), {"note": "x"}, **CALLS[call])
    first = receive(shop)
    before = contents(first)
    request = Request(
        first, app=shop, task=charge, body=first.body, headers=first.headers, hostname="here"
    )
    received(request=request)
    trace_task_ret(
        charge.name, request.id, request.request_dict, first.body, first.content_type,
        first.content_encoding, app=shop,
    )  # fmt: skip
    again = receive(shop)
    assert again.headers[ATTEMPTS]["held"] == 1
    after = contents(again)
    assert {name: (before.get(name), after.get(name)) for name in {*before, *after}
            if before.get(name) != after.get(name)} == {}  # fmt: skip
