"""The state of a worker's main process: which deliveries go to the pool, and which are parked."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from celery_redlock.protocol.names import Limits
from celery_redlock.worker.parking import admission
from celery_redlock.worker.parking.admission import PRESUMED_DEAD_S, AdmissionQueue, Parked

LATE = 60.0


class Deliveries:
    """An admission queue, and deliveries by name."""

    def __init__(self) -> None:
        self.queue = AdmissionQueue()
        self.known: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        return self.known.setdefault(name, SimpleNamespace(name=name, time_start=None))

    def arrive(self, name: str, now: float = 0.0, resource: str = "r", **how: Any) -> bool:
        how = {"since": 0.0, "until": LATE, **how}
        return self.queue.arrive(self[name], (resource,), now, **how)

    def ended(self, name: str, resource: str = "r") -> bool:
        return self.queue.ended(self[name], (resource,))

    def take(self, now: float = 0.0, resource: str = "r", *, free: bool = False) -> str:
        return name_of(self.queue.take((resource,), now, free=free))

    def call(self, now: float = 0.0) -> str:
        self.queue.notified(("r",))
        return self.take(now)


def name_of(parked: Parked | None) -> str:
    return parked.request.name if parked is not None else ""


@pytest.fixture
def some() -> Deliveries:
    return Deliveries()


@pytest.fixture
def row() -> Deliveries:
    """Return the state with one delivery in the pool and three parked."""
    some = Deliveries()
    assert some.arrive("first")
    for name in ("a", "b", "c"):
        assert not some.arrive(name)
    return some


def test_each_notification_admits_one_parked_delivery(row: Deliveries) -> None:
    assert row.ended("first")
    assert row.take() == "", "nobody has called"
    assert row.call() == "a"
    assert row.ended("a")
    assert row.take() == "", "a call is for one"
    assert row.call() == "b"


def test_notification_is_kept_until_the_running_body_has_ended(row: Deliveries) -> None:
    """The release of the body has notified the worker; the result of the body is not yet read."""
    assert row.call() == ""
    assert row.ended("first")
    assert row.take() == "a"


def test_free_key_reported_by_the_nodes_is_not_remembered_while_a_body_runs(
    row: Deliveries,
) -> None:
    assert row.take(free=True) == "", "one is with the pool"
    assert row.ended("first")
    assert row.take() == ""
    assert row.take(free=True) == "a"


def test_most_urgent_parked_delivery_goes_first_then_the_longest_waiting(some: Deliveries) -> None:
    some.arrive("first")
    some.arrive("young", since=20.0)
    some.arrive("old", since=10.0)
    some.arrive("as old", since=10.0)
    some.arrive("urgent", since=30.0, urgency=-9.0)
    order = []
    for name in ("first", "urgent", "old", "as old"):
        some.ended(name)
        order.append(some.call())
    assert order == ["urgent", "old", "as old", "young"]


def test_a_parked_delivery_that_is_overdue_goes_once_though_its_resource_is_held(
    row: Deliveries,
) -> None:
    first, second, third = row.queue.parked()
    assert row.queue.go(second, 1.0)
    assert not row.queue.go(second, 1.0)
    assert row.queue.parked() == [first, third]
    assert row.queue.counts(("r",)) == (2, 2)
    row.ended("first")
    assert row.call() == "", "it is with the pool"


def test_part_of_the_queue_has_new_deliveries_and_each_other_in_turn(
    some: Deliveries, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "MIN_PART", 3)
    for number in range(40):
        some.arrive(f"{number}", again=True)
    assert len(some.queue.part()) == 40, "all are new"
    seen = [parked for _ in range(admission.PARTS) for parked in some.queue.part()]
    assert set(seen) == set(some.queue.parked())
    assert len(seen) == 40
    some.arrive("new", again=True)
    assert name_of(some.queue.part()[-1]) == "new"


def test_size_of_the_admission_queue_is_the_sum_of_its_parked_deliveries(some: Deliveries) -> None:
    for number in range(8):
        some.arrive(f"{number}", again=True, size=100 + number)
    some.queue.hold(some["held"], ("else",), since=0.0, until=LATE, size=1000)
    assert some.queue.size == 1828
    some.take(free=True)
    some.queue.go(some.queue.parked()[0], 0.0)
    some.queue.withdraw(some.queue.parked()[0])
    some.queue.pause(lambda names: names == ("r",))
    assert some.queue.size == sum(parked.size for parked in some.queue.parked()) > 0
    some.queue.take_back(2)
    assert some.queue.size == sum(parked.size for parked in some.queue.parked()) > 0
    some.queue.resume(lambda _names: False)
    assert (some.queue.size, len(some.queue)) == (0, 0)


@pytest.mark.parametrize("keys", [1, 20_000])
def test_work_on_20_000_parked_deliveries_is_cheap(some: Deliveries, keys: int) -> None:
    """Steps are counted, not time: no call may look at all of them."""
    names = [f"r{number % keys}" for number in range(20_000)]
    for number, name in enumerate(names):
        some.arrive(f"{number}", resource=name, again=True, limit=1 + number % 2)
    looked = 0

    def count(_frame: Any, event: str, _arg: Any) -> None:
        nonlocal looked
        looked += event in ("call", "c_call")

    some.queue.part()
    parked = some.queue.parked()
    sys.setprofile(count)
    try:
        some.queue.running()
        some.queue.counts(("r0",))
        some.queue.limit(("r0",))
        some.queue.first_at_work(("r0",))
        some.queue.withdraw(parked[0])
        some.queue.go(parked[1], 0.0)
        some.queue.take(("r0",), 0.0, free=True)
        some.queue.arrive(some["new"], ("r0",), 0.0, since=0.0, until=LATE, again=True)
    finally:
        sys.setprofile(None)
    assert looked < 500


def test_deliveries_given_back_are_those_that_would_go_last(row: Deliveries) -> None:
    row.arrive("late", since=9.0, resource="else", again=True)
    assert row.queue.take_back(9) == []
    back = row.queue.take_back(2)
    assert [name_of(parked) for parked in back] == ["late", "c"]
    assert len(row.queue) == 2
    assert row.queue.counts(("else",)) == (0, 0)
    assert [name_of(parked) for parked in row.queue.take_back(0)] == ["b", "a"]
    assert row.queue.parked() == []
    assert not row.ended("first")


def test_deliveries_kept_for_a_pause_count_toward_the_maximum(row: Deliveries) -> None:
    row.queue.most = 4
    assert row.queue.hold(row["paused"], ("else",), since=0.0, until=LATE)
    assert len(row.queue) == 4
    assert not row.queue.hold(row["one more"], ("else",), since=0.0, until=LATE)
    assert len(row.queue.pause(lambda names: names == ("r",))) == 3
    assert len(row.queue) == 4


def test_body_presumed_dead_holds_up_no_parked_delivery(row: Deliveries) -> None:
    assert row.take(PRESUMED_DEAD_S, free=True) == "", "it waits for a slot"
    row["first"].time_start = 0.1
    assert row.take(PRESUMED_DEAD_S - 0.01, free=True) == "", "it has just begun"
    assert row.take(PRESUMED_DEAD_S, free=True) == "a"
    assert row.take(PRESUMED_DEAD_S, free=True) == "", "now this one is with the pool"


def test_admission_queue_keeps_nothing_of_a_resource_at_rest(row: Deliveries) -> None:
    for name in ("first", "a", "b"):
        assert row.ended(name)
        row.call()
    assert not row.ended("c")
    assert row.queue._groups == {}
    row.queue.notified(("r",))
    assert row.take() == ""
    assert row.queue._groups == {}


def test_notification_does_not_outlive_the_parked_deliveries_it_was_for(row: Deliveries) -> None:
    row.queue.notified(("r",))
    row.queue.take_back(0)
    row.arrive("new")
    row.ended("first")
    assert row.take() == ""


@pytest.fixture
def places() -> Deliveries:
    """Three may be at work at a time: as many are, and two are parked."""
    some = Deliveries()
    for name in ("first", "second", "third"):
        assert some.arrive(name, limit=3)
    for name in ("a", "b"):
        assert not some.arrive(name, limit=3)
    return some


def test_parked_deliveries_are_admitted_up_to_the_limit(places: Deliveries) -> None:
    assert places.call() == "", "all places are taken here"
    assert places.ended("second")
    assert places.take() == "a", "the call was kept"
    assert places.call() == ""
    assert places.queue.limit(("r",)) == 3


@pytest.mark.parametrize("last", [{}, {"again": True, "limit": 3}])
def test_larger_limit_counts_for_all_parked_deliveries(
    places: Deliveries, last: dict[str, Any]
) -> None:
    """A function may return more than when they came; their locks call it again."""
    assert not places.arrive("new", limit=5)
    assert not last or not places.arrive("newer", **last)
    assert places.queue.limit(("r",)) == Limits((5,))
    assert [places.take(free=True) for _ in range(3)] == ["a", "b", ""]


def test_long_running_body_takes_no_place_that_the_nodes_report_free(
    places: Deliveries,
) -> None:
    """Each of the long-running bodies holds another key."""
    for name in ("first", "second", "third"):
        places[name].time_start = 0.1
    assert places.take(PRESUMED_DEAD_S, free=True) == "a"
    assert places.take(PRESUMED_DEAD_S, free=True) == "b"
