"""PostgreSQL servers for tests: one a module, with the tables, emptied before each test."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.pq import ExecStatus

from celery_redlock.server import free_port
from celery_redlock.testing.postgresql import LocalPostgres, find_postgres
from tests.support import wanting
from tests.support.wait import wait_until

SCHEMA = (files("celery_redlock.stores.postgresql") / "schema.sql").read_text("utf-8")
POOLER = """\
[databases]
postgres = host=127.0.0.1 port={server} dbname=postgres user=postgres
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = any
pool_mode = {mode}
default_pool_size = 3
"""
EMPTY = "TRUNCATE redlock_lease, redlock_waiter"


missing = functools.partial(wanting.missing, find_postgres)
require = functools.partial(wanting.require, find_postgres)


def made(**settings: str) -> LocalPostgres:
    """A server that is not started yet.

    To make its data takes most of a second of a core: they are copied from the first one's, of all
    lanes.
    """
    server = LocalPostgres(**settings)
    first = Path(tempfile.gettempdir(), "postgres")
    with open(first.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not first.exists():
            server.create()
            copied(server.data, first)
            return server
    copied(first, server.data)
    return server


def copied(source: Path, target: Path) -> None:
    """With its owner."""
    subprocess.run(["cp", "-a", str(source), str(target)], check=True)


@contextlib.contextmanager
def start_postgres(**settings: str) -> Iterator[LocalPostgres]:
    """Start a server with our tables, that clients count as known."""
    require()
    with made(**settings) as server:
        sql(server, SCHEMA)
        yield server


def as_new(server: LocalPostgres) -> None:
    """Resume it, start it, empty it: whatever the last test did."""
    if server.paused:
        server.resume()
    if not server.running:
        server.start()
    sql(server, EMPTY)


def admin(server: LocalPostgres, **changed: Any) -> psycopg.Connection[Any]:
    """A connection that may do everything."""
    return psycopg.connect(server.url, autocommit=True, connect_timeout=5, **changed)


def sql(server: LocalPostgres, query: Any, *values: Any) -> list[tuple[Any, ...]]:
    """Execute something, and return its rows."""
    with admin(server) as connection:
        cursor = connection.execute(query, values or None)
        tuples = cursor.pgresult is not None and cursor.pgresult.status == ExecStatus.TUPLES_OK
        return cursor.fetchall() if tuples else []


@contextlib.contextmanager
def start_pgbouncer(server: LocalPostgres, mode: str = "transaction") -> Iterator[str]:
    """A pooler in front of a server; the URL of its database there."""
    if not wanting.present("pgbouncer"):
        pytest.skip("there is no pgbouncer (apt install pgbouncer)")
    with tempfile.TemporaryDirectory(prefix="redlock-pgbouncer-") as directory:
        port = free_port()
        Path(directory, "ini").write_text(POOLER.format(server=server.port, port=port, mode=mode))
        Path(directory).chmod(0o755)
        run_as = ["-u", "nobody"] if os.geteuid() == 0 else []
        program = shutil.which("pgbouncer") or "/usr/sbin/pgbouncer"
        with (
            open(Path(directory, "log"), "wb") as log,
            subprocess.Popen([program, *run_as, f"{directory}/ini"], stderr=log) as process,
        ):
            url = f"postgresql://postgres@127.0.0.1:{port}/postgres"

            def answers() -> bool:
                with contextlib.suppress(psycopg.OperationalError), psycopg.connect(url):
                    return True
                return False

            try:
                wait_until(answers, 20.0, "the pooler answers")
                yield url
            finally:
                process.kill()
