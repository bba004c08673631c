"""The subscription to one channel of a Redis node."""

from __future__ import annotations

from time import monotonic
from typing import Any, ClassVar

import redis

from ...protocol.errors import NodeError
from ...runtime.polling import SIZE
from ..subscription import Subscription
from .address import Address
from .resp import Replies, reason

__all__ = ["RedisSubscription"]


class RedisSubscription(Subscription):
    """One subscription, over its own connection."""

    broken: ClassVar[tuple[type[Exception], ...]] = (redis.RedisError, OSError, NodeError)
    reason = staticmethod(reason)

    def __init__(self, address: Address, channel: bytes) -> None:
        self._address = address
        self._channel = channel
        self._connection: Any = None
        self._socket: Any = None
        self._replies = Replies()
        self._confirmed = False
        self._head = b"*3\r\n$7\r\nmessage\r\n$%d\r\n%b\r\n$" % (len(channel), channel)

    def connect(self) -> None:
        """Connect and subscribe; see `Subscription.connect`."""
        self._connection = connection = self._address.connection()
        connection.connect()
        if connection.can_read():
            raise NodeError("it sent a reply without a request")
        # Keep a reference: redis-py drops the socket on a failed read.
        self._socket = stream = connection._sock
        until = monotonic() + connection.socket_timeout
        connection.send_command(b"SUBSCRIBE", self._channel, check_health=False)
        while not self._confirmed:
            if (left := until - monotonic()) <= 0:
                raise TimeoutError
            stream.settimeout(left)
            self._take(stream.recv(SIZE))
        stream.setblocking(False)

    def fileno(self) -> int:
        return int(self._socket.fileno())

    def read(self) -> list[bytes]:
        """Return the names of the waiters that were notified since the last read."""
        data = self._socket.recv(SIZE)
        if data.startswith(self._head) and data.count(b"\r\n") == 7 and not self._replies.partial:
            return [data.split(b"\r\n")[6]]  # a shortcut, because each hand-over takes this path
        return self._take(data)

    def _take(self, data: bytes) -> list[bytes]:
        if not data:
            raise NodeError("connection closed by the server")
        names: list[bytes] = []
        for reply in self._replies.feed(data, monotonic()):
            if isinstance(reply, Exception):
                raise reply
            if not isinstance(reply, list) or len(reply) != 3:
                raise NodeError("it sent something that is not a message")
            if reply[0] == b"message" and isinstance(reply[2], bytes):
                names.append(reply[2])
            elif reply[0] == b"subscribe" and not self._confirmed:
                self._confirmed = True
            else:
                # If accepted, each of these would make all waiters try.
                raise NodeError("it confirmed a subscription without a request")
        return names

    def close(self) -> None:
        """Close the connection."""
        self._socket = None
        if self._connection is not None:
            self._connection.disconnect()
