"""A release without a wait for its answers, as at the end of a task in a pool child.

It is written at once, and registered with a supervisor until a quorum has answered.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from celery_redlock import HeldLease, Redlock
from celery_redlock.keepalive.shared_table import SharedLeaseTable
from celery_redlock.keepalive.supervisor import LeaseSupervisor
from celery_redlock.stores.driver import Driver
from celery_redlock.stores.redis.address import parse_nodes
from tests.support.names import Servers
from tests.support.nodes import all_connected, supervised_table, tokens
from tests.support.proxy import Proxy
from tests.support.wait import wait_until

PATIENCE_S = 3.0
"""Seconds for which a release is waited for, where it is: more than a busy machine needs."""


@pytest.fixture
def table() -> SharedLeaseTable:
    return supervised_table(3)


@pytest.fixture
def proxies(servers: Servers) -> Iterator[list[Proxy]]:
    with ExitStack() as stack:
        yield [stack.enter_context(Proxy(server.port)) for server in servers[:3]]


@pytest.fixture
def held(proxies: list[Proxy], table: SharedLeaseTable) -> Iterator[HeldLease]:
    redlock = Redlock([proxy.url for proxy in proxies], ttl=60.0, node_timeout=PATIENCE_S)
    redlock.client.registry.table = table
    all_connected(redlock)
    held = redlock.lock("r")
    held.acquire()
    yield held
    for proxy in proxies:
        proxy.mode = "pass"
    redlock.close()


def registered(table: SharedLeaseTable) -> int:
    return sum(1 for block, _pid in table.blocks() for _record in table.records(block))


def release_in_no_time(held: HeldLease) -> None:
    began = time.monotonic()
    assert held.release(wait=False)
    assert time.monotonic() - began < PATIENCE_S / 2


def everywhere(servers: Servers) -> None:
    wait_until(lambda: tokens(servers[:3], "r") == 3, 10.0, "all nodes have it")


def test_unheard_release_is_read_soon_though_nothing_else_is_asked(
    held: HeldLease, servers: Servers, table: SharedLeaseTable
) -> None:
    everywhere(servers)
    for server in servers[:3]:
        server.pause()
    try:
        release_in_no_time(held)
        assert not held.release()  # by the next signal; it is released already
        assert registered(table) == 1
    finally:
        for server in servers[:3]:
            server.resume()
    wait_until(lambda: not registered(table), 10.0, "the answers are read")
    assert tokens(servers[:3], "r") <= 1  # of the last one nobody waits for an answer


def test_unheard_release_is_repeated_if_it_was_lost_with_its_connection(
    held: HeldLease, servers: Servers, proxies: list[Proxy]
) -> None:
    everywhere(servers)
    for proxy in proxies:
        proxy.mode = "deaf"
    release_in_no_time(held)
    for proxy in proxies:
        proxy.mode = "pass"
        proxy.reset()
    wait_until(lambda: not tokens(servers[:3], "r"), 10.0, "it is free")


def test_unheard_release_is_read_by_the_next_acquire(
    held: HeldLease, table: SharedLeaseTable
) -> None:
    client = held.redlock.client
    client.watchdog.close()  # nobody else reads
    held.release(wait=False)
    held.acquire()
    assert not client.unread
    assert registered(table) == 1
    held.release()


def test_unheard_release_of_a_process_that_dies_is_made_by_a_supervisor(
    held: HeldLease, servers: Servers, proxies: list[Proxy], table: SharedLeaseTable
) -> None:
    """All requests that the process wrote are lost."""
    held.release()
    ours, its = socket.socketpair()
    child = os.fork()
    if child == 0:
        try:
            lease = all_connected(held.redlock).lock("r")
            lease.acquire()
            its.send(b"held")
            its.recv(1)
            lease.release(wait=False)
            its.send(b"released")
            signal.pause()
        finally:
            os._exit(1)
    assert ours.recv(10) == b"held"
    everywhere(servers)
    for proxy in proxies:
        proxy.mode = "deaf"
    ours.send(b"!")
    assert ours.recv(10) == b"released"
    os.kill(child, signal.SIGKILL)
    driver = Driver(parse_nodes([server.url for server in servers[:3]]), "redlock:")
    supervisor = LeaseSupervisor(table, driver, PATIENCE_S)
    try:
        driver.connect()
        wait_until(
            lambda: supervisor.run_once() or not tokens(servers[:3], "r"), 10.0, "it is free"
        )
    finally:
        driver.close()
        ours.close()
        its.close()
        os.waitpid(child, 0)


def test_release_with_a_mark_is_waited_for(
    held: HeldLease, servers: Servers, proxies: list[Proxy], table: SharedLeaseTable
) -> None:
    """The message is acknowledged next, which must not happen before its mark is set."""
    assert held.claim is not None
    held.claim.mark = ("done:r", 60.0)
    for proxy in proxies:
        proxy.mode, proxy.delay = "late", 0.2
    assert held.release(wait=False)
    assert not registered(table)


def test_release_without_a_supervisor_is_waited_for(held: HeldLease, proxies: list[Proxy]) -> None:
    held.release()
    held.redlock.client.registry.table = None
    held.acquire()
    for proxy in proxies:
        proxy.mode, proxy.delay = "late", 0.2
    held.release(wait=False)
    assert not held.redlock.client.unread
