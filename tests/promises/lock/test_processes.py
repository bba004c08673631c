"""Processes: what a parent holds is not its child's, and a child's connections are its own."""

from __future__ import annotations

import os
import pickle
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import redis

from celery_redlock import Redlock, RedlockError, ResourceHeld, current_lease
from celery_redlock.server import LocalServer
from tests.support.nodes import all_connected, told_all
from tests.support.wait import wait_until

# Python 3.12 warns of every fork of a process with threads; this test checks that it works.
pytestmark = pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")


SHORT = 2.0
"""Ttl, in seconds, of a lease that is extended meanwhile: a busy machine may stop us for one."""


def in_child(work: Callable[[], Any]) -> Any:
    """Return the result of `work` in a forked child, or the traceback of its error."""
    receiver, sender = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            result = ("ok", work())
        except BaseException:
            result = ("error", traceback.format_exc())
        os.write(sender, pickle.dumps(result))
        os._exit(0)
    os.close(sender)
    with os.fdopen(receiver, "rb") as pipe:
        kind, result = pickle.loads(pipe.read())
    os.waitpid(pid, 0)
    assert kind == "ok", result
    return result


@pytest.fixture
def urls(servers: list[LocalServer]) -> list[str]:
    return [server.url for server in servers[:3]]


@pytest.fixture
def redlock(urls: list[str], lock_over: Callable[..., Redlock]) -> Redlock:
    return all_connected(lock_over(urls, ttl=30.0))


def commands(url: str) -> dict[str, int]:
    """Return the calls of each command on a server, without commands that only look."""
    with redis.Redis.from_url(url) as client:
        stats = client.info("commandstats")
    looking = ("cmdstat_info", "cmdstat_client", "cmdstat_hello")
    return {name: s["calls"] for name, s in stats.items() if not name.startswith(looking)}


def keys(url: str) -> list[bytes]:
    with redis.Redis.from_url(url) as client:
        return client.keys("redlock:*")


def clients(url: str) -> set[bytes]:
    """The ports of the lock's connections to a server."""
    with redis.Redis.from_url(url) as client:
        return {c["addr"] for c in client.client_list() if c["name"] == "celery_redlock"}


def test_release_in_a_forked_child_does_nothing_and_sends_nothing(
    redlock: Redlock, urls: list[str]
) -> None:
    lease = redlock.acquire("r")
    held = redlock.lock("s")
    held.acquire()
    told_all(redlock)
    before = [commands(url) for url in urls]

    def child() -> tuple[bool, bool, bool]:
        return redlock.release(lease), held.release(), held.lost

    assert in_child(child)[:2] == (False, False)
    assert [commands(url) for url in urls] == before
    assert [len(keys(url)) for url in urls] == [2, 2, 2]
    assert not held.lost
    assert redlock.release(lease) is True
    assert held.release() is True


def test_extension_in_a_forked_child_is_refused(redlock: Redlock) -> None:
    lease = redlock.acquire("r")

    def child() -> str:
        with pytest.raises(RedlockError) as raised:
            redlock.extend(lease)
        return type(raised.value).__name__

    assert in_child(child) == "LeaseLost"
    assert redlock.release(redlock.extend(lease)) is True


def test_forked_child_inside_a_block_has_no_lease_and_is_refused_the_lock(
    redlock: Redlock,
) -> None:
    def child() -> tuple[str, str]:
        with pytest.raises(RedlockError) as no_lease:
            current_lease()
        with pytest.raises(ResourceHeld) as refused, redlock.lock("r"):
            pass
        assert refused.value.holder is not None and refused.value.holder.owner is not None
        return str(no_lease.value)[:26], str(refused.value.holder.owner.pid)

    with redlock.lock("r") as held:
        assert in_child(child) == ("there is no current lease:", str(os.getpid()))
        assert not held.lost
        assert current_lease() is held


def test_forked_child_has_connections_of_its_own_and_the_parents_stay(
    redlock: Redlock, urls: list[str]
) -> None:
    lease = redlock.acquire("r")
    parents = [clients(url) for url in urls]

    def child() -> list[int]:
        other = redlock.acquire("s")
        all_connected(redlock)
        now = [clients(url) for url in urls]
        assert all(mine > theirs for mine, theirs in zip(now, parents, strict=True))
        assert redlock.release(other) is True
        return [len(mine - theirs) for mine, theirs in zip(now, parents, strict=True)]

    assert in_child(child) == [1, 1, 1]
    for url, before in zip(urls, parents, strict=True):
        wait_until(lambda u=url, b=before: clients(u) == b, 5, "the child's are closed")
    assert redlock.release(lease) is True


def test_extender_of_the_parent_goes_on_and_a_forked_child_has_its_own(redlock: Redlock) -> None:
    with redlock.lock("r", ttl=SHORT) as held:
        old = held.lease

        def child() -> bool:
            with redlock.lock("s", ttl=SHORT) as mine:
                first = mine.lease.deadline
                wait_until(lambda: mine.lease.deadline > first, 5, "it is extended in the child")
                return not mine.lost

        assert in_child(child) is True
        wait_until(lambda: held.lease.deadline > old.deadline, 5, "it is extended in the parent")
        assert not held.lost


def test_fork_while_other_threads_lock_works(redlock: Redlock) -> None:
    stop = threading.Event()

    def work(name: str) -> None:
        while not stop.is_set():
            redlock.release(redlock.acquire(name))

    with ThreadPoolExecutor(2) as threads:
        at_work = [threads.submit(work, name) for name in ("t0", "t1")]
        try:
            for number in range(5):
                assert in_child(lambda n=number: redlock.release(redlock.acquire(f"c{n}"))) is True
        finally:
            stop.set()
        assert [one.result(10) for one in at_work] == [None, None]
