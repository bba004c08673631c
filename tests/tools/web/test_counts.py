"""Numbers of waiters: each page shows those of `ls` and of the exporter, for the same replies."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from click.testing import CliRunner
from prometheus_client.parser import text_string_to_metric_families
from werkzeug.test import Client

from celery_redlock import Redlock
from celery_redlock.cli import redlock as group
from celery_redlock.server import LocalServer
from celery_redlock.web import sources
from celery_redlock.web.formatting import quoted

Replies = dict[str, Any]
SPACED, RAW, ESCAPED = 'mail:"a + b"', "row\x1b\n", "row\\x1b\\n"
"""A task's key with spaces; a block's with control characters; a task's that looks like it."""
UNCOUNTED = "tasks that wait inside workers are not counted"


@pytest.fixture
def app(
    server: LocalServer, servers: list[LocalServer], monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Celery, Replies]]:
    """An app, and what its workers answer."""
    made = Celery("web", broker=server.url, set_as_current=False)
    made.conf.redlock_nodes = [one.url for one in servers]
    replies: Replies = {}

    def broadcast(*_asked: Any, **_how: Any) -> list[Any]:
        return [{name: reply} for name, reply in replies.items()]

    monkeypatch.setattr(made.control, "broadcast", broadcast)
    monkeypatch.setattr(sources, "LOCK_TIMEOUT_S", 20.0)  # the machine may be busy
    yield made, replies
    Redlock.from_app(made).close()
    made.close()


def queue(admins: list[Any], resource: str, places: int) -> None:
    """Put so many waiters into a queue on each node."""
    key = f"redlock:{resource}#line".encode()
    for admin in admins:
        admin.zadd(key, {f"p:{place}": time.time() * 1e6 for place in range(places)})


def parked(resource: Any, *waited: Any, where: str = "parked") -> list[dict[str, Any]]:
    return [{"resource": resource, "waited": one, "where": where} for one in waited]


def ls(app: Celery) -> dict[str, int]:
    """Return the number of waiters of each key, by `ls`."""
    said = CliRunner().invoke(group, ["ls", "--json"], obj=SimpleNamespace(app=app))
    return {one["resource"]: one["waiting"] for one in json.loads(said.stdout)["entries"]}


def metric(client: Client, name: str) -> float:
    families = text_string_to_metric_families(client.get("/metrics").text)
    samples = [one for family in families for one in family.samples]
    return sum(one.value for one in samples if one.name == f"celery_redlock_{name}")


def of_one(client: Client, resource: str) -> dict[str, Any]:
    """Return the waiters of one lock, by its page."""
    told = client.get(f"/lock.json?resource={quoted(resource)}").json
    (line,) = [one for one in told["entries"] if one["kind"] == "line"] or [{"waiting": 0}]
    return line | {"workers": told["workers"]["rows"]}


def test_every_page_counts_as_ls_and_the_exporter_do(
    app: tuple[Celery, Replies], serve_app: Callable[..., Client], holds: Any, admins: list[Any]
) -> None:
    it, replies = app
    for name in ("order:1", SPACED, RAW, ESCAPED, "calm"):
        holds(name)
    queue(admins, "order:1", 3)  # a worker, a task in a slot, a block
    queue(admins, SPACED, 1)
    queue(admins, RAW, 1)
    replies["w1@h"] = {
        "waits": [
            *parked("order:1", 30.0, 20.0, 10.0),
            *parked("order:1", 99.0, where="slot"),
            *parked(SPACED, 50.0, 2.0),
        ],
        "queued": ["order:1", SPACED],
    }
    full = [*parked("order:1", 59.0), *parked(ESCAPED, 40.0, 1.0), *parked("free", 45.0)]
    replies["w2@h"] = {"waits": full, "queued": []}
    counted = {"order:1": 6, SPACED: 2, RAW: 1, ESCAPED: 2, "calm": 0}
    assert ls(it) == counted

    client = serve_app(app[0])
    client.get("/nodes")  # of the same look, and needs no counts
    told = client.get("/locks.json").json
    assert {row["resource"]: row["waiting"] for row in told["rows"]} == counted
    assert told["counts"]["waiting"] == 6 + 2 + 1 + 2 + 1 and told["counts"]["parked_known"]
    assert metric(client, "waiting") == told["counts"]["waiting"]
    assert metric(client, "oldest_wait_seconds") == 59 + 45  # held by a task; held by nobody
    lines = client.get("/waiters.json").json["lines"]["rows"]
    assert [(row["resource"], row["waiting"]) for row in lines] == [
        *(("order:1", 6), (SPACED, 2), (ESCAPED, 2), ("free", 1), (RAW, 1))
    ]
    assert [row["held_for"] for row in lines[:4]] == [59, 50, 40, 45]
    for name, count in {**counted, "free": 1}.items():
        assert of_one(client, name)["waiting"] == count, name
    assert len(of_one(client, SPACED)["workers"]) == 2, "its name has a + in it"
    text = client.get("/lock?resource=order:1").text
    assert "6 waiters. The first has waited for 59 s" in text
    assert "Nobody waits." in client.get("/lock?resource=calm").text
    assert UNCOUNTED not in client.get("/waiters").text


def test_the_place_of_a_dead_worker_is_named_where_it_is_counted(
    app: tuple[Celery, Replies], serve_app: Callable[..., Client], holds: Any, admins: list[Any]
) -> None:
    holds("order:1")
    holds("mail:2")
    queue(admins, "order:1", 2)  # a worker that answers, and one that died
    queue(admins, "mail:2", 1)
    waits = [*parked("order:1", 1.0), *parked("mail:2", 1.0)]
    app[1]["w1@h"] = {"waits": waits, "queued": ["order:1", "mail:2"]}
    client = serve_app(app[0])
    told = {one: client.get(f"/lock.json?resource={one}").json for one in ("order:1", "mail:2")}
    assert {one: it["unreported"] for one, it in told.items()} == {"order:1": 1, "mail:2": 0}
    text = client.get("/lock?resource=order:1").text
    assert "No worker reports 1 of them" in text and "has died" in text
    assert "No worker reports" not in client.get("/lock?resource=mail:2").text
    lines = client.get("/waiters.json").json["lines"]["rows"]
    assert {row["resource"]: row["unreported"] for row in lines} == {"order:1": 1, "mail:2": 0}
    assert client.get("/waiters").text.count("1 unreported") == 1


def test_silent_worker_counts_as_its_queue_place_and_the_pages_say_so(
    app: tuple[Celery, Replies], serve_app: Callable[..., Client], holds: Any, admins: list[Any]
) -> None:
    holds("order:1")
    queue(admins, "order:1", 2)
    app[1]["w1@h"] = {"error": "redlock_ttl is no number", "waits": parked("order:1", 1.0, 1.0)}
    client = serve_app(app[0])
    told = client.get("/locks.json").json
    assert (told["counts"]["waiting"], told["rows"][0]["waiting"]) == (2, 2)
    assert not told["counts"]["parked_known"] and metric(client, "waiting") == 2
    assert of_one(client, "order:1")["waiting"] == 2
    assert client.get("/lock.json?resource=order:1").json["unreported"] is None
    for path in ("/", "/lock?resource=order:1", "/waiters"):
        assert UNCOUNTED in client.get(path).text, path
    assert "2 waiters in the queue on the nodes." in client.get("/lock?resource=order:1").text


EVIL = "<script>\u202e\x1b\ud800" + "x" * 5000
ODD = [None, 7, True, "x", [], {}, EVIL, "", 10**400, float("nan"), float("inf"), -1.0, 1e15]


def test_hostile_replies_change_no_other_count_and_break_no_page(
    app: tuple[Celery, Replies], serve_app: Callable[..., Client], holds: Any, admins: list[Any]
) -> None:
    it, replies = app
    holds("order:1")
    queue(admins, "order:1", 1)
    replies["good@h"] = {"waits": parked("order:1", 5.0, 5.0), "queued": ["order:1"]}
    for number, odd in enumerate(ODD):
        replies[f"{number}@h"] = odd
        replies[f"w{number}@h"] = {"waits": odd, "queued": odd, "holds": odd}
        replies[f"q{number}@h"] = {"waits": [odd, *parked(odd, 1.0)], "queued": [odd] * 9}
        replies[f"n{number}@h"] = {"waits": parked("order:1", odd, where="slot")}
        if not 0 <= (odd if isinstance(odd, (int, float)) else -1) < 1e12:
            replies[f"p{number}@h"] = {"waits": parked("order:1", odd)}
    client = serve_app(app[0])
    told = client.get("/locks.json").json
    assert [row["waiting"] for row in told["rows"]] == [2] == list(ls(it).values())
    assert of_one(client, "order:1")["waiting"] == 2
    assert metric(client, "waiting") == told["counts"]["waiting"]
    for path in ("/", "/lock?resource=order:1", "/waiters", "/waiters.json"):
        answer = client.get(path)
        assert answer.status_code == 200 and ("<script>" in answer.text) is (".json" in path)
        assert answer.text.replace("\n", "").isprintable() and "x" * 1001 not in answer.text
