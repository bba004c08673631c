"""Times at which a worker requests keys for its parked deliveries, and the load on the nodes."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from celery_redlock.locking.wait_queue import Waiter
from celery_redlock.protocol.texts import shown
from celery_redlock.worker.parking import dispatcher as module
from celery_redlock.worker.parking.admission import AdmissionQueue, Resources
from celery_redlock.worker.parking.dispatcher import (
    AFTER_END_S,
    KEEP_NOTIFICATION_S,
    LOOK_S,
    NO_QUORUM_S,
    QUEUE_UP_S,
    SLOT_S,
    ParkingDispatcher,
)
from tests.support.fake_lock import FakeRedlock

Went = tuple[str, bool, bool]
"""A delivery that went: its key, whether the key was seen free, whether it queues in the pool."""


class Watch:
    """A dispatcher whose thread is the test, over fake nodes and with a fake clock."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.redlock = FakeRedlock(patch, ttl=60.0)
        self.clock = self.redlock.clock
        patch.setattr(module, "monotonic", self.clock)
        self.places: list[Waiter] = []
        wakeup: Any = SimpleNamespace(waiter=self._waiter)
        self.redlock.client.wakeup = wakeup
        self.queue = AdmissionQueue()
        self.slot = True
        self.went: list[Went] = []
        self.last = 0.0
        self.sweeps = 0
        self.dispatcher = ParkingDispatcher(
            self.redlock, self.queue, lambda: self.slot, self._proceed, self._sweep
        )
        patch.setattr(self.dispatcher, "_thread", SimpleNamespace())

    @contextlib.contextmanager
    def _waiter(self) -> Iterator[Waiter]:
        place = Waiter(3, set(range(5)), "process", None)
        self.places.append(place)
        yield place
        self.places.remove(place)

    def _proceed(self, resources: Resources, free: bool, queue_up: bool) -> None:
        self.went.append((shown(resources), free, queue_up))
        self.last = self.clock()

    def _sweep(self) -> None:
        self.sweeps += 1

    def park(self, *resources: str, held: bool = True, limit: int = 1) -> Any:
        resources = resources or ("r",)
        for _ in range(limit if held else 0):
            self.redlock.acquire(resources, limit=limit)
        request = SimpleNamespace(time_start=None)
        when: dict[str, Any] = {"since": 0.0, "until": 1e9, "again": True, "limit": limit}
        assert not self.queue.arrive(request, resources, self.clock(), **when)
        self.dispatcher.watch(resources)
        return request

    def run(self, seconds: float, until: Callable[[], object] = lambda: False) -> None:
        end = self.clock() + seconds
        while self.clock() < end and not until():
            self.clock.advance(min(max(0.001, self.dispatcher._work()), end - self.clock()))

    def call(self, count: int = 3) -> None:
        for node in range(count):
            self.places[0].add_notification(node)

    def stands(self, resource: str = "r") -> int:
        """On how many nodes somebody stands in the queue for it."""
        return sum(bool(node.lines.get(resource)) for node in self.redlock.fakes)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    return Watch(monkeypatch)


def test_parked_key_stands_in_the_wait_queue_until_a_quorum_notifies(watch: Watch) -> None:
    watch.park()
    watch.run(0.01)
    assert watch.stands() == 5
    assert watch.went == []
    watch.call()
    watch.run(0.001)
    assert watch.went == [("r", False, False)]


def test_parked_key_queues_as_reader_or_writer_by_what_goes_next(watch: Watch) -> None:
    def members() -> set[str]:
        return {one for node in watch.redlock.fakes for one in node.lines.get("r", {})}

    def park(*, shared: bool, urgency: float) -> Any:
        request = SimpleNamespace(time_start=None)
        when: dict[str, Any] = {"since": 0.0, "until": 1e9, "again": True, "urgency": urgency}
        assert not watch.queue.arrive(request, ("r",), watch.clock(), shared=shared, **when)
        watch.dispatcher.watch(("r",))
        return request

    watch.redlock.acquire("r")
    park(shared=True, urgency=1.0)
    watch.run(0.01)
    (place,) = watch.places
    assert members() == {place.member + "~shared"}
    writer = park(shared=False, urgency=0.0)
    watch.run(1.0)
    assert members() == {place.member}
    (parked,) = [one for one in watch.queue.parked() if one.request is writer]
    watch.queue.withdraw(parked)
    watch.run(1.0)
    assert members() == {place.member + "~shared"}


def test_notification_by_less_than_a_quorum_is_waited_for_a_moment(watch: Watch) -> None:
    watch.park()
    watch.run(0.01)
    watch.call(2)
    watch.run(0.001)
    assert watch.went == []
    watch.run(0.02)
    assert watch.went == [], "another was called: it is held"
    assert watch.stands() == 5
    for node in watch.redlock.fakes:
        node.forget()
    watch.run(0.01)
    watch.call(2)
    watch.run(0.02)
    assert watch.went == [("r", True, False)], "nobody was"


def test_free_resource_is_seen_within_a_second_without_a_notification(watch: Watch) -> None:
    watch.park()
    watch.run(0.3)
    for node in watch.redlock.fakes:
        node.forget()
    freed = watch.clock()
    watch.run(2.0, lambda: watch.went)
    assert watch.went == [("r", True, False)]
    assert watch.clock() - freed <= LOOK_S[1] < 1.0


def test_worker_without_a_slot_hands_its_notification_on(watch: Watch) -> None:
    watch.park()
    watch.run(0.01)
    watch.slot = False
    watch.redlock.driver.rounds.clear()
    watch.call()
    watch.run(0.02)
    assert watch.redlock.driver.rounds == ["pass"]
    assert watch.went == []
    watch.slot = True
    watch.run(0.2)
    assert watch.redlock.driver.rounds[:3] == ["pass", "queue", "peek"], "it competes again"


def test_notification_that_no_delivery_used_is_handed_on(watch: Watch) -> None:
    """The release of the running body has notified the worker; its slot does not become free."""
    running = watch.park()
    watch.queue.take(("r",), watch.clock(), free=True)
    watch.park(held=False)
    watch.run(0.01)
    watch.slot = False
    watch.redlock.driver.rounds.clear()
    watch.call()
    watch.run(KEEP_NOTIFICATION_S / 2)
    assert watch.went == [("r", False, False)], "the slot of our own body is about to be free"
    assert "pass" not in watch.redlock.driver.rounds
    watch.run(KEEP_NOTIFICATION_S)
    assert "pass" in watch.redlock.driver.rounds
    assert running is not None


def test_resource_without_a_slot_rests_until_there_is_one(
    watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch.park(held=False)
    watch.slot = False
    attended: list[float] = []
    attend = watch.dispatcher._attend

    def noted(*args: Any) -> bool:
        attended.append(watch.clock())
        return attend(*args)

    monkeypatch.setattr(watch.dispatcher, "_attend", noted)
    watch.run(QUEUE_UP_S * 0.9)
    assert len(attended) <= 2 and watch.went == []
    watch.slot, freed = True, watch.clock()
    watch.run(1.0, lambda: watch.went)
    assert watch.went == [("r", True, False)] and watch.last - freed <= 2 * SLOT_S


def test_parked_delivery_without_a_free_slot_takes_its_turn_among_the_others(watch: Watch) -> None:
    watch.park(held=False)
    watch.slot = False
    watch.run(QUEUE_UP_S * 0.9)
    assert watch.went == []
    watch.run(1.0, lambda: watch.went)
    assert watch.went == [("r", True, True)]


def test_parked_deliveries_go_one_after_the_other_without_a_quorum(watch: Watch) -> None:
    watch.park()
    watch.run(0.01)
    watch.redlock.driver.dead.update({0, 1, 2})
    watch.run(NO_QUORUM_S * 0.9)
    assert watch.went == []
    watch.run(2.0, lambda: watch.went)
    assert watch.went == [("r", True, False)]


def test_parked_key_leaves_the_wait_queue_when_no_delivery_is_parked(watch: Watch) -> None:
    watch.park()
    watch.run(0.01)
    watch.queue.take_back(0)
    watch.run(1.0)
    assert watch.stands() == 0
    assert watch.places == []
    assert watch.dispatcher._work() > 60, "there is nothing to do"


def test_failing_resource_holds_up_no_other(
    watch: Watch, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    watch.park("bad")
    watch.park("good", held=False)
    watch.run(0.0)
    attend = ParkingDispatcher._attend

    def fails(self: ParkingDispatcher, watched: Any, *when: float) -> bool:
        if watched.resources == ("bad",):
            raise RuntimeError("planted")
        return attend(self, watched, *when)

    monkeypatch.setattr(ParkingDispatcher, "_attend", fails)
    watch.run(1.0)
    assert ("good", True, False) in watch.went
    assert "parking failed for bad; it goes on in 1 s" in caplog.text


def rounds_a_second(watch: Watch, count: int) -> float:
    for number in range(count):
        watch.park(f"r{number}")
    watch.run(1.0)
    watch.redlock.driver.rounds.clear()
    watch.run(20.0)
    assert len(watch.queue) == count, "all still wait"
    return sum(Counter(watch.redlock.driver.rounds).values()) / 20.0


def test_many_parked_resources_share_their_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    few = rounds_a_second(Watch(monkeypatch), 1)
    many = rounds_a_second(Watch(monkeypatch), 200)
    assert few < 3
    assert many < 200 * few / 4


def test_thousands_of_resources_are_looked_at_rarely_and_notified_at_once(
    watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    def looks() -> float:
        asked.clear()
        watch.run(20.0)
        return sum(asked) / 20.0

    asked: list[int] = []
    peek = module.quorum.peek
    monkeypatch.setattr(
        module.quorum, "peek", lambda names, *how: asked.append(len(names)) or peek(names, *how)
    )
    monkeypatch.setattr(module, "LOOKED_AT", 20)
    for number in range(20):
        watch.park(f"r{number}")
    few = looks()
    for number in range(20, 80):
        watch.park(f"r{number}")
    assert looks() < 1.5 * few
    watch.call()
    watch.run(0.01)
    assert watch.went == [("r0", False, False)]


# -- A limit, and several resources ---------------------------------------------------------------


def test_parked_deliveries_go_up_to_the_number_of_free_places(watch: Watch) -> None:
    for _ in range(4):
        watch.park(limit=3, held=False)
    watch.run(0.01)
    assert watch.went == [("r", True, False)] * 3
    watch.redlock.acquire("r", limit=3)
    watch.went.clear()
    watch.run(1.0, lambda: watch.went)
    assert watch.went == [("r", True, False)] * 2


@pytest.mark.parametrize("ttls", [(5.0,), (5.0, 20.0, 20.0)])
def test_place_of_a_dead_holder_is_taken_when_its_ttl_is_over(
    watch: Watch, ttls: tuple[float, ...]
) -> None:
    began = watch.clock()
    for ttl in ttls:
        watch.redlock.acquire("r", limit=len(ttls), ttl=ttl)
    watch.park(limit=len(ttls), held=False)
    watch.run(6.0, lambda: watch.went)
    assert watch.went == [("r", True, False)]
    assert 5.0 <= watch.last - began < 5.01


def test_two_places_freed_behind_one_notification_are_both_taken(watch: Watch) -> None:
    """Both were freed before the worker was back in the queue: it looks instead of waiting."""
    leases = [watch.redlock.acquire("r", limit=2) for _ in range(2)]
    for _ in range(2):
        watch.park(limit=2, held=False)
    watch.run(0.01)
    for lease in leases:
        watch.redlock.release(lease)
    watch.call()
    watch.run(0.001)
    watch.queue.take(("r",), watch.clock())
    watch.dispatcher.gone(("r",))
    freed = watch.clock()
    watch.run(1.0, lambda: len(watch.went) > 1)
    assert watch.last - freed <= AFTER_END_S + 0.001


def test_delivery_of_several_keys_goes_when_all_are_free(watch: Watch) -> None:
    a, b = watch.redlock.acquire("a"), watch.redlock.acquire("b")
    watch.park("a", "b", held=False)
    watch.run(0.5)
    watch.redlock.release(b)
    watch.run(2.0)
    assert watch.went == []
    watch.redlock.release(a)
    freed = watch.clock()
    watch.run(1.0, lambda: watch.went)
    assert watch.went == [("a + b", True, False)]
    assert watch.clock() - freed < 1.0


def test_notification_for_one_of_several_keys_is_handed_on_if_another_is_held(watch: Watch) -> None:
    a = watch.redlock.acquire("a")
    watch.redlock.acquire("b")
    watch.park("a", "b", held=False)
    watch.run(1.0)
    assert (watch.stands("a"), watch.stands("b")) == (5, 5)
    watch.redlock.release(a)
    watch.redlock.driver.rounds.clear()
    watch.call()
    watch.run(0.001)
    assert watch.went == []
    assert watch.redlock.driver.rounds == ["peek", "pass", "queue"]
    assert (watch.stands("a"), watch.stands("b")) == (0, 5)
