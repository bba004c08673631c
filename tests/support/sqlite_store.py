"""Locks in a file of SQLite: a store written from docs/write-a-store.md alone.

A file is no lock server. It serves the processes of one machine, and is in no package: it shows
what a store must do.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from celery_redlock import ConfigurationError
from celery_redlock.stores.contract import Can, Granted, Kind, Store, Wanted

__all__ = ["KIND", "SqliteStore"]

SCHEMA = """
CREATE TABLE IF NOT EXISTS lease (name TEXT PRIMARY KEY, token TEXT NOT NULL, until REAL NOT NULL);
CREATE TABLE IF NOT EXISTS counter (value INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS memory (id TEXT NOT NULL);
INSERT INTO counter SELECT 0 WHERE NOT EXISTS (SELECT * FROM counter);
INSERT INTO memory SELECT hex(randomblob(8)) WHERE NOT EXISTS (SELECT * FROM memory);
"""


@dataclass(frozen=True)
class SqliteAddress:
    """The path of a file."""

    name: str
    store: str = "SQLite"
    unverified: str = ""
    exposed: None = None
    least_timeout: float = 0.0
    moves: bool = False


def parse(url: str, where: str) -> SqliteAddress:
    """Return the address in a URL, `sqlite:///path`."""
    path = url.partition("://")[2]
    if not path.startswith("/"):
        raise ConfigurationError(f"{where}: write sqlite:///path, with a whole path")
    return SqliteAddress(path)


class SqliteStore(Store):
    """One connection to a file."""

    broken = (sqlite3.DatabaseError,)
    _database: sqlite3.Connection | None = None

    def __init__(self, address: SqliteAddress) -> None:
        self._path = address.name

    def connect(self) -> str:
        self._database = database = sqlite3.connect(self._path, timeout=2.0, isolation_level=None)
        database.execute("PRAGMA journal_mode = WAL")
        database.executescript(SCHEMA)
        (memory,) = database.execute("SELECT id FROM memory").fetchone()
        return str(memory)

    def close(self) -> None:
        if self._database is not None:
            self._database.close()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        assert self._database is not None
        self._database.execute("BEGIN IMMEDIATE")
        try:
            yield self._database
        except BaseException:
            self._database.execute("ROLLBACK")
            raise
        self._database.execute("COMMIT")

    def acquire(self, wanted: Wanted) -> Granted:
        with self._transaction() as database:
            for place, seen in enumerate(self.peek(wanted.names)):
                if seen is not None and seen[0] != wanted.token:
                    return Granted(holder=seen[0], place=place)
            database.execute("UPDATE counter SET value = value + 1")
            self._set(database, wanted.names, wanted.token, wanted.ttl)
            (fence,) = database.execute("SELECT value FROM counter").fetchone()
            return Granted(fence=fence)

    def extend(self, wanted: Wanted) -> bool:
        with self._transaction() as database:
            held = self._held(wanted)
            if held:
                self._set(database, wanted.names, wanted.token, wanted.ttl)
            return held

    def release(self, wanted: Wanted) -> bool:
        with self._transaction() as database:
            held = self._held(wanted)
            for name in wanted.names:
                database.execute(
                    "DELETE FROM lease WHERE name = ? AND token = ?", [name, wanted.token]
                )
            return held

    def peek(self, names: Sequence[str]) -> list[tuple[str, float] | None]:
        assert self._database is not None
        now, found = time.time(), []
        for name in names:
            query = "SELECT token, until FROM lease WHERE name = ? AND until > ?"
            row = self._database.execute(query, [name, now]).fetchone()
            found.append(None if row is None else (row[0], row[1] - now))
        return found

    def scan(self, head: str) -> Iterator[str]:
        assert self._database is not None
        query = "SELECT name FROM lease WHERE substr(name, 1, ?) = ? AND until > ?"
        for (name,) in self._database.execute(query, [len(head), head, time.time()]):
            yield name

    def keep(self, name: str, value: str, ttl: float) -> None:
        with self._transaction() as database:
            self._set(database, [name], value, ttl)

    def _held(self, wanted: Wanted) -> bool:
        return all(seen is not None and seen[0] == wanted.token for seen in self.peek(wanted.names))

    def _set(
        self, database: sqlite3.Connection, names: Sequence[str], token: str, ttl: float
    ) -> None:
        for name in names:
            values = [name, token, time.time() + ttl]
            database.execute("INSERT OR REPLACE INTO lease VALUES (?, ?, ?)", values)


KIND = Kind(
    name="SQLite",
    can=Can(fencing="counted", keeps=True),
    parse="tests.support.sqlite_store:parse",
    store="tests.support.sqlite_store:SqliteStore",
    many="files",
)
