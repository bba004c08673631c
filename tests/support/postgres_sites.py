"""PostgreSQL databases of a test's own, and the roles that use them."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from celery_redlock.server import free_port
from celery_redlock.testing.postgresql import LocalPostgres
from tests.support import postgres
from tests.support.wait import wait_until

_names = (f"d{number}" for number in itertools.count())


@contextlib.contextmanager
def empty_server(**settings: str) -> Iterator[LocalPostgres]:
    """A server without our tables."""
    postgres.require()
    with postgres.made(**settings) as server:
        yield server


def new_database(server: LocalPostgres, *, tables: bool = True) -> str:
    """The URL of a new database."""
    name = next(_names)
    postgres.sql(server, f"CREATE DATABASE {name} TEMPLATE template0")
    url = url_of(server, database=name)
    if tables:
        execute(url, postgres.SCHEMA)
    return url


def url_of(
    server: LocalPostgres, *, user: str = "postgres", database: str = "postgres", port: int = 0
) -> str:
    """Where a database is, for a user."""
    return f"postgresql://{user}@127.0.0.1:{port or server.port}/{database}"


def execute(url: str, query: str) -> list[tuple[object, ...]]:
    """Execute something as whoever the URL names, and return its rows."""
    with psycopg.connect(url, autocommit=True, connect_timeout=5) as connection:
        cursor = connection.execute(query.encode())
        return cursor.fetchall() if cursor.description else []


@contextlib.contextmanager
def open_folder() -> Iterator[Path]:
    """A directory that the servers' user may enter, which no test's own is for it."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


@contextlib.contextmanager
def pooler(server: LocalPostgres, path: Path) -> Iterator[int]:
    """The port of a pgbouncer in front of a server, which lends connections for a transaction."""
    program = shutil.which("pgbouncer") or shutil.which("pgbouncer", path="/usr/sbin")
    if program is None:
        pytest.skip("there is no pgbouncer (apt install pgbouncer)")
    port = free_port()
    users, config = path / "users.txt", path / "pgbouncer.ini"
    users.write_text('"postgres" ""\n')
    config.write_text(
        f"[databases]\n* = host=127.0.0.1 port={server.port}\n"
        f"[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\n"
        f"auth_type = trust\nauth_file = {users}\npool_mode = transaction\n"
    )
    user = "nobody" if os.geteuid() == 0 else None
    for one in (users, config):
        one.chmod(0o644)
    with open(path / "pgbouncer.log", "wb") as log:
        process = subprocess.Popen(
            [program, str(config)], stdout=log, stderr=log, user=user, start_new_session=True
        )
    try:
        wait_until(lambda: _listens(port), 10.0, "pgbouncer listens")
        yield port
    finally:
        process.kill()
        process.wait()


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
        return True
    return False


@contextlib.contextmanager
def standby_of(server: LocalPostgres) -> Iterator[LocalPostgres]:
    """A standby that follows a server, and that no commit waits for."""
    standby = LocalPostgres()
    standby.copy(server, "-R")
    try:
        standby.start()
        query = "SELECT count(*) FROM pg_stat_replication WHERE state = 'streaming'"
        wait_until(lambda: postgres.sql(server, query) == [(1,)], 20.0, "the standby follows")
        yield standby
    finally:
        standby.stop()
