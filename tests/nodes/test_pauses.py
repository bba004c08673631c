"""Pauses on real nodes: which count while nodes are away, and that none outlives its end."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from celery import signals

from celery_redlock import Redlock
from celery_redlock.locking import pauses
from celery_redlock.protocol.errors import QuorumUnavailable
from celery_redlock.protocol.names import Limits
from celery_redlock.protocol.values import Owner
from celery_redlock.worker.parking.consumer import Parking
from celery_redlock.worker.startup import watch_pauses
from tests.support.names import Locks, Patch, Request, Servers
from tests.support.postgres_sites import empty_server, new_database
from tests.support.wait import wait_until

WHO = "alice"


@pytest.fixture(scope="module")
def database() -> Iterator[str]:
    with empty_server() as server:
        yield new_database(server)


@pytest.fixture(params=["redis", "postgresql"])
def over(request: Request, servers: Servers) -> Iterator[Redlock]:
    """A lock over five Redis nodes, or over PostgreSQL."""
    nodes = [server.url for server in servers]
    if request.param == "postgresql":
        nodes = [request.getfixturevalue("database")]
    lock = Redlock(nodes, restart_guard="off")
    yield lock
    for pause in pauses.in_force(lock)[0]:
        pauses.resume(lock, pause.pattern)
    lock.close()


def patterns(lock: Redlock) -> list[str]:
    found, sure = pauses.in_force(lock)
    assert sure
    return sorted(pause.pattern for pause in found)


def test_pause_shows_who_why_and_until_when_and_ends_by_its_pattern(over: Redlock) -> None:
    assert patterns(over) == []
    pauses.begin(over, "order:*", 3600.0, "alice@web-1", "bad | release %7C")
    pauses.begin(over, "mail:[a-c]*", 60.0, "bob")
    ((mail, order), _) = pauses.in_force(over)
    if mail.pattern != "mail:[a-c]*":
        mail, order = order, mail
    assert (order.who, order.reason) == ("alice@web-1", "bad | release %7C")
    assert 3590 < order.ends_in <= 3600 and 50 < mail.ends_in <= 60
    assert str(order).startswith("order:* is paused by alice@web-1 until 20")
    assert pauses.covering((mail, order), ("x", "order:7")) == order
    assert pauses.covering((mail, order), ("mail:b7",)) == mail
    assert pauses.covering((mail, order), ("mail:d7", "orders")) is None
    assert pauses.resume(over, "order:7") == ([], [])
    (ended,), silent = pauses.resume(over, "order:*")
    assert ended.token == order.token and not silent
    assert patterns(over) == ["mail:[a-c]*"]


def test_limit_stands_beside_a_pause_of_its_pattern_and_replaces_another_limit(
    over: Redlock,
) -> None:
    pauses.begin(over, "order:*", 60.0, WHO)
    pauses.begin(over, "order:*", 60.0, WHO, "first", 5)
    pauses.begin(over, "order:*", 60.0, "bob", "second", 7)
    (found, _) = pauses.in_force(over)
    assert sorted((one.limit, one.who) for one in found) == [(0, WHO), (7, "bob")]
    pause = pauses.covering(found, ("order:1",))
    assert pause is not None and pause.limit == 0
    assert len(pauses.resume(over, "order:*")[0]) == 2
    assert patterns(over) == []


@pytest.mark.parametrize(
    ("names", "limit", "becomes"),
    [
        (["order:1"], 3, Limits((2,), (100,))),
        (["order:1"], 1, 1),
        (["other"], 9, 9),
        (["mail:1"], 3, Limits((9,), (100,))),
        (["mail:1", "order:1"], Limits((3, 5)), Limits((9, 2), (100, 100))),
        (["mail:1", "order:1"], Limits((1, 5)), Limits((1, 2), (1, 100))),
        (["order:7"], 8, Limits((1,), (100,))),
    ],
)
def test_operator_limit_changes_declared_limits_and_no_exclusive_key(
    names: list[str], limit: Any, becomes: Any
) -> None:
    found = [
        pauses.Pause("1#pause", "t", pattern, WHO, "", number, 0.0, 60.0, 0.0)
        for pattern, number in (("order:*", 2), ("order:7", 1), ("mail:*", 9), ("*", 0))
    ]
    assert pauses.limited(found, names, limit) == becomes
    assert pauses.limited(found[3:], names, limit) == limit


def test_pause_ends_by_itself(over: Redlock) -> None:
    pauses.begin(over, "order:*", 1.0, WHO)
    assert patterns(over) == ["order:*"]
    wait_until(lambda: patterns(over) == [], 5.0, "it is over")


@pytest.fixture
def five(servers: Servers, lock_over: Locks) -> Locks:
    """A lock over all five servers, or over those of some numbers."""
    return lambda *numbers: lock_over(
        [servers[number] for number in numbers or range(5)], restart_guard="off", node_timeout=0.3
    )


def test_pause_is_in_force_while_nodes_are_away(five: Locks, servers: Servers) -> None:
    """Any quorum shares a node with the one that stored it; one node is enough to report it."""
    for server in servers[3:]:
        server.kill()
    pauses.begin(five(), "order:*", 60.0, WHO)
    for server in servers[3:]:
        server.start()  # empty
    for server in servers[:2]:
        server.pause()
    assert patterns(five()) == ["order:*"]  # by one of three
    servers[3].pause()
    found, sure = pauses.in_force(five())
    assert [pause.pattern for pause in found] == ["order:*"] and not sure
    for server in servers[:4]:
        server.resume()


def test_resumed_pause_does_not_come_back_with_a_node_that_missed_it(
    five: Locks, servers: Servers
) -> None:
    pauses.begin(five(), "order:*", 60.0, WHO)
    servers[4].pause()
    ended, silent = pauses.resume(five(), "order:*")
    assert len(ended) == 1 and silent == [f"127.0.0.1:{servers[4].port}"]
    servers[4].resume()
    assert patterns(five()) == []


def test_pause_and_resume_need_a_quorum(five: Locks, servers: Servers) -> None:
    pauses.begin(five(), "mail:*", 60.0, WHO)
    for server in servers[:3]:
        server.pause()
    with pytest.raises(QuorumUnavailable):
        pauses.begin(five(), "order:*", 60.0, WHO)
    with pytest.raises(QuorumUnavailable):
        pauses.resume(five(), "mail:*")
    for server in servers[:3]:
        server.resume()
    wait_until(lambda: patterns(five()) == ["mail:*"], 10.0, "what was written is undone")


def test_watch_for_pauses_sees_a_pause_and_ends_with_its_worker(
    over: Redlock, monkeypatch: Patch
) -> None:
    """A worker that a test starts in its process must not leave a thread that asks nodes."""

    def watching() -> list[threading.Thread]:
        return [one for one in threading.enumerate() if one.name == "celery_redlock pauses"]

    monkeypatch.setattr(Redlock, "from_app", staticmethod(lambda _app: over))
    monkeypatch.setattr("celery_redlock.worker.startup._takes_locks", lambda _app: True)
    told: list[tuple[pauses.Pause, ...]] = []
    parking: Any = Parking.__new__(Parking)
    monkeypatch.setattr(Parking, "pauses_are", lambda _self, now: told.append(now))
    watch_pauses(SimpleNamespace(app=None, on_task_request=parking))
    pauses.begin(over, "order:*", 60.0, WHO)
    wait_until(lambda: told and told[-1], 10.0, "the pause is told")
    assert len(watching()) == 1
    signals.worker_shutdown.send(sender=None)
    wait_until(lambda: not watching(), 10.0, "it has ended")


def test_oversized_pause_token_is_ignored() -> None:
    for texts in (("a" * 60_000, WHO, ""), ("a", "w" * 60_000, ""), ("a", WHO, "r" * 60_000)):
        token = Owner("web-1", 1, texts[0], stamp=texts[1], task=texts[2]).token("0" * 32, 1.7e9)
        assert Owner.of(token) is not None and pauses.Pause.of("1#pause", token, 60.0) is None
