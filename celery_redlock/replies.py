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
from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    ClusterDownError,
    InvalidResponse,
    MasterDownError,
    MovedError,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
)

from .errors import NodeError, printable

__all__ = ["SIZE", "Replies", "reason"]

SIZE = 65536
"""How many bytes to read at a time."""
LARGEST = 65536
"""Bytes of a reply that is still not whole. No answer to us is as long as this."""


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
            redis.RedisError: An error reply that ends the connection, or not the protocol, or
                more of one reply than any of ours can be.
        """
        self._arrived += data
        while True:
            if self._next() == b"+":
                # The parser would make a string of it, as if it were what a key holds.
                raise InvalidResponse("a status, where an answer is due")
            try:
                reply = self._parser.read_response(disable_decoding=True)
            except _Incomplete:
                unread = self._parser._buffer.unread_bytes()
                if unread > LARGEST:
                    raise InvalidResponse(f"a reply of more than {LARGEST} bytes") from None
                self.partial = unread > 0
                return
            except (ValueError, TypeError, LookupError, RecursionError, InvalidResponse) as error:
                # What the parser makes of numbers that are none, or of arrays in arrays. Its own
                # text quotes what came, which may be a token.
                raise InvalidResponse(f"not the protocol: {type(error).__name__}") from None
            yield reply

    def _next(self) -> bytes:
        """The first byte of what is read next; nothing, if that has not come."""
        buffer = self._parser._buffer._buffer
        position = buffer.tell()
        first: bytes = buffer.read(1)
        buffer.seek(position)
        return first or self._arrived[:1]


_CODES: dict[type[BaseException], str] = {
    ReadOnlyError: "READONLY",
    OutOfMemoryError: "OOM",
    NoPermissionError: "NOPERM",
    NoScriptError: "NOSCRIPT",
    BusyLoadingError: "LOADING",
    AuthenticationError: "AUTH",
    ClusterDownError: "CLUSTERDOWN",
    MasterDownError: "MASTERDOWN",
    MovedError: "MOVED",
}


def reason(error: BaseException) -> str:
    """What went wrong, in one line that begins with the server's own error code, for the log."""
    known = isinstance(error, OSError) and error.errno is not None
    if not known and not isinstance(error, (RedisError, NodeError)):
        # Such as a credential provider's, whose text may be a secret.
        return f"{type(error).__name__} while connecting"
    # A server that does not know a command quotes its arguments: our token.
    text = str(error).split(", with args beginning with")[0]
    text = printable(" ".join(text.split())[:200])
    prefix = getattr(type(error), "status_code", "") or _CODES.get(type(error), "")
    if prefix and not text.startswith(prefix):
        text = f"{prefix} {text}"
    if prefix == "READONLY":
        text += " (this address is a replica; name its master)"
    return text or type(error).__name__
