"""One Redis behind Sentinels: a node whose address changes, and which may forget meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest
import redis
from celery import Celery
from redis.sentinel import Sentinel

from celery_redlock import (
    AsyncRedlock,
    ConfigurationError,
    Lease,
    NotAcquired,
    Redlock,
    ResourceHeld,
)
from celery_redlock.config.settings import read_settings
from celery_redlock.protocol.restart_guard import NEWS_S
from tests.support.sentinels import SERVICE, Watched, watched
from tests.support.wait import wait_until

TTL = 6.0
"""Longer than a failover takes here: half a second until it is noticed, and one or two more."""


@pytest.fixture
def service() -> Iterator[Watched]:
    with watched() as found:
        with client_of(found.url, TTL + 1.0) as later:  # an uptime is of whole seconds
            wait_until(lambda: not _refused(later), 3 * TTL, "the servers are up for a ttl")
        yield found


def client_of(node: Any, ttl: float = TTL) -> closing[Redlock]:
    return closing(Redlock([node], ttl=ttl, restart_guard="auto"))


def test_sentinel_url_and_client_find_the_same_master(service: Watched) -> None:
    with ExitStack() as stack:
        sentinel = Sentinel([("127.0.0.1", port) for port in service.ports])
        stack.callback(sentinel.close)
        made = stack.enter_context(sentinel.master_for(SERVICE))
        with client_of(service.url) as by_url, client_of(made) as by_client, by_url.lock("r"):
            with pytest.raises(ResourceHeld):
                by_client.acquire("r")
            with redis.Redis(port=service.master) as client:
                assert client.exists("redlock:r")
            assert asyncio.run(refused_to_a_coroutine(service.url))
        assert by_url.nodes == by_client.nodes


async def refused_to_a_coroutine(url: str) -> bool:
    async with AsyncRedlock([url], ttl=TTL, restart_guard="auto") as redlock:
        return await redlock.try_acquire("r") is None


def test_lock_is_held_through_a_failover_and_no_other_gets_it(service: Watched) -> None:
    old, new = service.servers
    with client_of(service.url) as ours, client_of(service.url) as theirs, ours.lock("r") as held:
        begun = held.lease.deadline
        old.kill()
        wait_until(
            lambda: _refused(theirs) and held.lease.deadline > begun + TTL / 2,
            2 * TTL,
            "it was extended at the new master",
        )
        wait_until(lambda: service.master == new.port, 10, "the first Sentinel knows, too")
        assert not held.lost


def test_lock_that_a_promoted_replica_never_received_is_not_granted_again(service: Watched) -> None:
    old, new = service.servers
    with client_of(service.url) as ours, client_of(service.url) as theirs:
        theirs.connect()
        new.pause()
        with redis.Redis(port=old.port) as client:
            client.client_kill_filter(_type="replica")  # or it would read of it when it goes on
        held = ours.lock("r")
        held.acquire()
        assert held.claim is not None
        ours.client.watchdog.drop(held.claim)  # its process hangs: nobody takes it back there
        old.kill()
        new.resume()
        while held.claim.held(time.monotonic()):
            assert _refused(theirs)
        held.release()
        assert service.master == new.port, "the failover was over before the lease was"
        wait_until(lambda: not _refused(theirs), 3 * TTL, "it is granted again, a span later")


def _refused(redlock: Redlock) -> bool:
    try:
        redlock.release(redlock.acquire("r"))
    except NotAcquired:
        return True
    return False


def test_node_without_a_sentinel_is_silent() -> None:
    silent = pytest.raises(NotAcquired, match="No master found for 'mymaster'")
    with client_of("sentinel://127.0.0.1:1/mymaster") as redlock, silent:
        redlock.acquire("r")


@pytest.mark.parametrize(
    ("url", "wrong"),
    [
        ("sentinel://127.0.0.1:26379", "ends with the name of the master"),
        ("sentinel://127.0.0.1:port/mymaster", "is not host:port"),
        ("sentinel:///mymaster", "is not host:port"),
    ],
)
def test_invalid_sentinel_url_is_refused_at_once(url: str, wrong: str) -> None:
    with pytest.raises(ConfigurationError, match=wrong):
        Redlock([url])


def test_broker_behind_sentinels_is_the_node() -> None:
    app = Celery("s", broker="sentinel://:pw@a:1/2;sentinel://b", set_as_current=False)
    app.conf.broker_transport_options = {
        "master_name": "m",
        "sentinel_kwargs": {"password": "hidden"},
    }
    assert read_settings(app).nodes == ["sentinel://:pw@a:1,b/m?db=2&sentinel_password=hidden"]


def test_broker_behind_sentinels_needs_the_name_of_its_master() -> None:
    app = Celery("s", broker="sentinel://a:1", set_as_current=False)
    with pytest.raises(ConfigurationError, match="master_name"):
        read_settings(app)


# -- A planned failover: the old master answers for ten seconds more

ROUNDS = 3


def tried(redlock: Redlock, resource: str) -> Lease | None:
    with contextlib.suppress(NotAcquired):
        return redlock.acquire(resource)
    return None


def asked(redlock: Redlock) -> int:
    (node,) = redlock.client.driver.nodes
    return int(node.connection.port) if node.connection else 0


def test_planned_failover_gives_no_lock_to_two_holders() -> None:
    with watched() as service:
        for number in range(ROUNDS):
            one_round(service, number)
            wait_until(service.ready, 60.0, "the old master is a replica", every=0.1)


def one_round(service: Watched, number: int) -> None:
    """Fail over; locks last granted by the old master are granted again only after their end."""
    before = service.master
    with contextlib.ExitStack() as stack:
        ours = stack.enter_context(client_of(service.url))
        wait_until(lambda: tried(ours, f"{number} first"), 60.0, "the master has a vote")
        with redis.Redis(port=service.ports[0]) as sentinel:
            sentinel.execute_command("SENTINEL", "FAILOVER", SERVICE)
        last, name, theirs, switched = None, "", None, 0.0
        for attempt in range(1_000_000):
            if theirs is None and service.master != before:
                theirs = stack.enter_context(client_of(service.url))
                switched = time.monotonic()
            if asked(ours) == before and (lease := tried(ours, f"{number} {attempt}")) is not None:
                # Its process hangs: nobody extends or releases it.
                ours.client.watchdog.drop(ours.client.claims[lease.token])
                last, name = lease, lease.resource
            if theirs is not None and tried(theirs, name):
                break
            assert time.monotonic() < (switched or time.monotonic()) + 60.0, "never granted again"
            time.sleep(0.01)
        assert last is not None and asked(theirs) != before
        assert last.remaining() == 0, f"two holders, one for another {last.remaining():.1f} s"
        news = last.deadline - TTL - switched
        assert news < NEWS_S, f"the old master was asked for {news:.1f} s after the switch"
