"""From the bytes of a connection to replies: RESP2, from a node that is not trusted.

Everything a node sends us is read by `Replies`: the answers to locks, which are never waited for
here, and through `Parser` the handshake and the looks, which redis-py's connections make. Each byte
is looked at once, however slowly they come. And nothing that a node sends can grow this process by
more than is known beforehand: a number is one that a server can mean, a reply is so long, so deep
and under way for so long at most. Anything else ends the connection.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from time import monotonic
from typing import Any

import redis
from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    InvalidResponse,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)

from ...protocol.errors import NodeError
from ...protocol.values import printable

__all__ = ["LARGEST", "OVERHEAD", "PATIENCE", "SIZE", "Parser", "Replies", "reason"]

SIZE = 65536
"""How many bytes to read at a time."""
LARGEST = 65536
"""Bytes of the longest reply to a lock or a handshake. None of theirs is as long."""
DEEPEST = 2
"""Arrays in one another: SCAN is answered with two."""
PATIENCE = 2.0
"""Seconds from the first byte of a reply to its last one: a packet that was lost is there by then.
Waiting for the first byte is another matter: see `pipeline.py`."""
HANDSHAKE = 5
"""Timeouts that a whole handshake may take, which is a dozen replies: one that came from the other
side of the world has taken half of that."""
OVERHEAD = 64
"""Bytes that an item of an array may cost us besides its own: on the wire an empty list is four."""

INTEGER, STRING, ARRAY, ERROR, STATUS = b":$*-+"
_INCOMPLETE = object()
_ERRORS: dict[str, type[RedisError]] = {
    "READONLY": ReadOnlyError,
    "OOM": OutOfMemoryError,
    "NOPERM": NoPermissionError,
    "NOSCRIPT": NoScriptError,
    "LOADING": BusyLoadingError,
    "WRONGPASS": AuthenticationError,
    "NOAUTH": AuthenticationError,
}
"""By the code that an error begins with; without it the rest is the exception's text."""
_CODES: dict[type[BaseException], str] = {kind: code for code, kind in _ERRORS.items()}
_CODES[AuthenticationError] = "AUTH"


class Replies:
    """The replies in a stream of bytes.

    Args:
        statuses: Whether a status (`+OK`) is an answer. To a lock it is none: it would look like
            what a key holds.
        largest: Bytes of the longest reply.
        budget: Bytes of all replies together; each item of an array counts `OVERHEAD` more.
        patience: Seconds that a reply may take from its first byte to its last.
    """

    def __init__(
        self,
        *,
        statuses: bool = False,
        largest: int = LARGEST,
        budget: float = math.inf,
        patience: float = PATIENCE,
    ) -> None:
        self._statuses = statuses
        self._largest = largest
        self._left = budget
        self._patience = patience
        self._since: float | None = None
        self._buffer: bytes | bytearray = b""
        # Indexes of it: where the reply under way begins, where to go on reading, and up to where
        # no line ends. The first is negative once what lies behind it was given up.
        self._start = self._at = self._searched = 0
        self._text = -1  # Bytes of the string that comes next; negative if none does.
        self._arrays: list[tuple[list[Any], int]] = []  # Those begun, and how long they will be.

    @property
    def partial(self) -> bool:
        """Whether the beginning of a reply has come, and not its end."""
        return self._start < len(self._buffer)

    def feed(self, data: bytes, now: float = 0.0) -> Iterator[Any]:
        """The replies that `data` completes. Error replies are returned as exceptions.

        Args:
            data: What has arrived.
            now: When it was read; seconds.

        Raises:
            redis.RedisError: An error reply that ends the connection; or what is not the protocol,
                longer than any reply may be, or under way for too long.
        """
        if self._buffer:
            self._buffer += data
        else:
            self._buffer = data  # Whole replies, nearly always: no copy is made of them.
        self._spend(len(data))
        while (reply := self._next()) is not _INCOMPLETE:
            self._start, self._since = self._at, None
            if isinstance(reply, redis.ConnectionError):
                raise reply
            yield reply
        self._start -= self._at
        self._searched -= self._at
        if self._at == len(self._buffer):
            self._buffer = b""
        elif isinstance(self._buffer, bytes):
            self._buffer = bytearray(self._buffer[self._at :])  # to which more can be added
        else:
            del self._buffer[: self._at]
        self._at = 0
        if self.partial:
            self._room_for(len(self._buffer))
            if self._since is None:
                self._since = now
            elif now - self._since > self._patience:
                raise InvalidResponse(f"half a reply for more than {self._patience:g} s")

    def _next(self) -> Any:
        """The next reply, if all of it has come."""
        buffer, arrays = self._buffer, self._arrays
        while True:
            if self._text < 0:
                end = buffer.find(b"\r\n", max(self._at, self._searched))
                if end < 0:
                    self._searched = max(self._at, len(buffer) - 1)
                    return _INCOMPLETE
                kind, line = buffer[self._at], bytes(buffer[self._at + 1 : end])
                self._at = end + 2
                item = _number(line) if kind == INTEGER else self._begin(kind, line)
            if self._text >= 0:
                end = self._at + self._text
                if len(buffer) < end + 2:
                    return _INCOMPLETE
                item = bytes(buffer[self._at : end])
                if buffer[end : end + 2] != b"\r\n":
                    raise InvalidResponse("not the protocol: a string without its end")
                self._text, self._at = -1, end + 2
            elif item is _INCOMPLETE:
                continue
            while arrays:
                items, count = arrays[-1]
                items.append(item)
                if len(items) < count:
                    break
                item = arrays.pop()[0]
            else:
                return item

    def _begin(self, kind: int, line: bytes) -> Any:
        """What a line is by itself; or that the string or the array that it begins is yet to come.

        What came is never quoted: it may be a token.
        """
        if kind == STRING:
            length = _number(line)
            if length >= 0:
                self._room_for(length)
                self._text = length
                return _INCOMPLETE
        elif kind == ARRAY:
            length = _number(line)
            if length == 0:
                return []
            if length > 0:
                self._room_for(4 * length)  # an item has four bytes at least
                self._spend(OVERHEAD * length)
                if len(self._arrays) == DEEPEST:
                    raise InvalidResponse(f"more than {DEEPEST} arrays in one another")
                self._arrays.append(([], length))
                return _INCOMPLETE
        elif kind == ERROR:
            return _error(line)
        elif kind == STATUS:
            if self._statuses:
                return line
            raise InvalidResponse("a status, where an answer is due")
        else:
            raise InvalidResponse("not the protocol: is it the port of another program?")
        if length == -1:
            return None
        raise InvalidResponse("not the protocol: a length below zero")

    def _room_for(self, size: int) -> None:
        if self._at + size - self._start > self._largest:
            raise InvalidResponse(f"a reply of more than {self._largest} bytes")

    def _spend(self, size: int) -> None:
        self._left -= size
        if self._left < 0:
            raise InvalidResponse("more than is read of one node")


class Parser:
    """Reads for a connection of redis-py's, which waits for each reply.

    A reply must be there in the connection's timeout, from its request on: not each piece of it;
    and the last in `longest` times that, from the connection's beginning on.

    Attributes:
        largest: Bytes of the longest reply.
        budget: Bytes of all replies together: see `Replies`.
        longest: How many timeouts all of them may take.
    """

    largest = LARGEST
    budget = math.inf
    longest: float = HANDSHAKE

    def __init__(self, socket_read_size: int = SIZE) -> None:
        self._socket: Any = None
        self.on_disconnect()

    def on_connect(self, connection: Any) -> None:
        """Read from a connection that has been made."""
        self._socket, self._timeout = connection._sock, connection.socket_timeout
        self._end = monotonic() + self.longest * self._timeout

    def on_disconnect(self) -> None:
        """Forget the connection, and what has come from it."""
        self._socket = None
        self._ready: deque[Any] = deque()
        self._replies = Replies(
            statuses=True, largest=self.largest, budget=self.budget, patience=math.inf
        )

    def can_read(self, timeout: float = 0.0) -> bool:
        """Whether more has come than was asked for, as far as it was read. Never waits."""
        return bool(self._ready) or self._replies.partial

    def read_response(self, disable_decoding: bool = False, **_options: object) -> Any:
        """The next reply; an error reply is returned.

        Raises:
            TimeoutError: It is not there in time.
            redis.RedisError: See `Replies.feed`; or the connection was closed.
        """
        stream, until = self._socket, min(monotonic() + self._timeout, self._end)
        try:
            while not self._ready:
                if stream is None or (left := until - monotonic()) <= 0:
                    raise TimeoutError
                stream.settimeout(left)
                data = stream.recv(SIZE)
                if not data:
                    raise redis.ConnectionError("Connection closed by server.")
                self._ready.extend(self._replies.feed(data))
        finally:
            if stream is not None:
                stream.settimeout(self._timeout)  # for what is written next
        return self._ready.popleft()


def _number(line: bytes) -> int:
    """An integer, as servers write them: of 64 bits at most."""
    if len(line) < 19 and line.isdigit():
        return int(line)
    if len(line) <= 20 and (line.isdigit() or (line[:1] == b"-" and line[1:].isdigit())):
        number = int(line)
        if -(2**63) <= number < 2**63:
            return number
    raise InvalidResponse("not the protocol: a number that is none")


def _error(line: bytes) -> RedisError:
    text = line.decode("utf-8", "replace")
    code, _, rest = text.partition(" ")
    if code in _ERRORS:
        return _ERRORS[code](rest)
    if code != "ERR":
        return ResponseError(text)
    if rest == "max number of clients reached":
        return redis.ConnectionError(rest)
    if rest.startswith("AUTH <password> called without any password configured"):
        return AuthenticationError(rest)
    return ResponseError(rest)


def reason(error: BaseException) -> str:
    """What went wrong, in one line that begins with the server's own error code, for the log."""
    known = isinstance(error, OSError) and error.errno is not None
    if not known and not isinstance(error, (RedisError, NodeError)):
        # Such as a credential provider's, whose text may be a secret.
        return f"{type(error).__name__} while connecting"
    # A server that does not know a command quotes its arguments: our token.
    text = str(error).split(", with args beginning with")[0]
    text = printable(" ".join(text.split())[:200])
    prefix = _CODES.get(type(error), "")
    if prefix and not text.startswith(prefix):
        text = f"{prefix} {text}"
    if prefix == "READONLY":
        text += " (this address is a replica; name its master)"
    return text or type(error).__name__
