"""`redlock sql` and `redlock migrate`: the tables that locks in PostgreSQL need."""

from __future__ import annotations

import contextlib
import json
import operator
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg
import pytest
from click.testing import CliRunner

from celery_redlock import ConfigurationError, Redlock
from celery_redlock.cli import main
from celery_redlock.server import LocalServer
from celery_redlock.stores.postgresql import handshake, schema, statements
from celery_redlock.testing.postgresql import LocalPostgres
from tests.support.postgres_sites import execute, new_database, url_of
from tests.support.wait import wait_until

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
    assert f"the tables and functions are made, of version {schema.VERSION}" in first.stdout
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
    assert sorted(found, key=str) == [schema.VERSION] * 3 + [None]
    works(bare)


def test_tables_of_an_older_version_are_refused_until_they_are_migrated(bare: str) -> None:
    execute(bare, schema.ddl())
    execute(
        bare, "CREATE OR REPLACE FUNCTION redlock_version() RETURNS int LANGUAGE sql AS 'SELECT 0'"
    )
    with pytest.raises(ConfigurationError, match=r"of version 0.*run celery redlock migrate"):
        works(bare)
    assert "brought from version 0 to version 2" in call(bare, "migrate").stdout
    works(bare)


def test_tables_of_a_newer_version_are_left_alone(bare: str) -> None:
    execute(bare, schema.ddl())
    execute(
        bare, "CREATE OR REPLACE FUNCTION redlock_version() RETURNS int LANGUAGE sql AS 'SELECT 7'"
    )
    result = call(bare, "migrate")
    assert result.exit_code == 4 and "of version 7, newer than this library's (2)" in result.stderr
    assert execute(bare, "SELECT redlock_version()") == [(7,)]


def test_migrate_by_a_user_without_create_leaves_nothing_half_made(
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


@pytest.mark.parametrize(
    ("made", "name"),
    [
        (
            "CREATE TABLE redlock_memory (memory text, since timestamptz, swept timestamptz)",
            "memory",
        ),
        ("CREATE VIEW redlock_waiter AS SELECT 1", "waiter"),
        ("CREATE FUNCTION redlock_version() RETURNS int LANGUAGE sql AS 'SELECT 2'", "version"),
        (
            "CREATE FUNCTION redlock_free(text[], name) RETURNS int LANGUAGE sql AS 'SELECT 2'",
            "free",
        ),
    ],
)
def test_migrate_refuses_what_another_role_made_before(
    database_server: LocalPostgres, bare: str, made: str, name: str
) -> None:
    execute(
        bare,
        "DO $$ BEGIN CREATE ROLE other LOGIN; EXCEPTION WHEN OTHERS THEN END $$;"
        "GRANT CREATE ON SCHEMA public TO other",
    )
    other = url_of(database_server, user="other", database=bare.rpartition("/")[2])
    execute(other, made)
    result = call(bare, "migrate")
    assert result.exit_code == 1
    assert (
        f"nothing was done: redlock_{name} is there already, made by other, whose code all who lock"
        " would execute; if you trust that role, run this as other, else drop it" in result.stderr
    )
    assert execute(bare, "SELECT 1 FROM pg_class WHERE relname = 'redlock_lease'") == []
    # psql, which goes on after an error, makes nothing either.
    with pytest.raises(psycopg.errors.RaiseException):
        execute(bare, schema.ddl())


@pytest.fixture
def neighbour(database_server: LocalPostgres, bare: str) -> str:
    """The URL of a role that may create objects in the schema of the tables."""
    execute(
        bare,
        "DO $$ BEGIN CREATE ROLE other LOGIN; EXCEPTION WHEN OTHERS THEN END $$;"
        "GRANT CREATE ON SCHEMA public TO other; CREATE SEQUENCE fired;"
        "GRANT ALL ON SEQUENCE fired TO other",
    )
    return url_of(database_server, user="other", database=bare.rpartition("/")[2])


TRAP = """\
CREATE FUNCTION evil() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
PERFORM pg_catalog.nextval('public.fired'); RETURN NEW; END $$;
CREATE TRIGGER trap BEFORE INSERT ON redlock_memory EXECUTE FUNCTION evil();"""
MEMORY = """\
CREATE TABLE redlock_memory (memory text PRIMARY KEY, since timestamptz NOT NULL,
swept timestamptz NOT NULL DEFAULT '-infinity');"""
WAITS = "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND usename = 'postgres'"


@pytest.mark.parametrize("how", ["migrate", "sql"])
def test_migrate_refuses_a_table_that_a_neighbour_makes_meanwhile(
    bare: str, neighbour: str, how: str
) -> None:
    with ThreadPoolExecutor(1) as pool, psycopg.connect(neighbour) as open_one:
        open_one.execute("CREATE TABLE redlock_lease (x int)")  # not committed: nobody sees it
        work, given = (call, "migrate") if how == "migrate" else (execute, schema.ddl())
        made = pool.submit(work, bare, given)
        wait_until(lambda: bool(execute(bare, WAITS)), 20.0, "the administrator waits")
        execute(neighbour, MEMORY + TRAP + "GRANT ALL ON redlock_memory TO public")
        open_one.rollback()
        if how == "migrate":
            result = made.result()
            assert result.exit_code == 1, result.output
            assert "redlock_memory is there already, made by other" in result.stderr
        else:
            with pytest.raises(psycopg.errors.RaiseException, match="made by other"):
                made.result()
    assert execute(bare, "SELECT is_called FROM fired") == [(False,)]
    assert execute(bare, "SELECT 1 FROM pg_class WHERE relname = 'redlock_lease'") == []


def test_migrate_fires_no_trigger_of_a_neighbour(bare: str, neighbour: str) -> None:
    assert call(bare, "migrate").exit_code == 0
    execute(bare, "GRANT ALL ON redlock_memory TO other")
    execute(neighbour, TRAP)
    result = call(bare, "migrate")
    assert result.exit_code == 1
    assert "nothing was done: redlock_memory has the trigger trap, which this would fire" in (
        result.stderr
    )
    assert execute(bare, "SELECT is_called FROM fired") == [(False,)]


def test_migrate_refuses_an_isolation_level_that_hides_what_others_make(bare: str) -> None:
    level = "options=-cdefault_transaction_isolation%3Dserializable"
    with pytest.raises(psycopg.errors.RaiseException, match="run this at READ COMMITTED"):
        execute(f"{bare}?{level}", schema.ddl())
    assert call(f"{bare}?{level}", "migrate").exit_code == 0


@pytest.mark.parametrize("names", ["advisory", "table"])
def test_migrate_gives_up_where_another_transaction_keeps_a_lock(
    bare: str, neighbour: str, names: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = schema._ALONE if names == "advisory" else "CREATE TABLE redlock_lease (x int)"
    short = schema.ddl().replace("'20s'", "'50ms'")
    monkeypatch.setattr(schema, "PATIENCE", "SET LOCAL lock_timeout = '50ms'")
    with psycopg.connect(neighbour) as other:
        other.execute(held.encode())
        result = call(bare, "migrate")
        assert result.exit_code == 3
        assert "nothing was done: another transaction keeps a lock" in result.stderr
        if names == "table":
            with pytest.raises(psycopg.errors.LockNotAvailable):
                execute(bare, short)
        other.rollback()
    assert call(bare, "migrate").exit_code == 0


@pytest.mark.parametrize(
    "name", ["ref\\&x", "\\1", "back\\slash", "a$b$", 'we"ird', "a%sb", "$sql$"]
)
def test_migrate_works_in_a_schema_of_any_name(bare: str, name: str) -> None:
    quoted = '"' + name.replace('"', '""') + '"'
    execute(bare, f"CREATE SCHEMA {quoted}; SET search_path = {quoted};" + schema.ddl())
    (row,) = execute(
        bare,
        "SELECT relnamespace::regnamespace::text FROM pg_class WHERE relname = 'redlock_waiter'",
    )
    assert row == (quoted,)
    execute(bare, f"SELECT * FROM {quoted}.redlock_acquire('{{x}}', 'mine', 10, 1, 10)")
    assert execute(bare, f"SELECT resource FROM {quoted}.redlock_lease") == [("x",)]


def test_migrate_refuses_a_schema_whose_name_would_end_a_function(bare: str) -> None:
    execute(bare, 'CREATE SCHEMA "a$$b"')
    result = call(f"{bare}?options=-csearch_path%3Da$$b", "migrate")
    assert result.exit_code == 1
    assert "nothing was done: the name of the schema a$$b has $$ in it; rename it" in result.stderr


def test_migrate_makes_functions_that_look_nowhere_but_in_pg_catalog(bare: str) -> None:
    execute(bare, 'CREATE SCHEMA "My locks"; SET search_path = "My locks";' + schema.ddl())
    odd = "SELECT proname FROM pg_proc WHERE starts_with(proname::text, 'redlock_') AND"
    assert execute(bare, f"{odd} NOT 'search_path=pg_catalog, pg_temp' = ANY (proconfig)") == []
    # They work with any search_path.
    execute(bare, """SELECT * FROM "My locks".redlock_acquire('{x}', 'mine', 10, 1, 10)""")
    assert execute(bare, 'SELECT resource FROM "My locks".redlock_lease') == [("x",)]


def test_migrate_leaves_the_search_path_of_a_transaction_as_it_was(bare: str) -> None:
    with psycopg.connect(bare) as connection:
        connection.execute("SET search_path = public")
        connection.execute(schema.ddl().encode())
        assert connection.execute("SHOW search_path").fetchone() == ("public",)


def test_migrate_with_a_search_path_without_a_schema_names_what_to_set(bare: str) -> None:
    result = call(f"{bare}?options=-csearch_path%3Dnowhere", "migrate")
    assert result.exit_code == 1 and "no schema of the search_path exists" in result.stderr


def test_tables_in_a_schema_that_was_renamed_are_missing_until_they_are_migrated(bare: str) -> None:
    execute(bare, "CREATE SCHEMA old; SET search_path = old;" + schema.ddl())
    execute(bare, "ALTER SCHEMA old RENAME TO new")
    url = f"{bare}?options=-csearch_path%3Dnew"
    with pytest.raises(ConfigurationError, match="run celery redlock migrate"):
        works(url)
    assert call(url, "migrate").exit_code == 0
    works(url)


@pytest.fixture
def of_version_1(bare: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A database with the tables and functions of version 1, and this process is its client."""
    text = "".join(re.findall(r"\$sql\$(.*?)\$sql\$", schema.ddl(), re.S))
    execute(bare, text.replace("AS 'SELECT 2'", "AS 'SELECT 1'"))
    monkeypatch.setattr(handshake, "VERSION", 1)
    for verb, one in statements._STATEMENTS.items():
        sql = re.sub(rb"(\$[2-9])::(text|float8|bigint)\b(?!\[)", rb"\1", one.sql)
        monkeypatch.setitem(statements._STATEMENTS, verb, replace(one, sql=sql))
    return bare


def test_tables_of_version_1_are_migrated_while_clients_of_version_1_lock(
    of_version_1: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    over, locked = threading.Event(), [0, 0, 0]

    def client(number: int) -> None:
        with contextlib.closing(Redlock([of_version_1], ttl=10.0)) as redlock:
            while not over.is_set():
                with redlock.lock(f"order:{number % 2}", wait=10.0, fencing=True):
                    locked[number] += 1

    def progress() -> None:
        before = list(locked)
        wait_until(lambda: all(map(operator.lt, before, locked)), 20.0, "each client has locked")

    redlock = Redlock([of_version_1])
    lease = redlock.acquire("held")
    with ThreadPoolExecutor(3) as pool:
        clients = [pool.submit(client, number) for number in range(3)]
        try:
            progress()
            said = call(of_version_1, "migrate").stdout
            assert "brought from version 1 to version 2" in said
            progress()
            assert "nothing has changed" in call(of_version_1, "migrate").stdout
            progress()
        finally:
            over.set()
        for one in clients:
            one.result()
    assert redlock.extend(lease) and redlock.release(lease)
    redlock.close()
    monkeypatch.undo()
    works(of_version_1)


def test_migrate_names_an_unreachable_server_without_its_password() -> None:
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


def test_migrate_over_redis_has_nothing_to_do(server: LocalServer) -> None:
    result = call(server.url, "migrate")
    assert result.exit_code == 0
    assert result.stdout.startswith("nothing to do: locks are not kept in PostgreSQL here")
    assert json.loads(call(server.url, "migrate", "--json").stdout) == {"outcome": "not needed"}


def test_tables_made_by_migrate_can_be_dropped(bare: str) -> None:
    call(bare, "migrate")
    execute(bare, schema.DROP)
    assert execute(bare, TABLES) == []
    assert execute(bare, "SELECT 1 FROM pg_proc WHERE proname LIKE 'redlock%'") == []
    call(bare, "migrate")
    works(bare)
