"""Any name and any token can be kept in PostgreSQL, whatever it consists of."""

from __future__ import annotations

import random
from collections.abc import Iterator

import psycopg
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from celery_redlock.protocol.round import Verb
from celery_redlock.stores.kinds import open_reader, parse_nodes
from celery_redlock.stores.postgresql.statements import MAX_BYTES, from_text, to_text
from celery_redlock.testing.postgresql import LocalPostgres
from tests.support import postgres
from tests.support.names import Locks
from tests.support.subjects import Postgres, claim

LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
LONG = "".join(random.Random(1).choices(LETTERS, k=20_000))
"""An incompressible name: a compressible one may be longer in an index."""


@pytest.fixture(scope="module")
def server() -> Iterator[LocalPostgres]:
    with postgres.start_postgres() as started:
        for encoding in ("SQL_ASCII", "LATIN1"):
            create = f"CREATE DATABASE {encoding} TEMPLATE template0 ENCODING '{encoding}'"
            postgres.sql(started, f"{create} LC_COLLATE 'C' LC_CTYPE 'C'")
        yield started


@example(["\0", "\\0000"])
@given(st.lists(st.text(st.characters(exclude_categories=())), min_size=2, max_size=2, unique=True))
def test_two_names_have_two_texts_in_postgresql_and_are_read_back(names: list[str]) -> None:
    one, other = map(to_text, names)
    assert one != other
    assert [from_text(one), from_text(other)] == names


def test_name_too_long_for_an_index_has_a_digest_in_its_middle(postgresql: Postgres) -> None:
    short = to_text(f"redlock:{LONG}#done")
    assert len(short) <= MAX_BYTES
    assert short.startswith(b"redlock:" + LONG[:100].encode())
    assert short.endswith(b"#done")
    assert to_text(f"redlock:{LONG[:10_000]}!{LONG[10_001:]}#done") != short
    for name in (LONG, "\U0001f512" * 5000):
        mine = claim(resource="r")
        mine.mark = (f"{name}#done", 60.0)
        postgresql.ask(Verb.ACQUIRE, mine)
        assert postgresql.ask(Verb.RELEASE, mine) is True
        assert postgresql.ask(Verb.PEEK, claim("x", f"{name}#done"))[0] == "done"


@pytest.mark.parametrize("encoding", ["sql_ascii", "latin1"])
def test_database_in_another_encoding_than_utf8_works(
    server: LocalPostgres, lock_over: Locks, encoding: str
) -> None:
    url = server.url.removesuffix("/postgres") + f"/{encoding}"
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(postgres.SCHEMA)
    redlock = lock_over([url], ttl=60.0)
    names = ["é", "o\0\\"] + ["日本"] * (encoding == "sql_ascii")
    with redlock.lock(names):
        reader = open_reader(parse_nodes([url])[0], redlock.prefix, 5.0)
        reader.connect()
        assert set(reader.scan("")) == set(names)
        reader.close()
