"""The driver of an event loop over scripted peers: what a coroutine gets, whatever the nodes do."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from celery_redlock.protocol import quorum
from celery_redlock.protocol.round import Round
from celery_redlock.stores.driver import BATCH, Driver
from tests.support.peer import DEADLINE, Line
from tests.support.peer_world import (
    SHORT,
    PeerWorld,
    a_claim,
    echo,
    echoing,
    mute,
    own,
    votes,
)
from tests.support.wait import wait_until


async def driver_over(world: PeerWorld, **options: Any) -> Driver:
    """Return a driver of this loop that is connected to all peers."""
    driver = world.loop_driver(asyncio.get_running_loop(), **options)
    await asyncio.to_thread(driver.connect, DEADLINE, DEADLINE)
    return driver


async def acquire(driver: Driver, name: str, patience: float = DEADLINE, token: str = "") -> Round:
    claim = a_claim(name, len(driver.nodes), token=token)
    return await driver.ask(lambda now: quorum.acquire(claim, now, patience))


async def until(condition: Callable[[], object], what: str) -> None:
    """Wait for a condition in the loop."""
    end = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < end, what
        await asyncio.sleep(0.001)


async def test_first_operation_of_a_loop_connects_without_blocking_it(world: PeerWorld) -> None:
    go = threading.Event()

    def slow(line: Line) -> None:
        assert go.wait(DEADLINE)
        peer.serve(line)

    peer = world.peer(slow)
    driver = world.loop_driver(asyncio.get_running_loop())
    asked = [asyncio.ensure_future(acquire(driver, name)) for name in "ab"]
    await until(lambda: peer.connections, "it connects")
    assert not any(task.done() for task in asked)
    go.set()
    assert [votes(await task) for task in asked] == [["yes"]] * 2
    assert peer.connections == 1


async def test_answer_to_a_cancelled_coroutine_is_not_taken_for_the_next_one(
    world: PeerWorld,
) -> None:
    go = threading.Event()

    def late(line: Line) -> None:
        first = line.request()
        assert go.wait(DEADLINE)
        line.send(echo(first))
        echoing(line)

    peer = world.peer(late)
    driver = await driver_over(world)
    cancelled = asyncio.ensure_future(acquire(driver, "cancelled"))
    await asyncio.to_thread(peer.next)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    following = asyncio.ensure_future(acquire(driver, "next"))
    await asyncio.sleep(0)
    go.set()
    assert own(await following)
    assert peer.connections == 1


async def test_loop_requests_larger_than_a_socket_takes_arrive_whole(world: PeerWorld) -> None:
    go = threading.Event()

    def lazy(line: Line) -> None:
        line.send(peer.answer(line.request()))
        assert go.wait(DEADLINE)
        peer.serve(line)

    peer = world.peer(lazy)
    driver = await driver_over(world)
    assert votes(await acquire(driver, "before")) == ["yes"]
    big = [a_claim(f"{n}:" + "x" * 15_000, token=str(n)) for n in range(2 * BATCH)]
    asked = asyncio.ensure_future(driver.ask(lambda now: quorum.extend(big, now, DEADLINE)))
    await until(lambda: driver.nodes[0].unsent, "the buffers are full")
    behind = asyncio.ensure_future(acquire(driver, "behind"))
    await asyncio.sleep(0)
    go.set()
    assert (await asked).confirmed() == big
    assert votes(await behind) == ["yes"]
    assert peer.connections == 1


async def test_result_of_an_operation_started_in_a_loop_needs_no_further_request(
    world: PeerWorld,
) -> None:
    world.peer()
    driver = await driver_over(world)
    claim = a_claim("r")
    await driver.ask(lambda now: quorum.acquire(claim, now, DEADLINE))
    done: list[Any] = []
    driver.start(lambda now: quorum.release(claim, now, DEADLINE), done.append)
    await until(lambda: done, "its answer was read")
    assert done[0].held
    assert done[0].confirmed


async def test_operation_started_in_a_loop_ends_without_answers_at_its_deadline(
    world: PeerWorld,
) -> None:
    world.peer(mute)
    driver = await driver_over(world)
    claim = a_claim("r")
    done: list[Any] = []
    driver.start(lambda now: quorum.release(claim, now, SHORT), done.append)
    assert not done
    await until(lambda: driver.read() and done, "it has ended")
    assert not done[0].confirmed


async def test_coroutine_waiting_for_answers_ends_when_the_driver_is_closed(
    world: PeerWorld,
) -> None:
    peer = world.peer(lambda line: line.request() and line.gone())
    driver = await driver_over(world)
    asked = asyncio.ensure_future(acquire(driver, "r"))
    await asyncio.to_thread(peer.next)
    begun = time.monotonic()
    driver.close()
    assert votes(await asked) == ["silent"]
    assert time.monotonic() - begun < DEADLINE / 2


def test_connection_made_after_the_loop_has_closed_harms_nothing(world: PeerWorld) -> None:
    go = threading.Event()

    def slow(line: Line) -> None:
        assert go.wait(DEADLINE)
        peer.serve(line)

    async def begin() -> Driver:
        driver = world.loop_driver(asyncio.get_running_loop())
        driver.connect(0)
        return driver

    peer = world.peer(slow)
    driver = asyncio.run(begin())
    go.set()
    wait_until(lambda: driver.nodes[0].channel.up, 5, "it is connected")
    driver.close(DEADLINE)
