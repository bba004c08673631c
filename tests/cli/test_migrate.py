"""`redlock sql` and `redlock migrate`: the tables that locks in PostgreSQL need."""

from __future__ import annotations

import contextlib
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from celery_redlock import ConfigurationError, Redlock
from celery_redlock.cli import main
from celery_redlock.server import LocalServer
from celery_redlock.stores.postgresql import schema
from celery_redlock.testing.postgresql import LocalPostgres
from tests.support.postgres_sites import execute, new_database, url_of

TABLES = "SELECT relname FROM pg_class WHERE relname LIKE 'redlock%' AND relkind = 'r' ORDER BY 1"


@pytest.fixture
def bare(database_server: LocalPostgres) -> str:
    """A database without our tables."""
    return new_database(database_server, tables=False)


def call(url: str, *arguments: str) -> Any:
    result = CliRunner().invoke(main, ["--nodes", url, *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def works(url: str) -> None:
    with contextlib.closing(Redlock([url])) as lock, lock.lock("order:1", fencing=True):
        pass


def test_migrate_makes_the_tables_and_may_be_run_again(bare: str) -> None:
    with pytest.raises(ConfigurationError, match="run celery redlock migrate"):
        works(bare)
    first = call(bare, "migrate")
    assert first.exit_code == 0, first.output
    assert "the tables and functions are made, of version 1" in first.stdout
    works(bare)
    lock = Redlock([bare])
    with lock.lock("order:2"):
        again = call(bare, "migrate")
        assert (again.exit_code, "nothing has changed" in again.stdout) == (0, True)
        assert lock.holder("order:2") is not None
    lock.close()
    said = json.loads(call(bare, "migrate", "--json").stdout)
    assert said["outcome"] == "unchanged" and said["version"] == said["was"] == schema.VERSION


def test_migrate_by_several_at_once_makes_them_once(bare: str) -> None:
    with ThreadPoolExecutor(4) as pool:
        from celery_redlock.stores.kinds import parse_nodes

        (address,) = parse_nodes([bare])
        found = list(pool.map(lambda _n: schema.migrate(address), range(4)))  # type: ignore[arg-type]
    assert sorted(found, key=str) == [1, 1, 1, None]
    works(bare)


def test_tables_of_an_older_version_are_refused_until_they_are_migrated(bare: str) -> None:
    execute(bare, schema.ddl())
    execute(
        bare, "CREATE OR REPLACE FUNCTION redlock_version() RETURNS int LANGUAGE sql AS 'SELECT 0'"
    )
    with pytest.raises(ConfigurationError, match=r"of version 0.*run celery redlock migrate"):
        works(bare)
    assert "brought from version 0 to version 1" in call(bare, "migrate").stdout
    works(bare)


def test_tables_of_a_newer_version_are_left_alone(bare: str) -> None:
    execute(bare, schema.ddl())
    execute(
        bare, "CREATE OR REPLACE FUNCTION redlock_version() RETURNS int LANGUAGE sql AS 'SELECT 7'"
    )
    result = call(bare, "migrate")
    assert result.exit_code == 4 and "of version 7, newer than this library's (1)" in result.stderr
    assert execute(bare, "SELECT redlock_version()") == [(7,)]


def test_who_may_not_create_tables_is_told_so_and_leaves_nothing_half_made(
    database_server: LocalPostgres, bare: str
) -> None:
    execute(
        bare,
        "DO $$ BEGIN CREATE ROLE worker LOGIN; EXCEPTION WHEN OTHERS THEN END $$;"
        "REVOKE CREATE ON SCHEMA public FROM PUBLIC",
    )
    name = bare.rpartition("/")[2]
    result = call(url_of(database_server, user="worker", database=name), "migrate")
    assert result.exit_code == 1
    assert "nothing was done: permission denied for schema public" in result.stderr
    assert "a user who may create tables is to be named in its URL" in result.stderr
    assert execute(bare, TABLES) == []


def test_a_server_that_does_not_answer_is_named_without_its_password() -> None:
    result = call("postgresql://worker:SECRET@127.0.0.1:1/shop", "migrate")
    assert result.exit_code == 3 and "127.0.0.1:1/shop: " in result.stderr
    assert "SECRET" not in result.output


def test_sql_prints_what_migrate_runs(bare: str, server: LocalServer) -> None:
    printed = call(bare, "sql")
    assert printed.exit_code == 0 and printed.stderr == ""
    execute(bare, printed.stdout)
    works(bare)
    assert json.loads(call(bare, "sql", "--json").stdout)["sql"] == schema.ddl()
    (file,) = Path(schema.__file__).parent.glob("*.sql")
    assert printed.stdout.rstrip() == file.read_text("utf-8").rstrip()
    # Whoever has nothing to name yet, and who has Redis and thinks of moving, may read it too.
    assert CliRunner().invoke(main, ["sql"]).stdout == printed.stdout
    over_redis = call(server.url, "sql")
    assert over_redis.stdout == printed.stdout
    assert "not kept in PostgreSQL here" in over_redis.stderr


def test_over_redis_there_is_nothing_to_migrate(server: LocalServer) -> None:
    result = call(server.url, "migrate")
    assert result.exit_code == 0
    assert result.stdout.startswith("nothing to do: locks are not kept in PostgreSQL here")
    assert json.loads(call(server.url, "migrate", "--json").stdout) == {"outcome": "not needed"}


def test_what_was_made_can_be_taken_away(bare: str) -> None:
    call(bare, "migrate")
    execute(bare, schema.DROP)
    assert execute(bare, TABLES) == []
    assert execute(bare, "SELECT FROM pg_proc WHERE proname LIKE 'redlock%'") == []
    call(bare, "migrate")
    works(bare)
