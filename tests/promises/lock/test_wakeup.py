"""Whoever waits reads what its process is sent: interrupted, hung up on, without a thread."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType

import pytest
import redis

from celery_redlock import Redlock
from celery_redlock.locking.pubsub import ReleaseSubscriber
from celery_redlock.locking.wait_queue import Waiter
from celery_redlock.runtime.blocking import blocking
from celery_redlock.server import LocalServer
from celery_redlock.stores.kinds import parse_nodes
from tests.support.wait import wait_until


class Struck(Exception):
    """The exception of a soft time limit, as the interrupted code sees it."""


@pytest.fixture
def wakeup(servers: list[LocalServer]) -> Iterator[ReleaseSubscriber]:
    subscriber = ReleaseSubscriber(parse_nodes([server.url for server in servers]), "p:")
    with contextlib.closing(subscriber):
        yield subscriber


def notify(admins: list[redis.Redis], wakeup: ReleaseSubscriber, waiter: Waiter) -> None:
    """Have all nodes call a waiter, as a release does."""
    for admin in admins:
        assert admin.publish(wakeup.channel, waiter.name)


def is_called(waiter: Waiter) -> bool:
    return blocking(waiter.wait(0.01)) and waiter.notifications >= waiter.quorum


def hears(wakeup: ReleaseSubscriber, admins: list[redis.Redis], waiter: Waiter) -> None:
    """Let its subscriptions come back, if any is lost; then it is called by all."""

    def has_all() -> bool:
        waiter.forget()
        blocking(waiter.wait(0.001))
        return len(wakeup._listening) == len(admins)

    wait_until(has_all, 20, "it is subscribed to all nodes")
    waiter.forget()
    notify(admins, wakeup, waiter)
    wait_until(lambda: is_called(waiter), 5, "it is called")
    assert waiter.sure


def test_exception_at_any_call_of_a_read_loses_no_later_call(
    wakeup: ReleaseSubscriber, admins: list[redis.Redis], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("celery_redlock.locking.pubsub.RECONNECT_S", 0.0)
    main = threading.get_ident()
    count = target = 0
    files = ("pubsub.py", "subscription.py", "resp.py", "wait_queue.py", "polling.py")

    def profile(frame: FrameType, event: str, _argument: object) -> None:
        nonlocal count
        ours = threading.get_ident() == main and frame.f_code.co_filename.endswith(files)
        if event in ("call", "c_return") and ours:
            count += 1
            if count == target:
                sys.setprofile(None)
                raise Struck

    struck = 0
    with wakeup.waiter() as waiter:
        hears(wakeup, admins, waiter)
        while target <= count:
            count, target = 0, target + 2
            waiter.forget()
            notify(admins, wakeup, waiter)
            sys.setprofile(profile)
            try:
                is_called(waiter)
            except Struck:
                struck += 1
            finally:
                sys.setprofile(None)
            wait_until(lambda: is_called(waiter), 20, "it was called, or looks again")
            hears(wakeup, admins, waiter)
    assert struck > 20


def test_subscription_that_ended_while_nobody_waited_is_made_again_by_the_next_waiter(
    wakeup: ReleaseSubscriber, admins: list[redis.Redis]
) -> None:
    with wakeup.waiter() as waiter:
        hears(wakeup, admins, waiter)
    before = dict(wakeup._subscriptions)
    for admin in admins:
        admin.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
    with wakeup.waiter() as waiter:
        assert not waiter.is_subscribed, "it has noticed before its first try"
        hears(wakeup, admins, waiter)
    assert all(wakeup._subscriptions[node] is not before[node] for node in before)


def test_threads_that_wait_for_different_locks_are_each_called(
    servers: list[LocalServer], lock_over: Callable[..., Redlock]
) -> None:
    """One of them reads for all; when it has its lock, another does."""
    holder, redlock = lock_over(servers), lock_over(servers)
    names = [f"r{number}" for number in range(8)]
    leases = [holder.acquire(name) for name in names]
    granted: list[str] = []

    def wait(name: str) -> None:
        redlock.release(redlock.acquire(name, wait=30.0))
        granted.append(name)

    threads = [threading.Thread(target=wait, args=[name]) for name in names]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(redlock.client.wakeup._waiters) == len(names), 10, "all wait")
    for number, lease in enumerate(leases):
        holder.release(lease)
        wait_until(lambda n=number: len(granted) > n, 10, "one more has had its lock")  # type: ignore[misc]
    assert sorted(granted) == names
