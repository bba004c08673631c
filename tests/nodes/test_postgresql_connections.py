"""Connections to PostgreSQL: NOTIFY wakes waiters, and what becomes of those that end."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from celery_redlock import Redlock
from celery_redlock.protocol import quorum
from celery_redlock.protocol.values import Query
from celery_redlock.testing.postgresql import LocalPostgres
from tests.support import postgres
from tests.support.beside import Beside
from tests.support.machine import brief, in_time
from tests.support.wait import wait_until

WAITER = """
import sys
from celery_redlock import Redlock
from celery_redlock.locking import acquisition
acquisition.LOOK_AFTER_S = acquisition.RETRY_AFTER_S = (60.0, 60.0)  # never by itself
redlock = Redlock(sys.argv[1:], ttl=60.0, node_timeout=5.0, restart_guard="off")
with redlock.client.wakeup.waiter():
    while not redlock.client.wakeup._listening: pass
lease = redlock.acquire("r", wait=60.0)
print("granted", flush=True)
sys.stdin.readline()
redlock.release(lease)
"""


@pytest.fixture
def make(database: LocalPostgres, lock_over: Callable[..., Redlock]) -> Callable[[], Redlock]:
    return lambda: lock_over([database], ttl=60.0, node_timeout=5.0)


@pytest.fixture
def waiter(database: LocalPostgres) -> Iterator[Callable[[], Beside]]:
    """Starts a process that waits; it stands in the queue then."""
    with contextlib.ExitStack() as stack:

        def start() -> Beside:
            before = in_queue(database)
            process = stack.enter_context(Beside("-c", WAITER, database.url))
            wait_until(lambda: in_queue(database) == before + 1, 20.0, "it stands in the queue")
            return process

        yield start


def in_queue(database: LocalPostgres) -> int:
    ((count,),) = postgres.sql(database, "SELECT count(*) FROM redlock_waiter")
    return int(count)


def granted(process: Beside, since: float) -> None:
    assert process.line() == "granted"
    in_time(since, time.monotonic(), 1.0, "from the release to the grant")


def release(process: Beside) -> float:
    since = time.monotonic()
    process.tell("go on")
    return since


LISTENERS = """\
SELECT a.pid FROM pg_stat_activity a JOIN pg_locks l USING (pid)
WHERE l.locktype = 'advisory' AND l.granted"""


def test_waiter_whose_connection_was_killed_is_notified_over_the_next(
    make: Callable[[], Redlock],
    waiter: Callable[[], Beside],
    database: LocalPostgres,
) -> None:
    holder = make()
    lease = holder.acquire("r")
    process = waiter()
    (before,) = postgres.sql(database, LISTENERS)
    postgres.sql(database, "SELECT pg_terminate_backend(%s)", *before)
    wait_until(
        lambda: postgres.sql(database, LISTENERS) not in ([], [before]), 10.0, "it listens again"
    )
    wait_until(lambda: in_queue(database) == 1, 10.0, "and stands in the queue")
    since = time.monotonic()
    holder.release(lease)
    granted(process, since)


GREENLETS = """
from gevent import monkey
monkey.patch_all()
import sys, time
import gevent
from celery_redlock import QuorumUnavailable, Redlock
longest = 0.0
def watch():
    global longest
    while True:
        before = time.monotonic()
        gevent.sleep(0.01)
        longest = max(longest, time.monotonic() - before)
gevent.spawn(watch)
one, other = (Redlock([sys.argv[1]], ttl=10.0, restart_guard="off", node_timeout=5.0) for _ in "12")
def take(name):
    for _ in range(10):
        one.release(one.acquire(name, wait=30.0))
gevent.joinall([gevent.spawn(take, f"r{n % 3}") for n in range(10)], raise_error=True)
lease = one.acquire("r")
gevent.spawn_later(0.5, one.release, lease)
began = time.monotonic()
other.release(other.acquire("r", wait=9.0))
assert time.monotonic() - began < 5.0
print("pause", flush=True)
sys.stdin.readline()
try:
    one.acquire("r")
except QuorumUnavailable:
    pass
new = Redlock([sys.argv[1]], ttl=10.0, restart_guard="off")
try:
    new.acquire("r")
except QuorumUnavailable:
    pass
print(longest, flush=True)
"""


def test_greenlets_run_while_another_waits_for_postgresql(database: LocalPostgres) -> None:
    """It waits for an answer, a lock, a connection or a notification."""
    pytest.importorskip("gevent")
    with Beside("-c", GREENLETS, database.url) as process:
        assert process.line() == "pause"
        database.pause()
        release(process)
        begin = time.monotonic()
        longest = float(process.line())
        database.resume()
    brief(
        longest, 0.8, "a greenlet, where the shortest of these waits takes a second,", since=begin
    )


# -- Connections that end: during a request, in a fork, with their process


def test_postgresql_connection_that_breaks_while_written_to_is_a_silent_node(
    lock_over: Callable[..., Redlock],
) -> None:
    with postgres.start_postgres() as server:
        redlock = lock_over([server.url])
        redlock.connect()
        (node,) = redlock.client.driver.nodes
        with socket.socket(fileno=os.dup(node.fileno())) as stream:
            stream.shutdown(socket.SHUT_RDWR)
        # The second is written behind a first that could not be.
        peek = partial(quorum.peek, [Query(("r",), 1)], patience=0.2)
        assert [round_.silent for round_ in redlock.client.driver.run_all([peek] * 3)] == [1] * 3
        lease = redlock.acquire("r", wait=5.0)
        assert redlock.release(lease)


def test_fork_and_exit_without_close_cause_no_warning_of_psycopg() -> None:
    program = """
import gc, os, sys
from celery_redlock import Redlock
redlock = Redlock([sys.argv[1]])
lease = redlock.acquire("r")
(node,) = redlock.client.driver.nodes
connection = node.connection
child = os.fork()
if not child:
    gc.collect()
    os._exit(0)
os.waitpid(child, 0)
assert redlock.release(lease)
assert node.connection is connection  # the fork has not ended it
"""
    with postgres.start_postgres() as server:
        command = [sys.executable, "-W", "always::ResourceWarning", "-c", program, server.url]
        run = subprocess.run(command, capture_output=True, text=True, timeout=30.0, check=True)
        query = "SELECT FROM pg_stat_activity WHERE application_name = 'celery_redlock'"
        wait_until(lambda: not postgres.sql(server, query), 5.0, "its connection has ended")
    assert run.stderr == ""


def test_gevent_survives_a_connection_closed_while_another_greenlet_waits_for_it() -> None:
    """libev aborts the process where it watches a descriptor that was closed behind its back."""
    pytest.importorskip("gevent")
    program = """
from gevent import monkey
monkey.patch_all()
import sys, gevent
from celery_redlock import Redlock
redlock = Redlock([sys.argv[1]], ttl=5.0, restart_guard="off")
for _ in range(5):
    assert redlock.release(redlock.acquire("r", wait=5.0))
    (node,) = redlock.client.driver.nodes
    asking = gevent.spawn(redlock.try_acquire, "q")
    closing = gevent.spawn(node.close)  # both before the loop turns
    gevent.joinall([asking, closing], timeout=10.0)
"""
    with postgres.start_postgres() as server:
        command = [sys.executable, "-c", program, server.url]
        run = subprocess.run(command, capture_output=True, text=True, timeout=60.0)
    assert (run.returncode, "Assertion" in run.stderr) == (0, False), run.stderr
