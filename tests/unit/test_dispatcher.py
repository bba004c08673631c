"""When a worker asks for what is waited for in it, and how much that asks of the nodes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from celery_redlock.locking.wait_queue import QueueEntry
from celery_redlock.worker.parking import dispatcher as module
from celery_redlock.worker.parking.admission import (
    LOOK_S,
    QUEUE_UP_S,
    AdmissionQueue,
    Do,
    Parked,
)
from celery_redlock.worker.parking.dispatcher import ParkingDispatcher
from tests.unit.fake_lock import FakeRedlock


class Watch:
    """A dispatcher whose thread is the test, over fake nodes and with a fake clock."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.redlock = FakeRedlock(patch, ttl=60.0)
        self.clock = self.redlock.clock
        patch.setattr(module, "monotonic", self.clock)
        self.places: list[QueueEntry] = []
        wakeup: Any = SimpleNamespace(in_line=self._in_line)
        self.redlock.client.wakeup = wakeup
        self.queue = AdmissionQueue(1000)
        self.slots = 9
        self.went: list[str] = []
        self.last = 0.0
        self.dispatcher = ParkingDispatcher(
            self.redlock, self.queue, lambda: self.slots, self._go, lambda: None
        )
        patch.setattr(self.dispatcher, "_thread", SimpleNamespace())

    @contextlib.contextmanager
    def _in_line(self) -> Iterator[QueueEntry]:
        place = QueueEntry(3, set(range(5)), "process")
        self.places.append(place)
        yield place
        self.places.remove(place)

    def _go(self, parked: Parked) -> None:
        self.went.append(parked.key)
        self.last = self.clock()

    def park(self, resource: str = "r", *, held: bool = True) -> Any:
        if held:
            self.redlock.acquire(resource)
        request = SimpleNamespace(time_start=None)
        when: dict[str, Any] = {"since": 0.0, "until": 1e9, "refused": True}
        assert not self.queue.arrive(request, resource, self.clock(), **when)
        return request

    def run(self, seconds: float, until: Callable[[], object] = lambda: False) -> None:
        end = self.clock() + seconds
        while self.clock() < end and not until():
            self.clock.advance(min(max(0.001, self.dispatcher._work()), end - self.clock()))

    def call(self, count: int = 3) -> None:
        for node in range(count):
            self.places[0].hear(node)

    def stands(self, resource: str = "r") -> int:
        """On how many nodes somebody stands in the queue for it."""
        return sum(bool(node.lines.get(resource)) for node in self.redlock.fakes)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    return Watch(monkeypatch)


def test_it_stands_in_the_queue_and_a_quorum_calls_it(watch: Watch) -> None:
    watch.park()
    watch.run(0.01)
    assert watch.stands() == 5
    assert watch.went == []
    watch.call()
    watch.run(0.001)
    assert watch.went == ["r"]


def test_what_happens_while_it_queues_is_not_overlooked(watch: Watch) -> None:
    watch.park()
    watch.dispatcher.wake()
    watch.dispatcher._work()
    assert watch.dispatcher._news.wait(0.0)


def test_fewer_than_a_quorum_are_waited_for_a_moment(watch: Watch) -> None:
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
    assert watch.went == ["r"], "nobody was"


def test_after_each_that_goes_it_stands_behind_the_others(watch: Watch) -> None:
    watch.park()
    watch.park(held=False)
    watch.run(0.01)
    (before,) = watch.redlock.fakes[0].lines["r"].values()
    watch.call()
    watch.run(0.001)
    (after,) = watch.redlock.fakes[0].lines["r"].values()
    assert after > before
    assert watch.stands() == 5


def test_a_free_key_is_seen_within_a_second_though_nobody_calls(watch: Watch) -> None:
    watch.park()
    watch.run(0.3)
    for node in watch.redlock.fakes:
        node.forget()
    freed = watch.clock()
    watch.run(2.0, lambda: watch.went)
    assert watch.went == ["r"]
    assert watch.last - freed <= LOOK_S[1] < 1.0


def test_a_holder_that_dies_is_outlived_by_its_ttl_alone(watch: Watch) -> None:
    began = watch.clock()
    watch.redlock.acquire("r", ttl=5.0)
    watch.park(held=False)
    watch.run(6.0, lambda: watch.went)
    assert watch.went == ["r"]
    assert 5.0 <= watch.last - began < 5.01


def test_a_worker_without_a_slot_hands_its_call_on(watch: Watch) -> None:
    watch.park()
    watch.run(0.01)
    watch.slots = 0
    watch.redlock.driver.rounds.clear()
    watch.call()
    watch.run(QUEUE_UP_S / 2)
    assert watch.redlock.driver.rounds == ["pass"], "and the nodes are not asked meanwhile"
    assert watch.went == []
    watch.slots = 9
    watch.run(0.2)
    assert watch.redlock.driver.rounds[:3] == ["pass", "queue", "peek"], "it competes again"


def test_it_leaves_the_queue_when_nobody_waits(watch: Watch) -> None:
    watch.park()
    watch.run(0.01)
    watch.queue.take_back(0)
    watch.run(1.0)
    assert watch.stands() == 0
    assert watch.places == []
    assert watch.dispatcher._work() > 60, "there is nothing to do"


def test_it_leaves_the_queue_when_its_worker_stops(watch: Watch) -> None:
    watch.park()
    watch.run(0.01)
    watch.dispatcher.close()
    watch.dispatcher._run()
    assert watch.stands() == 0


def test_one_failing_key_holds_up_no_other(
    watch: Watch, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    watch.park("bad")
    watch.park("good", held=False)
    tell = ParkingDispatcher._tell_nodes

    def fails(self: ParkingDispatcher, do: Do, key: str) -> None:
        if key == "bad":
            raise RuntimeError("planted")
        tell(self, do, key)

    monkeypatch.setattr(ParkingDispatcher, "_tell_nodes", fails)
    watch.run(1.0)
    assert "good" in watch.went
    assert "bad: parking cannot join its wait queue on the nodes" in caplog.text


def rounds_a_second(watch: Watch, count: int) -> float:
    for number in range(count):
        watch.park(f"r{number}")
    watch.run(1.0)
    watch.redlock.driver.rounds.clear()
    watch.run(20.0)
    assert len(watch.queue) == count, "all still wait"
    return len(watch.redlock.driver.rounds) / 20.0


def test_many_keys_are_asked_about_together(monkeypatch: pytest.MonkeyPatch) -> None:
    few = rounds_a_second(Watch(monkeypatch), 1)
    many = rounds_a_second(Watch(monkeypatch), 200)
    assert few < 3
    assert many < 200 * few / 4
