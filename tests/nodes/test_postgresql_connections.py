"""Ends of connections to PostgreSQL: during a request, in a fork, with their process."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from functools import partial

import pytest

from celery_redlock import Redlock
from celery_redlock.protocol import quorum
from celery_redlock.protocol.values import Query
from tests.support import postgres
from tests.support.wait import wait_until


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
