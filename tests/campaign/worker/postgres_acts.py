"""Faults of a PostgreSQL node. Each act is a generator: it waits, then heals.

There is no minority that could be cut off, swapped or given another clock: each fault of the one
node is one of the quorum.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import Any

import psycopg

from celery_redlock.testing.postgresql import LocalPostgres
from tests.campaign.worker.chronicle import Fault
from tests.campaign.worker.crew import Crew, Steps
from tests.campaign.worker.feeder import RESOURCES
from tests.campaign.worker.stage import TTL
from tests.support import postgres
from tests.support.eyes import PREFIX
from tests.support.wait import wait_until

LEFT_OUT = (
    "there is one node: no minority is cut off, paused or empty, no other servers stand behind its"
    " address, it is not demoted, its clock is not stepped"
)
OURS = "application_name = 'celery_redlock'"
STOPS = 10.0
"""Seconds for a server to end when asked to."""


class PostgresNodeActs(Crew):
    """Faults of PostgreSQL, one at a time."""

    @property
    def _server(self) -> LocalPostgres:
        (server,) = self.stage.nodes
        assert isinstance(server, LocalPostgres)
        return server

    def _down(self, what: str) -> contextlib.AbstractContextManager[Fault]:
        """Return the fault of a server that is down.

        It may have forgotten acknowledged writes if so set.
        """
        lasts = self.stage.store == "postgresql"
        return self._fault(f"server {what}" if lasts else f"node kill: server {what}")

    def _admin(self, database: str = "postgres") -> psycopg.Connection[Any]:
        """A connection past all links."""
        options = "-c lock_timeout=1000"
        return postgres.admin(
            self._server, dbname=database, application_name="nemesis", options=options
        )

    def _ask(self, statement: Any, database: str = "postgres") -> list[tuple[Any, ...]]:
        """Return the rows of a statement; none if the server does not answer."""
        with contextlib.suppress(psycopg.Error), self._admin(database) as connection:
            cursor = connection.execute(statement)
            return cursor.fetchall() if cursor.description else []
        return []

    def _recovered(self) -> None:
        """Wait until it takes connections again."""

        def answers() -> bool:
            return bool(self._ask("SELECT 1"))

        wait_until(answers, 30.0, "the server takes connections")

    # -- The whole server

    def pause_server(self, seconds: float = 0.0, kind: str = "server stop") -> Steps:
        """SIGSTOP of all its processes."""
        self._contend(self.choose.choice(RESOURCES), many=3)
        with self._fault(kind):
            try:
                self._server.pause()
                yield seconds or self.choose.uniform(0.3, 1.5 * TTL)
            finally:
                self._server.resume()

    def lose_majority(self) -> Steps:
        """Pause the server for less than a ttl, or for more, while bodies run."""
        seconds, kind = yield from self._majority_lost("server")
        yield from self.pause_server(seconds, kind)

    def kill_server(self) -> Steps:
        """kill -9 of all its processes; back at once or later, with what it had on the disk."""
        wanted = self.choose.sample(RESOURCES, 3)
        yield from self._busy(*wanted, seconds=2 * TTL)
        with self._down("kill -9"):
            try:
                self._contend(*wanted)
                self._server.kill()
                yield self.choose.choice((0.0, self.choose.uniform(0.0, TTL)))
            finally:
                self._server.start()

    def restart_server(self) -> Steps:
        """SIGINT: it ends all connections and writes all to the disk."""
        with self._fault("server restart"):
            try:
                os.kill(self._server.pid, signal.SIGINT)
                for _look in range(int(STOPS / 0.05)):
                    if not self._server.running:
                        break
                    yield 0.05
            finally:
                self._server.restart()

    def crash_backend(self) -> Steps:
        """kill -9 of one process: the others are ended, and it recovers as after a crash."""
        wanted = self.choose.sample(RESOURCES, 3)
        yield from self._busy(*wanted, seconds=2 * TTL)
        for pid in self._some_backend():
            with self._down("backend kill -9"):
                self._contend(*wanted)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                yield 0.1
                self._recovered()

    # -- Single backends

    def _some_backend(self) -> list[int]:
        """The process that serves one connection of a worker; none, if there is none."""
        pids = [pid for (pid,) in self._ask(f"SELECT pid FROM pg_stat_activity WHERE {OURS}")]
        return [self.choose.choice(sorted(pids))] if pids else []

    def stop_backend(self) -> Steps:
        """SIGSTOP one backend anywhere: it may keep a row, or a lock of the server's own."""
        self._contend(self.choose.choice(RESOURCES), many=3)
        for pid in self._some_backend():
            with self._fault("backend stop"):
                try:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGSTOP)
                    yield self.choose.uniform(0.3, 2.0 * TTL)
                finally:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGCONT)

    def end_backends(self) -> Steps:
        """pg_terminate_backend: end one of our sessions, or all."""
        which = f"SELECT pid FROM pg_stat_activity WHERE {OURS}"
        which += self.choose.choice(("", " ORDER BY random() LIMIT 1"))
        with self._fault("backends terminated"):
            self._ask(f"SELECT pg_terminate_backend(pid) FROM ({which}) ours")
        yield 0.0

    def deafen(self) -> Steps:
        """End the sessions that wait for notifications."""
        self._contend(self.choose.choice(RESOURCES), many=5)
        yield 0.2
        with self._fault("listeners terminated"):
            self._ask("SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory'")
        yield 0.0

    def cancel_queries(self) -> Steps:
        """pg_cancel_backend: cancel running queries, as operators and statement_timeout do."""
        end = time.monotonic() + self.choose.uniform(0.2, 1.0)
        with self._fault("queries cancelled"):
            while time.monotonic() < end:
                self._ask(
                    "SELECT pg_cancel_backend(pid) FROM pg_stat_activity"
                    f" WHERE {OURS} AND state = 'active'"
                )
                yield 0.01

    # -- Other sessions

    def lock_rows(self) -> Steps:
        """Lock the rows of wanted locks by another transaction."""
        wanted = self.choose.sample(RESOURCES, 5)
        self._contend(*wanted)
        with (
            contextlib.suppress(psycopg.errors.LockNotAvailable),
            self._admin() as connection,
            self._fault("rows locked"),
            connection.transaction(),
        ):
            names = [PREFIX + resource for resource in wanted]
            connection.execute(
                "SELECT FROM redlock_lease WHERE resource = ANY (%s) FOR UPDATE", [names]
            )
            yield self.choose.uniform(0.3, 1.5 * TTL)

    def lock_tables(self) -> Steps:
        """Lock a table, as VACUUM FULL or a migration does."""
        table = self.choose.choice(("redlock_lease", "redlock_waiter", "redlock_memory"))
        with (
            contextlib.suppress(psycopg.errors.LockNotAvailable),
            self._admin() as connection,
            self._fault(f"{table} locked"),
            connection.transaction(),
        ):
            connection.execute(f"LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE".encode())
            yield self.choose.uniform(0.3, TTL)

    def read_only(self) -> Steps:
        """Let the server refuse writes, as an operator does when the disk is nearly full."""
        with self._fault("read only"):
            try:
                self._ask("ALTER SYSTEM SET default_transaction_read_only = on")
                self._ask("SELECT pg_reload_conf()")
                yield self.choose.uniform(0.3, TTL)
            finally:
                self._ask("ALTER SYSTEM RESET default_transaction_read_only")
                self._ask("SELECT pg_reload_conf()")

    def no_clients(self) -> Steps:
        """Let the server refuse all clients, and disconnect those that it has."""
        with self._fault("no connections"):
            try:
                self._ask("ALTER DATABASE postgres ALLOW_CONNECTIONS false", "template1")
                self._ask(
                    f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {OURS}",
                    "template1",
                )
                yield self.choose.uniform(0.3, TTL)
            finally:
                self._ask("ALTER DATABASE postgres ALLOW_CONNECTIONS true", "template1")
