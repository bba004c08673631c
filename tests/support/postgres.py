"""PostgreSQL servers for tests: one a module, with the tables, emptied before each test."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import psycopg
import pytest

from celery_redlock.protocol.errors import ConfigurationError
from celery_redlock.testing.postgresql import LocalPostgres, find_postgres

SCHEMA = (files("celery_redlock.stores.postgresql") / "schema.sql").read_text("utf-8")
EMPTY = "TRUNCATE redlock_lease, redlock_waiter"


@functools.cache
def missing() -> str:
    """Why there can be no PostgreSQL here; empty where there can."""
    try:
        find_postgres()
    except ConfigurationError as error:
        return str(error)
    return ""


def require() -> None:
    """Skip the test where no server can be run."""
    if missing():
        pytest.skip(missing())


@contextlib.contextmanager
def start_postgres(**settings: str) -> Iterator[LocalPostgres]:
    """A server with our tables, that clients have known for ever."""
    require()
    with LocalPostgres(**settings) as server:
        sql(server, SCHEMA)
        yield server


def as_new(server: LocalPostgres) -> None:
    """Resume it, start it, empty it: whatever the last test did."""
    if server.paused:
        server.resume()
    if not server.runs:
        server.start()
    sql(server, EMPTY)


def admin(server: LocalPostgres, **changed: Any) -> psycopg.Connection[Any]:
    """A connection that may do everything."""
    return psycopg.connect(server.url, autocommit=True, connect_timeout=5, **changed)


def sql(server: LocalPostgres, query: Any, *values: Any) -> list[tuple[Any, ...]]:
    """Execute something, and return its rows."""
    with admin(server) as connection:
        cursor = connection.execute(query, values or None)
        return cursor.fetchall() if cursor.description else []
