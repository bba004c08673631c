"""One of the threads that wait polls for all; each is woken, whoever leaves or is struck."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

import pytest

from celery_redlock.runtime import polling
from celery_redlock.runtime.polling import SharedPoll
from tests.support.names import Patch
from tests.support.peer import DEADLINE, in_thread
from tests.support.struck import Struck, struck_at_each_call
from tests.support.wait import wait_until


class Wired:
    """Some sockets of which each sets an event when a byte has arrived."""

    def __init__(self, count: int) -> None:
        self.lock = threading.RLock()
        self.poll = SharedPoll(self.lock, self._read)
        pairs = [socket.socketpair() for _ in range(count)]
        self.near, self.far = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        self.events = [self.poll.event() for _ in range(count)]
        for index, end in enumerate(self.near):
            end.setblocking(False)
            self.poll.watch(index, end.fileno())

    def _read(self, ready: object) -> None:
        for index in ready:  # type: ignore[attr-defined]
            if self.near[index].recv(16):
                self.events[index].set()

    def send(self, index: int) -> None:
        self.far[index].send(b"x")

    @property
    def polled_by(self) -> int | None:
        return self.poll.poller

    def close(self) -> None:
        for end in (*self.near, *self.far):
            end.close()


@pytest.fixture
def wired(monkeypatch: Patch) -> Iterator[Wired]:
    """Three sockets; a thread that is not woken sleeps for longer than the test waits."""
    monkeypatch.setattr(polling, "LONGEST_S", 4 * DEADLINE)
    with contextlib.closing(Wired(3)) as made:
        yield made


def waiting(wired: Wired, *indexes: int) -> list[Callable[[], bool]]:
    """Have a thread wait for each of some events; the first polls. Return what joins them."""
    joins = []
    for number, index in enumerate(indexes):
        joins.append(in_thread(lambda index=index: wired.events[index].wait(2 * DEADLINE)))  # type: ignore[misc]
        wait_until(lambda: wired.polled_by, 5, "one polls")
        wait_until(lambda n=number: len(wired.poll._sleeping) == n, 5, "the others sleep")
    return joins


def test_sleeping_thread_is_woken_by_what_the_polling_thread_reads(wired: Wired) -> None:
    polling_, sleeping = waiting(wired, 0, 1)
    wired.send(1)
    assert sleeping()
    wired.send(0)
    assert polling_()


def test_sleeping_thread_polls_when_the_polling_thread_leaves(wired: Wired) -> None:
    joins = waiting(wired, 0, 1, 2)
    for index in (0, 2, 1):
        wired.send(index)
        assert joins[index]()
    assert wired.polled_by is None
    assert not wired.poll._sleeping


def test_polling_thread_is_woken_by_another_thread_that_sets_its_event(wired: Wired) -> None:
    joins = waiting(wired, 0, 1)
    for index in (0, 1):
        wired.events[index].set()
        assert joins[index]()


def test_polling_thread_polls_a_socket_that_was_added_meanwhile(wired: Wired) -> None:
    wired.poll.forget(0)
    (join,) = waiting(wired, 0)
    with wired.lock:
        wired.poll.watch(0, wired.near[0].fileno())
    wired.send(0)
    assert join()


def test_event_that_was_set_before_the_wait_is_not_waited_for(wired: Wired) -> None:
    wired.events[0].set()
    assert wired.events[0].wait(2 * DEADLINE)
    begun = time.monotonic()
    assert not wired.events[0].wait(0.01)
    assert time.monotonic() - begun < DEADLINE


def test_wait_that_times_out_leaves_nothing_behind(wired: Wired) -> None:
    (join,) = waiting(wired, 0)
    assert not wired.events[1].wait(0.01)
    assert not wired.poll._sleeping
    wired.send(0)
    assert join()


@pytest.fixture
def on_alarm() -> Iterator[Callable[[Callable[[], object]], Callable[[], None]]]:
    """Have the main thread interrupted by a handler; returns what interrupts it."""
    before = signal.getsignal(signal.SIGALRM)

    def install(handler: Callable[[], object]) -> Callable[[], None]:
        def handle(_signum: int, _frame: FrameType | None) -> None:
            handler()

        signal.signal(signal.SIGALRM, handle)
        return lambda: os.kill(os.getpid(), signal.SIGALRM)

    yield install
    signal.signal(signal.SIGALRM, before)


def test_handler_that_waits_inside_a_wait_reads_the_event_of_both(
    wired: Wired, on_alarm: Callable[[Callable[[], object]], Callable[[], None]]
) -> None:
    """The poll that it has interrupted goes on behind it, and has nothing left to read."""
    inner: list[bool] = []

    def handler() -> None:
        wired.send(0)
        wired.send(1)
        inner.append(wired.events[1].wait(2 * DEADLINE))

    interrupt = on_alarm(handler)

    def once_it_polls() -> None:
        wait_until(lambda: wired.polled_by, 5, "it polls")
        interrupt()

    join = in_thread(once_it_polls)
    begun = time.monotonic()
    assert wired.events[0].wait(2 * DEADLINE)
    assert time.monotonic() - begun < DEADLINE
    assert inner == [True]
    join()


def test_exception_in_the_polling_thread_hands_the_poll_to_another(
    wired: Wired, on_alarm: Callable[[Callable[[], object]], Callable[[], None]]
) -> None:
    def strike() -> None:
        raise Struck

    interrupt = on_alarm(strike)
    joins: list[Callable[[], bool]] = []

    def follow() -> None:
        wait_until(lambda: wired.polled_by, 5, "it polls")
        joins.append(in_thread(lambda: wired.events[1].wait(2 * DEADLINE)))
        wait_until(lambda: wired.poll._sleeping, 5, "the other sleeps")
        interrupt()

    followed = in_thread(follow)
    with pytest.raises(Struck):
        wired.events[0].wait(2 * DEADLINE)
    followed()
    wired.send(1)
    assert joins[0]()


def test_exception_at_any_call_keeps_nobody_from_being_woken(wired: Wired) -> None:
    def work() -> None:
        wired.send(0)
        wired.events[0].wait(2 * DEADLINE)

    def check() -> None:
        wired.events[0].clear()
        wired.send(1)
        assert in_thread(lambda: wired.events[1].wait(2 * DEADLINE))()

    assert struck_at_each_call("/runtime/polling.py", work, before=check) > 10
