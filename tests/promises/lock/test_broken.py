"""Faults from outside: strange replies, callbacks, a closed lock, and wrong arguments."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from typing import Any

import pytest
import redis

from celery_redlock import (
    AsyncRedlock,
    ConfigurationError,
    NotAcquired,
    QuorumUnavailable,
    RedlockError,
)
from celery_redlock.config.task_lock import TaskLock
from celery_redlock.locking import acquisition
from celery_redlock.locking.wait_queue import Waiter
from celery_redlock.protocol.round import Verb
from celery_redlock.server import LocalServer
from tests.support.names import Locks, Log, Patch, Servers
from tests.support.wait import wait_until


@pytest.fixture
def make(servers: Servers, lock_over: Locks) -> Locks:
    return lambda *extra, count=2, **options: lock_over([*servers[:count], *extra], **options)


def test_on_lost_that_exits_does_not_end_the_extender(
    make: Locks, admins: list[redis.Redis]
) -> None:
    lock = make(ttl=2.0)
    told = threading.Event()

    def exits(_lease: object) -> None:
        told.set()
        sys.exit("as a program's user may write")

    with lock.lock("lost", on_lost=exits):
        for client in admins[:2]:
            client.set("redlock:lost", "another's", px=300)
        assert told.wait(30)
    with lock.lock("next") as lease:
        until = time.monotonic() + 3.0
        while time.monotonic() < until:  # for longer than the ttl: it must be extended
            lease.ensure()
            time.sleep(0.01)
        assert make().try_acquire("next") is None


class Hiccup(redis.CredentialProvider):
    asked = 0

    def get_credentials(self) -> tuple[str]:
        self.asked += 1
        if self.asked < 3:
            raise RuntimeError("the token service is away, and this is a secret")
        return ("word",)


def test_credential_provider_that_fails_is_asked_again(make: Locks, caplog: Log) -> None:
    provider = Hiccup()
    with LocalServer(password="word") as guarded:
        third = {"host": "127.0.0.1", "port": guarded.port, "credential_provider": provider}
        lock = make(third, ttl=5)
        provider.asked = 0
        lock.release(lock.acquire("r"))
        wait_until(lambda: lock.client.driver.nodes[2].channel.up, 5, "the third node is connected")
    assert provider.asked == 3
    assert "RuntimeError while connecting" in caplog.text
    assert "a secret" not in caplog.text


def test_closed_redlock_is_unavailable_and_hides_no_error_of_a_block(make: Locks) -> None:
    lock = make(ttl=1)
    with pytest.raises(KeyError), lock.lock("r"):
        lock.close()
        raise KeyError
    began = time.monotonic()
    for wait in (0.0, 30.0):
        with pytest.raises(QuorumUnavailable, match="closed"):
            lock.acquire("r2", wait=wait)
    assert time.monotonic() < began + 15.0
    never_used = make()
    never_used.close()
    with pytest.raises(QuorumUnavailable, match="closed"):
        never_used.acquire("r2")


@pytest.mark.parametrize("after", [0.0, 0.02, 0.5])
def test_waiters_of_a_redlock_that_is_closed_are_unavailable_at_once(
    make: Locks, after: float
) -> None:
    holder, lock = make(ttl=60), make(ttl=60)
    held = holder.acquire("r")
    errors: list[Exception] = []

    def wait() -> None:
        with pytest.raises(QuorumUnavailable, match="closed") as refused:
            lock.acquire("r", wait=30)
        errors.append(refused.value)

    threads = [threading.Thread(target=wait, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    time.sleep(after)  # before, while and after they join the queue
    lock.close()
    wait_until(lambda: len(errors) == 4, 5.0, "all waiters have ended")
    assert holder.release(held)


@pytest.mark.parametrize("after", [0.0, 0.02, 0.5])
def test_waiters_of_an_event_loop_whose_redlock_is_closed_are_unavailable_at_once(
    make: Locks, servers: Servers, after: float
) -> None:
    make(ttl=60).acquire("r")

    async def closed() -> list[object]:
        lock = AsyncRedlock([server.url for server in servers[:2]], ttl=60)
        client = lock.client
        waits = [asyncio.ensure_future(lock.acquire("r", wait=30)) for _ in range(4)]
        await asyncio.sleep(after)
        assert lock.client is client
        await lock.close()
        return await asyncio.wait_for(asyncio.gather(*waits, return_exceptions=True), 5.0)

    errors = asyncio.run(closed())
    assert [type(error) for error in errors] == [QuorumUnavailable] * 4
    assert all("closed" in str(error) for error in errors)


@pytest.mark.parametrize("verb", [Verb.HAND_ON, Verb.DEQUEUE])
def test_waiter_that_loses_its_connections_as_it_leaves_the_queue_is_not_notified_any_more(
    make: Locks, admins: list[redis.Redis], monkeypatch: Patch, verb: Verb
) -> None:
    """A release would notify it in place of the next waiter, which would wait for 1 to 2 s."""
    holder, first, second = (make(ttl=60.0, node_timeout=5.0) for _ in range(3))
    for lock in (holder, first, second):
        lock.release(lock.acquire("warm"))
    line = "redlock:r#line"
    queue = acquisition.Acquisition._queue

    async def cut_off(self: Any, entry: Any, asked: Verb, nodes: Any = None) -> None:
        if asked is verb and self._client is first.client:
            for admin in admins[:2]:
                if verb is Verb.DEQUEUE:
                    admin.zadd(line, {entry.token: entry.since})  # as if another node had called
                admin.execute_command("CLIENT KILL TYPE normal SKIPME yes")
            nodes = None
        await queue(self, entry, asked, nodes)

    monkeypatch.setattr(acquisition.Acquisition, "_queue", cut_off)
    monkeypatch.setattr(Waiter, "left_by", property(lambda self: set()))
    held = holder.acquire("r")
    if verb is Verb.DEQUEUE:
        threading.Timer(0.3, holder.release, (held,)).start()
        held = first.acquire("r", wait=5.0)
        holder = first
    else:
        with pytest.raises(NotAcquired):
            first.acquire("r", wait=0.3)
    wait_until(lambda: not any(admin.exists(line) for admin in admins[:2]), 3.0, "it has left")
    got: list[float] = []

    def wait() -> None:
        second.release(second.acquire("r", wait=10.0))
        got.append(time.monotonic())

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    wait_until(lambda: all(admin.exists(line) for admin in admins[:2]), 5.0, "it is in the queue")
    released = time.monotonic()
    assert holder.release(held)
    thread.join(10.0)
    assert got[0] < released + 1.0


def test_decorator_over_two_functions_of_one_name_reads_each_signature() -> None:
    lock = TaskLock({"key": "x:<a>"})
    assert lock.resources(None, lambda a, b: None, (1, 2), {}) == ("x:1",)
    assert lock.resources(None, lambda z, a: None, (5, 6), {}) == ("x:6",)


# -- A wrong argument is refused when it is given, not when it would first matter


@pytest.mark.parametrize(
    "wrong",
    [{"wait": "x"}, {"wait": -1}, {"max_lifetime": "y"}, {"on_lost": "raise"}, {"ttl": 0},
     {"owner": "me"}],
    ids=str,
)  # fmt: skip
def test_invalid_argument_of_lock_is_refused_at_once(
    servers: Servers, lock_over: Locks, wrong: dict[str, Any]
) -> None:
    redlock = lock_over(servers)
    (name,) = wrong
    with pytest.raises(ConfigurationError, match=name), redlock.lock("r", **wrong):
        pass
    assert redlock.holder("r") is None


@pytest.mark.parametrize("resource", ["", None, 5, b"r"])
def test_invalid_argument_of_acquire_extend_or_release_is_refused_at_once(
    servers: Servers, lock_over: Locks, resource: Any
) -> None:
    redlock = lock_over(servers)
    with pytest.raises(ConfigurationError, match="a resource is a name"):
        redlock.acquire(resource)
    with pytest.raises(ConfigurationError, match="wait"):
        redlock.acquire("r", wait=True)
    for method in (redlock.extend, redlock.release):
        with pytest.raises(ConfigurationError, match="not a Lease"):
            method(resource)


@pytest.mark.parametrize("options", [{"shared": True}, {"limit": 2}, {}], ids=str)
def test_lock_object_that_a_thread_uses_is_refused_in_another(
    make: Locks, admins: list[redis.Redis], options: dict[str, Any]
) -> None:
    """It has the state of one lease: the first exit would release the lease of the second block."""
    lock = make(ttl=2.0)
    shared = lock.lock("one", wait=5.0, **options)
    refused: list[RedlockError] = []

    def enter() -> None:
        for way in (shared.__enter__, shared.acquire):
            with pytest.raises(RedlockError, match="make one for each use") as caught:
                way()
            refused.append(caught.value)

    with shared as lease:
        thread = threading.Thread(target=enter)
        thread.start()
        thread.join(10)
        assert len(refused) == 2
        lease.ensure()
        with pytest.raises(RedlockError, match="in use already"):
            shared.acquire()
    assert not any(client.keys("redlock:one*") for client in admins[:2])
    thread = threading.Thread(target=lambda: shared.__enter__().release())
    thread.start()
    thread.join(10)
    with shared:  # it may be used again, by any thread
        pass


def test_threads_that_enter_one_lock_object_at_once_never_overlap(make: Locks) -> None:
    lock = make(ttl=2.0)
    shared, inside, entered, refused = lock.lock("one", wait=5.0), [0], [], []

    def enter() -> None:
        for _ in range(200):
            try:
                with shared as lease:
                    inside[0] += 1
                    assert inside[0] == 1
                    lease.ensure()
                    inside[0] -= 1
                    entered.append(1)
            except RedlockError as error:
                assert "make one for each use" in str(error)
                refused.append(1)

    threads = [threading.Thread(target=enter) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(entered) + len(refused) == 800 and refused
    assert lock.try_acquire("one") is not None


async def test_lock_object_that_a_coroutine_uses_is_refused_in_another(servers: Servers) -> None:
    async with AsyncRedlock([servers[0].url], ttl=2.0) as lock:
        shared = lock.lock("one", wait=5.0)

        async def enter() -> None:
            with pytest.raises(RedlockError, match="make one for each use"):
                await shared.__aenter__()

        async with shared as lease:
            await asyncio.create_task(enter())
            lease.ensure()
        async with shared:
            pass
