"""Looks at what locks are kept in, from outside: straight at a server, with its plain words."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, ClassVar, TypeAlias

import psycopg
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from celery_redlock.protocol.errors import NodeError
from celery_redlock.server import LocalServer
from celery_redlock.stores.etcd.address import EtcdAddress
from celery_redlock.stores.etcd.wire import Keys, value_of
from celery_redlock.stores.kinds import parse_nodes
from celery_redlock.testing.etcd import LocalEtcd
from celery_redlock.testing.postgresql import LocalPostgres
from tests.support import etcd, postgres

__all__ = ["PREFIX", "Server", "eyes"]

PREFIX = "redlock:"
SHARED = "~shared"
"""End of a reader's token, and of its entry in a wait queue."""

Server: TypeAlias = LocalServer | LocalPostgres | LocalEtcd


class RedisEyes:
    """Looks at a Redis node with plain commands."""

    blind: ClassVar[tuple[type[Exception], ...]] = (redis.RedisError,)

    def __init__(self, node: LocalServer) -> None:
        self._client = redis.Redis(
            port=node.port, socket_timeout=1.0, retry=Retry(NoBackoff(), 0), decode_responses=True
        )

    def tokens(self, resources: Sequence[str]) -> list[tuple[str, str]]:
        """Return the held resources and their tokens; those of readers are in sorted sets."""
        tokens = self._client.mget([PREFIX + resource for resource in resources])
        held = [(r, token) for r, token in zip(resources, tokens, strict=True) if token is not None]
        others = [r for r, token in zip(resources, tokens, strict=True) if token is None]
        looks = self._client.pipeline(transaction=False)
        looks.time()
        for resource in others:
            looks.zrange(PREFIX + resource, 0, -1, withscores=True)
        (seconds, micros), *found = looks.execute(raise_on_error=False)
        for resource, readers in zip(others, found, strict=True):
            if isinstance(readers, list):  # else a writer's by now
                now = seconds * 1000 + micros / 1000
                held += ((resource, token) for token, ends in readers if ends > now)
        return held

    def queue(self, resource: str) -> tuple[list[str], list[tuple[str, float]]]:
        """Return the tokens of the readers of a resource, and the writers in its wait queue.

        Each writer with the time at which it joined, in seconds since 1970. A writer whose process
        does not listen is left out.
        """
        look = self._client.pipeline()
        look.time()
        look.zrange(PREFIX + resource, 0, -1, withscores=True)
        look.zrange(f"{PREFIX}{resource}#line", 0, -1, withscores=True)
        time, held, waiters = look.execute(raise_on_error=False)
        if not isinstance(time, tuple) or not isinstance(waiters, list):
            return [], []  # it is loading its data, or has none of its memory left
        held = held if isinstance(held, list) else []  # a writer's
        now = time[0] * 1000 + time[1] / 1000
        writers = [(name, since / 1e6) for name, since in waiters if not name.endswith(SHARED)]
        channels = [name.rpartition(":")[0] for name, _since in writers]
        listens = dict(self._client.pubsub_numsub(*channels)) if channels else {}
        return (
            [token for token, ends in held if ends > now],
            [one for one, channel in zip(writers, channels, strict=True) if listens.get(channel)],
        )

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
        """Return the held resources and their tokens."""
        rows = self._ask(
            "SELECT resource, token FROM redlock_lease"
            " WHERE resource = ANY (%s) AND until > clock_timestamp()",
            [PREFIX + resource for resource in resources],
        )
        return [(name.removeprefix(PREFIX), token) for name, token in rows]

    def names(self) -> list[str]:
        """Return the names of all held locks; a row of a released one is none."""
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


class EtcdEyes:
    """Looks at an etcd cluster over its gateway."""

    blind: ClassVar[tuple[type[Exception], ...]] = (OSError, NodeError)

    def __init__(self, node: LocalEtcd) -> None:
        self._node = node

    def tokens(self, resources: Sequence[str]) -> list[tuple[str, str]]:
        """Return the held resources and their tokens."""
        return [(name, token) for name, token in self._all() if name in set(resources)]

    def names(self) -> list[str]:
        """All that is there, by name."""
        return [PREFIX + name for name, _ in self._all()]

    def _all(self) -> list[tuple[str, str]]:
        start = Keys(PREFIX).locks
        (one,) = [parse_nodes([self._node.url])[0]]
        assert isinstance(one, EtcdAddress)
        connection = one.connect()
        with contextlib.closing(connection):
            every = {"key": etcd.text(start), "range_end": etcd.above(start)}
            found = connection.ask("kv/range", every).get("kvs", ())
        pairs = [(value_of(kv["key"])[len(start) :], value_of(kv["value"])) for kv in found]
        return [(name.decode(), token.decode()) for name, token in pairs]

    def close(self) -> None:
        """Each look has a connection of its own: a member may be down."""


def eyes(node: Server) -> RedisEyes | PostgresEyes | EtcdEyes:
    """Return a look at a node, straight at the server, past all links."""
    if isinstance(node, LocalEtcd):
        return EtcdEyes(node)
    return PostgresEyes(node) if isinstance(node, LocalPostgres) else RedisEyes(node)
