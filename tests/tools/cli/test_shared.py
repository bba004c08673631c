"""Readers of a key, as operators see them: each by itself, and freed by itself."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery
from click.testing import CliRunner

from celery_redlock import Lease, Redlock, locked
from celery_redlock.cli import redlock as group
from celery_redlock.cli.context import Site
from celery_redlock.cli.watch import Changes
from celery_redlock.locking import pauses
from celery_redlock.protocol.values import Owner, token_digest
from celery_redlock.server import LocalServer
from celery_redlock.survey.force_release import force_release
from celery_redlock.survey.snapshot import look, survey
from tests.support.nodes import all_connected, told_all
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


def reading(redlock: Redlock, count: int) -> list[Lease]:
    """Return so many read locks, the oldest first, on all nodes."""
    leases = [
        redlock.acquire(
            "db:7", shared=True, owner=Owner("h", 1, f"id{n}", stamp=f"s{n}", task="shop.read")
        )
        for n in range(1, count + 1)
    ]
    told_all(redlock)
    return leases


def explained(app: Celery, task: str) -> Any:
    return json.loads(call(app, "explain", task, "[7]", "--json").stdout)["run"]


def test_each_reader_is_shown_and_released_by_itself(app: Celery) -> None:
    redlock = all_connected(Redlock.from_app(app))
    leases = reading(redlock, 2)
    entries = look(redlock, "db:7")
    digests = [token_digest(lease.token) for lease in leases]
    assert [(e.kind, e.place, e.owner and e.owner.task_id) for e in entries] == [
        ("lock", f" reader {digests[0]}", "id1"),
        ("lock", f" reader {digests[1]}", "id2"),
    ]
    assert all(19 < left <= 30 for entry in entries for left in entry.ttls if left)
    said = call(app, "ls").stdout
    assert all(f"db:7 reader {digest}" in said for digest in digests)
    assert f"lock reader {digests[1]}: shop.read id2" in call(app, "show", "db:7").stdout
    freed = force_release(redlock, entries[0])
    assert (freed.outcome, freed.nodes, freed.taken) == ("freed", 3, False), "the other stays"
    assert force_release(redlock, entries[0]).outcome == "gone", "the other does not stand for it"
    (left,) = look(redlock, "db:7")
    assert left.digest == digests[1]
    assert redlock.try_acquire("db:7") is None
    assert redlock.release(leases[1])


def test_reader_is_released_by_its_digest_and_never_by_a_slot(app: Celery) -> None:
    redlock = all_connected(Redlock.from_app(app))
    leases = reading(redlock, 3)
    first, second, third = (token_digest(lease.token) for lease in leases)

    def release(*arguments: str) -> Any:
        return call(app, "release", "db:7", "--force", *arguments)

    assert redlock.release(leases[0])
    told_all(redlock)
    for arguments in ([], ["--slot", "2"], ["--slot", "9"]):
        refused = release(*arguments)
        assert refused.exit_code == 2 and "2 holders; say which, by --digest:" in refused.output
        assert f"db:7 reader {second}: shop.read id2, pid 1 on h, token {second}" in refused.output
    refused = release("--digest", first)
    assert refused.exit_code == 1 and f"no node has a lock of it with the digest {first}" in (
        refused.output
    )
    freed = release("--digest", second)
    assert freed.stdout == (
        f"db:7 reader {second}: freed on 3 nodes;"
        f" shop.read id2, pid 1 on h, token {second} had it\n"
    )
    assert [entry.digest for entry in look(redlock, "db:7")] == [third]
    assert json.loads(release("--digest", third, "--json").stdout)["taken"] is False


def test_watch_prints_each_reader_that_begins_and_ends(
    app: Celery, capsys: pytest.CaptureFixture[str]
) -> None:
    redlock = all_connected(Redlock.from_app(app))
    say = Changes(for_programs=False)

    def changes() -> list[str]:
        told_all(redlock)
        say(survey(redlock, "db:7", kinds=("lock",), timeout=20))
        return [
            re.split(" after | shop", line[9:])[0] for line in capsys.readouterr().out.splitlines()
        ]

    assert changes() == []
    leases = reading(redlock, 3)
    names = [f"db:7 reader {token_digest(lease.token)}" for lease in leases]
    assert changes() == [f"+ {name}" for name in names]
    assert redlock.release(leases[0])
    assert changes() == [f"- {names[0]} has ended"], "the others have not changed"
    assert redlock.release(leases[1]) and redlock.release(leases[2])
    assert sorted(changes()) == sorted(f"- {name} has ended" for name in names[1:])


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
    run = explained(app, "shop.read")
    assert run["outcome"] == "run" and run["text"].startswith(text)
    assert explained(app, "shop.write")["outcome"] == "parked"
    assert explained(app, "shop.write_instead")["outcome"] == "raise"
    redlock.release(lease)
    lease = redlock.acquire("db:7")
    assert explained(app, "shop.read")["outcome"] == "parked"
    redlock.release(lease)


def test_explain_says_that_an_operator_limit_does_not_change_a_reader(app: Celery) -> None:
    pauses.begin(Redlock.from_app(app), "db:*", 60.0, "alice", limit=1)
    said = call(app, "explain", "shop.read", "[7]").stdout
    assert "UTC; this call has no limit for it to change" in said
    pauses.begin(Redlock.from_app(app), "db:*", 60.0, "alice")
    assert " is paused by alice" in (said := call(app, "explain", "shop.read", "[7]").stdout)
    assert said.count("for it to change") == 1
