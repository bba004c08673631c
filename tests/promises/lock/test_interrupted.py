"""A time limit may strike at any bytecode, in the midst of our own code as well."""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from celery_redlock import NotAcquired, Redlock
from celery_redlock.protocol.round import Verb
from celery_redlock.runtime.blocking import blocking
from celery_redlock.server import LocalServer
from celery_redlock.stores.redis.node import RedisNode
from tests.support.struck import Struck
from tests.support.wait import wait_until

# The alarm may strike in a destructor, which can do no more than print it.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture
def make(servers: list[LocalServer], lock_over: Callable[..., Redlock]) -> Callable[..., Redlock]:
    def make(count: int | None = None, **options: Any) -> Redlock:
        redlock = lock_over(servers[:count], **options)
        redlock.connect()
        return redlock

    return make


@pytest.fixture
def alarms() -> Iterator[None]:
    before = signal.getsignal(signal.SIGALRM)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("alarms")
def test_time_limit_raised_as_timeout_error_is_not_swallowed(make):
    """Many a timeout decorator raises TimeoutError, which is an OSError."""
    fired, caught, moments = 0, 0, random.Random(20261121)

    def strike(signum: int, frame: object) -> None:
        nonlocal fired
        fired += 1
        raise TimeoutError("the user's")

    signal.signal(signal.SIGALRM, strike)
    redlock = make(ttl=20.0)
    with redlock.lock("first"):
        pass  # the watchdog runs: struck as it starts a thread, Python raises an error of its own
    for turn in range(400):
        lock = redlock.lock(f"limit:{turn}")
        try:
            try:
                signal.setitimer(signal.ITIMER_REAL, moments.uniform(0.00002, 0.0006))
                lock.acquire()
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        except TimeoutError:
            caught += 1
        except NotAcquired:
            pass
        lock.release()
    assert fired > 50, "the alarm never struck: this test proves nothing"
    assert caught >= 0.85 * fired  # but for those in a destructor, or in closing a socket


def test_interrupt_before_a_connection_is_made_does_not_lose_the_node(
    servers, lock_over, monkeypatch
):
    redlock = lock_over(servers[:1])
    start = threading.Thread.start

    def struck(thread: threading.Thread) -> None:
        if thread.name.startswith("celery_redlock connect"):
            raise Struck
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", struck)
        with pytest.raises(Struck):
            redlock.acquire("r")
    assert redlock.release(redlock.acquire("r", wait=5.0))


def test_two_threads_that_connect_to_one_node_make_one_connection(make, monkeypatch, caplog):
    """An interrupt while a thread is being started leaves it running, without a record of it."""
    redlock = make()
    node = redlock.client.driver.nodes[0]
    alive = threading.Thread.is_alive

    def unknown(thread: threading.Thread) -> bool:
        return not thread.name.startswith("celery_redlock connect") and alive(thread)

    monkeypatch.setattr(threading.Thread, "is_alive", unknown)
    for _ in range(30):
        with redlock.client.driver._lock:  # or another thread might just be reading from it
            node._drop("interrupted", blame=False)
        for _ in range(4):
            assert redlock.release(redlock.acquire("r", wait=5.0))
    assert not caplog.messages


def test_interrupt_while_a_connection_is_closed_does_not_lose_the_node(make, monkeypatch):
    redlock = make(1)
    node = redlock.client.driver.nodes[0]
    disconnect = node.connection.disconnect

    def struck() -> None:
        disconnect()
        raise Struck

    with monkeypatch.context() as patch:
        patch.setattr(node.connection, "disconnect", struck)
        with pytest.raises(Struck):
            node._drop("interrupted", blame=False)
    assert redlock.release(redlock.acquire("r", wait=5.0))


def test_interrupt_while_an_attempt_is_undone_leaves_nothing_behind(make, servers, monkeypatch):
    # A node that is late here would be one of too few: this is no test of that.
    redlock, other = (make(ttl=60.0, node_timeout=5.0) for _ in range(2))
    ask = RedisNode.ask
    held = len(servers) // 2 + 1

    def forgetful(self, round_, payload, now, *more):
        if round_.verb is Verb.ACQUIRE and self.index >= held:
            round_.silence(self.index, "not asked")
        else:
            ask(self, round_, payload, now, *more)

    def strikes(self, round_, payload, now, *more):
        if round_.verb is Verb.UNDO and not struck:
            struck.append(self.index)
            raise Struck
        ask(self, round_, payload, now, *more)

    struck: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(RedisNode, "ask", forgetful)
        lease = other.acquire("undone")  # on a bare quorum: we get the rest
    with monkeypatch.context() as patch:
        patch.setattr(RedisNode, "ask", strikes)
        with pytest.raises(Struck):
            redlock.acquire("undone")
    assert struck

    def holders() -> set[str]:
        return {detail[0] for detail in blocking(other.client.peek(("undone",))).details if detail}

    wait_until(lambda: holders() == {lease.token}, 5.0, "only the holder's token is left")
