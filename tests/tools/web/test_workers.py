"""Answers and events of workers, over a real broker."""

from __future__ import annotations

import html
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from celery import Celery
from werkzeug.test import Client

from celery_redlock.keys.canonical import text_of
from celery_redlock.server import LocalServer, start_servers
from celery_redlock.web import make_app, workers
from celery_redlock.web.formatting import quoted
from celery_redlock.web.workers import MAX_EVENTS, EventReceiver, ask
from tests.support.cluster import Cluster
from tests.support.nodes import TOKEN, with_acl_user
from tests.support.wait import wait_until

EVIL = "<b>\u202e\x1b" + "x" * 5000


@pytest.fixture
def app(server: LocalServer) -> Iterator[Celery]:
    made = Celery("web", broker=server.url, set_as_current=False)
    yield made
    made.close()


@pytest.fixture
def receiver(app: Celery, server: LocalServer) -> Iterator[EventReceiver]:
    made = EventReceiver(app)
    made.start()
    listens(made, server)
    yield made
    made.close()


def listens(receiver: EventReceiver, server: LocalServer) -> None:
    """Wait until it listens: Redis knows it a moment after the consumer is ready."""
    wait_until(lambda: receiver.since, 60, "it listens")
    with redis.Redis.from_url(server.url) as client:
        wait_until(client.pubsub_numpat, 30, "Redis knows")


def send(app: Celery, kind: str = "task-lock-waiting", /, **fields: Any) -> None:
    with app.connection_for_write() as connection:
        app.events.Dispatcher(connection, hostname="w@h").send(kind, **fields)


HOLDER = {"task": "shop.pay", "task_id": "t1", "pid": 7, "host": "h1"}


def test_refusals_and_losses_are_received_as_events(app: Celery, receiver: EventReceiver) -> None:
    send(app, uuid="a", name="shop.refund", resource="order:1", holder=HOLDER, waited=2.5)
    send(app, "task-lock-lost", uuid="b", resource="order:2", reason="refused", held_for=9.0)
    send(app, "task-succeeded", uuid="c")
    wait_until(lambda: receiver.count >= 2, 30, "both are heard")
    lost, waiting = receiver.received()
    assert lost["what"] == "lost" and (lost["reason"], lost["seconds"]) == ("refused", 9.0)
    assert waiting["holder"] == "shop.pay t1, pid 7 on h1" and waiting["worker"] == "w@h"
    assert workers._holder({"task": "shop.pay", "host": "h1", "pid": 0}) == "shop.pay, h1"
    assert workers._holder({}) == workers._holder("odd") == ""
    assert waiting["task"] == "shop.refund" and lost["task"] == "", "of a worker that does not say"
    assert [one["task_id"] for one in receiver.received("order:1")] == ["a"]
    assert receiver.count == 2


def test_received_events_are_bounded_and_may_have_any_shape(
    app: Celery, receiver: EventReceiver
) -> None:
    for odd in (None, 7, 10**400, [], {"task": []}, EVIL):
        send(app, uuid=odd, name=odd, resource=odd, holder=odd, waited=odd, reason=odd)
    wait_until(lambda: receiver.count == 6, 30, "all are heard")
    assert all(len(str(value)) < 5000 for one in receiver.received() for value in one.values())
    for number in range(MAX_EVENTS + 10):
        receiver._receive({"type": "task-lock-waiting", "uuid": str(number), "timestamp": 1.0})
    assert len(receiver.received()) == MAX_EVENTS and receiver.received()[0]["task_id"] == str(
        MAX_EVENTS + 9
    )


def test_events_are_received_again_when_the_broker_is_back(
    app: Celery, server: LocalServer, receiver: EventReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "RETRY_DELAY_S", (0.05, 0.1))
    server.kill()
    wait_until(lambda: receiver.error, 30, "it notices")
    assert receiver.since is None and str(server.port) not in receiver.error
    server.start()
    listens(receiver, server)
    send(app, uuid="a", resource="r")
    wait_until(lambda: receiver.count == 1, 30, "it hears")


def test_reply_of_a_worker_is_cleaned_of_malformed_parts() -> None:
    class Control:
        def broadcast(self, *args: Any, **kwargs: Any) -> Any:
            good = {"resource": "r", "task": EVIL, "waited": float("nan"), "secret": "x"}
            odd = {"resource": 7, "task_id": 8, "pid": 10**400, "held_for": 10**400}
            return [
                {"b@h": {"holds": [odd], "waits": [good, "no row"], "queued": ["r", 7, EVIL]}},
                {"a@h": {"error": EVIL}},
                {"c@h": None},
                {"d@h": {"holds": "none", "waits": None, "queued": {}}},
                "no reply",
            ]

    class App:
        control = Control()

    a, b, c, d = ask(App())
    assert len(a["error"]) < 5000 and c["error"] and not d["error"]
    assert d["holds"] == d["waits"] == d["queued"] == a["queued"] == []
    assert b["queued"][0] == "r" and len(b["queued"]) == 2 and len(b["queued"][1]) < 5000
    (hold,) = b["holds"]
    assert (hold["resource"], hold["task_id"]) == ("7", "8"), "names are text"
    assert hold["pid"] is None and hold["held_for"] is None
    (wait,) = b["waits"]
    assert wait["waited"] is None and "secret" not in wait and len(wait["task"]) < 5000


@pytest.mark.worker
def test_page_shows_the_tasks_that_real_workers_wait_for(tmp_path: Any) -> None:
    with start_servers(4, config=with_acl_user()) as (*nodes, broker):
        cluster = Cluster(nodes, broker, tmp_path, redlock_events=True)
        app = Celery("page", broker=broker.url, set_as_current=False)
        app.conf.update(cluster.conf, broker_url=broker.url)
        app.conf.redlock_nodes = [node.url for node in nodes]  # that user may list no keys
        page = make_app(app, idle=None)
        receiver = page.sources.receiver
        assert receiver is not None
        client = Client(page)
        name = "page + \x1b[31m"
        key = f"k:{text_of(name, 0)}"  # with spaces, and of the rest what can be printed
        try:
            client.get("/")
            wait_until(lambda: receiver.since, 60, "it listens")
            with cluster.worker("-c", "1", "-P", "threads", "-E"):
                with cluster.redlock.lock(key):
                    sent = cluster.send("work", name)
                    others = [cluster.send("work", name) for _ in range(2)]

                    def of_it(rows: Any) -> Any:
                        return next((one for one in rows if one["task_id"] == sent.id), None)

                    def waits() -> Any:
                        return of_it(client.get("/waiters.json").json["waits"]["rows"])

                    wait = wait_until(waits, 60, "the worker tells who waits", every=0.2)
                    assert wait["resource"] == key

                    def one_lock() -> Any:
                        one = client.get("/lock.json", query_string={"resource": key}).json
                        return of_it(one["workers"]["rows"])

                    said = wait_until(one_lock, 60, "so does the lock's own page", every=0.2)
                    assert said["what"] == "waits" and said["where"] in ("parked", "slot")

                    def event() -> Any:
                        return of_it(client.get("/events.json").json["rows"])

                    told = wait_until(event, 60, "that it waits is heard", every=0.2)
                    assert (told["what"], told["resource"]) == ("waiting", key)
                    assert told["task"] == "tests.promises.worker.tasks.work"
                    text = client.get("/events").text
                    assert "Waiting</span>" in text and "Refused" not in text
                    assert told["task"] in text

                    def counted() -> Any:
                        told = client.get("/locks.json").json
                        row = next(row for row in told["rows"] if row["resource"] == key)
                        one = client.get("/lock.json", query_string={"resource": key}).json
                        lines = [e["waiting"] for e in one["entries"] if e["kind"] == "line"]
                        told = [row["nodes"], told["counts"]["waiting"], row["waiting"], *lines]
                        return told == [3, 3, 3, 3]

                    # Their worker has one place in the queue.
                    wait_until(counted, 60, "all three are counted", every=0.2)
                    assert client.get("/locks.json").json["counts"]["parked_known"]
                    for path in ("/", "/waiters", "/events", f"/lock?resource={quoted(key)}"):
                        text = html.unescape(client.get(path).text)
                        assert key in text and not TOKEN.search(text)
                        assert path == "/" or sent.id in text
                for one in (sent, *others):
                    cluster.result(one, 30)
        finally:
            page.close()
            app.close()
            cluster.close()
