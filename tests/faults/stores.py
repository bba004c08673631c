"""What a campaign's locks are kept in, and how it is looked at from outside.

Five Redis nodes, or one PostgreSQL database. That one keeps over a crash all that it has
acknowledged; "forgetful" acknowledges commits before they are on the disk (`synchronous_commit`),
and loses some.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, TypeAlias

import psycopg
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from celery_redlock.server import LocalServer
from celery_redlock.testing.postgresql import LocalPostgres
from tests.support import postgres

STORES = ("redis", "postgresql", "forgetful")
PREFIX = "redlock:"
NODES = 5
LASTING = ("--appendonly", "yes", "--appendfsync", "always")
DEBUG = ("--enable-debug-command", "local")
POSTGRES = {"fsync": "on", "full_page_writes": "on"}
FORGETFUL = {"synchronous_commit": "off", "wal_writer_delay": "10s", "fsync": "on"}

Server: TypeAlias = LocalServer | LocalPostgres


def make_nodes(store: str) -> list[Any]:
    """The servers of a store, not started."""
    if store == "redis":
        return [LocalServer(config=(*DEBUG, *(LASTING if n < 2 else ()))) for n in range(NODES)]
    assert not postgres.missing(), postgres.missing()
    return [LocalPostgres(**(FORGETFUL if store == "forgetful" else POSTGRES))]


def prepare(node: Server) -> None:
    """Make what locks are kept in, on a server that has just been started."""
    if isinstance(node, LocalPostgres):
        postgres.sql(node, postgres.SCHEMA)


def url_at(node: Server, port: int) -> str:
    """A node's URL, through a link."""
    return node.url.replace(f":{node.port}/", f":{port}/")


class RedisEyes:
    """Looks at a Redis node with plain commands."""

    blind: ClassVar[tuple[type[Exception], ...]] = (redis.RedisError,)

    def __init__(self, node: LocalServer) -> None:
        self._client = redis.Redis(
            port=node.port, socket_timeout=1.0, retry=Retry(NoBackoff(), 0), decode_responses=True
        )

    def tokens(self, resources: Sequence[str]) -> list[tuple[str, str]]:
        """Which of these are held, and by which token."""
        tokens = self._client.mget([PREFIX + resource for resource in resources])
        return [(r, token) for r, token in zip(resources, tokens, strict=True) if token is not None]

    def names(self) -> list[str]:
        """All that is there, by name."""
        return list(self._client.scan_iter(f"{PREFIX}*", count=1000))

    def close(self) -> None:
        self._client.close()


class PostgresEyes:
    """Looks at a PostgreSQL node with plain statements."""

    blind: ClassVar[tuple[type[Exception], ...]] = (psycopg.Error,)

    def __init__(self, node: LocalPostgres) -> None:
        self._node = node
        self._connection: psycopg.Connection[Any] | None = None

    def tokens(self, resources: Sequence[str]) -> list[tuple[str, str]]:
        """Which of these are held, and by which token."""
        rows = self._ask(
            "SELECT resource, token FROM redlock_lease"
            " WHERE resource = ANY (%s) AND until > clock_timestamp()",
            [PREFIX + resource for resource in resources],
        )
        return [(name.removeprefix(PREFIX), token) for name, token in rows]

    def names(self) -> list[str]:
        """All locks that are held, by name; a row of what was given back is none."""
        rows = self._ask("SELECT resource FROM redlock_lease WHERE until > clock_timestamp()")
        return [name for (name,) in rows]

    def _ask(self, statement: Any, *values: Any) -> list[tuple[Any, ...]]:
        if self._connection is None or self._connection.closed:
            # No lock that an act takes is to keep it waiting for more than a look or two.
            self._connection = postgres.admin(
                self._node, application_name="sentry", options="-c lock_timeout=200"
            )
        return self._connection.execute(statement, values or None).fetchall()

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()


def eyes(node: Server) -> RedisEyes | PostgresEyes:
    """What looks at a node, straight at the server, past all links."""
    return PostgresEyes(node) if isinstance(node, LocalPostgres) else RedisEyes(node)
