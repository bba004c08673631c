"""The bare limit of ZooKeeper: the fewest requests that are a lease, in one session of kazoo.

One request to create an ephemeral node, one to delete it; a waiter watches it. A session is kept
alive by pings, so the one request of an extension is a transaction that checks each node, as ours
does.
"""

from __future__ import annotations

import os
import threading
from time import monotonic
from urllib.parse import quote

from kazoo.client import KazooClient
from kazoo.exceptions import NodeExistsError

__all__ = ["BareZooKeeper"]


class BareZooKeeper:
    """A lease in the ensemble at `url`."""

    def __init__(self, url: str, ttl: float = 10.0) -> None:
        hosts = url.partition("://")[2].partition("?")[0]
        self._client = KazooClient(hosts=hosts, timeout=2 * ttl)
        self._client.start()
        self._tokens = os.urandom(12).hex()
        self._count = 0
        self._held: dict[str, str] = {}

    def close(self) -> None:
        self._client.stop()
        self._client.close()

    def acquire(self, resource: str) -> str | None:
        """Return the token of a lock on `resource`, or None without one."""
        self._count += 1
        token = f"{self._tokens}{self._count:08x}"
        try:
            self._client.create(_path(resource), token.encode(), ephemeral=True)
        except NodeExistsError:
            return None
        self._held[resource] = token
        return token

    def release(self, resource: str, token: str) -> bool:
        """Delete the lock if it is ours; return whether it was."""
        if self._held.get(resource) != token:
            return False
        self._client.delete(_path(resource), version=0)
        return True

    give = release

    def wait(self, resource: str, seconds: float) -> str | None:
        """Return the token of a lock on `resource`, or None if it is not free within `seconds`."""
        end = monotonic() + seconds
        while (left := end - monotonic()) > 0:
            gone = threading.Event()
            if self._client.exists(_path(resource), watch=lambda _, gone=gone: gone.set()):
                gone.wait(left)
            if (token := self.acquire(resource)) is not None:
                return token
        return None

    def extend(self, held: dict[str, str]) -> int:
        """Extend many, resources and their tokens, in one transaction; return how many."""
        transaction = self._client.transaction()
        for resource, token in held.items():
            if self._held.get(resource) == token:
                transaction.check(_path(resource), 0)
        results = transaction.commit() if transaction.operations else []
        return sum(result is True for result in results)


def _path(resource: str) -> str:
    return "/bare-" + quote(resource, safe="")
