"""The bare limit of PostgreSQL is a lock, as `test_bare.py` shows of that of Redis."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import psycopg
import pytest

from benchmarks.bare_postgresql import TABLE, BarePostgres
from tests.support.postgres_sites import empty_server


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with empty_server() as server, psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute(TABLE)
        yield server.url


def test_one_holds_it_and_only_the_holder_extends_and_frees_it(url: str) -> None:
    with closing(BarePostgres(url)) as one, closing(BarePostgres(url)) as other:
        token = one.acquire("r")
        assert token and other.acquire("r") is None
        assert (other.extend({"r": "not its token"}), one.extend({"r": token})) == (0, 1)
        assert not other.release("r", "not its token") and one.release("r", token)
        assert other.acquire("r")


def test_whoever_waits_is_called_by_the_release(url: str) -> None:
    with closing(BarePostgres(url)) as one, closing(BarePostgres(url)) as other:
        token = one.acquire("waited for")
        assert token
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(other.wait, "waited for", 30.0)
            assert one.give("waited for", token)
            assert waiting.result(20.0)
