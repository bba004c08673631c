"""A keeper over real nodes: what it extends, what it frees, and what it leaves alone."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import redis

from celery_redlock import HeldLease, Redlock
from celery_redlock.keepalive import supervisor
from celery_redlock.keepalive.shared_table import SharedLeaseTable
from celery_redlock.keepalive.supervisor import REPORT_AFTER_S, LeaseSupervisor
from celery_redlock.protocol.claim import Claim
from celery_redlock.runtime.clock import monotonic
from celery_redlock.stores.driver import Driver
from celery_redlock.stores.redis.address import parse_nodes
from tests.support.names import Log, Patch, Servers
from tests.support.nodes import supervised_table, tokens
from tests.support.wait import wait_until

TTL = 2.0
"""Seconds: long against what a busy machine makes us late by."""


@pytest.fixture
def table() -> SharedLeaseTable:
    return supervised_table(5)


@pytest.fixture
def redlock(servers: Servers, table: SharedLeaseTable) -> Iterator[Redlock]:
    redlock = Redlock([server.url for server in servers], ttl=TTL)
    redlock.client.registry.table = table
    yield redlock
    redlock.close()


@pytest.fixture
def keeper(servers: Servers, table: SharedLeaseTable) -> Iterator[LeaseSupervisor]:
    driver = Driver(parse_nodes([server.url for server in servers]), "redlock:")
    driver.connect()
    yield LeaseSupervisor(table, driver, 0.25)
    driver.close()


@pytest.fixture
def held(redlock: Redlock) -> Iterator[Callable[..., HeldLease]]:
    """A way to hold what this process does not extend, as if it were stopped.

    On all nodes: of those that are not connected in time, a first call takes none.
    """
    redlock.client.driver.connect(10.0, 10.0)
    leases = []

    def hold(resource: str, **options: float) -> HeldLease:
        lease = redlock.lock(resource, **options)
        lease.acquire()
        redlock.client.watchdog.drop(lease._known_claim())
        leases.append(lease)
        return lease

    yield hold
    for lease in leases:
        lease.release()


def work(keeper: LeaseSupervisor, seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        keeper.run_once()


def until_free(keeper: LeaseSupervisor, servers: Servers, resource: str = "r") -> None:
    wait_until(lambda: keeper.run_once() or tokens(servers, resource) == 0, 10.0, "it is free")


def test_supervisor_extends_unattended_leases_and_leaves_others_alone(
    keeper: LeaseSupervisor,
    held: Callable[..., HeldLease],
    servers: Servers,
    table: SharedLeaseTable,
) -> None:
    """Both kinds side by side; halfway, a new supervisor takes over from one that has ended."""
    lease, short = held("r"), held("short", max_lifetime=TTL)
    released, kept = held("released"), held("kept")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(table, "unregister", lambda claim: None)
        assert released.release()
        assert kept.keep(60.0)
        work(keeper, 1.2 * TTL)  # by then they live by what the first was acknowledged
        assert tokens(servers, "released") == 0  # it sets nothing again
        work(LeaseSupervisor(table, keeper._driver, 0.25), 1.2 * TTL)
    assert tokens(servers, "r") >= 3  # one that was late once is not set again
    assert not lease.lost
    assert lease.remaining() > 0.3 * TTL
    assert short.lost  # no further than its maximum lifetime
    assert tokens(servers, "short") == tokens(servers, "released") == 0
    with redis.Redis(port=servers[0].port) as client:
        assert client.pttl("redlock:kept") > 50_000  # nor does it shorten what is left locked


def test_unanswered_attempt_is_not_reported_as_lost_by_the_supervisor(
    keeper: LeaseSupervisor, redlock: Redlock, caplog: Log
) -> None:
    redlock.client.registry.table.register(Claim(("r",), "a token", TTL, 5))
    work(keeper, 2 * REPORT_AFTER_S)
    assert caplog.records == []


def test_supervisor_goes_on_while_a_minority_is_stopped(
    keeper: LeaseSupervisor, held: Callable[..., HeldLease], servers: Servers
) -> None:
    lease = held("r")
    servers[0].pause()
    servers[1].kill()
    work(keeper, 1.5 * TTL)
    assert not lease.lost


def test_supervisor_reports_a_deleted_lock_if_its_holder_is_silent(
    keeper: LeaseSupervisor, held: Callable[..., HeldLease], servers: Servers, caplog: Log
) -> None:
    lease = held("r")
    for server in servers[:3]:
        with redis.Redis(port=server.port) as client:
            client.set("redlock:r", "a thief", px=20_000)
    work(keeper, TTL + 1.0)
    said = [record for record in caplog.records if record.levelname == "ERROR"]
    assert len(said) == 1  # said once
    assert "lost the lock r held by pid" in said[0].getMessage()
    assert lease.lost


@pytest.mark.parametrize("wakes", [True, False])
def test_lease_forgotten_by_a_quorum_is_lost_only_at_its_deadline(
    keeper: LeaseSupervisor,
    redlock: Redlock,
    held: Callable[..., HeldLease],
    servers: Servers,
    monkeypatch: Patch,
    caplog: Log,
    wakes: bool,
) -> None:
    """Until then its holder may set its token again.

    If that is stopped, the loss is logged once.
    """
    claim = held("r", ttl=30.0)._known_claim()
    until, began, passed = claim.deadline, monotonic(), 0.0
    monkeypatch.setattr(supervisor, "monotonic", lambda: monotonic() + passed)
    monkeypatch.setattr(supervisor, "LATE", 1.0)  # it asks at once
    for server in servers[:3]:
        with redis.Redis(port=server.port) as client:
            client.flushall()

    def is_refused() -> bool:
        keeper.run_once()
        return any(known.lost for known in keeper._claims.values())

    wait_until(is_refused, 5.0, "it has asked")
    assert "has forgotten r" in caplog.text

    def said_at(moment: float) -> list[str]:
        """Look at that moment; return the errors of all looks."""
        nonlocal passed
        passed = moment - monotonic()
        keeper.run_once()
        return [one.getMessage() for one in caplog.records if one.levelname == "ERROR"]

    assert not said_at(began + 5.0)
    assert not said_at(began + 10.0)
    if wakes:
        claim.ttl = 60.0  # well beyond the moments below: only the supervisor's clock is shifted
        redlock.client.extended([claim], redlock.client.driver.extend([claim], 1.0))
    assert not said_at(until - 0.1)
    for moment in (until + REPORT_AFTER_S, until + 2 * REPORT_AFTER_S):
        assert len(said_at(moment)) == (0 if wakes else 1)


def test_lease_released_while_the_supervisor_extends_it_is_no_amnesia(
    keeper: LeaseSupervisor,
    held: Callable[..., HeldLease],
    servers: Servers,
    monkeypatch: Patch,
    caplog: Log,
) -> None:
    """The supervisor may be stopped for any time between its look and its request."""
    lease = held("r")
    run_all, rounds = keeper._driver.run_all, []

    def stopped_before(operations: list[Any]) -> Any:
        lease.release()
        rounds.extend(run_all(operations))
        return rounds

    monkeypatch.setattr(keeper._driver, "run_all", stopped_before)
    wait_until(lambda: keeper.run_once() or rounds, TTL, "it has come to extend")
    assert tokens(servers, "r") == 0
    work(keeper, 1.2 * TTL)
    assert caplog.text == ""


def kill(child: int) -> None:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


@contextmanager
def killed_while_away(
    keeper: LeaseSupervisor, redlock: Redlock, away: Servers, ttl: float = 30.0
) -> Iterator[int]:
    """Let the holder of "r" die while some nodes hang and have disconnected the supervisor."""
    child = child_that_holds(redlock, "r", ttl=ttl)
    work(keeper, 0.1)
    for server, node in zip(away, keeper._driver.nodes, strict=False):
        server.pause()
        node._drop("a connection that breaks", blame=False)
    kill(child)
    yield child
    for server in away:
        server.resume()


def child_that_holds(
    redlock: Redlock, *resources: str, ttl: float = 30.0, patience: float | None = None
) -> int:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            for resource in resources:
                lease = redlock.lock(resource, ttl=ttl)
                lease.acquire()
                if patience is not None:
                    until = time.monotonic() + patience
                    redlock.client.registry.in_pool_child = True
                    redlock.client.registry.patience(lease._known_claim(), until)
            os.write(writing, b"held")
            time.sleep(30)
        finally:
            os._exit(1)
    assert os.read(reading, 4) == b"held"
    os.close(reading)
    os.close(writing)
    return child


def test_locks_of_a_dead_process_are_freed_and_not_before(
    keeper: LeaseSupervisor,
    redlock: Redlock,
    servers: Servers,
    table: SharedLeaseTable,
    caplog: Log,
) -> None:
    child = child_that_holds(redlock, "r", "s")
    wait_until(lambda: tokens(servers, "s") == 5, 10.0, "the last nodes have it too")
    work(keeper, 0.3)
    assert [tokens(servers, resource) for resource in "rs"] == [5, 5]
    os.kill(child, signal.SIGKILL)  # it is not reaped: a zombie is dead
    until_free(keeper, servers)
    until_free(keeper, servers, "s")
    os.waitpid(child, 0)
    assert re.search(rf"freed r, which pid {child} on \S+ held when it died", caplog.text)
    assert list(table.blocks()) == []


def test_death_of_a_process_is_not_taken_for_that_of_a_new_one(
    keeper: LeaseSupervisor, redlock: Redlock, servers: Servers, table: SharedLeaseTable
) -> None:
    """The descriptor of the dead one is closed; that of the new one gets its number."""
    dead = child_that_holds(redlock, "r")
    work(keeper, 0.1)
    kill(dead)
    living = child_that_holds(redlock, "s")
    wait_until(lambda: tokens(servers, "s") == 5, 10.0, "the last nodes have it too")
    until_free(keeper, servers)
    work(keeper, 0.3)
    assert [pid for _block, pid in table.blocks()] == [living]
    assert tokens(servers, "s") == 5
    kill(living)
    until_free(keeper, servers, "s")


def test_unresponsive_pool_child_is_killed_and_its_lock_freed(
    keeper: LeaseSupervisor, redlock: Redlock, servers: Servers, caplog: Log
) -> None:
    patient = child_that_holds(redlock, "s", patience=60.0)
    deaf = child_that_holds(redlock, "r", patience=0.2)
    until_free(keeper, servers)
    assert os.waitpid(deaf, 0)[1] == signal.SIGKILL
    (said,) = [one.getMessage() for one in caplog.records if one.levelname == "ERROR"]
    assert said.startswith(f"killing process {deaf}: its work under the lock r held by pid {deaf}")
    work(keeper, 0.2)
    assert tokens(servers, "s") >= 3
    kill(patient)
    until_free(keeper, servers, "s")


def test_time_in_which_the_supervisor_was_stopped_is_no_silence_of_a_child(
    keeper: LeaseSupervisor, redlock: Redlock, servers: Servers, caplog: Log
) -> None:
    child = child_that_holds(redlock, "r", patience=0.0)
    keeper._looked = time.monotonic() - 60.0  # as if it had been stopped for a minute
    keeper.run_once()
    assert "killing" not in caplog.text
    keeper._away -= 60.0  # that is over
    until_free(keeper, servers)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL


def test_supervisor_that_is_late_at_every_look_kills_a_child_all_the_same(
    keeper: LeaseSupervisor, redlock: Redlock
) -> None:
    """On a busy machine each look is late, which must not count as a stop each time."""
    child = child_that_holds(redlock, "r", patience=0.1)

    def killed() -> bool:
        keeper.run_once()
        time.sleep(0.25)
        return os.waitpid(child, os.WNOHANG)[0] == child

    wait_until(killed, 5.0, "it is killed")


def test_nodes_that_were_away_get_the_release_of_a_dead_process(
    keeper: LeaseSupervisor, redlock: Redlock, servers: Servers
) -> None:
    with killed_while_away(keeper, redlock, servers[:2]):
        until_free(keeper, servers[2:])
    wait_until(lambda: tokens(servers, "r") == 0, 20.0, "all are free")


def test_release_of_a_dead_process_is_repeated_until_a_quorum_confirms_it(
    keeper: LeaseSupervisor,
    redlock: Redlock,
    servers: Servers,
    table: SharedLeaseTable,
    caplog: Log,
) -> None:
    """Such nodes have closed the connections of a supervisor that seldom asks them anything."""
    refused = "r cannot be freed yet"
    with killed_while_away(keeper, redlock, servers[:3]) as child:
        wait_until(lambda: keeper.run_once() or refused in caplog.text, 10.0, "too few answer")
        assert len(list(table.blocks())) == 1
    freed = f"freed r, which pid {child} on {socket.gethostname()} held when it died"
    wait_until(lambda: keeper.run_once() or freed in caplog.text, 20.0, "a quorum confirms it")
    assert tokens(servers, "r") == 0
    assert list(table.blocks()) == []
    assert [caplog.text.count(words) for words in (refused, freed)] == [1, 1]


def test_lock_of_a_dead_process_that_cannot_be_freed_is_dropped_after_its_ttl(
    keeper: LeaseSupervisor, redlock: Redlock, servers: Servers, table: SharedLeaseTable
) -> None:
    with killed_while_away(keeper, redlock, servers[:3], ttl=1.5):
        wait_until(lambda: keeper.run_once() or not list(table.blocks()), 20.0, "it is given up")
