"""Times at which leases are extended, and reports of a loss: to whom, and how soon."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import pytest

from celery_redlock.keepalive.watchdog import LOOK_AGAIN_S, Schedule, Watchdog, Watched
from celery_redlock.protocol.claim import Claim
from celery_redlock.runtime.timer import Timer
from tests.support.clock import FakeClock
from tests.support.fake_lock import FakeRedlock
from tests.support.names import Log

NOW, TTL = 1000.0, 9.0


def held(token: str = "t", at: float = NOW, ttl: float = TTL) -> Claim:
    claim = Claim("r", token, ttl, 1)
    claim.acknowledged(0, at, at)
    assert claim.grant(at)
    return claim


def watched(claim: Claim, until: float = float("inf")) -> Watched:
    return Watched(claim, until, lambda claim: None)


@pytest.fixture
def claim() -> Claim:
    return held()


@pytest.fixture
def schedule(claim: Claim) -> Schedule:
    """Return a schedule of one lease."""
    schedule = Schedule()
    schedule.add(watched(claim), NOW)
    return schedule


def test_confirmed_lease_is_due_again_after_a_third_and_an_unconfirmed_after_a_tenth(
    schedule: Schedule, claim: Claim
) -> None:
    due = schedule.take(NOW + 3.0)
    assert schedule.settle(due, [claim], NOW + 3.0) == []
    assert schedule.wakes == NOW + 6.0
    due = schedule.take(NOW + 6.0)
    assert schedule.settle(due, [], NOW + 6.0) == []
    assert schedule.wakes == pytest.approx(NOW + 6.9)


def test_lease_is_due_at_its_deadline_at_the_latest(schedule: Schedule, claim: Claim) -> None:
    due = schedule.take(NOW + 8.7)
    schedule.settle(due, [], NOW + 8.7)
    assert schedule.wakes == claim.deadline


def test_leases_that_are_nearly_due_are_extended_together() -> None:
    schedule = Schedule()
    for number in range(3):
        schedule.add(watched(held(str(number), NOW + number)), NOW + number)
    assert [w.claim.token for w in schedule.take(NOW + 3.0)] == ["0", "1"]


def test_lease_is_lost_once_it_is_older_than_its_max_lifetime() -> None:
    schedule, claim = Schedule(), held()
    schedule.add(watched(claim, until=NOW + 2.0), NOW)
    assert schedule.wakes == NOW + 2.0
    alive, over = schedule.part(schedule.take(NOW + 2.0), NOW + 2.0)
    assert (alive, [w.claim for w in over]) == ([], [claim])
    assert claim.lost == "max_lifetime"


def test_released_lease_is_not_reported_as_lost(schedule: Schedule, claim: Claim) -> None:
    due = schedule.take(NOW + 3.0)
    claim.ended = True
    assert schedule.settle(due, [], NOW + 100.0) == []
    assert schedule.watched == {}


class Still(Timer):
    """A timer that takes no turn."""

    def begin(self) -> None: ...


class Thread:
    """A watchdog whose turns are taken by the test, instead of by its thread."""

    def __init__(self) -> None:
        self.clock = FakeClock(NOW)
        self.events: list[str] = []
        self.error: Exception | None = None
        self.lasts = 0.0
        self.dog = Watchdog(self.extend, self.clock, timer=Still)

    def extend(self, claims: Sequence[Claim], done: Callable[[Sequence[Claim]], None]) -> None:
        self.events.append("extends " + " ".join(claim.token for claim in claims))
        self.clock.advance(self.lasts)
        if self.error is not None:
            raise self.error
        done(claims)

    def watch(self, claim: Claim) -> None:
        self.dog.watch(claim, lambda claim: self.events.append(f"lost {claim.token}"))

    def turn(self, at: float) -> None:
        self.clock.now = at
        self.dog.extend_due(self.dog.schedule.take(at))


def test_unnoticed_loss_is_reported_once_when_the_lease_is_released() -> None:
    """It is unnoticed beside a greenlet that never waits, because the watchdog cannot run."""
    thread, claim, other = Thread(), held(), held("other")
    thread.watch(claim)
    thread.watch(other)
    thread.dog.drop(other)
    thread.clock.now = claim.deadline
    thread.dog.drop(claim)
    thread.dog.drop(claim)
    thread.dog.drop(other)
    assert thread.events == ["lost t"]


def test_extension_round_that_fails_with_an_error_is_tried_again(caplog: Log) -> None:
    thread, claim = Thread(), held()
    thread.watch(claim)
    thread.error = RuntimeError("a bug")
    thread.turn(NOW + 3.0)
    assert "could not extend 1 leases" in caplog.text
    assert thread.dog.next_due == pytest.approx(NOW + 3.9)
    thread.error = None
    thread.turn(NOW + 3.9)
    assert thread.events == ["extends t", "extends t"]


def test_loss_is_reported_before_a_round_of_other_leases_is_waited_for() -> None:
    thread = Thread()
    old, young = held("old"), held("young", NOW + 4.0)
    thread.watch(old)
    thread.clock.now = NOW + 4.0
    thread.watch(young)
    thread.lasts = 0.25
    thread.turn(old.deadline)
    assert thread.events == ["lost old", "extends young"]


def test_body_is_looked_at_when_it_asks_and_while_its_lease_is_held(caplog: Log) -> None:
    thread, claim, other = Thread(), held(ttl=90.0), held("other", ttl=90.0)
    answers = [4.0, 2.0]

    def look() -> float:
        thread.events.append("looks")
        return answers.pop(0)  # the third time it fails

    thread.watch(claim)
    thread.watch(other)
    thread.dog.look_at(claim, look)
    assert thread.dog.next_due == NOW + 4.0
    thread.turn(NOW + 4.0)
    assert thread.dog.next_due == NOW + 6.0
    thread.turn(NOW + 6.0)
    assert "could not check the progress of the work under r" in caplog.text
    assert thread.dog.next_due == NOW + 30.0  # and goes on with the leases
    answers += [1.0, 1.0]
    thread.dog.look_at(claim, look)
    thread.dog.drop(claim)
    thread.turn(NOW + 30.0)
    thread.dog.look_at(claim, look)
    looks = ["looks", "extends t", "looks", "extends t", "looks", "looks", "extends other"]
    assert thread.events == looks


def test_short_leases_wake_the_extender_once_and_not_each() -> None:
    thread = Thread()
    woken: list[float] = []
    thread.dog._timer.wake = lambda: woken.append(thread.clock.now)  # type: ignore[method-assign]
    for number in range(3):
        claim = held(str(number))
        thread.watch(claim)
        thread.dog.drop(claim)
        assert thread.dog._turn() == LOOK_AGAIN_S
        thread.clock.advance(0.1)
    assert woken == [NOW]


def test_extender_thread_extends_due_leases_and_ends_when_closed() -> None:
    extended = threading.Event()

    def extend(claims: Sequence[Claim], done: Callable[[Sequence[Claim]], None]) -> None:
        done(claims)
        extended.set()

    clock = FakeClock(NOW)
    dog = Watchdog(extend, clock)
    dog.watch(held(ttl=90.0), lambda claim: None)
    clock.advance(30.0)
    dog.wake()  # else it would sleep for longer than we wait
    assert extended.wait(5.0)
    dog.close()
    thread = dog._timer._threads[None]
    thread.join(5.0)
    assert not thread.is_alive()


def test_time_limit_that_strikes_while_the_extender_starts_is_raised_as_itself(
    claim: Claim, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Struck(BaseException): ...

    def start(_thread: threading.Thread) -> None:
        try:
            raise Struck
        finally:
            threading.Lock().release()  # as where `threading` waits for the thread

    claim.granted_at = 0.0
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(Struck):
            Watchdog(lambda _claims, _done: None, FakeClock()).watch(claim, lambda _claim: None)


@pytest.mark.defaults
def test_extension_waits_until_the_first_lease_ends_or_the_next_is_due(
    redlock: FakeRedlock,
) -> None:
    client = redlock.client
    for name, ttl in (("short", 1.0), ("long", 2.0)):
        redlock.acquire(name, ttl=ttl)
    short, long = claims = list(client.claims.values())
    assert client.patience_of(claims) == client.patience(1.0) < client.patience(2.0)
    redlock.watchdog.next_due = redlock.clock() + 0.05
    assert client.patience_of(claims) == pytest.approx(0.05)
    redlock.watchdog.next_due = float("inf")
    redlock.clock.advance(short.deadline - redlock.clock() - 0.02)
    assert client.patience_of(claims) == pytest.approx(0.02)
    assert client.patience_of([long]) == client.patience(2.0)
