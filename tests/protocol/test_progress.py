"""Silent bodies: when a body is silent for too long, which hooks run, what counts as a report."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from celery_redlock import HeldLease, LeaseLost, current_lease
from celery_redlock.events import Listener, subscribe, unsubscribe
from celery_redlock.locking import progress
from celery_redlock.locking.progress import Progress
from celery_redlock.locking.unlocked import Unlocked
from tests.support.clock import FakeClock
from tests.support.fake_lock import FakeRedlock
from tests.support.names import Log, Patch

TIMEOUT = 10.0


class Watch:
    """A body under a lock, and the watchdog's turns; time passes when the test moves the clock."""

    def __init__(self, redlock: FakeRedlock, patch: Patch, on_lost: object) -> None:
        self.clock = FakeClock(1000.0)
        patch.setattr(progress, "time", SimpleNamespace(monotonic=self.clock))
        self.look: Callable[[], float] = lambda: math.inf
        patch.setattr(redlock.watchdog, "look_at", self._keep, raising=False)
        self.patience: list[float] = []
        patch.setattr(
            redlock.client.registry, "patience", lambda _claim, until: self.patience.append(until)
        )
        self.held: HeldLease = redlock.lock("r")
        self.held.unused = False  # not each test runs a body
        self.progress = Progress(self.held, TIMEOUT, on_lost)

    def _keep(self, _claim: Any, look: Callable[[], float]) -> None:
        self.look = look
        look()

    def run(self, body: Callable[[], Any]) -> Any:
        with self.held:
            return self.progress.run(body)

    def after(self, seconds: float) -> float:
        """The watchdog looks after so many seconds; when it will look again."""
        self.clock.advance(seconds)
        return self.look()


class Heard(Listener):
    def __init__(self) -> None:
        self.losses: list[LeaseLost] = []

    def lost(self, loss: LeaseLost) -> None:
        self.losses.append(loss)


@pytest.fixture
def heard() -> Iterator[list[LeaseLost]]:
    listener = Heard()
    subscribe(listener)
    yield listener.losses
    unsubscribe(listener)


def test_silence_of_a_body_is_logged_once_and_the_next_one_again(
    redlock: FakeRedlock, monkeypatch: Patch, heard: list[LeaseLost], caplog: Log
) -> None:
    watch = Watch(redlock, monkeypatch, "log")

    def body() -> str:
        assert watch.after(4.0) == TIMEOUT - 4.0
        current_lease().progress()
        assert watch.after(TIMEOUT - 1.0) == 1.0
        assert not heard and not watch.held.stalled
        assert watch.after(1.0) == TIMEOUT
        assert watch.held.stalled and not watch.held.lost
        watch.after(TIMEOUT)
        assert len(heard) == 1
        current_lease().progress()
        assert not watch.held.stalled
        watch.after(TIMEOUT + 2.5)
        return "its end"

    assert watch.run(body) == "its end"
    assert [loss.reason for loss in heard] == ["stalled", "stalled"]
    levels = [(record.levelno, record.getMessage()[:24]) for record in caplog.records]
    assert levels == [
        (logging.WARNING, "no progress for 10.0 s u"),
        (logging.WARNING, "no progress for 12.5 s u"),
    ]
    assert watch.patience == [math.inf]  # nobody kills what is only watched


def test_silent_body_gets_an_exception_and_may_be_killed_after_as_long_again(
    redlock: FakeRedlock, monkeypatch: Patch, heard: list[LeaseLost]
) -> None:
    watch = Watch(redlock, monkeypatch, "raise")

    def body() -> None:
        assert watch.patience == [1000.0 + 2 * TIMEOUT]
        watch.clock.advance(3.0)
        current_lease().progress()
        assert watch.patience[1:] == [1003.0 + 2 * TIMEOUT]
        watch.after(TIMEOUT)
        threading.Event().wait(20.0)  # a signal ends it

    with pytest.raises(LeaseLost, match=r"^r: no progress was reported for 10.0 s") as told:
        watch.run(body)
    assert (told.value.reason, told.value.resource) == ("stalled", "r")
    assert len(heard) == 1
    assert watch.patience[2:] == [math.inf]
    assert watch.after(5 * TIMEOUT) == math.inf  # one that has ended is not silent


def test_time_in_which_the_extender_was_stopped_too_is_no_silence_but_once(
    redlock: FakeRedlock, monkeypatch: Patch, heard: list[LeaseLost]
) -> None:
    watch = Watch(redlock, monkeypatch, "raise")

    def body() -> None:
        for _ in range(2):
            assert watch.after(3 * TIMEOUT) == TIMEOUT  # all of the worker was stopped
            assert watch.patience[-1] == watch.clock() + 2 * TIMEOUT
            watch.clock.advance(0.5)
            current_lease().progress()
            assert watch.after(TIMEOUT - 1.0) == 1.0
        assert watch.after(1.0 + 0.6 * TIMEOUT) == TIMEOUT
        patience = watch.patience[-1]
        assert not heard
        watch.after(1.7 * TIMEOUT)  # a C call keeps the GIL, again and again
        assert watch.patience[-1] == patience
        threading.Event().wait(20.0)

    with pytest.raises(LeaseLost, match=r"no progress was reported for 17.0 s"):
        watch.run(body)
    assert watch.patience[-1] == math.inf
    assert watch.after(5 * TIMEOUT) == watch.patience[-1] == math.inf


def test_progress_counts_from_inside_other_locks_and_from_another_thread(
    redlock: FakeRedlock, monkeypatch: Patch
) -> None:
    watch = Watch(redlock, monkeypatch, "log")

    def body() -> None:
        watch.clock.advance(9.0)
        with redlock.lock("of another"), Unlocked("nothing"):
            current_lease().progress()
        assert watch.look() == TIMEOUT
        watch.clock.advance(9.0)
        thread = threading.Thread(target=current_lease().progress)
        thread.start()
        thread.join()
        assert watch.look() == TIMEOUT

    watch.run(body)
    watch.held.progress()  # and is nothing once the body has ended
    with redlock.lock("of none that is watched") as other:
        other.progress()


def test_progress_of_a_body_that_runs_without_its_lock_is_not_watched(
    redlock: FakeRedlock, monkeypatch: Patch
) -> None:
    watch = Watch(redlock, monkeypatch, "raise")
    with Unlocked("r"):
        assert watch.progress.run(lambda: current_lease().progress() or 7) == 7
    assert watch.patience == []
