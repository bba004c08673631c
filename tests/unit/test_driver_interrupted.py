"""The driver over scripted peers: a thread that polls for others leaves, or is interrupted."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType

import pytest

from celery_redlock.protocol import quorum
from celery_redlock.protocol.claim import Claim
from celery_redlock.protocol.errors import RedlockError
from celery_redlock.protocol.round import Round
from tests.sim.interruption import at_each_line
from tests.support.peer import DEADLINE, Line, in_thread, verb_of
from tests.support.peer_world import (
    PeerWorld,
    a_claim,
    acquire,
    echo,
    echoing,
    own,
    release,
    votes,
)
from tests.support.wait import wait_until


def test_thread_takes_over_polling_when_the_polling_thread_leaves(
    world: PeerWorld,
) -> None:
    """The first thread polls and gives up; the second must not sleep to its own deadline."""
    left = threading.Event()

    def script(line: Line) -> None:
        asked = [line.request() for _ in range(2)]
        names = [verb_of(one)[1][0] for one in asked]
        assert left.wait(DEADLINE)
        line.send(b"".join(map(echo, asked)))
        assert b"redlock:patient" in names
        peer.serve(line)

    peer = world.peer(script)
    driver = world.driver()
    hasty = in_thread(lambda: acquire(driver, "hasty", 0.2))
    peer.next()
    begun = time.monotonic()
    patient = in_thread(lambda: acquire(driver, "patient", DEADLINE))
    peer.next()
    assert votes(hasty()) == ["silent"]
    left.set()
    assert own(patient())
    assert time.monotonic() - begun < DEADLINE / 2


class Struck(BaseException):
    """The exception that a time limit raises in the code it interrupts."""


@pytest.fixture
def strike() -> Iterator[Callable[[], None]]:
    """Raise `Struck` in the main thread, from any thread."""

    def handler(_signum: int, _frame: object) -> None:
        raise Struck

    before = signal.signal(signal.SIGALRM, handler)
    main = threading.main_thread().ident
    assert main is not None
    yield partial(signal.pthread_kill, main, signal.SIGALRM)
    signal.signal(signal.SIGALRM, before)


def test_thread_whose_poller_is_interrupted_gets_its_answer(
    world: PeerWorld, strike: Callable[[], None]
) -> None:
    def script(line: Line) -> None:
        first = line.request()
        polling.set()
        second = line.request()
        strike()
        assert struck.wait(DEADLINE)
        line.send(b"".join(map(echo, (first, second))))
        echoing(line)

    polling, struck = threading.Event(), threading.Event()
    world.peer(script)
    driver = world.driver()

    def follow() -> Round:
        assert polling.wait(DEADLINE)
        return acquire(driver, "follower")

    follower = in_thread(follow)
    with pytest.raises(Struck):
        acquire(driver, "leader")
    begun = time.monotonic()
    struck.set()
    assert own(follower())
    assert time.monotonic() - begun < DEADLINE / 2
    assert own(acquire(driver, "next"))


def interrupted_at_each_call(work: Callable[[], object], before: Callable[[], object]) -> int:
    """Run `work` over and over; raise `Struck` behind its first call, its second, and so on.

    Python runs signal handlers where a function begins and behind a call of one written in C. (Not
    at each line: between the last line of a `with` and its end no handler runs.)

    Returns:
        How many places there are.
    """
    count = target = 0

    def profile(frame: FrameType, event: str, _argument: object) -> None:
        nonlocal count
        if event in ("call", "c_return") and "/celery_redlock/stores/" in frame.f_code.co_filename:
            count += 1
            if count == target:
                sys.setprofile(None)
                raise Struck

    while target <= count:
        count, target = 0, target + 1
        before()
        sys.setprofile(profile)
        try:
            work()
        except Struck:
            pass
        finally:
            sys.setprofile(None)
    return target


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_exception_at_any_call_of_the_driver_mixes_up_no_answers_and_blocks_nobody(
    world: PeerWorld,
) -> None:
    for _ in range(3):
        world.peer(echoing)
    driver = world.driver()
    numbers = iter(range(10**6))

    def asked(patience: float = DEADLINE) -> bool:
        return own(acquire(driver, f"key {next(numbers)}", patience))

    def check() -> None:
        wait_until(lambda: asked(0.5), 5, "the nodes answer")
        assert in_thread(asked)()

    places = interrupted_at_each_call(asked, before=check)
    assert places > 50


def test_operation_inside_another_is_right_or_refused(world: PeerWorld) -> None:
    """A signal handler uses the driver at each line of that driver."""
    world.peer(echoing)
    driver = world.driver()
    outcomes: list[str] = []

    def use() -> None:
        try:
            outcomes.append("own" if own(acquire(driver, f"key {len(outcomes)}")) else "mixed up")
        except RedlockError as error:
            assert "inside itself" in str(error)
            outcomes.append("refused")

    at_each_line(use, use, step=3)
    assert set(outcomes) == {"own", "refused"}


def test_release_inside_another_operation_is_made(world: PeerWorld) -> None:
    peer = world.peer()
    driver = world.driver()
    numbers = iter(range(10**6))

    def hold() -> Claim:
        claim = a_claim(f"held {next(numbers)}")
        driver.run(lambda now: quorum.acquire(claim, now, DEADLINE))
        return claim

    def use() -> None:
        release(driver, hold())

    def before() -> None:
        claims.append(hold())

    claims: list[Claim] = []
    at_each_line(use, lambda: release(driver, claims[-1]), before=before, step=7)
    assert len(claims) > 20
    release(driver, claims[-1])  # the last pass has fewer lines
    assert votes(acquire(driver, "last")) == ["yes"]
    assert list(peer.held) == [b"redlock:last"]
