"""From the bytes of a connection to replies, by redis-py's own parser, but never waiting for more.

The parser reads from what it takes for a socket. Here that is a buffer of what has arrived, which
says so when it has been read out; the parser then goes back to the beginning of the reply, and
tries again when there is more. (On a real non-blocking socket it would call that an error.)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from redis._parsers import _RESP2Parser
from redis._parsers.encoders import Encoder
from redis.exceptions import InvalidResponse

__all__ = ["SIZE", "Replies"]

SIZE = 65536
"""How many bytes to read at a time."""


class _Incomplete(Exception):
    """There is no complete reply yet."""


class Replies:
    """The replies in a stream of bytes.

    Attributes:
        partial: The beginning of a reply has been read, and not its end.
    """

    encoder = Encoder("utf-8", "strict", False)
    socket_timeout = 0.0

    def __init__(self) -> None:
        self.partial = False
        self._arrived = b""
        self._sock = self
        self._parser: Any = _RESP2Parser(SIZE)
        self._parser.on_connect(self)

    def recv(self, size: int) -> bytes:
        """What the parser takes for a socket's method."""
        data, self._arrived = self._arrived[:size], self._arrived[size:]
        if not data:
            raise _Incomplete
        return data

    def feed(self, data: bytes) -> Iterator[Any]:
        """The replies that `data` completes. Error replies are returned as exceptions.

        Raises:
            redis.RedisError: An error reply that ends the connection, or not the protocol.
        """
        self._arrived += data
        while True:
            try:
                reply = self._parser.read_response(disable_decoding=True)
            except _Incomplete:
                self.partial = self._parser._buffer.unread_bytes() > 0
                return
            except (ValueError, TypeError, LookupError, RecursionError) as error:
                # What the parser makes of numbers that are none, or of arrays in arrays.
                raise InvalidResponse(f"not the protocol: {type(error).__name__}") from None
            yield reply
