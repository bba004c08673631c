"""Timelines: the events that they derive from looks, and those they forget."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from celery_redlock.protocol.values import Owner
from celery_redlock.survey.models import Entry, NodeLook, Survey
from celery_redlock.web import history as history_module
from celery_redlock.web import serializers
from celery_redlock.web.history import UNWATCHED_S, History, state_of

UP = tuple(NodeLook(f"n{n}", True, "", 0.001) for n in range(5))
DOWN = (*UP[:3], *(NodeLook(f"n{n}", False, "refused", 0.0) for n in (3, 4)))


def entry(digest: str = "aaaa", nodes: int = 5, **more: Any) -> Entry:
    ttls = (*[9.0] * nodes, *[None] * (5 - nodes))
    given = {"resource": "r", "kind": "lock", "slot": 1} | more
    given["key"] = f"redlock:{given['resource']}"
    owner = Owner("h", 7, "id", task="shop.pay", shared=given.pop("shared", False))
    return Entry(**given, owner=owner, digest=digest, ttls=ttls, nodes=nodes, total=5, quorum=3)


def seen(history: History, *looks: tuple[float, list[Entry]], nodes: Any = UP) -> list[str]:
    for at, entries in looks:
        history.record(Survey(tuple(entries), nodes, at))
    return [change.what for change in history.of("r")]


def test_timeline_shows_came_passed_and_gone_with_the_last_first() -> None:
    history = History()
    looks = [(1.0, []), (2.0, [entry()]), (3.0, [entry()]), (4.0, [entry("bbbb")]), (5.0, [])]
    assert seen(history, *looks) == ["gone", "passed", "came"]
    gone, passed, came = history.of("r")
    assert (came.after, came.at) == (1.0, 2.0) and (gone.after, gone.at) == (4.0, 5.0)
    assert came.who == "shop.pay id, pid 7 on h" and passed.digest == gone.digest == "bbbb"
    assert history.since == 1.0


def test_timeline_does_not_say_that_the_first_seen_lock_came() -> None:
    assert seen(History(), (1.0, [entry()])) == ["there"]


def test_timeline_shows_a_quorum_lost_and_won_only_if_nodes_answer() -> None:
    history = History()
    assert seen(history, (1.0, [entry()]), (2.0, [entry(nodes=2)])) == ["short", "there"]
    assert seen(history, (3.0, [entry(nodes=3)])) == ["held", "short", "there"]
    assert seen(history, (4.0, [entry(nodes=2)]), nodes=DOWN) == ["held", "short", "there"]


def test_timeline_shows_each_reader_by_itself() -> None:
    history = History()
    one, two, three = (entry(digest, shared=True) for digest in ("aaaa", "bbbb", "cccc"))
    looks = [(1.0, []), (2.0, [one, replace(two, slot=2), replace(three, slot=3)])]
    assert seen(history, *looks) == ["came"] * 3
    assert seen(history, (3.0, [two, replace(three, slot=2)])) == ["gone", *["came"] * 3]
    seen(history, (4.0, [three]), (5.0, [entry("dddd")]))
    told = [(change.at, change.what, change.place) for change in history.of("r")]
    assert told[2:4] == [(4.0, "gone", "reader bbbb"), (3.0, "gone", "reader aaaa")]
    assert {*told[:2]} == {(5.0, "gone", "reader cccc"), (5.0, "came", "")}


def test_timeline_shows_spans_without_a_look() -> None:
    history = History()
    seen(history, (1.0, []), (2.0, [entry()]))
    history.record_failure("2 of 5 nodes answered")
    assert seen(history, (9.0, [entry()])) == ["blind", "came"]
    blind = history.of("r")[0]
    assert (blind.after, blind.at, blind.who) == (2.0, 9.0, "2 of 5 nodes answered")
    assert seen(history, (9.1 + UNWATCHED_S, [entry()]))[0] == "unwatched"


def test_timeline_ignores_queues_and_fences() -> None:
    lines = [entry(kind="line"), entry(kind="fence")]
    assert seen(History(), (1.0, []), (2.0, lines), (3.0, [])) == []


def node(uptime: float | None, error: str = "") -> dict[str, Any]:
    return {"name": "n1", "answers": not error, "error": error, "uptime": uptime}


def test_timeline_shows_nodes_that_come_and_go() -> None:
    history = History()
    for at, one in ((1.0, node(9.0)), (2.0, node(None, "refused")), (3.0, node(0.0))):
        history.record_nodes([one, {**node(at), "name": "n0"}], at)
    up, down = history.of_nodes()["n1"]
    assert (up.what, up.at, down.what, down.at) == ("up", 3.0, "down", 2.0)
    assert (down.after, down.who) == (1.0, "refused")
    assert "n0" not in history.of_nodes()


@pytest.mark.parametrize(
    ("looks", "changes"),
    [
        ([(100.0, 50.0), (101.0, 50.0), (102.0, 52.0)], []),
        ([(100.0, 50.0), (101.0, 0.0), (102.0, 1.0)], ["restarted"]),
        ([(100.0, 3.0), (200.0, 60.0)], ["restarted"]),
        ([(100.0, 3.0), (200.0, 102.0)], []),
        ([(100.0, 9.0), (200.0, None), (300.0, 9.0)], ["restarted"]),
        ([(100.0, None), (200.0, None)], []),
    ],
)
def test_timeline_shows_a_restart_between_two_looks(
    looks: list[tuple[float, float | None]], changes: list[str]
) -> None:
    history = History()
    for at, uptime in looks:
        history.record_nodes([node(uptime)], at)
    assert [change.what for change in history.of_nodes().get("n1", [])] == changes


def test_timeline_is_bounded_and_keeps_the_last_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history_module, "MAX_CHANGES", 3)
    monkeypatch.setattr(history_module, "MAX_LOCKS", 10)
    history = History()
    for at in range(1, 100):
        held = [entry(f"{at}", resource=f"r{at % 20}"), entry(f"{at}")]
        history.record(Survey(tuple(held), UP, float(at)))
    assert len(history._changes) <= 10
    assert all(len(changes) <= 3 for changes in history._changes.values())
    assert history.of("r")[0].digest == "99"


@pytest.mark.parametrize(
    ("it", "silent", "state"),
    [
        (entry(), 0, "held"),
        (entry(nodes=3), 2, "held"),
        (entry(nodes=2), 0, "short"),
        (entry(nodes=2), 1, "unsure"),
        (entry(nodes=1), 1, "short"),
        (replace(entry(), ttls=(float("inf"), 9.0, 9.0, None, None)), 0, "never"),
    ],
)
def test_state_of_a_lock_claims_no_more_than_was_seen(it: Entry, silent: int, state: str) -> None:
    assert state_of(it, silent) == state


def test_quorum_lasts_as_long_as_the_last_node_that_makes_it() -> None:
    it = replace(entry(), ttls=(1.0, 5.0, None, 3.0, 9.0))
    assert serializers.quorum_left(it) == 3.0
    assert serializers.quorum_left(replace(it, ttls=(1.0, None, None, None, 9.0))) is None
