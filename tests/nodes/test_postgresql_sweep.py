"""Expired rows in PostgreSQL are deleted once a minute, by one of the processes that use it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest

from celery_redlock import Redlock
from celery_redlock.stores.postgresql import node as postgresql_node
from celery_redlock.testing.postgresql import LocalPostgres
from tests.support import postgres
from tests.support.wait import wait_until

ROWS = """\
INSERT INTO redlock_lease VALUES
    ('lives', 't', 0, now() + interval '1 h', now()),
    ('lives, fenced, taken long ago', 't', 5, now() + interval '1 h', now() - interval '8 d'),
    ('over', 't', 0, now() - interval '1 s', now()),
    ('given back', 't', 0, '-infinity', now()),
    ('over, fenced', 't', 5, now() - interval '1 s', now() - interval '6 d 23 h'),
    ('over, fenced, of a week ago', 't', 5, now() - interval '8 d', now() - interval '8 d')"""
WAITERS = """\
INSERT INTO redlock_waiter VALUES
    ('r', 'waits', 1, now() + interval '1 min'), ('r', 'is forgotten', 1, now())"""
LEFT = ["lives", "lives, fenced, taken long ago", "over, fenced"]


@pytest.fixture(autouse=True)
def _rows(database: LocalPostgres) -> None:
    postgres.sql(database, ROWS)
    postgres.sql(database, WAITERS)
    swept_long_ago(database)


def swept_long_ago(database: LocalPostgres) -> None:
    postgres.sql(database, "UPDATE redlock_memory SET swept = now() - interval '61 s'")


def names(database: LocalPostgres) -> list[str]:
    return [n for (n,) in postgres.sql(database, "SELECT resource FROM redlock_lease ORDER BY 1")]


def test_sweep_deletes_expired_rows_and_keeps_fences_for_a_week(database: LocalPostgres) -> None:
    postgres.sql(database, "SELECT redlock_sweep()")
    assert names(database) == LEFT
    assert postgres.sql(database, "SELECT waiter FROM redlock_waiter") == [("waits",)]
    postgres.sql(database, ROWS + " ON CONFLICT DO NOTHING")
    postgres.sql(database, "SELECT redlock_sweep()")
    assert len(names(database)) == 6, "not again within a minute"


def test_process_that_uses_the_database_sweeps_it_once_a_minute(
    database: LocalPostgres, lock_over: Callable[..., Redlock], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgresql_node, "SWEEP_EVERY_S", 0.1)
    redlock = lock_over([database], ttl=60.0)

    def swept() -> bool:
        redlock.release(redlock.acquire("x"))
        return names(database) == LEFT

    wait_until(swept, 5.0, "what is over has gone")


def test_simultaneous_sweeps_run_once_and_nobody_waits(database: LocalPostgres) -> None:
    postgres.sql(
        database,
        "INSERT INTO redlock_lease SELECT 'old' || n, 't', 0, '-infinity', now()"
        " FROM generate_series(1, 20000) n",
    )
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda _: postgres.sql(database, "SELECT redlock_sweep()"), range(8)))
    assert names(database) == LEFT
    (count,) = postgres.sql(
        database, "SELECT count(*) FROM redlock_memory WHERE swept > '-infinity'"
    )
    assert count == (1,)


def test_sweep_leaves_a_row_that_is_just_taken(database: LocalPostgres) -> None:
    """The row looks expired to the sweeper until the other transaction has committed."""
    with psycopg.connect(database.url) as other:
        other.execute("SELECT redlock_acquire('{over}', 'new', 60, NULL, NULL)")
        postgres.sql(database, "SET lock_timeout = '1s'; SELECT redlock_sweep()")
        other.commit()
    assert names(database) == sorted([*LEFT, "over"])
