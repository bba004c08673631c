"""How much the doorman asks of the nodes. `tests/worker/test_parking.py` has what it does."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from celery_redlock.doorman import Doorman
from celery_redlock.gate import Gate
from tests.unit.fake_lock import FakeRedlock

WATCHED = 20.0
"""Seconds of the fake clock."""


def rounds_of(patch: pytest.MonkeyPatch, doors: int) -> float:
    """Rounds for each of some doors in a second, while all wait for locks that others hold."""
    redlock = FakeRedlock(patch, ttl=60.0)
    patch.setattr("celery_redlock.doorman.monotonic", redlock.clock)

    @contextlib.contextmanager
    def waiting(_name: str) -> Iterator[Any]:
        waiter: Any = SimpleNamespace(news=None)
        waiter.forget = lambda: waiter.news.forget()
        yield waiter

    wakeup: Any = SimpleNamespace(waiting=waiting)
    redlock._wakeup = wakeup
    called: list[str] = []
    gate = Gate(called.append)
    doorman = Doorman(redlock, gate, lambda call, *arguments: call(*arguments), list)
    patch.setattr(doorman, "_thread", SimpleNamespace())  # it is us
    for number in range(doors):
        redlock.acquire(f"r{number}")
        now = redlock.clock()
        assert not gate.arrive(SimpleNamespace(id=str(number)), f"r{number}", now, waits=True)
        doorman.attend(called.pop())
    doorman._attend_all()
    doorman._attend_all()
    redlock.driver.rounds.clear()
    until = redlock.clock() + WATCHED
    while redlock.clock() < until:
        redlock.clock.advance(max(0.001, doorman._attend_all()))
    assert gate.parked == doors, "all still wait"
    verbs = Counter(redlock.driver.rounds)
    assert verbs["peek"] > doors, "each is looked after"
    return sum(verbs.values()) / doors / WATCHED


def test_many_doors_are_looked_after_more_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = rounds_of(monkeypatch, 5), rounds_of(monkeypatch, 200)
    assert many < few / 3
