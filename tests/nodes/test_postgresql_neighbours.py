"""A neighbour may create objects in the schema of the tables: none of them is executed.

PostgreSQL takes the function or operator whose types fit best, of all schemas of the search_path.
So whoever may create objects there (up to version 14 everybody may, in `public`) can have a
statement of others execute a function of theirs, with the others' rights. Here a role plants, for
each name that our SQL has, a trap for all types that such a call could have.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterator
from itertools import combinations, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

import celery_redlock
from celery_redlock.cli import main
from celery_redlock.protocol.round import Verb
from celery_redlock.protocol.values import QueueEntry
from celery_redlock.stores.postgresql import schema
from celery_redlock.testing.postgresql import LocalPostgres
from tests.support import postgres
from tests.support.postgres_sites import empty_server, execute, url_of
from tests.support.subjects import PREFIX, Postgres, claim
from tests.support.wait import wait_until

PACKAGE = Path(celery_redlock.__file__).parent
SOURCES = (*(PACKAGE / "stores/postgresql").glob("*.py"), PACKAGE / "doctor/postgresql.py")
SQL = schema.ddl() + " ".join(
    str(text.value)
    for source in SOURCES
    for text in ast.walk(ast.parse(source.read_text("utf-8")))
    if isinstance(text, ast.Constant) and "SELECT" in str(text.value)
)
NAMES = sorted(set(re.findall(r"(\w+)\(", SQL)))
KEYWORDS = dict(re.findall(r"(\w+)\((\w+) =>", schema.ddl()))
"""By the functions that are called with it, the name of an argument."""
ROLES = """\
CREATE ROLE neighbour LOGIN; CREATE ROLE worker LOGIN;
GRANT CREATE ON SCHEMA public TO PUBLIC;
CREATE SEQUENCE trapped; GRANT ALL ON SEQUENCE trapped TO PUBLIC;"""
GRANTS = """\
GRANT SELECT, INSERT, UPDATE, DELETE ON redlock_lease, redlock_waiter, redlock_memory TO worker"""
TYPES = (
    *("text", "integer", "bigint", "double precision", "numeric", "boolean", "interval", "name"),
    *("timestamp with time zone", "text[]", "integer[]", "double precision[]", "oid", "regclass"),
)
FEW = ("text", "integer", "double precision", "text[]")
"""Types of the traps for calls with three arguments and more."""
DEFAULTS = (("date DEFAULT NULL",), ("VARIADIC date[] DEFAULT NULL",))
"""Arguments that a call need not have."""
OPERATORS = ("=", "<>", "<", "<=", ">", ">=", "+", "-", "*", "||")
BUILT_IN = """\
SELECT proname, n, min(CASE typtype WHEN 'p' THEN 'text' ELSE format_type(prorettype, NULL) END)
FROM pg_proc JOIN pg_type t ON t.oid = prorettype,
    generate_series(pronargs - pronargdefaults, pronargs + 3 * (provariadic <> 0)::int) n
WHERE proname = ANY (%s) AND pronamespace = 'pg_catalog'::regnamespace AND prokind <> 'p'
AND n < 5 GROUP BY 1, 2"""
OURS = """\
SELECT proname::text, proargtypes::regtype[]::text[] FROM pg_proc
WHERE pronamespace = 'public'::regnamespace AND pg_catalog.starts_with(proname::text, 'redlock_')"""
# It counts its calls past any rollback.
TRAP = """\
CREATE FUNCTION public.{}({}) RETURNS {} LANGUAGE plpgsql AS $$ BEGIN
PERFORM pg_catalog.nextval('public.trapped'); RAISE EXCEPTION 'trapped by {}'; END $$;"""


def traps(server: LocalPostgres) -> Iterator[str]:
    """Return the definitions of functions and operators of the names of PostgreSQL's own."""
    for name, arity, result in postgres.sql(server, BUILT_IN, NAMES):
        all_types = product(*[FEW if arity > 2 else TYPES] * arity) if arity else DEFAULTS
        for types in all_types:
            arguments = f"{KEYWORDS.get(name, '')} {', '.join(types)}"
            yield TRAP.format(name, arguments, result, f"{name}({arguments})")
    for number, (name, left, right) in enumerate(product(OPERATORS, TYPES, TYPES)):
        result = left if name in "+-*||" else "bool"
        yield TRAP.format(f"t{number}", f"{left}, {right}", result, f"{left} {name} {right}")
        yield (
            f"CREATE OPERATOR public.{name}"
            f" (LEFTARG = {left}, RIGHTARG = {right}, FUNCTION = public.t{number});"
        )


def traps_of_ours(server: LocalPostgres) -> Iterator[str]:
    """Return the definitions of functions of the names of ours; one or two types are others."""
    for name, types in postgres.sql(server, OURS):
        changed = [{at: new} for at in range(len(types)) for new in TYPES]
        changed += [
            dict(zip(places, new, strict=True))
            for places in combinations(range(len(types)), 2)
            for new in product(FEW, FEW)
        ]
        planted = {tuple(new.get(at, old) for at, old in enumerate(types)) for new in changed}
        for arguments in map(", ".join, planted - {tuple(types)}):
            yield TRAP.format(name, arguments, "text", f"{name}({arguments})")


def trapped(server: LocalPostgres) -> bool:
    return postgres.sql(server, "SELECT is_called FROM trapped") == [(True,)]


@pytest.fixture(scope="module")
def invaded() -> Iterator[LocalPostgres]:
    """A server whose neighbour was there before our tables."""
    with empty_server(track_functions="all") as started:
        postgres.sql(started, ROLES)
        execute(url_of(started, user="neighbour"), "".join(traps(started)))
        yield started


@pytest.fixture(scope="module")
def surrounded(invaded: LocalPostgres) -> LocalPostgres:
    """The same, once the neighbour has seen the names of our functions."""
    call(invaded, "migrate")
    postgres.sql(invaded, GRANTS)
    execute(url_of(invaded, user="neighbour"), "".join(traps_of_ours(invaded)))
    return invaded


def call(server: LocalPostgres, *arguments: str) -> str:
    """Return what a command of an administrator prints."""
    result = CliRunner().invoke(main, ["--nodes", server.url, *arguments])
    assert not trapped(server), (arguments, result.output)
    assert result.exit_code == 0, (arguments, result.output)
    return result.output


def test_migrate_by_an_administrator_calls_nothing_of_a_neighbour(invaded: LocalPostgres) -> None:
    assert "functions are made" in call(invaded, "migrate")
    assert "nothing has changed" in call(invaded, "migrate")
    postgres.sql(invaded, schema.DROP)
    assert not trapped(invaded)


@pytest.mark.parametrize("user", ["worker", "postgres"])
def test_verbs_call_nothing_of_a_neighbour(surrounded: LocalPostgres, user: str) -> None:
    server = surrounded
    uncalled = set(re.findall(r"FUNCTION \S*\b(redlock_\w+)\(", schema.ddl()))
    postgres.sql(server, "SELECT pg_stat_reset()")
    node = Postgres(SimpleNamespace(url=url_of(server, user=user)))  # type: ignore[arg-type]
    node.node._swept = -math.inf  # type: ignore[attr-defined]
    one, both, other = claim("mine", "c"), claim("mine", ("a", "b")), claim("other", ("b", "c"))
    one.proposal, one.ceiling, one.mark = 1, 10, ("c#done", 60.0)
    first, second = (QueueEntry(("a", "b"), 1, f"{PREFIX}p1:{n}", n) for n in range(2))
    steps: list[tuple[Verb, Any]] = [
        *((Verb.ACQUIRE, both), (Verb.ACQUIRE, one), (Verb.ACQUIRE, other), (Verb.PEEK, one)),
        *((Verb.EXTEND, both), (Verb.RENEW, one), (Verb.ENQUEUE, first), (Verb.ENQUEUE, second)),
        *((Verb.DEQUEUE, first), (Verb.UNDO, other), (Verb.RELEASE, both), (Verb.RELEASE, one)),
        *((Verb.ENQUEUE, first), (Verb.HAND_ON, first)),
    ]
    try:
        node.listen("p1")
        for verb, given in steps:
            answer = node.ask(verb, given)
            assert not trapped(server), (verb, answer)
            assert not str(answer).startswith("silent"), (verb, answer)
        assert node.calls(1) == ["p1:1"]
    finally:
        node.close()

    def all_called() -> bool:
        query = "SELECT funcname FROM pg_stat_user_functions WHERE calls > 0"
        uncalled.difference_update(name for (name,) in postgres.sql(server, query))
        return not uncalled

    wait_until(all_called, 20.0, "the test has called each function", seen=lambda: uncalled)


def test_commands_of_an_administrator_call_nothing_of_a_neighbour(
    surrounded: LocalPostgres,
) -> None:
    server = surrounded
    node = Postgres(server)
    assert node.ask(Verb.ACQUIRE, claim("a token", "order:1")) is None
    node.ask(Verb.ENQUEUE, QueueEntry(("order:1",), 1, f"{PREFIX}p1:1", 1))
    node.close()
    assert "order:1" in call(server, "ls", "--all")
    for command in (
        *(("show", "order:1"), ("stats",), ("exporter", "--once"), ("doctor",)),
        *(("pause", "order:*", "--for", "60s"), ("resume", "order:*")),
        *(("limit", "order:*", "2", "--for", "60s"), ("release", "order:1", "--force")),
    ):
        call(server, *command)


def test_url_that_names_the_schema_calls_nothing_in_front_of_it(
    surrounded: LocalPostgres,
) -> None:
    server = surrounded
    postgres.sql(server, "CREATE SCHEMA postgres AUTHORIZATION neighbour")  # "$user"
    trap = TRAP.format("redlock_version", "", "int", "redlock_version()")
    neighbour = url_of(server, user="neighbour")
    execute(neighbour, trap.replace("FUNCTION public.", "FUNCTION postgres."))
    execute(neighbour, "GRANT USAGE ON SCHEMA postgres TO PUBLIC")
    named = f"{server.url}?options=-csearch_path%3Dpublic"
    for command in (("ls",), ("doctor",), ("pause", "order:*", "--for", "60s", "--yes")):
        result = CliRunner().invoke(main, ["--nodes", named, *command])
        assert (result.exit_code, trapped(server)) == (0, False), (command, result.output)
    # This is what it is for: without it, the neighbour's function is called.
    assert (
        CliRunner()
        .invoke(main, ["--nodes", server.url, "pause", "x", "--for", "1s", "--yes"])
        .exit_code
    )
    assert trapped(server)
    postgres.sql(server, "DROP SCHEMA postgres CASCADE; ALTER SEQUENCE trapped RESTART")
