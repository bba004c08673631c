"""`SENTINEL FAILOVER`: the old master answers for ten seconds more; no lock has two holders."""

from __future__ import annotations

import contextlib
import time

import redis

from celery_redlock import Lease, NotAcquired, Redlock
from celery_redlock.protocol.restart_guard import NEWS_S
from tests.support.sentinels import SERVICE, Watched, watched
from tests.support.wait import wait_until

TTL = 3.0
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

        def client() -> Redlock:
            made = Redlock([service.url], ttl=TTL, restart_guard="auto")
            return stack.enter_context(contextlib.closing(made))

        ours = client()
        wait_until(lambda: tried(ours, f"{number} first"), 60.0, "the master has a vote")
        with redis.Redis(port=service.ports[0]) as sentinel:
            sentinel.execute_command("SENTINEL", "FAILOVER", SERVICE)
        last, name, theirs, switched = None, "", None, 0.0
        for attempt in range(1_000_000):
            if theirs is None and service.master != before:
                theirs, switched = client(), time.monotonic()
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
