"""Hears what one PostgreSQL database notifies on one channel."""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Iterator
from typing import Any

from ...protocol.errors import NodeError
from ...protocol.texts import event
from .address import PostgresAddress, reason
from .handshake import hang_up, pooled

__all__ = ["PostgresSubscription"]

logger = logging.getLogger("celery_redlock.wakeup")

PRESENT = "SELECT pg_catalog.pg_advisory_lock(pg_catalog.hashtextextended(%s, 0))"
POOLED_RETRY_S = 60.0
"""Before it is looked again whether a pooler is still in front of the server."""


class PostgresSubscription:
    """One LISTEN, over a connection of its own."""

    _said = False

    def __init__(self, address: PostgresAddress, channel: bytes) -> None:
        self._address = address
        # An identifier has no more than 63 bytes. `redlock_call` makes the same of it.
        self._channel = f"redlock_{hashlib.md5(channel, usedforsecurity=False).hexdigest()}"
        self._connection: Any = None
        self._interrupted = threading.Event()

    def calls(self) -> Iterator[bytes | None]:
        """Connect, and yield each payload; None first, once it listens.

        Raises:
            Exception: The connection has ended, or cannot be made, or goes through a pooler.
        """
        self._connection = connection = self._address.connect()
        if pooled(connection):
            if not PostgresSubscription._said:
                PostgresSubscription._said = True
                logger.warning(
                    "%s: a pooler stands in front of it, through which LISTEN does not work:"
                    " waiters look every second in place of being called",
                    self._address.name,
                    extra=event("node_pooled"),
                )
            connection.close()
            self._interrupted.wait(POOLED_RETRY_S)
            raise NodeError("a pooler is in front of it")
        connection.execute(f"LISTEN {self._channel}")
        # Held as long as this connection lives: it tells a release that this process listens.
        connection.execute(PRESENT, [self._channel])
        yield None
        for notify in connection.notifies():
            yield notify.payload.encode()
        raise NodeError("connection closed by the server")

    def interrupt(self) -> None:
        """Have `calls` end, which another thread may just be reading from."""
        self._interrupted.set()
        if self._connection is not None:
            hang_up(self._connection)

    def close(self) -> None:
        """Close the connection."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def reason(self, error: Exception) -> str:
        """Say what went wrong, in one line without a secret."""
        return reason(error)
