"""Who goes to the pool, and who is parked: the state of a worker's main process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from celery_redlock import gate as module
from celery_redlock.gate import HOT, TENURE, Gate, Parked


class Requests:
    """A gate, and deliveries by name."""

    def __init__(self) -> None:
        self.attended: list[str] = []
        self.gate = Gate(self.attended.append)
        self.known: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        return self.known.setdefault(name, SimpleNamespace(name=name, time_start=None))

    def arrive(self, name: str, now: float = 0.0, resource: str = "r", **how: Any) -> bool:
        how.setdefault("until", 60.0)
        return self.gate.arrive(self[name], resource, now, **how)

    def landed(self, name: str, now: float = 0.0, **how: Any) -> list[str]:
        return names(self.gate.landed(self[name], "r", now, **how))

    def free(self, now: float = 0.0, ghosts: tuple[str, ...] = ()) -> list[str]:
        return names(self.gate.free("r", now, {id(self[name]) for name in ghosts}))


def names(parked: list[Parked]) -> list[str]:
    return [one.request.name for one in parked]


@pytest.fixture
def some() -> Requests:
    return Requests()


@pytest.fixture
def row() -> Requests:
    """One at work, three parked, and the turn is ours."""
    some = Requests()
    assert some.arrive("first")
    for name in ("a", "b", "c"):
        assert not some.arrive(name)
    some.gate.take_turn("r", 0.0)
    return some


def test_the_first_goes_and_its_followers_are_parked(some: Requests) -> None:
    assert some.arrive("first")
    assert not some.arrive("second")
    assert not some.arrive("third")
    assert some.arrive("other", resource="else")
    assert some.gate.parked == 2
    assert some.attended == ["r"]  # once, not for each of a thousand


def test_one_after_the_other_goes_while_the_tenure_lasts(row: Requests) -> None:
    assert row.landed("first", 0.1) == ["a"]
    assert row.landed("a", 0.2) == ["b"]
    assert row.gate.parked == 1


def test_none_goes_without_the_turn(some: Requests) -> None:
    some.arrive("first")
    some.arrive("second")
    assert some.landed("first") == []
    assert some.free() == []
    assert some.attended == ["r", "r"]
    some.gate.take_turn("r", 0.0)
    assert some.free() == ["second"]


def test_none_follows_when_the_turn_is_lost(row: Requests) -> None:
    row.gate.lose_turn("r", 0.1)
    assert row.landed("first", 0.1) == []
    assert not row.gate.view("r", 0.1).stand_back


def test_two_never_go_together(row: Requests) -> None:
    """The end of one is heard twice: from the pool, and from the nodes."""
    assert row.landed("first", 0.1) == ["a"]
    assert row.free(0.1) == []
    assert row.landed("first", 0.1) == []


def test_after_its_tenure_a_worker_stands_back(row: Requests) -> None:
    assert row.landed("first", TENURE) == []
    assert row.gate.view("r", TENURE).stand_back
    assert row.free(TENURE) == []
    row.gate.lose_turn("r", TENURE)
    assert not row.gate.view("r", TENURE).stand_back
    row.gate.take_turn("r", TENURE)
    assert row.free(TENURE) == ["a"]


@pytest.mark.parametrize("how", [{"sure": False}, {"conflict": True}])
def test_where_it_may_still_be_held_the_nodes_are_asked(row: Requests, how: Any) -> None:
    before = len(row.attended)
    assert row.landed("first", 0.1, **how) == []
    assert len(row.attended) == before + 1
    assert row.free(0.1) == ["a"]


def test_a_conflict_is_remembered_for_a_while(some: Requests) -> None:
    some.arrive("first")
    some.landed("first", 1.0, conflict=True)
    assert not some.arrive("second", 1.0 + HOT - 0.1)
    some = Requests()
    some.arrive("first")
    some.landed("first", 1.0, conflict=True)
    assert some.arrive("second", 1.0 + HOT)


def test_who_met_a_held_lock_is_parked_though_nothing_is_known_here(some: Requests) -> None:
    assert not some.arrive("again", waits=True)
    assert some.attended == ["r"]


def test_who_was_sent_again_goes_no_sooner_than_it_is_ripe(row: Requests) -> None:
    """Its sender may still have to store the state RETRY."""
    some = Requests()
    some.arrive("again", waits=True, ripe=0.1)
    some.gate.take_turn("r", 0.0)
    assert some.free(0.09) == []
    assert some.gate.view("r", 0.0).ripe == 0.1
    assert some.free(0.1) == ["again"]


def test_an_unripe_one_does_not_hold_up_its_followers(some: Requests) -> None:
    some.arrive("again", waits=True, ripe=0.1)
    some.arrive("ripe")
    some.gate.take_turn("r", 0.0)
    assert some.free(0.0) == ["ripe"]


def test_who_waits_longest_stands_first(some: Requests) -> None:
    some.arrive("first")
    some.arrive("young", since=20.0)
    some.arrive("old", since=10.0)
    some.arrive("as old", since=10.0)
    some.gate.take_turn("r", 0.0)
    assert some.landed("first") == ["old"]
    assert some.landed("old") == ["as old"]
    assert some.landed("as old") == ["young"]


def test_who_is_parked_for_too_long_goes(row: Requests) -> None:
    row.arrive("impatient", until=1.0)
    assert names(row.gate.overdue(0.9)) == []
    assert names(row.gate.overdue(1.0)) == ["impatient"]
    assert row.gate.parked == 3
    assert row.landed("first", 0.1) == []  # it is with the pool
    assert row.landed("impatient", 0.1) == ["a"]


def test_all_go_where_no_quorum_tells_whose_turn_it_is(row: Requests) -> None:
    assert names(row.gate.flush("r")) == ["a", "b", "c"]
    assert row.gate.parked == 0


def test_the_revoked_leaves_the_row(row: Requests) -> None:
    (first, *_) = row.gate.waiting()
    assert row.gate.withdraw(first)
    assert not row.gate.withdraw(first)
    assert row.landed("first", 0.1) == ["b"]


def test_a_lost_connection_empties_the_rows(row: Requests) -> None:
    row.gate.clear()
    assert row.gate.parked == 0
    assert row.gate.waiting() == []
    assert row.landed("first", 0.1) == []


def test_a_dead_one_whose_end_nobody_tells_does_not_stop_the_row(row: Requests) -> None:
    assert row.free(5.0, ghosts=("first",)) == []  # it waits for a slot
    row["first"].time_start = 1.0
    assert row.free(5.0) == []  # it has just begun
    assert row.free(5.0, ghosts=("first",)) == ["a"]


def test_nothing_is_kept_of_a_resource_that_is_at_rest(some: Requests) -> None:
    for name in ("a", "b", "c"):
        some.arrive(name)
    some.gate.take_turn("r", 0.0)
    for name in ("a", "b", "c"):
        some.landed(name)
    some.gate.lose_turn("r", 0.0)
    assert some.gate._rows == {}


def test_nor_of_one_that_was_hot(some: Requests) -> None:
    some.arrive("a")
    some.landed("a", 1.0, conflict=True)
    some.gate.overdue(1.0 + HOT)
    assert some.gate._rows == {}


def test_the_prefetch_window_is_widened_for_the_parked_alone(some: Requests) -> None:
    asked: list[str] = []

    def widen() -> bool:
        asked.append("widen")
        return len(asked) < 2

    assert some.arrive("first", widen=widen)
    some.arrive("a", widen=widen)
    some.arrive("b", widen=widen)
    assert [one.widened for one in some.gate.waiting()] == [True, False]


def test_there_are_so_many_resources_at_most(
    some: Requests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MANY", 2)
    assert some.arrive("a", resource="1")
    assert some.arrive("b", resource="2")
    assert some.arrive("c", resource="3")
    assert some.arrive("d", resource="3")
    assert not some.arrive("again", resource="4", waits=True)  # let go, it would be back at once
    assert not some.arrive("e", resource="2")
