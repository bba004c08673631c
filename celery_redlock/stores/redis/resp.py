"""Parse the bytes of a connection into replies: RESP2, from a node that is not trusted.

`Replies` reads everything that a node sends: the answers to locks, which this module never waits
for, and through `Parser` the replies that redis-py's connections wait for: the handshake and
surveys. Each byte is read once, however slowly they come. And nothing that a node sends can grow
this process beyond limits that are known beforehand: a number must be one that a server can mean,
and a reply is bounded in length, in depth and in time. Anything else ends the connection.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Generator, Iterable
from time import monotonic
from typing import Any

from redis import exceptions
from redis.exceptions import ConnectionError, InvalidResponse, RedisError, ResponseError

from ...protocol.errors import NodeError
from ...protocol.texts import printable
from ...runtime.polling import SIZE

__all__ = ["MAX_REPLY_BYTES", "REPLY_S", "Parser", "Replies", "reason"]

MAX_REPLY_BYTES = 2**20
"""The longest reply to a lock or a handshake. The reply about the slots of a hundred keys with the
largest limit is a fifth of it, unless thousands hold them."""
MAX_DEPTH = 2
"""Nesting of arrays: a reply to SCAN has two levels."""
REPLY_S = 2.0
"""Seconds from the first byte of a reply to its last one: a packet that was lost is there by then.
The wait for the first byte is limited in `pipeline.py`."""
HANDSHAKE_TIMEOUTS = 5
"""Timeouts that a whole handshake, a dozen replies, may take: one from the other side of the world
took half of that."""
ITEM_BYTES = 64
"""Memory that an item of an array may cost besides its bytes: on the wire, `[]` has four."""

_USUAL: dict[bytes, tuple[Any, ...]] = {
    b":1\r\n": (1,),
    b":0\r\n": (0,),
    b"$-1\r\n": (None,),
    b":1\r\n$-1\r\n": (1, None),
    b"$1\r\n1\r\n": (b"1",),
}
"""Results of nearly all reads, by their bytes: parsing them would cost as much as all the rest."""
_SIMPLE = {bytes, int, type(None)}
"""Types of replies that can be returned again, because they are immutable."""
MAX_SAME_BYTES = 4096
"""Up to this size, data is compared with that of the last read. A master's INFO on its replication
stays the same for as long as it has no replica, and precedes every vote."""
_ERRORS: dict[str, type[RedisError]] = {
    "READONLY": exceptions.ReadOnlyError,
    "OOM": exceptions.OutOfMemoryError,
    "NOPERM": exceptions.NoPermissionError,
    "NOSCRIPT": exceptions.NoScriptError,
    "LOADING": exceptions.BusyLoadingError,
    "WRONGPASS": exceptions.AuthenticationError,
    "NOAUTH": exceptions.AuthenticationError,
}
"""Exceptions by the code that an error begins with; their text is the rest without the code."""
_CODES: dict[type, str] = {kind: code for code, kind in _ERRORS.items()}
_CODES[exceptions.AuthenticationError] = "AUTH"
_MORE = object()
"""Stands for a reply of which more must arrive."""


class Replies:
    """The replies in a stream of bytes.

    Args:
        largest: Bytes of the longest reply.
        budget: Bytes of all replies together; each item of an array counts `ITEM_BYTES` more.
        patience: Seconds from the first byte of a reply to its last.
    """

    def __init__(
        self,
        largest: int = MAX_REPLY_BYTES,
        budget: float = math.inf,
        patience: float = REPLY_S,
    ) -> None:
        self._largest = largest
        self._left = budget
        self._patience = patience
        self._since: float | None = None  # time at which the reply under way began
        self._size = 0  # bytes read of the reply under way
        self._buffer = bytearray()  # bytes not read yet
        self._reading = self._replies()
        self._last: tuple[bytes, tuple[Any, ...]] = b"", ()

    @property
    def partial(self) -> bool:
        """True if the beginning of a reply has come, but not its end."""
        return self._size > 0 or len(self._buffer) > 0

    def feed(self, data: bytes, now: float = 0.0) -> Iterable[Any]:
        """Return the replies that `data`, read at `now`, completes; error replies as exceptions.

        Raises:
            redis.RedisError: After the replies before it: an error reply that ends the connection;
                or data that is not the protocol, too long, or under way for too long.
        """
        if self._left < math.inf:
            self._spend(len(data))
        whole = not (self._size or self._buffer)  # `not self.partial`, without a call
        if whole and data in _USUAL:
            return _USUAL[data]
        if whole and data == self._last[0]:
            return self._last[1]
        self._buffer += data
        return self._completed(now, data if whole and len(data) <= MAX_SAME_BYTES else b"")

    def _completed(self, now: float, data: bytes) -> Generator[Any, None, None]:
        """Yield complete replies; store them if they are all of `data`."""
        replies: list[Any] = []
        for reply in self._reading:
            if reply is _MORE:
                break
            self._size, self._since = 0, None
            if isinstance(reply, ConnectionError):
                raise reply
            replies.append(reply)
            yield reply
        if data and not self.partial and {type(reply) for reply in replies} <= _SIMPLE:
            self._last = data, tuple(replies)
        if self.partial:
            self._room_for(len(self._buffer))
            self._since = now if self._since is None else self._since
            if now - self._since > self._patience:
                raise InvalidResponse(f"half a reply for more than {self._patience:g} s")

    def _replies(self) -> Generator[Any, None, None]:
        while True:
            yield (yield from self._reply(0))

    def _reply(self, depth: int) -> Generator[Any, None, Any]:
        """Read a reply; yield `_MORE` whenever more must arrive.

        Errors never quote the data: it may be a token.
        """
        searched = 0
        while (end := self._buffer.find(b"\r\n", searched)) < 0:
            searched = max(0, len(self._buffer) - 1)
            yield _MORE
        line = self._taken(end + 2)[:-2]
        kind, line = line[:1], line[1:]
        if kind == b":":
            return _number(line)
        if kind == b"-":
            return _error(line)
        if kind == b"+":
            return line.decode("utf-8", "replace")  # not bytes: a lock must not take it for a value
        if kind not in (b"$", b"*"):
            raise InvalidResponse("not the protocol: is it the port of another program?")
        length = _number(line)
        if length < 0:
            if length == -1:
                return None
            raise InvalidResponse("not the protocol: a length below zero")
        if kind == b"$":
            self._room_for(length)
            while len(self._buffer) < length + 2:
                yield _MORE
            text = self._taken(length + 2)
            if not text.endswith(b"\r\n"):
                raise InvalidResponse("not the protocol: a string without its end")
            return text[:-2]
        self._room_for(4 * length)  # an item has at least four bytes
        self._spend(ITEM_BYTES * length)
        if length and depth == MAX_DEPTH:
            raise InvalidResponse(f"more than {MAX_DEPTH} arrays in one another")
        items = []
        for _ in range(length):
            items.append((yield from self._reply(depth + 1)))
        return items

    def _taken(self, count: int) -> bytes:
        taken = bytes(self._buffer[:count])
        del self._buffer[:count]
        self._size += count
        return taken

    def _room_for(self, size: int) -> None:
        if self._size + size > self._largest:
            raise InvalidResponse(f"a reply of more than {self._largest} bytes")

    def _spend(self, size: int) -> None:
        self._left -= size
        if self._left < 0:
            raise InvalidResponse("more than is read of one node")


class Parser:
    """Parser for redis-py's connections, which wait for each reply.

    Each whole reply must arrive within the connection's timeout, and the last one within `longest`
    times that, from the beginning of the connection on. For `largest` and `budget` see `Replies`.
    """

    largest = MAX_REPLY_BYTES
    budget = math.inf
    longest: float = HANDSHAKE_TIMEOUTS

    def __init__(self, socket_read_size: int = SIZE) -> None:
        self._socket: Any = None
        self.on_disconnect()

    def on_connect(self, connection: Any) -> None:
        """Start to read from a connection that has been made."""
        self._socket, self._timeout = connection._sock, connection.socket_timeout
        self._end = monotonic() + self.longest * self._timeout

    def on_disconnect(self) -> None:
        """Drop the connection, with all data from it."""
        self._socket = None
        self._ready: deque[Any] = deque()
        self._replies = Replies(self.largest, self.budget, patience=math.inf)

    def can_read(self, timeout: float = 0.0) -> bool:
        """Return True if more was read than was asked for. Never waits."""
        return bool(self._ready) or self._replies.partial

    def read_response(self, disable_decoding: bool = False, **_options: object) -> Any:
        """Return the next reply; an error reply is returned, too, not raised.

        Raises:
            TimeoutError: It did not arrive in time.
            redis.RedisError: See `Replies.feed`; or the connection was closed.
        """
        stream = self._socket
        if stream is None:
            raise ConnectionError("Connection closed by server.")
        until = min(monotonic() + self._timeout, self._end)
        try:
            while not self._ready:
                if (left := until - monotonic()) <= 0:
                    raise TimeoutError
                stream.settimeout(left)
                data = stream.recv(SIZE)
                if not data:
                    raise ConnectionError("Connection closed by server.")
                self._ready.extend(self._replies.feed(data))
        finally:
            stream.settimeout(self._timeout)  # for the next write
        return self._ready.popleft()


def _number(line: bytes) -> int:
    """Parse an integer as servers write it: of 64 bits at most."""
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
        return ConnectionError(rest)
    if rest.startswith("AUTH <password> called without any password configured"):
        return exceptions.AuthenticationError(rest)
    return ResponseError(rest)


def reason(error: BaseException) -> str:
    """Return the reason of an error in one line, beginning with the server's own error code."""
    known = isinstance(error, OSError) and error.errno is not None
    if not known and not isinstance(error, (RedisError, NodeError)):
        # Such as an error of a credential provider, whose text may be a secret.
        return f"{type(error).__name__} while connecting"
    # For an unknown command a server quotes its arguments: our token.
    text = str(error).split(", with args beginning with")[0]
    text = printable(" ".join(text.split())[:200])
    prefix = _CODES.get(type(error), "")
    if prefix and not text.startswith(prefix):
        text = f"{prefix} {text}"
    if prefix == "READONLY":
        text += " (this address is a replica; name its master)"
    return text or type(error).__name__
