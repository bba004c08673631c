"""The subscription to one channel of a PostgreSQL database."""

from __future__ import annotations

import hashlib
import logging
from typing import Any, ClassVar

import psycopg

from ...protocol.errors import NodeError
from ...protocol.texts import event
from ..subscription import RECONNECT_S, Subscription
from .address import PostgresAddress, reason
from .handshake import BareConnection, answering, pooled

__all__ = ["PostgresSubscription"]

logger = logging.getLogger("celery_redlock.wakeup")

PRESENT = "SELECT pg_catalog.pg_advisory_lock(pg_catalog.hashtextextended(%s, 0))"
POOLED_RETRY_S = 60.0
"""Seconds until the next attempt if a pooler is in front of the server."""


class PostgresSubscription(Subscription):
    """One LISTEN, over its own connection."""

    broken: ClassVar[tuple[type[Exception], ...]] = (psycopg.Error, OSError, NodeError)
    _said = False
    reason = staticmethod(reason)

    def __init__(self, address: PostgresAddress, channel: bytes) -> None:
        self._address = address
        # An identifier has at most 63 bytes. `redlock_call` computes the same name.
        self._channel = f"redlock_{hashlib.md5(channel, usedforsecurity=False).hexdigest()}"
        self._connection: Any = None

    def connect(self) -> None:
        """Connect and listen; see `Subscription.connect`. Fails if a pooler is in between."""
        connection = self._address.connect()
        try:
            with answering(connection):
                if pooled(connection):
                    self._refuse_pooler()
                connection.execute(f"LISTEN {self._channel}")
                # Held as long as this connection lives, so that a release can see that this process
                # listens.
                connection.execute(PRESENT, [self._channel])
            self._connection = BareConnection(connection)
        except BaseException:
            connection.close()
            raise

    def _refuse_pooler(self) -> None:
        if not PostgresSubscription._said:
            PostgresSubscription._said = True
            logger.warning(
                "a pooler is in front of node %s, and LISTEN does not work through it: waiters ask"
                " every second instead of being notified",
                self._address.name,
                extra=event("node_pooled"),
            )
        self.retry = POOLED_RETRY_S, POOLED_RETRY_S + RECONNECT_S
        raise NodeError("a pooler is in front of it")

    def fileno(self) -> int:
        return int(self._connection.fd)

    def read(self) -> list[bytes]:
        """Return the names of the waiters that were notified since the last read."""
        pgconn = self._connection.pgconn
        pgconn.consume_input()
        names: list[bytes] = []
        while (notify := pgconn.notifies()) is not None:
            names.append(notify.extra)
        return names

    def close(self) -> None:
        """Close the connection."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.disconnect()
