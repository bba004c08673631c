"""Read the locks of one PostgreSQL database, over a connection of its own.

Names and values are those that a Redis node would have: the last fencing token of a resource, and
its wait queue, have its name with a suffix.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from time import monotonic
from typing import Any

import psycopg

from ...protocol.names import FENCE_SUFFIX, LINE_SUFFIX
from ...protocol.replies import MAX_TTL_S
from ..reading import MAX_TIMEOUTS, QUEUE, KeyValue, NodeReader, to_bytes, to_text
from .address import reason
from .handshake import hang_up
from .statements import from_text
from .statements import to_text as to_name

__all__ = ["PostgresReader"]


# A role that may create objects in a schema of the search_path must not get its own called. So a
# function with arguments is named with its schema, and operators get the types they are made for.
SCAN = """\
SELECT resource, until > clock_timestamp(), fence > 0 FROM redlock_lease
WHERE pg_catalog.starts_with(resource, %(head)s) AND (until > clock_timestamp() OR fence > 0)"""
SCAN_QUEUES = """\
SELECT DISTINCT resource FROM redlock_waiter
WHERE pg_catalog.starts_with(resource, %(head)s) AND until > clock_timestamp()"""
# A released row has -infinity, which versions before 17 cannot subtract from.
VALUES = """\
SELECT resource, token, fence,
    extract(epoch FROM until)::float8 - extract(epoch FROM clock_timestamp())::float8,
    extract(epoch FROM changed + interval '7 days' - clock_timestamp())::float8
FROM redlock_lease WHERE resource = ANY (%(names)s)"""
QUEUES = """\
SELECT resource, waiter, since, count, seconds FROM (
    SELECT resource, waiter, since, count(*) OVER w AS count,
        row_number() OVER (PARTITION BY resource ORDER BY since, waiter) AS place,
        extract(epoch FROM pg_catalog.max(until) OVER w - clock_timestamp())::float8 AS seconds
    FROM redlock_waiter WHERE resource = ANY (%(names)s) AND until > clock_timestamp()
    WINDOW w AS (PARTITION BY resource)
) q WHERE place <= %(members)s ORDER BY resource, place"""


class PostgresReader(NodeReader):
    """Reader of one database; `columns` has the names of the columns of the last answer."""

    connection: psycopg.Connection[tuple[Any, ...]]
    columns: Sequence[str] = ()
    store = "PostgreSQL"
    _end = threading.Timer(0.0, lambda: None)

    def connect(self) -> None:
        """Connect to the database.

        Raises:
            NodeError: It cannot be reached, or refuses us.
        """
        # Without prepared statements or settings that last, because there may be a pooler.
        self.connection = connection = self._address.connect(cursor_factory=psycopg.ClientCursor)
        # A server that is frozen answers nothing any more, not even that a statement took too long.
        self._end = threading.Timer(MAX_TIMEOUTS * self._timeout, hang_up, [connection])
        self._end.daemon = True
        self._end.start()
        self.heard = monotonic()

    def close(self) -> None:
        """Close the connection. Never fails."""
        self._end.cancel()
        super().close()

    def why(self, error: Exception) -> str:
        """Return the reason of a failed read, in one line without secrets; empty if too slow."""
        return "" if isinstance(error, psycopg.errors.QueryCanceled) else reason(error)

    def _ping(self) -> object:
        return self.ask("SELECT 1")

    @property
    def peer(self) -> str:
        """The IP address at the other end; empty for this machine's own sockets."""
        return self.connection.info.hostaddr

    def scan(self, head: str) -> dict[str, bytes]:
        """Return the keys that begin with prefix and `head`, by their names without the prefix."""
        begin = to_name(self.prefix + head).decode()
        names = []
        for resource, held, fenced in self.ask(SCAN, head=begin):
            names += [resource] * held + [resource + FENCE_SUFFIX] * fenced
        names += [queue + LINE_SUFFIX for (queue,) in self.ask(SCAN_QUEUES, head=begin)]
        keys = [from_text(name.encode()) for name in names]
        return {key[len(self.prefix) :]: to_bytes(key) for key in keys}

    def values(self, keys: Mapping[str, bytes]) -> dict[str, KeyValue]:
        """Return the values of some keys, by their names, without those that do not exist."""
        found: dict[str, KeyValue] = {}
        rows = {row[0]: row[1:] for row in self.ask(VALUES, names=_bases(keys))}
        for name, key in keys.items():
            base, suffix = _split(key)
            if base not in rows or suffix == LINE_SUFFIX:
                continue
            token, fence, left, remembered = rows[base]
            if suffix == FENCE_SUFFIX and fence:
                found[name] = KeyValue(b"%d" % fence, max(0.0, remembered))
            elif not suffix and left > 0:
                value = to_bytes(from_text(token.encode()))
                found[name] = KeyValue(value, left if left == math.inf else min(left, MAX_TTL_S))
        return found | self.queues({n: k for n, k in keys.items() if n.endswith(LINE_SUFFIX)}, 1)

    def queues(self, keys: Mapping[str, bytes], members: int) -> dict[str, KeyValue]:
        """Return the wait queues under some keys, by their names, with their first `members`."""
        if not keys:
            return {}
        waiting: dict[str, list[Any]] = {}
        for base, *row in self.ask(QUEUES, names=_bases(keys), members=members):
            waiting.setdefault(base, []).append(row)
        found = {}
        for name, key in keys.items():
            if rows := waiting.get(_split(key)[0]):
                first = tuple((waiter.encode(), float(since)) for waiter, since, _, _ in rows)
                found[name] = KeyValue(QUEUE, max(0.0, rows[0][3]), rows[0][2], first)
        return found

    def ask(self, query: str, **values: Any) -> Sequence[tuple[Any, ...]]:
        """Return the rows of a query, or of the last of several; each may take the timeout."""
        limit = f"SET LOCAL statement_timeout = {max(1, int(self._timeout * 1000))};"
        cursor = self.connection.execute(limit + query, values)
        while cursor.nextset():
            pass
        self.columns = [column.name for column in cursor.description or ()]
        rows = cursor.fetchall()
        self.heard = monotonic()
        return rows


def _split(key: bytes) -> tuple[str, str]:
    """Return the resource of a key, as the table names it, and the suffix of the key."""
    name = to_text(key)
    for suffix in (FENCE_SUFFIX, LINE_SUFFIX):
        if name.endswith(suffix):
            return to_name(name.removesuffix(suffix)).decode(), suffix
    return to_name(name).decode(), ""


def _bases(keys: Mapping[str, bytes]) -> list[str]:
    return [_split(key)[0] for key in keys.values()]
