"""Who goes to the pool, and who is parked: the state of a worker's main process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from celery_redlock.worker.parking.admission import (
    CALLED_S,
    NO_QUORUM_S,
    PRESUMED_DEAD_S,
    QUEUE_UP_S,
    RENEW_S,
    AdmissionQueue,
    Do,
    Effect,
)

LATE = 1000.0


class Deliveries:
    """An admission queue of a worker with free slots, and deliveries by name."""

    def __init__(self) -> None:
        self.queue = AdmissionQueue(100)
        self.known: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        return self.known.setdefault(name, SimpleNamespace(name=name, time_start=None))

    def arrive(self, name: str, now: float = 0.0, key: str = "r", **how: Any) -> bool:
        return self.queue.arrive(self[name], key, now, **{"since": 0.0, "until": LATE, **how})

    def ended(self, name: str, now: float = 0.0) -> bool:
        return self.queue.ended(self[name], "r", now)

    def decide(self, now: float = 0.0, slots: int = 9, **calls: bool) -> list[Effect]:
        return self.queue.decide(now, slots, calls)

    def call(self, now: float = 0.0) -> str:
        return went(self.decide(now, r=True))

    def answer(self, now: float = 0.0, *, free_in: float | None = 0.0, slots: int = 9) -> str:
        return went(self.queue.answered({"r": free_in}, now, slots))

    @property
    def parked(self) -> list[str]:
        return [parked.request.name for parked in self.queue.parked()]


def went(effects: list[Effect]) -> str:
    return " ".join(effect.parked.request.name for effect in effects if effect.parked is not None)


def kinds(effects: list[Effect]) -> list[Do]:
    return [effect.do for effect in effects]


@pytest.fixture
def some() -> Deliveries:
    return Deliveries()


@pytest.fixture
def row() -> Deliveries:
    """One with the pool, three parked, and the worker stands in the key's queue."""
    some = Deliveries()
    assert some.arrive("first")
    for name in ("a", "b", "c"):
        assert not some.arrive(name)
    assert kinds(some.decide()) == [Do.ENQUEUE, Do.ASK]
    return some


def test_the_first_goes_and_its_followers_are_parked(row: Deliveries) -> None:
    assert row.arrive("other", key="else")
    assert len(row.queue) == 3
    assert row.parked == ["a", "b", "c"]
    assert sorted(name for _one, name in row.queue.running()) == ["else", "r"]


def test_one_that_met_a_held_lock_is_parked_though_nothing_is_known_here(some: Deliveries) -> None:
    assert not some.arrive("again", refused=True)


def test_one_that_comes_while_others_wait_does_not_overtake_them(row: Deliveries) -> None:
    row.ended("first")
    assert not row.arrive("late")
    assert row.call() == "a"


def test_each_call_lets_one_go_and_then_it_stands_behind_the_others(row: Deliveries) -> None:
    assert row.ended("first")
    assert went(row.decide()) == "", "nobody has called"
    effects = row.decide(r=True)
    assert (went(effects), kinds(effects)) == ("a", [Do.GO, Do.ENQUEUE])
    assert row.ended("a")
    assert went(row.decide()) == "", "a call is for one"
    assert row.call() == "b"


def test_a_call_is_kept_until_the_body_here_has_ended(row: Deliveries) -> None:
    """Its release has called us, and its result is yet to be read."""
    assert row.call() == ""
    assert row.ended("first")
    assert went(row.decide()) == "a"


def test_a_call_that_was_handed_on_lets_none_go(row: Deliveries) -> None:
    assert row.call() == ""
    effects = row.decide(1.0)
    assert kinds(effects) == [Do.HAND_ON, Do.ENQUEUE, Do.ASK]
    assert row.ended("first")
    assert went(row.decide(1.0)) == ""


def test_a_worker_keeps_its_place_on_the_nodes(row: Deliveries) -> None:
    assert kinds(row.decide(RENEW_S - 0.1)) == [Do.ASK]
    assert kinds(row.decide(RENEW_S)) == [Do.ENQUEUE, Do.ASK]


def test_that_the_nodes_say_it_is_free_counts_at_once_or_not_at_all(row: Deliveries) -> None:
    assert row.answer() == "", "one is with the pool"
    assert row.ended("first")
    assert went(row.decide()) == ""
    assert row.answer(free_in=0.1) == ""
    assert row.answer(slots=0) == ""
    assert row.answer() == "a"


def test_two_never_go_together(row: Deliveries) -> None:
    row.ended("first")
    assert row.call() == "a"
    assert row.call() == ""
    assert row.answer() == ""
    assert not row.ended("first"), "an end that is told twice is one"
    assert row.answer() == ""


def test_no_more_go_than_there_are_slots(some: Deliveries) -> None:
    for key in ("r", "s", "t"):
        some.arrive(f"first {key}", key=key, refused=True)
    some.decide()
    assert went(some.decide(slots=2, r=True, s=True, t=True)) == "first r first s"
    assert some.queue.answered({"t": 0.0}, 0.0, 0) == []
    assert went(some.queue.answered({"t": 0.0}, 0.0, 1)) == "first t"


def test_where_a_slot_is_never_free_one_takes_its_turn_among_the_others(row: Deliveries) -> None:
    """Meanwhile the nodes are not asked; and a call is handed on, after a moment."""
    row.ended("first")
    assert kinds(row.decide(10.0, slots=0, r=True)) == [Do.HAND_ON]
    assert row.decide(10.0 + QUEUE_UP_S - 0.1, slots=0) == []
    assert row.answer(10.0 + QUEUE_UP_S - 0.1, slots=0) == ""
    row.decide(20.0, slots=0)
    assert kinds(row.decide(20.0 + QUEUE_UP_S, slots=0)) == [Do.ASK]
    assert row.answer(20.0 + QUEUE_UP_S, slots=0) == "a"


def test_the_slot_of_a_body_that_has_just_released_is_waited_for(row: Deliveries) -> None:
    assert row.decide(10.0, slots=0, r=True) == []
    assert row.decide(10.0 + CALLED_S / 2, slots=0) == []
    row.ended("first", 10.0 + CALLED_S / 2)
    assert went(row.decide(10.0 + CALLED_S / 2, slots=1)) == "a"


def test_without_a_quorum_one_after_the_other_goes(row: Deliveries) -> None:
    row.ended("first")
    assert row.answer(0.0, free_in=None) == ""
    assert row.answer(NO_QUORUM_S - 0.1, free_in=None) == ""
    assert row.answer(NO_QUORUM_S, free_in=None) == "a"


def test_the_most_urgent_goes_first_then_the_one_that_has_waited_longest(some: Deliveries) -> None:
    some.arrive("first")
    some.arrive("young", since=20.0)
    some.arrive("old", since=10.0)
    some.arrive("as old", since=10.0)
    some.arrive("urgent", since=30.0, urgency=-9.0)
    some.decide()
    order = []
    for name in ("first", "urgent", "old", "as old"):
        some.ended(name)
        order.append(some.call())
    assert order == ["urgent", "old", "as old", "young"]


def test_overdue_ones_go_into_free_slots_one_at_a_time(row: Deliveries) -> None:
    for name in ("x", "y"):
        row.arrive(name, until=1.0)
    assert went(row.decide(0.9)) == ""
    assert went(row.decide(1.0, slots=0)) == ""
    assert went(row.decide(1.0)) == "x", "though its key is held"
    assert went(row.decide(1.0)) == "y"
    row.ended("first")
    assert row.call(1.0) == "", "they are with the pool"


def test_no_more_are_parked_than_may(row: Deliveries) -> None:
    row.queue.most = 3
    assert row.arrive("goes, meets the lock and is sent again")
    assert len(row.queue) == 3


def test_what_is_given_back_would_have_gone_last(row: Deliveries) -> None:
    row.arrive("late", since=9.0, key="else", refused=True)
    assert [parked.request.name for parked in row.queue.take_back(2)] == ["late", "c"]
    assert len(row.queue) == 2
    assert [parked.request.name for parked in row.queue.take_back(0)] == ["b", "a"]
    assert row.parked == []
    assert not row.ended("first")


def test_a_revoked_one_leaves(row: Deliveries) -> None:
    first = row.queue.parked()[0]
    row.queue.withdraw(first)
    row.queue.withdraw(first)
    row.ended("first")
    assert row.call() == "b"


def test_a_dead_one_whose_end_nobody_tells_holds_up_no_other(row: Deliveries) -> None:
    assert row.answer(PRESUMED_DEAD_S) == "", "it waits for a slot"
    row["first"].time_start = 0.1
    assert row.answer(PRESUMED_DEAD_S - 0.01) == "", "it has just begun"
    assert row.answer(PRESUMED_DEAD_S) == "a"
    assert row.answer(PRESUMED_DEAD_S) == "", "now this one is with the pool"


def test_nothing_is_kept_of_a_key_that_is_at_rest(row: Deliveries) -> None:
    for name in ("first", "a", "b"):
        assert row.ended(name)
        effects = row.decide(r=True)
    assert (went(effects), kinds(effects)) == ("c", [Do.GO, Do.FORGET])
    assert not row.ended("c")
    assert row.queue._keys == {}
    assert row.decide(r=True) == []
    assert row.arrive("next")


def test_a_call_does_not_outlive_those_it_was_for(row: Deliveries) -> None:
    row.decide(r=True)
    row.queue.take_back(0)
    assert kinds(row.decide()) == [Do.HAND_ON, Do.FORGET]
    row.arrive("new")
    row.ended("first")
    assert went(row.decide()) == ""
