"""`AsyncRedlock` does among coroutines what `Redlock` does among threads, and with it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import redis

from celery_redlock import (
    AsyncRedlock,
    ConfigurationError,
    LeaseLost,
    RedlockError,
    ResourceHeld,
    current_lease,
)
from celery_redlock.locking import acquisition
from celery_redlock.testing import fake_redlock
from celery_redlock.testing.postgresql import LocalPostgres
from tests.support import postgres, stores
from tests.support.machine import in_time
from tests.support.stores import Servers
from tests.support.wait import wait_until

ROOT = Path(__file__).parents[3]
SHORT = 2.0
"""Ttl, in seconds, of a lock that ends or is extended in a test; a node then has 0.2 s."""

Make = Callable[..., Any]


@pytest.fixture(scope="module", params=["redis", "postgresql"])
def servers(request: pytest.FixtureRequest) -> Iterator[Servers]:
    with stores.start(request.param) as started:
        yield started


@pytest.fixture
def over(servers: Servers) -> Make:
    @asynccontextmanager
    async def made(**options: Any) -> AsyncIterator[AsyncRedlock]:
        async with AsyncRedlock([s.url for s in servers], **{"ttl": 20.0, **options}) as redlock:
            yield redlock

    return made


async def test_async_lease_is_acquired_extended_and_released_as_by_threads(
    over: Make, servers: Servers, lock_over: Make
) -> None:
    other = lock_over(servers)
    async with over() as redlock:
        lease = await redlock.acquire("r", ttl=5.0, fencing=True)
        assert lease.fencing_token
        assert await redlock.try_acquire("r") is None
        with pytest.raises(ResourceHeld):
            other.acquire("r")
        renewed = await redlock.extend(lease)
        assert renewed.deadline > lease.deadline
        holder = await redlock.holder("r")
        assert holder is not None and holder.nodes == len(servers)
        assert await redlock.release(renewed)
        assert not await redlock.release(renewed)
        assert await redlock.holder("r") is None
        with pytest.raises(LeaseLost):
            await redlock.extend(renewed)
        two = [await redlock.acquire("few", limit=2) for _ in range(2)]
        assert len(await redlock.holders("few", limit=2)) == 2
        with pytest.raises(ResourceHeld):
            await redlock.acquire("few", limit=2)
        for lease in two:
            await redlock.release(lease)
        async with redlock.lock(["a", "b"]) as held:
            assert other.try_acquire("b") is None
            assert current_lease() is held
            assert await held.keep(30.0)
        assert other.try_acquire("a") is None, "it is kept"


async def test_async_block_is_extended_by_the_loop_and_by_no_thread(over: Make) -> None:
    async with over(ttl=SHORT) as redlock:
        before = set(threading.enumerate())
        async with redlock.lock("r", wait=20.0) as held:
            first = held.lease.deadline
            while held.lease.deadline < first + SHORT:
                await asyncio.sleep(0.01)
            held.ensure()
            started = set(threading.enumerate()) - before
            assert not [thread for thread in started if "watchdog" in thread.name]
            assert asyncio.all_tasks() == {asyncio.current_task()}
        assert not redlock.client.watchdog.schedule.watched


async def test_async_block_is_shared_by_nested_blocks_and_keeps_other_tasks_out(
    over: Make,
) -> None:
    async with over() as redlock:
        async with redlock.lock("r") as outer:
            async with redlock.lock("r") as inner:
                assert inner is outer
            assert not outer.lost

            async def other() -> None:
                with pytest.raises(ResourceHeld):
                    async with redlock.lock("r"):
                        pass

            await asyncio.create_task(other())
        assert await redlock.holder("r") is None


async def test_async_waiter_is_woken_by_a_release_and_tries_at_no_other_time(
    over: Make, servers: Servers, lock_over: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acquisition, "LOOK_AFTER_S", (50.0, 50.0))
    monkeypatch.setattr(acquisition, "RETRY_AFTER_S", (50.0, 50.0))
    other = lock_over(servers)
    async with over() as redlock:
        client = redlock.client
        await redlock.connect(20.0)
        with client.wakeup.waiter():
            while len(client.wakeup._listening) < len(servers):
                await asyncio.sleep(0.002)
        for holder in (other, redlock):
            lease = await _result(holder.acquire("r"))
            waits = asyncio.create_task(redlock.acquire("r", wait=50.0))
            while in_line(servers) != [1] * len(servers):
                await asyncio.sleep(0.002)
            began = time.monotonic()
            await _result(holder.release(lease))
            granted = await waits
            in_time(began, time.monotonic(), 1.0, "from the release to the grant")
            await redlock.release(granted)


async def _result(found: Any) -> Any:
    return await found if asyncio.iscoroutine(found) else found


def in_line(servers: Servers) -> list[int]:
    lengths = []
    for server in servers:
        if isinstance(server, LocalPostgres):
            ((length,),) = postgres.sql(server, "SELECT count(*) FROM redlock_waiter")
        else:
            with redis.Redis(port=server.port) as client:
                length = client.zcard("redlock:r#line")
        lengths.append(int(length))
    return lengths


def test_coroutines_of_two_loops_and_threads_never_overlap_on_one_key(
    over: Make, servers: Servers, lock_over: Make
) -> None:
    inside: list[object] = []
    overlaps = done = 0

    def enter(who: object) -> None:
        nonlocal overlaps
        inside.append(who)
        overlaps += len(inside) > 1

    def leave(who: object) -> None:
        nonlocal done
        inside.remove(who)
        done += 1

    async def turn(redlock: AsyncRedlock, who: object) -> None:
        for _ in range(4):
            async with redlock.lock("hot", wait=60.0) as lease:
                enter(who)
                await asyncio.sleep(0.001)
                lease.ensure()
                leave(who)

    async def loop(first: bool) -> None:
        async with over() as redlock:
            await asyncio.gather(*[turn(redlock, (first, n)) for n in range(15)])

    def thread(number: int) -> None:
        for _ in range(4):
            with redlock.lock("hot", wait=60.0) as lease:
                enter(number)
                time.sleep(0.001)
                lease.ensure()
                leave(number)

    redlock = lock_over(servers)
    threads = [threading.Thread(target=thread, args=(number,)) for number in range(5)]
    threads += [threading.Thread(target=asyncio.run, args=(loop(n == 0),)) for n in range(2)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(120.0)
    assert (done, overlaps) == (4 * (5 + 2 * 15), 0)


async def test_loop_blocked_for_longer_than_the_ttl_loses_the_lease_and_logs_it(
    over: Make, servers: Servers, lock_over: Make, caplog: pytest.LogCaptureFixture
) -> None:
    other = lock_over(servers)
    told: list[tuple[Any, Any]] = []

    def in_loop() -> bool:
        return asyncio.get_running_loop().is_running()

    async with over(ttl=SHORT) as redlock:
        lock = redlock.lock("r", wait=20.0, on_lost=lambda lease: told.append((lease, in_loop())))
        async with lock as held:
            wait_until(lambda: other.holder("r") is None, 20.0, "the ttl ends: the loop stands")
            assert held.lost
            with pytest.raises(LeaseLost) as loss:
                held.ensure()
            assert loss.value.reason == "expired"
            while not told:
                await asyncio.sleep(0.002)
            lease = other.acquire("r")
        assert other.release(lease), "what was lost is not released"
    assert told == [(told[0][0], True)]
    assert "lost the lock r" in caplog.text


async def test_sidecar_extends_leases_while_the_loop_is_blocked(
    over: Make, servers: Servers, lock_over: Make
) -> None:
    other = lock_over(servers)
    async with over(ttl=SHORT, keeper="process") as redlock:
        kept, until = False, time.monotonic() + 30.0
        while not kept and time.monotonic() < until:  # the process takes its time to start
            async with redlock.lock("r", wait=20.0) as held:
                begun = time.monotonic()
                kept = True
                while kept and time.monotonic() < begun + 1.5 * SHORT:  # the loop stands
                    kept = other.holder("r") is not None
                kept = kept and not held.lost
        redlock._threads.close()  # the process
        assert kept and other.holder("r") is None


def test_async_redlock_made_at_import_serves_one_loop_after_the_other(
    servers: Servers, lock_over: Make
) -> None:
    redlock = AsyncRedlock([server.url for server in servers])
    clients = []

    async def main() -> None:
        async with redlock.lock("r"):
            clients.append(redlock.client)

    for _ in range(3):
        asyncio.run(main())
    assert len(set(map(id, clients))) == 3
    assert all(node.connection is None for client in clients for node in client.driver.nodes)


def test_invalid_use_of_async_redlock_is_refused_where_it_is_written(servers: Servers) -> None:
    redlock = AsyncRedlock([server.url for server in servers])

    async def later(_lease: object) -> None: ...

    with pytest.raises(ConfigurationError, match="not the coroutine function"):
        redlock.lock("r", on_lost=later)
    with pytest.raises(ConfigurationError, match="ttl"):
        AsyncRedlock([server.url for server in servers], ttl=-1.0)
    with pytest.raises(RedlockError, match="needs `async with`"), redlock.lock("r"):
        pass
    with pytest.raises(RedlockError, match="needs a running event loop"):
        redlock.acquire("r").send(None)

    async def wrong() -> None:
        with pytest.raises(ConfigurationError, match="wait"):
            await redlock.acquire("r", wait=-1.0)

    asyncio.run(wrong())


FORKED = """
import asyncio, os, sys
from celery_redlock import AsyncRedlock, Redlock

redlock = AsyncRedlock(sys.argv[1:], ttl=20.0, restart_guard="off", node_timeout=5.0)

async def child():
    assert await redlock.try_acquire("r") is None, "its parent holds it"
    async with redlock.lock("other"):
        pass

async def main():
    async with redlock.lock("r") as held:
        if (pid := os.fork()) == 0:
            assert held.lost, "a child holds nothing of its parent"
            asyncio.set_event_loop(None)
            asyncio.events._set_running_loop(None)
            asyncio.run(child())
            os._exit(0)
        _, status = await asyncio.to_thread(os.waitpid, pid, 0)
        assert status == 0, status
        held.ensure(5.0)
        await held.release()
        assert await redlock.holder("r") is None

asyncio.run(main())
"""

ENDS = """
import asyncio, sys
from celery_redlock import AsyncRedlock

redlock = AsyncRedlock(sys.argv[1:], ttl=20.0, restart_guard="off", node_timeout=5.0)

async def hold(started):
    async with redlock.lock("r"):
        started.set()
        await asyncio.sleep(3600)

async def wait():
    async with redlock.lock("r", wait=60.0):
        raise SystemExit("it was freed before its holder was cancelled")

async def main():
    started = asyncio.Event()
    tasks = [asyncio.create_task(hold(started)), asyncio.create_task(wait())]
    await started.wait()
    while not redlock.client.wakeup._waiters:
        await asyncio.sleep(0.01)

asyncio.run(main())  # which cancels both
"""


@pytest.mark.parametrize("program", [FORKED, ENDS], ids=["forked", "cancelled_by_the_end"])
def test_asyncio_program_ends_without_a_warning_and_leaves_no_lock(
    servers: Servers, lock_over: Make, program: str
) -> None:
    command = [sys.executable, "-W", "error", "-c", program, *(server.url for server in servers)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")
    other = lock_over(servers)
    assert other.holder("r") is None
    assert in_line(servers) == [0] * len(servers)


async def test_async_redlock_works_over_the_fakes_in_memory(servers: Servers) -> None:
    redlock = AsyncRedlock([server.url for server in servers], ttl=20.0)
    with fake_redlock() as nodes:
        with nodes.hold("r"):
            assert await redlock.try_acquire("r") is None
            waits = asyncio.create_task(redlock.acquire("r", wait=50.0))
            await asyncio.sleep(0)
        await redlock.release(await waits)
        async with redlock.lock("s") as held:
            nodes.advance(100.0)
            held.ensure()
            nodes.steal("s")
            assert held.lost
    assert await redlock.holder("s") is None, "on the real nodes"
