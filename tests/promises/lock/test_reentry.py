"""A signal handler, a finalizer and a log handler use the lock that their thread is just using."""

from __future__ import annotations

import logging
import signal
import threading
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest

from celery_redlock import NotAcquired, Redlock, RedlockError
from celery_redlock.protocol.round import Round
from celery_redlock.stores.driver import Driver
from tests.protocol.sim.interruption import at_each_line
from tests.support.names import Patch, Request, Servers
from tests.support.wait import wait_until


class Users:
    """A client that holds a lock to the end of the test, and one whose thread is interrupted."""

    def __init__(self, urls: list[str]) -> None:
        self.other = Redlock(urls, ttl=600.0, node_timeout=3.0)
        self.redlock = Redlock(urls, ttl=60.0, node_timeout=3.0)
        self.other.connect(30)
        self.redlock.connect(30)
        self.theirs = self.other.acquire("theirs")
        wait_until(lambda: self.redlock.try_acquire("theirs") is None, 5, "all nodes know it")
        self.outcomes: Counter[str] = Counter()
        self._number = 0

    def use(self) -> None:
        """Ask for a lock of the other client, then acquire and release a free one."""
        self._number += 1
        name = f"free:{self._number}"
        try:
            if self.redlock.try_acquire("theirs") is not None:
                self.outcomes["two holders"] += 1
            lease = self.redlock.try_acquire(name)
            if lease is None:
                self.outcomes["not given what is free"] += 1
            elif not self.redlock.release(lease):
                self.outcomes["not held to the end"] += 1
            self.outcomes["used"] += 1
        except NotAcquired as error:
            self.outcomes[f"{type(error).__name__}"] += 1
        except RedlockError as error:
            assert "inside itself" in str(error), error
            self.outcomes["refused"] += 1

    def close(self) -> None:
        self.redlock.close()
        self.other.close()


@pytest.fixture(params=[1, 3], ids=["one node", "three nodes"])
def users(request: Request, servers: Servers) -> Iterator[Users]:
    them = Users([server.url for server in servers[: request.param]])
    yield them
    them.close()


@pytest.fixture(autouse=True)
def _no_hang() -> Iterator[None]:
    """Raise in a thread that hangs."""

    def hangs(_signum: int, _frame: object) -> None:
        raise AssertionError("it hangs")

    before = signal.signal(signal.SIGVTALRM, hangs), signal.getsignal(signal.SIGALRM)
    alarm = threading.Timer(90.0, signal.pthread_kill, (threading.get_ident(), signal.SIGVTALRM))
    alarm.daemon = True
    alarm.start()
    yield
    alarm.cancel()
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before[1])
    signal.signal(signal.SIGVTALRM, before[0])


def test_lock_used_at_each_line_of_itself_is_right_or_refused(users: Users) -> None:
    """Whatever line it interrupts: the lock of another is not granted, and a free one is."""
    handled = Counter[str]()

    def handler() -> None:
        outer, users.outcomes = users.outcomes, handled
        users.use()
        users.outcomes = outer

    nodes = len(users.redlock.nodes)
    lines = at_each_line(users.use, handler, step=nodes + 1)
    assert lines > 200
    assert set(users.outcomes) == {"used"}
    assert set(handled) == {"used", "refused"}
    assert users.other.extend(users.theirs)


def test_broken_reentrance_check_would_be_noticed(users: Users, monkeypatch: Patch) -> None:
    """The check was broken once; the test above must fail then."""
    monkeypatch.setattr(Driver, "_reentered", lambda _self: False)
    good = {"used", "refused"}
    try:
        at_each_line(users.use, users.use, step=3, until=lambda: set(users.outcomes) - good)
    except (AttributeError, IndexError, AssertionError, ValueError):
        return  # a connection that is gone; answers in excess, or none; a reader that reads already
    assert set(users.outcomes) - good, "nothing went wrong"


def test_lock_released_by_a_handler_at_each_line_is_free_at_last(users: Users) -> None:
    """The handler releases another lock: it is never refused, and in the end all nodes are free."""
    leases = [users.redlock.acquire("held:0")]

    def hold() -> None:
        lease = users.redlock.acquire(f"held:{len(leases)}")
        users.use()
        leases.append(lease)

    def release() -> None:
        assert users.redlock.release(leases[-1])

    assert at_each_line(hold, release, step=11) > 300
    assert set(users.outcomes) == {"used"}
    for lease in leases[:-2]:
        name = lease.resource
        wait_until(lambda name=name: users.other.holder(name) is None, 5, f"{name} is free")


def test_put_off_release_that_is_interrupted_twice_is_still_made(
    users: Users, monkeypatch: Patch
) -> None:
    """A handler has released a lock, and that release is interrupted when it is made up for."""
    client = users.redlock.client
    monkeypatch.setattr(client.watchdog, "retry_soon", lambda *_: None)  # here it is done by hand
    lease = users.redlock.acquire("held")
    with client.driver._lock:
        users.redlock.release(lease)
    assert users.other.holder("held") is not None
    carry, strikes = client.driver._carry, [KeyboardInterrupt, KeyboardInterrupt]

    async def struck(rounds: Sequence[Round]) -> None:
        if strikes:
            raise strikes.pop()
        await carry(rounds)

    monkeypatch.setattr(client.driver, "_carry", struck)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            client.driver._settle()
    assert users.other.holder("held") is not None
    users.use()  # as the next request of any kind does
    wait_until(lambda: users.other.holder("held") is None, 5, "it is free")


def test_slow_log_handler_keeps_no_other_thread_waiting(users: Users) -> None:
    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if threading.current_thread() is thread:
                logging_.set()
                assert go_on.wait(20)

    logging_, go_on = threading.Event(), threading.Event()
    thread = threading.Thread(target=users.use)
    handler = Handler()
    logger = logging.getLogger("celery_redlock.node")
    logger.addHandler(handler)
    try:
        with users.redlock.client.driver._lock:
            users.redlock.client.driver.nodes[0].reports.complain(None, "for the test")
            thread.start()
        assert logging_.wait(20)
        users.use()  # the other thread is still logging
        assert not go_on.is_set()
    finally:
        go_on.set()
        thread.join(20)
        logger.removeHandler(handler)
    assert set(users.outcomes) == {"used"}
