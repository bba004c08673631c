"""The questions to a PostgreSQL server about itself, right after a connection to it was made."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

import psycopg
from psycopg import errors

from ...protocol.node_info import NodeInfo
from .address import reason
from .schema import VERSION

__all__ = ["BareConnection", "answering", "hang_up", "introduce", "pooled"]

ANSWER_S = 5.0
"""Seconds for the answer. libpq waits without a limit if a server sends nothing, or too slowly."""
ISOLATION = "read committed"
HELLO = """\
SELECT redlock_version(), pg_catalog.current_setting('transaction_isolation'), h.*
FROM redlock_hello() h"""
MAX_AGE_S = 10 * 365 * 86_400.0


def introduce(connection: psycopg.Connection[Any]) -> NodeInfo:
    """Query a server about itself.

    A database can only forget locks when it is promoted, or restored from a backup. Either changes
    its identity, so its age counts from that change, in place of a server's uptime.

    Raises:
        psycopg.Error: An error that its user cannot mend, or no answer in time.
    """
    try:
        with answering(connection):
            row = connection.execute(HELLO).fetchone()
    except (errors.UndefinedFunction, errors.UndefinedTable):
        return NodeInfo(unfit="its tables are missing; run celery redlock migrate")
    except errors.InsufficientPrivilege as error:
        why = reason(error)
        return NodeInfo(unfit=f"its user lacks a right ({why}); see docs/postgresql.md")
    version, isolation, identity, age = row or (0, "", "", 0.0)
    if version < VERSION:
        return NodeInfo(
            unfit=f"its tables are of version {version}, and this library wants {VERSION};"
            " run celery redlock migrate"
        )
    if isolation != ISOLATION:
        return NodeInfo(
            unfit=f"its default_transaction_isolation is {isolation!r} for this user, under which"
            f" a refused lock is an error; ALTER ROLE this_user SET"
            f" default_transaction_isolation = '{ISOLATION}'"
        )
    return NodeInfo(run_id=identity, uptime=min(float(age), MAX_AGE_S), role="master")


def pooled(connection: psycopg.Connection[Any]) -> bool:
    """Return True if a pooler is in front of it: a LISTEN may soon belong to another client."""
    (pid,) = connection.execute("SELECT pg_backend_pid()").fetchone() or (0,)
    return bool(pid != connection.pgconn.backend_pid)


@contextlib.contextmanager
def answering(connection: psycopg.Connection[Any]) -> Iterator[None]:
    """Close the connection if the server takes longer than `ANSWER_S` for the whole block."""
    end = threading.Timer(ANSWER_S, hang_up, [connection])
    end.daemon = True
    end.start()
    try:
        yield
    finally:
        end.cancel()


def hang_up(connection: psycopg.Connection[Any]) -> None:
    """End a connection that another thread may just be reading from. Never fails."""
    with (
        contextlib.suppress(Exception),
        socket.socket(fileno=os.dup(connection.fileno())) as stream,
    ):
        stream.shutdown(socket.SHUT_RDWR)


class BareConnection:
    """A connection of psycopg, with the name that all kinds have for its end."""

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self.pgconn = connection.pgconn
        # Of its own, to be watched: where gevent watches one that libpq closes, libev aborts the
        # process. It knows of those that Python's sockets close.
        self.fd = os.dup(self.pgconn.socket)
        # psycopg would warn of one that was not closed: in each fork, and where its owner ends.
        del connection.pgconn

    def disconnect(self) -> None:
        self.pgconn.finish()
        socket.socket(socket.AF_INET, socket.SOCK_STREAM, fileno=self.fd).close()
