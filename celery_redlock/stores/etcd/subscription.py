"""Hears what one etcd cluster is told for one process."""

from __future__ import annotations

import contextlib
import secrets
import select
from collections.abc import Iterator
from time import monotonic

from ...protocol.errors import NodeError
from ...runtime.polling import SIZE, WAITS
from .address import Connection, EtcdAddress, reason
from .questions import TTL_SHIFT, lease_id
from .wire import Replies, Request, answer, number, request, text, value_of

__all__ = ["EtcdSubscription"]

LISTENS_S = 3
"""For how long a process counts as listening that does not say so; whole seconds. Who waits beside
one that has died meanwhile tries by itself."""


class EtcdSubscription:
    """One watch, over a connection of its own, of a key that lives as long as it is kept alive.

    A release writes into that key who is called; where it is missing nobody listens.
    """

    def __init__(self, address: EtcdAddress, channel: bytes) -> None:
        self._address = address
        self._key = text(channel)
        self._lease = str(lease_id(LISTENS_S, secrets.randbits(TTL_SHIFT)))
        self._keeper: Connection | None = None
        self._watcher: Connection | None = None

    def calls(self) -> Iterator[bytes | None]:
        """Connect, and yield each payload; None first, once it listens.

        Raises:
            Exception: A connection has ended, or cannot be made.
        """
        first = secrets.randbelow(len(self._address.members))
        self._keeper = keeper = self._address.connect(first)
        self._watcher = watcher = self._address.connect(first)
        keeper.ask("lease/grant", {"ID": self._lease, "TTL": str(LISTENS_S)})
        said = keeper.ask("kv/put", {"key": self._key, "lease": self._lease})
        since = str(number(said["header"]["revision"]) + 1)
        create = {"key": self._key, "start_revision": since}
        sock = watcher._sock
        sock.sendall(request(Request("watch", {"create_request": create}), watcher.head))
        sock.setblocking(False)
        replies, listens = Replies(endless=True), False
        due = monotonic() + LISTENS_S / 3
        while True:
            if monotonic() >= due:
                due = monotonic() + LISTENS_S / 3
                if not listens:
                    raise TimeoutError
                kept = keeper.ask("lease/keepalive", {"ID": self._lease})["result"]
                if number(kept.get("TTL", 0)) <= 0:
                    raise NodeError("it was not heard of for too long")
            select.select([sock], [], [], max(0.0, due - monotonic()))
            try:
                data = sock.recv(SIZE)  # no less than a record of TLS
            except WAITS:
                continue
            if not data:
                raise NodeError("connection closed by the server")
            for status, lines in replies.feed(data, monotonic()):
                for line in lines.split(b"\n"):
                    for call in _heard(status, line):
                        listens = listens or call is None
                        yield call

    def interrupt(self) -> None:
        """Have `calls` end, which another thread may just be reading from."""
        if self._watcher is not None:
            with contextlib.suppress(OSError):
                self._watcher.hang_up()

    def close(self) -> None:
        """Close the connections; nobody is called here any more."""
        if self._keeper is not None:
            with contextlib.suppress(Exception):
                self._keeper.ask("lease/revoke", {"ID": self._lease})
        for connection in (self._keeper, self._watcher):
            if connection is not None:
                connection.disconnect()

    def reason(self, error: Exception) -> str:
        """Say what went wrong, in one line without a secret."""
        return reason(error)


def _heard(status: int, line: bytes) -> Iterator[bytes | None]:
    if not line.strip():
        return
    result = answer(status, line).get("result")
    if result is None or result.get("canceled"):
        raise NodeError("it does not watch any more")
    if result.get("created"):
        yield None
    for event in result.get("events", ()):
        if event.get("type") == "DELETE":
            raise NodeError("it was not heard of for too long")
        yield value_of(event["kv"].get("value", ""))
