"""A client leaves a master as soon as a Sentinel names another, although the old one still answers.

The Sentinels are puppets here, so that each test chooses what they say and when.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import redis

from celery_redlock import AsyncRedlock, NotAcquired, QuorumUnavailable, Redlock
from celery_redlock.protocol.names import TRUSTED_KEY
from celery_redlock.runtime.clock import monotonic
from celery_redlock.server import start_servers
from celery_redlock.stores.redis.master_watch import SEEK_S
from tests.support.names import Patch
from tests.support.sentinels import SERVICE, Puppet
from tests.support.wait import wait_until

TTL = 1.0
WATCH = "celery_redlock.stores.redis.master_watch"


@pytest.fixture(scope="module")
def masters() -> Iterator[tuple[int, int]]:
    """The ports of a master, and of its replica that has been promoted; both answer."""
    config = ("--repl-diskless-sync-delay", "0")
    with start_servers(2, config=config) as (old, new), redis.Redis(port=new.port) as client:
        client.replicaof("127.0.0.1", old.port)
        wait_until(lambda: client.info("replication")["master_link_status"] == "up", 20, "a copy")
        client.replicaof("NO", "ONE")
        yield old.port, new.port


@pytest.fixture
def sentinels(masters: tuple[int, int]) -> Iterator[list[Puppet]]:
    """Two Sentinels that name the old master."""
    with ExitStack() as stack:
        yield [stack.enter_context(Puppet(masters[0])) for _ in range(2)]


@pytest.fixture
def ours(sentinels: list[Puppet]) -> Iterator[Redlock]:
    """A client that has been granted locks by the old master, and has the Sentinels' ear."""
    hosts = ",".join(f"127.0.0.1:{sentinel.port}" for sentinel in sentinels)
    url = f"sentinel://{hosts}/{SERVICE}?socket_connect_timeout=10"
    with contextlib.closing(Redlock([url], ttl=TTL, restart_guard="auto")) as redlock:
        wait_until(lambda: granted(redlock), 20, "the old master has a vote")
        for sentinel in sentinels:
            wait_until(lambda one=sentinel: one.subscribers, 10, "it has subscribed")
        yield redlock


def granted(redlock: Redlock) -> bool:
    with contextlib.suppress(NotAcquired):
        redlock.release(redlock.acquire("r"))
        return True
    return False


def asks(redlock: Redlock) -> int:
    """Return the port of the master that it asks."""
    granted(redlock)
    (node,) = redlock.client.driver.nodes
    return int(node.connection.port) if node.connection else 0


def test_idle_client_leaves_the_old_master_before_it_asks_it_again(
    masters: tuple[int, int], sentinels: list[Puppet], ours: Redlock, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(f"{WATCH}.SEEK_S", 0.0)  # as if idle long
    monkeypatch.setattr(f"{WATCH}.REST_S", 10.0)  # the machine may be busy
    with redis.Redis(port=masters[0]) as old:
        sentinels[1].switch(masters[1])
        sentinels[1].announce()
        time.sleep(0.2)  # idle; the announcement has arrived
        sentinels[1].delay = 0.2  # the other one's older word comes first
        old.config_resetstat()
        wait_until(lambda: asks(ours) == masters[1], 20, "it asks the new master")
        assert "cmdstat_set" not in old.info("commandstats")


def test_coroutine_leaves_the_old_master_before_it_asks_it_again(
    masters: tuple[int, int], sentinels: list[Puppet], ours: Redlock
) -> None:
    async def leaves() -> None:
        url = f"sentinel://127.0.0.1:{sentinels[0].port}/{SERVICE}"
        async with AsyncRedlock([url], ttl=TTL, restart_guard="auto") as redlock:
            lease = await redlock.acquire("of a coroutine", wait=20)  # for its vote
            await asyncio.sleep(0.2)  # it has subscribed
            assert await redlock.release(await redlock.extend(lease))
            sentinels[0].switch(masters[1])
            sentinels[0].announce()
            await asyncio.sleep(0.2)
            why = ""
            while "was a replica" not in why:  # on a busy machine it may be silent at first
                with pytest.raises(QuorumUnavailable) as refusal:
                    await redlock.acquire("of a coroutine")
                why = str(refusal.value)

    asyncio.run(leaves())


def test_client_that_slept_over_a_failover_has_a_vote_as_soon_as_the_others(
    masters: tuple[int, int], sentinels: list[Puppet], ours: Redlock
) -> None:
    mark = f"redlock:{TRUSTED_KEY}"
    with redis.Redis(port=masters[1]) as new:
        new.delete(mark)
        for sentinel in sentinels:
            sentinel.switch(masters[1])
            sentinel.announce()
        url = f"sentinel://127.0.0.1:{sentinels[0].port}/{SERVICE}"
        with contextlib.closing(Redlock([url], ttl=TTL, restart_guard="auto")) as other:
            wait_until(lambda: granted(other) and new.exists(mark), 20, "it has its vote, marked")
    wait_until(lambda: asks(ours) == masters[1], 20, "it asks the new master")
    (node,) = ours.client.driver.nodes
    assert not node._trust.doubt(monotonic())


def test_announcement_about_another_service_changes_nothing(
    masters: tuple[int, int], sentinels: list[Puppet], ours: Redlock
) -> None:
    (node,) = ours.client.driver.nodes
    before = node.connection
    for service in ("other", SERVICE + "2"):
        sentinels[0].announce(service)
    time.sleep(0.2)
    assert granted(ours) and node.connection is before


def test_unannounced_switch_is_noticed_when_a_sentinel_is_back(
    masters: tuple[int, int], sentinels: list[Puppet], ours: Redlock
) -> None:
    sentinels[1].hang_up()
    sentinels[1].switch(masters[1])
    wait_until(lambda: asks(ours) == masters[1], 10 * SEEK_S, "it asks the new master")


def test_sentinel_that_allows_no_subscription_is_asked_once_a_second(
    masters: tuple[int, int], sentinels: list[Puppet], ours: Redlock
) -> None:
    for sentinel in sentinels:
        sentinel.allows = False
        sentinel.hang_up()
    begun, before = time.monotonic(), sentinels[0].greeted
    wait_until(lambda: asks(ours) and sentinels[0].greeted > before + 1, 10, "it was asked")
    sentinels[1].switch(masters[1])
    wait_until(lambda: asks(ours) == masters[1], 10 * SEEK_S, "it asks the new master")
    assert sentinels[0].greeted - before <= (time.monotonic() - begun) / SEEK_S + 2


def test_newest_configuration_of_several_sentinels_counts(
    masters: tuple[int, int], sentinels: list[Puppet]
) -> None:
    sentinels[1].switch(masters[1])
    for first in (0, 1):
        hosts = ",".join(f"127.0.0.1:{sentinels[n].port}" for n in (first, 1 - first))
        url = f"sentinel://{hosts}/{SERVICE}"
        with contextlib.closing(Redlock([url], ttl=TTL, restart_guard="auto")) as redlock:
            redlock.connect()
            assert asks(redlock) == masters[1]


def test_client_without_any_sentinel_goes_on_with_its_master(
    masters: tuple[int, int], sentinels: list[Puppet], ours: Redlock
) -> None:
    for sentinel in sentinels:
        sentinel.__exit__()
    ends = time.monotonic() + 1.5 * SEEK_S
    while time.monotonic() < ends:
        assert granted(ours)
        time.sleep(0.05)
    assert asks(ours) == masters[0]
