"""What is over is deleted from PostgreSQL: by one of those who use it, once a minute."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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


@pytest.fixture(scope="module")
def server() -> Iterator[LocalPostgres]:
    with postgres.start_postgres() as started:
        yield started


@pytest.fixture(autouse=True)
def _servers_as_new(server: LocalPostgres) -> None:
    postgres.as_new(server)
    postgres.sql(server, ROWS)
    postgres.sql(server, WAITERS)
    swept_long_ago(server)


def swept_long_ago(server: LocalPostgres) -> None:
    postgres.sql(server, "UPDATE redlock_memory SET swept = now() - interval '61 s'")


def names(server: LocalPostgres) -> list[str]:
    return [n for (n,) in postgres.sql(server, "SELECT resource FROM redlock_lease ORDER BY 1")]


def test_what_is_over_goes_and_a_fence_stays_for_a_week(server: LocalPostgres) -> None:
    postgres.sql(server, "SELECT redlock_sweep()")
    assert names(server) == LEFT
    assert postgres.sql(server, "SELECT waiter FROM redlock_waiter") == [("waits",)]
    postgres.sql(server, ROWS + " ON CONFLICT DO NOTHING")
    postgres.sql(server, "SELECT redlock_sweep()")
    assert len(names(server)) == 6, "not again within a minute"


def test_a_process_that_asks_has_it_done_once_a_minute(
    server: LocalPostgres, lock_over: Callable[..., Redlock], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgresql_node, "SWEEP_EVERY_S", 0.1)
    redlock = lock_over([server], ttl=60.0)

    def swept() -> bool:
        redlock.release(redlock.acquire("x"))
        return names(server) == LEFT

    wait_until(swept, 5.0, "what is over has gone")


def test_of_many_at_once_one_does_it_and_nobody_waits(server: LocalPostgres) -> None:
    postgres.sql(
        server,
        "INSERT INTO redlock_lease SELECT 'old' || n, 't', 0, '-infinity', now()"
        " FROM generate_series(1, 20000) n",
    )
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda _: postgres.sql(server, "SELECT redlock_sweep()"), range(8)))
    assert names(server) == LEFT
    (count,) = postgres.sql(server, "SELECT count(*) FROM redlock_memory WHERE swept > '-infinity'")
    assert count == (1,)


def test_a_row_that_is_just_taken_is_let_be(server: LocalPostgres) -> None:
    """It looks over to who sweeps, until the other has committed."""
    with psycopg.connect(server.url) as other:
        other.execute("SELECT redlock_acquire('{over}', 'new', 60, NULL, NULL)")
        postgres.sql(server, "SET lock_timeout = '1s'; SELECT redlock_sweep()")
        other.commit()
    assert names(server) == sorted([*LEFT, "over"])
