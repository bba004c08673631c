"""A `with` block whose lock is released wherever an exception strikes, also at its very end."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import celery_redlock
from celery_redlock import (
    AsyncRedlock,
    NotAcquired,
    QuorumUnavailable,
    Redlock,
    RedlockError,
    current_lease,
)
from celery_redlock.locking import stack
from celery_redlock.locking.block import Block
from celery_redlock.server import LocalServer
from tests.support.struck import Struck, struck_at_each_call
from tests.support.wait import wait_until

# An alarm may also strike in a destructor, which can do no more than print it.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

PACKAGE = str(Path(celery_redlock.__file__).parent)
INTERRUPTED = "an exception interrupted the release of the lock r at the end of its block"


@pytest.fixture
def redlock(servers: list[LocalServer], lock_over: Callable[..., Redlock]) -> Redlock:
    redlock = lock_over(servers[:1], ttl=20.0)
    with redlock.lock("first"):
        pass  # connects, and starts the extender
    return redlock


@pytest.fixture
def is_free(redlock: Redlock) -> Callable[[], bool]:
    return lambda: redlock.holder("r") is None


@contextlib.contextmanager
def struck_at(*functions: str) -> Iterator[None]:
    """Raise `Struck` where one of these functions of the package begins, for the first time."""

    def profile(frame: FrameType, event: str, _argument: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_name in functions and PACKAGE in code.co_filename:
            sys.setprofile(None)
            raise Struck

    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)


def test_exception_at_any_call_of_a_with_block_leaves_no_lock(redlock, is_free):
    def block() -> None:
        with redlock.lock("r", wait=1.0) as lease:
            assert not lease.lost

    places = struck_at_each_call(
        PACKAGE, block, before=lambda: wait_until(is_free, 1.0, "the lock is free")
    )
    assert places > 100
    assert not redlock.client.watchdog.schedule.watched


def test_exception_before_the_first_line_of_an_exit_is_logged_and_the_lock_is_free(
    redlock, is_free, caplog
):
    kept = []
    with pytest.raises(Struck) as struck, struck_at("_leave_block"), redlock.lock("r") as lease:
        kept.append(lease)
    assert struck.tb  # that the traceback and the lease are kept does not matter
    wait_until(is_free, 1.0, "the lock is free")
    assert [INTERRUPTED in record.getMessage() for record in caplog.records] == [True]
    assert kept[0].lost
    with pytest.raises(RedlockError, match="no current lease"):
        current_lease()


def test_block_in_a_loop_is_not_nested_in_one_that_was_interrupted_at_its_exit(redlock, is_free):
    lock, tokens = redlock.lock("r"), set()
    for _ in range(5):
        # Neither wait nor pause: the block that is left over is released before the next is tried.
        with pytest.raises(Struck), struck_at("_leave_block"), lock as lease:
            tokens.add(lease.token)
    assert len(tokens) == 5
    with lock:
        assert not is_free()
    assert is_free()


def test_block_whose_nested_block_is_interrupted_at_its_exit_is_released(redlock, is_free):
    lock = redlock.lock("r")
    with pytest.raises(Struck), lock, struck_at("_leave_block"), lock:
        pass
    wait_until(is_free, 1.0, "the lock is free")
    with lock:
        pass
    assert is_free()


def test_lock_is_released_by_its_next_extension_if_the_report_of_its_end_is_interrupted(
    servers, lock_over, monkeypatch
):
    redlock = lock_over(servers[:1], ttl=1.0)

    def interrupted(block: Block, leave: object) -> None:
        raise Struck

    monkeypatch.setattr(Block, "_block_over", interrupted)
    with pytest.raises(Struck), struck_at("_leave_block"), redlock.lock("r"):
        pass
    wait_until(lambda: redlock.holder("r") is None, 1.0, "the lock is free")


def test_lock_is_extended_as_long_as_its_block_lasts(servers, lock_over):
    redlock = lock_over(servers[:1], ttl=2.0)
    with redlock.lock("r") as lease:
        extended = lease.lease.deadline + 1.0
        wait_until(lambda: lease.lease.deadline > extended, 5.0, "it was extended twice")
        with contextlib.ExitStack() as stack:
            other = stack.enter_context(redlock.lock("s"))
            extended = other.lease.deadline + 1.0
            wait_until(lambda: other.lease.deadline > extended, 5.0, "the other as well")
    assert redlock.holder("r") is redlock.holder("s") is None


def test_exception_at_any_call_of_an_async_with_block_leaves_no_lock(servers, is_free):
    async def struck_everywhere() -> int:
        lock = AsyncRedlock([servers[0].url], ttl=20.0)
        runs = iter(range(10**6))
        places = 0
        async with lock:
            async with lock.lock("first"):
                pass
            while True:
                count = await struck_once(lock, next(runs) + 1)
                for _ in range(1000):
                    if is_free():
                        break
                    await asyncio.sleep(0.001)
                assert is_free(), f"after place {places}"
                if not count:
                    return places
                places += 1

    async def struck_once(lock: AsyncRedlock, target: int) -> bool:
        count = 0

        def profile(frame: FrameType, event: str, _argument: object) -> None:
            nonlocal count
            if event in ("call", "c_return") and PACKAGE in frame.f_code.co_filename:
                count += 1
                if count == target:
                    sys.setprofile(None)
                    raise Struck

        sys.setprofile(profile)
        try:
            async with lock.lock("r", wait=1.0):
                pass
        except Struck:
            return True
        finally:
            sys.setprofile(None)
        return False

    assert asyncio.run(struck_everywhere()) > 100


def test_alarm_every_few_milliseconds_leaves_no_lock(redlock, monkeypatch):
    monkeypatch.setattr(sys, "unraisablehook", deque(maxlen=0).append)  # nothing can strike it
    moments, struck, strikes = random.Random(20261127), 0, False

    def strike(_signum: int, _frame: object) -> None:
        nonlocal strikes
        if strikes:
            strikes = False  # once: a second one could strike this test itself
            raise Struck

    def is_free(resource: str) -> bool:
        with contextlib.suppress(QuorumUnavailable):  # the machine may be busy
            return redlock.holder(resource) is None
        return False

    before = signal.signal(signal.SIGALRM, strike)
    try:
        for turn in range(400):
            first, then = moments.uniform(0.0002, 0.0015), moments.uniform(0.001, 0.003)
            signal.setitimer(signal.ITIMER_REAL, first, then)
            try:
                strikes = True
                with redlock.lock(f"r{turn}"):
                    pass
                strikes = False
            except Struck:
                struck += 1
            except NotAcquired:
                pass
            strikes = False
            wait_until(partial(is_free, f"r{turn}"), 5.0, f"r{turn} is free")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    with redlock.lock("last") as lease:
        assert stack.leases() == [lease]
    assert struck > 50, "the alarm never struck: this test proves nothing"


def test_no_code_of_the_package_runs_when_a_lock_that_was_in_use_is_collected(redlock):
    """An exception that strikes in a finalizer is only printed, and does not reach the program."""
    called: list[Any] = []
    lock: Any = redlock.lock("r")
    with lock:
        pass
    sys.setprofile(lambda frame, event, argument: called.append(frame.f_code))
    del lock
    sys.setprofile(None)
    assert [code for code in called if PACKAGE in code.co_filename] == []
