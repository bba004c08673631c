"""The bare limit of PostgreSQL: the fewest statements that are a lease, over psycopg.

One row a resource, one prepared statement to take it, one to give it back, each a transaction; a
waiter listens, and tries at each call. What a lock library is for is left out, as in `bare.py`.
"""

from __future__ import annotations

import os
from time import monotonic

import psycopg

TABLE = """
CREATE TABLE IF NOT EXISTS bare_lease (
    resource text PRIMARY KEY, token text NOT NULL, until timestamptz NOT NULL
)"""
ACQUIRE = """
INSERT INTO bare_lease AS l VALUES (%s, %s, clock_timestamp() + make_interval(secs => %s))
ON CONFLICT (resource) DO UPDATE SET token = excluded.token, until = excluded.until
WHERE l.until <= clock_timestamp() RETURNING token"""
RELEASE = "DELETE FROM bare_lease WHERE resource = %s AND token = %s"
GIVE = f"WITH gone AS ({RELEASE} RETURNING resource) SELECT pg_notify('bare', '') FROM gone"
EXTEND = """
UPDATE bare_lease l SET until = clock_timestamp() + make_interval(secs => %s)
FROM unnest(%s::text[], %s::text[]) AS mine (resource, token)
WHERE l.resource = mine.resource AND l.token = mine.token AND l.until > clock_timestamp()"""


class BarePostgres:
    """A lease in one table of the database at `url`."""

    def __init__(self, url: str, ttl: float = 10.0) -> None:
        self._ttl = ttl
        self._connection = psycopg.connect(url, autocommit=True)
        # All statements are prepared at once, as nothing is asked but these.
        self._connection.prepare_threshold = 0
        self._listening = psycopg.connect(url, autocommit=True)
        self._tokens = os.urandom(12).hex()
        self._count = 0

    def close(self) -> None:
        self._connection.close()
        self._listening.close()

    def acquire(self, resource: str) -> str | None:
        """Return the token of a lock on `resource`, or None without one."""
        self._count += 1
        token = f"{self._tokens}{self._count:08x}"
        taken = self._connection.execute(ACQUIRE, [resource, token, self._ttl]).fetchone()
        return token if taken else None

    def release(self, resource: str, token: str) -> bool:
        """Delete the lock if it is ours; return whether it was."""
        return self._connection.execute(RELEASE, [resource, token]).rowcount == 1

    def give(self, resource: str, token: str) -> bool:
        """Release it, and call whoever waits."""
        return self._connection.execute(GIVE, [resource, token]).rowcount == 1

    def wait(self, resource: str, seconds: float) -> str | None:
        """Return the token of a lock on `resource`, or None if it is not free within `seconds`."""
        self._listening.execute("LISTEN bare")
        end = monotonic() + seconds
        while (token := self.acquire(resource)) is None and monotonic() < end:
            for _ in self._listening.notifies(timeout=end - monotonic(), stop_after=1):
                pass
        return token

    def extend(self, held: dict[str, str]) -> int:
        """Extend many, resources and their tokens, in one statement; return how many."""
        values = [self._ttl, list(held), list(held.values())]
        return self._connection.execute(EXTEND, values).rowcount
