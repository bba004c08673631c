"""A coroutine that is cancelled where it waits, wherever that is, leaves nothing behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import redis

from celery_redlock import AsyncRedlock
from celery_redlock.protocol.names import TRUSTED_KEY
from celery_redlock.server import LocalServer, start_servers
from tests.support.steps_async import cancelled_at

pytestmark = pytest.mark.usefixtures("never_by_itself")

TTL = 60.0
TRIES = 200
"""Waits of one operation; no operation has so many."""


@pytest.fixture(params=[False, True], ids=["at_once", "as_it_ends"])
def late(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(scope="module")
def servers() -> Iterator[list[LocalServer]]:
    with start_servers(3) as three:
        yield three


@asynccontextmanager
async def another(servers: list[LocalServer]) -> AsyncIterator[AsyncRedlock]:
    async with AsyncRedlock([s.url for s in servers], ttl=TTL, node_timeout=5.0) as redlock:
        yield redlock


def left_on(admins: list[redis.Redis]) -> list[list[str]]:
    return [[key for key in admin.scan_iter() if TRUSTED_KEY not in key] for admin in admins]


async def until(predicate: Callable[[], Any], what: str) -> None:
    deadline = asyncio.get_running_loop().time() + 20.0
    while not predicate():
        assert asyncio.get_running_loop().time() < deadline, what
        await asyncio.sleep(0.002)


async def nothing_is_left(redlock: AsyncRedlock, admins: list[redis.Redis]) -> None:
    """Wait until no key, waiter, claim or pending request is left."""
    await until(lambda: left_on(admins) == [[]] * len(admins), f"{left_on(admins)} is left")
    client: Any = redlock.client
    assert not client.claims and not client.watchdog.schedule.watched
    sleeping = [one for one in client.driver._poll._sleeping if isinstance(one, asyncio.Event)]
    assert not client.wakeup._waiters and not sleeping
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def block(redlock: AsyncRedlock) -> None:
    async with redlock.lock("r", fencing=False), redlock.lock(["r", "s"]) as held:
        held.ensure()
    async with redlock.lock("r", limit=3), redlock.lock("s", limit=2):
        pass


async def test_async_block_cancelled_at_any_wait_leaves_nothing(
    servers: list[LocalServer], admins: list[redis.Redis], late: bool
) -> None:
    async with another(servers) as redlock:
        await redlock.holder("r")
        for number in range(1, TRIES):
            more = await cancelled_at(number, block(redlock), late=late)
            await nothing_is_left(redlock, admins)
            if not more:
                break
    assert 4 < number < TRIES - 1


async def test_async_block_cancelled_while_it_connects_leaves_nothing(
    servers: list[LocalServer], admins: list[redis.Redis], late: bool
) -> None:
    for number in range(1, TRIES):
        async with another(servers) as redlock:
            more = await cancelled_at(number, block(redlock), late=late)
            await nothing_is_left(redlock, admins)
        if not more:
            break
    assert 4 < number < TRIES - 1


async def test_async_acquire_cancelled_at_any_wait_leaves_no_lease(
    servers: list[LocalServer], admins: list[redis.Redis], late: bool
) -> None:
    async with another(servers) as redlock:
        await redlock.holder("r")
        for number in range(1, TRIES):
            if not await cancelled_at(number, acquired(redlock, ["r", "s"]), late=late):
                break
            await nothing_is_left(redlock, admins)
        assert 1 < number < TRIES - 1
        assert await redlock.holder("r") is not None, "the one that was not cancelled"


async def acquired(redlock: AsyncRedlock, resource: str | list[str], wait: float = 0.0) -> None:
    await redlock.acquire(resource, wait=wait)


async def test_async_release_cancelled_at_any_wait_has_been_made(
    servers: list[LocalServer], admins: list[redis.Redis], late: bool
) -> None:
    async with another(servers) as redlock:
        for number in range(1, TRIES):
            held = await redlock.acquire("r")
            more = await cancelled_at(number, released(redlock, held), late=late)
            await nothing_is_left(redlock, admins)
            if not more:
                break
        assert 1 < number < TRIES - 1


async def released(redlock: AsyncRedlock, held: Any) -> None:
    await redlock.release(held)


@pytest.mark.parametrize("resource", ["r", ["r", "s"]], ids=["one", "several"])
async def test_async_waiter_cancelled_at_any_wait_leaves_the_queue_and_wakes_the_next(
    servers: list[LocalServer], admins: list[redis.Redis], resource: Any, late: bool
) -> None:
    """Another waiter stands behind it, and only this one or the holder can wake that."""
    async with another(servers) as redlock, another(servers) as next_one:
        for other in (redlock, next_one):
            client: Any = other.client
            await other.connect()
            with client.wakeup.waiter():
                await until(lambda: len(client.wakeup._listening) == len(servers), "it hears")  # noqa: B023
        for number in range(1, TRIES):
            holder = await next_one.acquire("r")
            stepped = cancelled_at(number, waited(redlock, resource), late=late)
            first = asyncio.create_task(stepped)
            await until(lambda: standing(first) == in_line(admins), "the first waits")  # noqa: B023
            second = asyncio.create_task(waited(next_one, "r"))
            both = lambda: standing(first, second)  # noqa: B023, E731
            await until(lambda: both() == in_line(admins), "the second waits")  # noqa: B023
            await next_one.release(holder)
            more = await asyncio.wait_for(first, 20.0)
            await asyncio.wait_for(second, 20.0)
            await nothing_is_left(redlock, admins)
            if not more:
                break
        assert 3 < number < TRIES - 1


def standing(*tasks: asyncio.Task[Any]) -> list[int]:
    return [sum(not task.done() for task in tasks)] * 3


async def waited(redlock: AsyncRedlock, resource: Any) -> None:
    async with redlock.lock(resource, wait=30.0):
        pass


def in_line(admins: list[redis.Redis]) -> list[int]:
    return [int(admin.zcard("redlock:r#line")) for admin in admins]  # type: ignore[arg-type]


@pytest.mark.parametrize("connected", [True, False])
async def test_async_block_cancelled_while_nodes_hang_ends_at_once_and_is_undone_later(
    servers: list[LocalServer], admins: list[redis.Redis], connected: bool
) -> None:
    async with another(servers) as redlock:
        if connected:
            await redlock.holder("r")
        for server in servers:
            server.pause()
        try:
            task = asyncio.create_task(block(redlock))
            await asyncio.sleep(0)
            assert redlock.client.claims, "it has asked, or waits for a connection"
            task.cancel()
            waits = 0
            while not task.done():
                waits += 1
                await asyncio.sleep(0)
            assert task.cancelled() and waits < 5
        finally:
            for server in servers:
                server.resume()
        await nothing_is_left(redlock, admins)
