"""The examples over one PostgreSQL and no Redis: the broker in it too, and checks behind locks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import forked
from tests.support.example import EXAMPLES, worker
from tests.support.postgres import start_postgres

REFUSED = """\
the one after it: 50 in the account
the late one: refused, ada: a later holder was here
in the end: 50 in the account
"""
ACCEPTED = """\
the one after it: 50 in the account
the late one: 100 in the account
in the end: 100 in the account
"""
CHECKS = {
    "sqlalchemy": '"version_id_col": fencing_token, "version_id_generator": False',
    "django": ", fencing_token=token)\n    if not mine",
}
"""Code that makes the write compare the token, and the code without it."""
WITHOUT = {"sqlalchemy": "", "django": ")\n    if not mine"}


@pytest.fixture(scope="module")
def database() -> Iterator[str]:
    with start_postgres() as server:
        yield server.url


def of(database: str) -> dict[str, str]:
    return {**os.environ, "DATABASE_URL": database, "PYTHONPATH": str(EXAMPLES.parent)}


def said_by(program: Path, database: str) -> str:
    """Run it as a reader would; return its output without the log of the stopped one's lock."""
    code, said = forked.run(str(program), cwd=EXAMPLES, env=of(database))
    assert code == 0, said
    lines = ("the one", "the late", "in the end")
    return "".join(line for line in said.splitlines(True) if line.startswith(lines))


@pytest.mark.parametrize("library", CHECKS)
def test_safeguard_example_refuses_the_late_write_of_a_stopped_holder(
    library: str, database: str
) -> None:
    assert said_by(EXAMPLES / f"safeguard_{library}.py", database) == REFUSED


@pytest.mark.parametrize("library", CHECKS)
def test_safeguard_example_without_its_check_takes_the_late_write(
    library: str, database: str, tmp_path: Path
) -> None:
    source = (EXAMPLES / f"safeguard_{library}.py").read_text()
    assert source.count(CHECKS[library]) == 1
    bare = tmp_path / f"safeguard_{library}.py"
    bare.write_text(source.replace(CHECKS[library], WITHOUT[library]))
    assert said_by(bare, database) == ACCEPTED


def charged(program: Path, database: str) -> list[str]:
    """Have a worker run it; return its output."""
    place, log = program.parent, program.with_suffix(".log")
    with worker("no_redis", of(database), log, place):
        code, said = forked.run("no_redis.py", cwd=place, env=of(database))
    assert code == 0, said
    return said.splitlines()


def test_example_no_redis_keeps_broker_results_and_locks_in_one_database(
    database: str, tmp_path: Path
) -> None:
    program = tmp_path / "no_redis.py"
    source = (EXAMPLES / "no_redis.py").read_text()
    program.write_text(source)
    orders = ("order blue: two charges", "order green: two charges")
    assert charged(program, database) == [f"{order}, one after the other" for order in orders]
