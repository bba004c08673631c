"""While leases are extended, threads that compute give the GIL up sooner; and only so long."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator, Sequence

import pytest

from celery_redlock.keepalive.watchdog import Watchdog
from celery_redlock.protocol.claim import Claim
from celery_redlock.runtime.haste import OURS, haste
from celery_redlock.testing.fakes import FakeClock

USUAL = 3000
"""Microseconds: not CPython's own, as an application may have set it."""


@pytest.fixture(autouse=True)
def usual() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(USUAL / 1e6)
    yield
    sys.setswitchinterval(before)


def interval() -> int:
    return round(sys.getswitchinterval() * 1e6)


def test_it_lasts_as_long_as_the_block() -> None:
    with haste():
        assert interval() == OURS
    assert interval() == USUAL


def test_it_ends_with_an_exception() -> None:
    with pytest.raises(SystemExit), haste():
        raise SystemExit
    assert interval() == USUAL


def test_the_last_of_several_gives_it_back() -> None:
    first, second = haste(), haste()
    with first:
        second.__enter__()
    assert interval() == OURS
    second.__exit__(None, None, None)
    assert interval() == USUAL


def test_what_the_application_sets_meanwhile_stays() -> None:
    with haste():
        sys.setswitchinterval(0.002)
    assert interval() == 2000


def test_an_application_in_more_of_a_haste_is_left_alone() -> None:
    sys.setswitchinterval(1e-6)
    with haste():
        assert interval() == 1
    assert interval() == 1


def test_who_has_read_it_meanwhile_and_sets_it_again_makes_it_stay_no_longer_than_that() -> None:
    with haste():
        read = sys.getswitchinterval()
    sys.setswitchinterval(read)
    with haste():
        pass
    assert interval() == USUAL


def test_a_forks_child_is_in_no_haste() -> None:
    with haste():
        child = os.fork()
        if not child:
            os._exit(0 if interval() == USUAL else 1)
        _pid, status = os.waitpid(child, 0)
        assert interval() == OURS
    assert os.waitstatus_to_exitcode(status) == 0


def test_a_round_and_the_telling_of_a_loss_are_made_in_haste() -> None:
    seen: list[tuple[str, int]] = []

    def extend(claims: Sequence[Claim]) -> Sequence[Claim]:
        seen.append(("extends", interval()))
        raise RuntimeError("a bug")

    clock = FakeClock(1000.0)
    dog = Watchdog(extend, clock)
    dog._thread = threading.current_thread()  # none is started
    claim = Claim("r", "t", 9.0, 1)
    claim.acknowledged(0, 1000.0, 1000.0)
    assert claim.grant(1000.0)
    dog.watch(claim, lambda claim: seen.append(("lost", interval())))
    for at in (1003.0, claim.deadline):
        clock.now = at
        dog._tend(dog.schedule.take(at))
        assert interval() == USUAL
    assert seen == [("extends", OURS), ("lost", OURS)]
