"""Hears what one Redis node publishes to one channel."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from time import monotonic
from typing import Any

from ...protocol.errors import NodeError
from ...runtime.polling import SIZE
from .address import Address
from .resp import Replies, reason

__all__ = ["RedisSubscription"]


class RedisSubscription:
    """One subscription, over a connection of its own."""

    def __init__(self, address: Address, channel: bytes) -> None:
        self._address = address
        self._channel = channel
        self._connection: Any = None
        self._socket: Any = None

    def calls(self) -> Iterator[bytes | None]:
        """Connect, and yield each message that is published; None first, once it is subscribed.

        Raises:
            Exception: The connection has ended, or cannot be made.
        """
        channel = self._channel
        self._connection = connection = self._address.connection()
        connection.connect()
        if connection.can_read():
            raise NodeError("it sent what nobody asked for")
        # Kept here: redis-py forgets its socket as soon as a read fails.
        self._socket = stream = connection._sock
        stream.settimeout(None)
        connection.send_command(b"SUBSCRIBE", channel, check_health=False)
        replies, confirmed = Replies(), False
        call = b"*3\r\n$7\r\nmessage\r\n$%d\r\n%b\r\n$" % (len(channel), channel)
        while data := stream.recv(SIZE):
            if data.startswith(call) and data.count(b"\r\n") == 7 and not replies.partial:
                # A shortcut: a waiter waits for this.
                yield data.split(b"\r\n")[6]
                continue
            for reply in replies.feed(data, monotonic()):
                if isinstance(reply, Exception):
                    raise reply
                kind, _channel, what = reply
                if kind == b"message":
                    yield what
                elif kind == b"subscribe" and not confirmed:
                    confirmed = True
                    yield None
                else:
                    # Believed, each of these would make all waiters try.
                    raise NodeError("it confirms what nobody asked for")
        raise NodeError("connection closed by the server")

    def interrupt(self) -> None:
        """Have `calls` end, which another thread may just be reading from."""
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection."""
        self._socket = None
        if self._connection is not None:
            self._connection.disconnect()

    def reason(self, error: Exception) -> str:
        """Say what went wrong, in one line without a secret."""
        return reason(error)
