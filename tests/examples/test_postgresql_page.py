"""docs/postgresql.md: the rights that it gives to a worker suffice, and each of them is needed."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import psycopg
import pytest

from celery_redlock import Redlock
from celery_redlock.protocol.errors import RedlockError
from celery_redlock.testing.postgresql import LocalPostgres
from tests.support.wait import wait_until

PAGE = (Path(__file__).parents[2] / "docs" / "postgresql.md").read_text("utf-8")
SCHEMA = (files("celery_redlock.stores.postgresql") / "schema.sql").read_text("utf-8")
(BLOCK,) = re.findall(r"^```sql\n(CREATE ROLE .*?)^```$", PAGE, re.M | re.S)
GRANT = r"^GRANT (.*?) ON (.*?) TO shop_worker;$"
RIGHTS = [
    f"{right} ON {place}"
    for rights, places in re.findall(GRANT, BLOCK, re.M)
    for place in places.split(", ")
    for right in rights.split(", ")
]
assert len(RIGHTS) == 1 + 8 + 3


@pytest.fixture(scope="module")
def owner(database_server: LocalPostgres) -> Iterator[psycopg.Connection[Any]]:
    """Yield a connection with all rights, to tables that others may use only as the page grants."""
    with psycopg.connect(database_server.url, autocommit=True) as connection:
        connection.execute("REVOKE ALL ON SCHEMA public FROM PUBLIC")
        connection.execute(SCHEMA.encode())
        connection.execute(BLOCK.encode())
        yield connection


def refused(database_server: LocalPostgres, owner: psycopg.Connection[Any]) -> str:
    """Do all that a worker does, as the page's user, and return the first thing that failed."""
    owner.execute("TRUNCATE redlock_lease, redlock_waiter")
    url = database_server.url.replace("postgres@", "shop_worker@")
    redlock = Redlock([url], ttl=20, fencing=True)
    try:
        return next((name for name, step in STEPS.items() if not step(redlock, owner, url)), "")
    except (RedlockError, psycopg.Error) as error:
        return str(error)
    finally:
        redlock.close()


def fenced(redlock: Redlock, _owner: Any, _url: str) -> bool:
    lease = redlock.acquire("fenced")
    return bool(redlock.holder("fenced") and redlock.extend(lease) and redlock.release(lease))


def unfenced(redlock: Redlock, owner: psycopg.Connection[Any], _url: str) -> bool:
    """Acquire several names; return True if their rows are gone after the release."""
    lease = redlock.acquire(["a", "b"], fencing=False)
    left = "SELECT count(*) FROM redlock_lease WHERE resource IN ('redlock:a', 'redlock:b')"
    return redlock.release(lease) and owner.execute(left).fetchone() == (0,)


def waited(redlock: Redlock, owner: psycopg.Connection[Any], url: str) -> bool:
    """Pass the lock on to a waiter by a notification; its queue is empty then."""
    lease = redlock.acquire("waited for")
    other = Redlock([url], ttl=20)
    lock = other.lock("waited for", wait=20.0)
    waiter = threading.Thread(target=_try, args=[lock.acquire])
    waiter.start()
    queue = "SELECT count(*) FROM redlock_waiter"
    try:
        wait_until(lambda: owner.execute(queue).fetchone() == (1,), 10.0, "it waits")
    except AssertionError:
        return False
    finally:
        redlock.release(lease)
        waiter.join()
        lock.release()
        other.close()
    return owner.execute(queue).fetchone() == (0,)


def swept(_redlock: Redlock, _owner: Any, url: str) -> bool:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("UPDATE redlock_memory SET swept = '-infinity'")
        connection.execute("SELECT redlock_sweep()")
    return True


def _try(acquire: Callable[[], None]) -> None:
    try:
        acquire()
    except RedlockError:
        return


STEPS = {"fenced": fenced, "unfenced": unfenced, "waited": waited, "swept": swept}


def test_rights_on_the_postgresql_page_suffice(
    database_server: LocalPostgres, owner: psycopg.Connection[Any]
) -> None:
    assert refused(database_server, owner) == ""


@pytest.mark.parametrize("right", RIGHTS)
def test_each_right_on_the_postgresql_page_is_needed(
    right: str, database_server: LocalPostgres, owner: psycopg.Connection[Any]
) -> None:
    owner.execute(f"REVOKE {right} FROM shop_worker".encode())
    try:
        assert refused(database_server, owner)
    finally:
        owner.execute(f"GRANT {right} TO shop_worker".encode())
