"""Readers of a key, as operators see them: each by itself, and freed by itself."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery
from click.testing import CliRunner

from celery_redlock import Redlock, locked
from celery_redlock.cli import redlock as group
from celery_redlock.cli.context import Site
from celery_redlock.locking import pauses
from celery_redlock.protocol.values import Owner
from celery_redlock.server import LocalServer
from celery_redlock.survey.force_release import force_release
from celery_redlock.survey.snapshot import look
from tests.support.nodes import all_connected
from tests.support.wait import wait_until


@pytest.fixture
def app(servers: list[LocalServer]) -> Iterator[Celery]:
    # No broker is there, so nobody waits for the answers of workers.
    made = Celery("shop", broker="redis://127.0.0.1:1/0", set_as_current=False)
    made.conf.update(redlock_nodes=[s.url for s in servers[:3]], redlock_restart_guard="off")

    for name, options in {
        "read": {"shared": True},
        "read_or_skip": {"shared": True, "on_conflict": "skip"},
        "read_or_fail": {"shared": True, "on_conflict": "raise"},
        "write": {},
        "write_instead": {"on_conflict": "replace"},
    }.items():

        def body(shop: int) -> None: ...

        made.task(name=f"shop.{name}", shared=False)(locked("db:<shop>", **options)(body))  # type: ignore[arg-type]
    yield made
    Redlock.from_app(made).close()
    made.close()


def call(app: Celery, *arguments: str) -> Any:
    return CliRunner().invoke(group, [*arguments, "--timeout", "2"], obj=Site(app=app))


def explained(app: Celery, task: str) -> Any:
    return json.loads(call(app, "explain", task, "[7]", "--json").stdout)["run"]


def test_each_reader_is_shown_and_freed_by_itself(app: Celery) -> None:
    redlock = all_connected(Redlock.from_app(app))
    owners = [Owner("h", 1, f"id{n}", stamp=f"s{n}", task="shop.read") for n in (1, 2)]
    leases = [redlock.acquire("db:7", shared=True, owner=owner) for owner in owners]
    wait_until(lambda: [e.nodes for e in look(redlock, "db:7")] == [3, 3], 10, "all have it")
    entries = look(redlock, "db:7")
    assert [(e.kind, e.place, e.owner and e.owner.task_id) for e in entries] == [
        ("lock", " reader 1", "id1"),
        ("lock", " reader 2", "id2"),
    ]
    assert all(19 < left <= 30 for entry in entries for left in entry.ttls if left)
    said = call(app, "ls").stdout
    assert "db:7 reader 1" in said and "db:7 reader 2" in said
    assert "lock reader 2: shop.read id2" in call(app, "show", "db:7").stdout
    assert force_release(redlock, entries[0]).outcome == "freed"
    (left,) = look(redlock, "db:7")
    assert left.owner == owners[1]
    assert redlock.try_acquire("db:7") is None
    assert redlock.release(leases[1])


def test_explain_says_what_a_reader_does_while_a_writer_waits(app: Celery) -> None:
    redlock = all_connected(Redlock.from_app(app))
    reading, leases = redlock.acquire("db:7", shared=True), []
    assert explained(app, "shop.read_or_skip")["outcome"] == "run"
    writer = threading.Thread(target=lambda: leases.append(redlock.acquire("db:7", wait=60.0)))
    writer.start()
    try:
        wait_until(lambda: explained(app, "shop.read")["outcome"] == "parked", 10, "it waits")
        for task, outcome in {"shop.read_or_skip": "skip", "shop.read_or_fail": "raise"}.items():
            run = explained(app, task)
            assert run["outcome"] == outcome
            assert run["text"].endswith("; a writer waits, and goes before new readers")
    finally:
        redlock.release(reading)
        writer.join(30)
    redlock.release(*leases)
    wait_until(lambda: explained(app, "shop.read_or_skip")["outcome"] == "run", 10, "it is free")


def test_explain_tells_a_reader_from_a_writer(app: Celery) -> None:
    redlock = all_connected(Redlock.from_app(app))
    lease = redlock.acquire("db:7", shared=True)
    text = "runs as soon as it is delivered, beside the 1 that read"
    assert explained(app, "shop.read") == {"outcome": "run", "text": text}
    assert explained(app, "shop.write")["outcome"] == "parked"
    assert explained(app, "shop.write_instead")["outcome"] == "raise"
    redlock.release(lease)
    lease = redlock.acquire("db:7")
    assert explained(app, "shop.read")["outcome"] == "parked"
    redlock.release(lease)


def test_explain_says_that_an_operators_limit_is_none_of_a_readers(app: Celery) -> None:
    pauses.begin(Redlock.from_app(app), "db:*", 60.0, "alice", limit=1)
    said = call(app, "explain", "shop.read", "[7]").stdout
    assert "UTC; this call has no limit for it to change" in said
    pauses.begin(Redlock.from_app(app), "db:*", 60.0, "alice")
    assert " is paused by alice" in (said := call(app, "explain", "shop.read", "[7]").stdout)
    assert said.count("for it to change") == 1
