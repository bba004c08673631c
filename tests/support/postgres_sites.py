"""PostgreSQL databases of a test's own, and whoever is to use them."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator

from celery_redlock.testing.postgresql import LocalPostgres
from tests.support import postgres

_names = (f"d{number}" for number in itertools.count())


@contextlib.contextmanager
def empty_server(**settings: str) -> Iterator[LocalPostgres]:
    """A server without our tables."""
    postgres.require()
    with LocalPostgres(**settings) as server:
        yield server


def new_database(server: LocalPostgres, *, tables: bool = True) -> str:
    """The URL of a new database."""
    name = next(_names)
    postgres.sql(server, f"CREATE DATABASE {name} TEMPLATE template0")
    url = url_of(server, database=name)
    if tables:
        execute(url, postgres.SCHEMA)
    return url


def url_of(
    server: LocalPostgres, *, user: str = "postgres", database: str = "postgres", port: int = 0
) -> str:
    """Where a database is, for a user."""
    return f"postgresql://{user}@127.0.0.1:{port or server.port}/{database}"


def execute(url: str, query: str) -> list[tuple[object, ...]]:
    """Execute something as whoever the URL names, and return its rows."""
    import psycopg

    with psycopg.connect(url, autocommit=True, connect_timeout=5) as connection:
        cursor = connection.execute(query.encode())
        return cursor.fetchall() if cursor.description else []
