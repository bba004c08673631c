"""A pooler in front of PostgreSQL, that gives each transaction whichever connection is free."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from celery_redlock import Redlock, ResourceHeld
from celery_redlock.locking import pubsub
from celery_redlock.stores.kinds import open_reader, parse_nodes
from celery_redlock.stores.postgresql.address import PostgresAddress
from celery_redlock.stores.postgresql.subscription import PostgresSubscription
from celery_redlock.testing.postgresql import LocalPostgres
from tests.support import postgres, postgres_sites
from tests.support.names import Locks, Log, Patch
from tests.support.postgres_sites import execute, new_database, open_folder, url_of
from tests.support.wait import wait_until


@pytest.fixture(scope="module")
def pooler(started_database: LocalPostgres) -> Iterator[str]:
    with postgres.start_pgbouncer(started_database) as url:
        yield url


@pytest.fixture
def make(pooler: str, database: LocalPostgres, lock_over: Locks) -> Locks:
    return lambda: lock_over([pooler], ttl=3.0, node_timeout=5.0)


def test_locks_work_through_a_pooler(make: Locks) -> None:
    crowd = [make() for _ in range(6)]  # more than the connections behind it
    holder, other = crowd[:2]
    with holder.lock("r", fencing=True) as held:
        with pytest.raises(ResourceHeld):
            other.acquire(["q", "r"])
        first = held.lease.deadline
        wait_until(lambda: held.lease.deadline > first, 5.0, "it is extended")
        seen = other.holder("r")
        assert seen is not None
    fences = [held.lease.fencing_token]

    def take(redlock: Redlock) -> None:
        for _ in range(10):
            lease = redlock.acquire("r", wait=30.0, fencing=True)
            fences.append(lease.fencing_token)
            assert redlock.release(lease)

    threads = [threading.Thread(target=take, args=(redlock,)) for redlock in crowd]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(fences) == 61
    assert fences == sorted(set(fences))  # type: ignore[type-var]


def test_missing_notifications_through_a_pooler_are_logged_once_and_waiters_poll(
    make: Locks,
    database: LocalPostgres,
    caplog: Log,
    monkeypatch: Patch,
) -> None:
    monkeypatch.setattr(PostgresSubscription, "_said", False)
    monkeypatch.setattr(pubsub, "RECONNECT_S", 0.0)
    opened = []
    connect = PostgresAddress.connect

    def counted(self: PostgresAddress, **changed: Any) -> Any:
        opened.append(threading.current_thread().name)
        return connect(self, **changed)

    monkeypatch.setattr(PostgresAddress, "connect", counted)
    holder, first, second = make(), make(), make()
    got: list[str] = []

    def wait(redlock: Redlock) -> None:
        lease = redlock.acquire("r", wait=30.0)
        got.append("it")
        redlock.release(lease)

    threads = [threading.Thread(target=wait, args=(redlock,)) for redlock in (first, second)]
    with holder.lock("r"):
        for thread in threads:
            thread.start()
        line = "SELECT count(*) FROM redlock_waiter"
        wait_until(lambda: postgres.sql(database, line) == [(2,)], 10.0, "both wait")
        assert not got
    for thread in threads:
        thread.join(10.0)
    assert len(got) == 2
    assert sum("a pooler is in front of node" in said for said in caplog.messages) == 1
    assert sum("subscribe" in name for name in opened) == 2, "nobody tries again and again"
    locks = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'"
    assert postgres.sql(database, locks) == [(0,)]


def test_close_does_not_wait_for_a_listener_that_cannot_listen(make: Locks) -> None:
    redlock = make()
    redlock.release(redlock.acquire("r"))
    with redlock.lock("r"), pytest.raises(ResourceHeld):
        redlock.acquire("r", wait=0.1)
    name = "celery_redlock subscribe"
    listening = [t for t in threading.enumerate() if t.name.startswith(name)]
    assert listening
    redlock.close()
    for thread in listening:
        thread.join(5.0)
        assert not thread.is_alive()


def test_held_locks_can_be_read_through_a_pooler(make: Locks, pooler: str, caplog: Log) -> None:
    caplog.set_level(logging.DEBUG)
    redlock = make()
    reader = open_reader(parse_nodes([pooler])[0], redlock.prefix, 1.0)
    reader.connect()
    with redlock.lock("r", fencing=True):
        keys = reader.scan("")
        assert set(keys) == {"r", "r#fence"}
        assert set(reader.values(keys)) == {"r", "r#fence"}
        assert reader.rtt() < 5.0
    reader.close()
    # No connection behind the pooler is left with what the reader has set.
    assert redlock.release(redlock.acquire("r"))


def test_search_path_that_another_program_sets_in_the_same_pool_reaches_the_locks(
    started_database: LocalPostgres, lock_over: Locks
) -> None:
    direct = new_database(started_database)
    execute(direct, "CREATE SCHEMA tenant; SET search_path = tenant;" + postgres.SCHEMA)
    with open_folder() as folder, postgres_sites.pooler(started_database, folder) as port:
        url = url_of(started_database, database=direct.rpartition("/")[2], port=port)
        first, second = lock_over([url]), lock_over([url])
        first.acquire("r")
        with pytest.raises(ResourceHeld):
            second.acquire("r")
        execute(url, "SET search_path = tenant")
        assert second.acquire("r")  # so docs/postgresql.md gives locks a user of their own
