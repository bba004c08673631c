"""The subscription of one process to an etcd cluster."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from time import monotonic

from ...protocol.errors import NodeError
from ...runtime.polling import SIZE
from ..subscription import Subscription
from .address import NO_ANSWER, TIMEOUT_S, Connection, EtcdAddress, reason
from .questions import TTL_SHIFT, lease_id
from .wire import MALFORMED, Replies, Request, answer, number, request, text, value_of

__all__ = ["EtcdSubscription"]

LISTENS_S = 3
"""Seconds for which a process counts as listening without a renewal; a whole number. If a process
dies in this time, other waiters try by themselves."""


class EtcdSubscription(Subscription):
    """One watch, over its own connection, of a key that exists as long as this process renews it.

    A release writes the name of the notified waiter into that key. If the key is missing, nobody
    listens.
    """

    reason = staticmethod(reason)

    def __init__(self, address: EtcdAddress, channel: bytes) -> None:
        self.every = LISTENS_S / 3
        self._address = address
        self._key = text(channel)
        self._lease = str(lease_id(LISTENS_S, secrets.randbits(TTL_SHIFT)))
        self._keeper: Connection | None = None
        self._watcher: Connection | None = None
        self._replies, self._kept = Replies(endless=True), Replies()
        self._listens = self._asked = False
        self._due = 0.0

    def connect(self) -> None:
        """Connect and watch; see `Subscription.connect`."""
        first = secrets.randbelow(len(self._address.members))
        self._keeper = keeper = self._address.connect(first)
        self._watcher = watcher = self._address.connect(first)
        keeper.ask("lease/grant", {"ID": self._lease, "TTL": str(LISTENS_S)})
        said = keeper.ask("kv/put", {"key": self._key, "lease": self._lease})
        since = str(number(said["header"]["revision"]) + 1)
        create = {"key": self._key, "start_revision": since}
        sock = watcher._sock
        sock.sendall(request(Request("watch", {"create_request": create}), watcher.head))
        until = monotonic() + TIMEOUT_S
        while not self._listens:
            if (left := until - monotonic()) <= 0:
                raise TimeoutError
            sock.settimeout(left)
            self._take(sock.recv(SIZE))
        self._due = monotonic() + self.every
        for connection in (keeper, watcher):
            connection._sock.setblocking(False)

    def fileno(self) -> int:
        assert self._watcher is not None
        return self._watcher._sock.fileno()

    def read(self) -> list[bytes]:
        """Return the names of the waiters that were notified since the last read."""
        assert self._watcher is not None
        self._keep()
        return self._take(self._watcher._sock.recv(SIZE))

    def _take(self, data: bytes) -> list[bytes]:
        if not data:
            raise NodeError("connection closed by the server")
        names: list[bytes] = []
        for status, lines in self._replies.feed(data, monotonic()):
            for line in lines.split(b"\n"):
                try:
                    names += self._called(status, line)
                except MALFORMED:
                    raise NodeError(NO_ANSWER) from None
        return names

    def _called(self, status: int, line: bytes) -> Iterator[bytes]:
        if not line.strip():
            return
        result = answer(status, line).get("result")
        if result is None or result.get("canceled"):
            raise NodeError("the watch was cancelled")
        self._listens = self._listens or bool(result.get("created"))
        for event in result.get("events", ()):
            if event.get("type") == "DELETE":
                raise NodeError("the lease of the subscription has expired")
            yield value_of(event["kv"].get("value", ""))

    def _keep(self) -> None:
        """Renew the key that shows that this process listens."""
        now = monotonic()
        if now < self._due or self._keeper is None:
            return
        self._due = now + self.every
        sock = self._keeper._sock
        if self._asked:  # at the previous call, so the answer must have arrived
            self._check(sock.recv(SIZE), now)
        kept = Request("lease/keepalive", {"ID": self._lease})
        sock.send(request(kept, self._keeper.head))
        self._asked = True

    def _check(self, data: bytes, now: float) -> None:
        if not data:
            raise NodeError("connection closed by the server")
        for status, body in self._kept.feed(data, now):
            self._asked = False
            try:
                left = number(answer(status, body)["result"].get("TTL", 0))
            except MALFORMED:
                raise NodeError(NO_ANSWER) from None
            if left <= 0:
                raise NodeError("the lease of the subscription has expired")
        if self._asked:
            raise NodeError("its response is incomplete")

    def close(self) -> None:
        """Close the connections, and delete the key that shows that this process listens."""
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            revoke = Request("lease/revoke", {"ID": self._lease})
            with contextlib.suppress(OSError):
                keeper._sock.setblocking(False)
                keeper._sock.send(request(revoke, keeper.head))
        for connection in (keeper, self._watcher):
            if connection is not None:
                connection.disconnect()
