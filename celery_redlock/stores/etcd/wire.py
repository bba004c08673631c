"""The protocol of etcd: JSON over HTTP/1.1, as each member's gateway accepts it on its client port.

A member executes the requests of one connection one after the other, in the order in which they
were written, and answers in the same order. So they may be written without waiting for answers.
"""

from __future__ import annotations

import json
import re
from base64 import b64decode, b64encode
from collections.abc import Iterator
from typing import Any, NamedTuple

from ...protocol.errors import NodeError
from ...protocol.texts import printable

__all__ = ["MALFORMED", "Keys", "Replies", "Request", "above", "answer"]
__all__ += ["number", "refusal", "request", "text", "value_of"]

MAX_REPLY_BYTES = 2**20
"""The longest answer to a lock or a handshake."""
MAX_HEAD_BYTES = 65_536
"""Bytes of a head, of the line that begins a chunk, and of the fields after the last chunk."""
REPLY_S = 2.0
"""Seconds from the first byte of an answer to its last: a packet that was lost is there by then."""
INTEGER = re.compile(r"-?\d{1,20}", re.ASCII)
DIGITS = re.compile(rb"[0-9a-fA-F]{1,16}")
LENGTH = re.compile(rb"\n(content-length|transfer-encoding):([^\n]*)")
MALFORMED = (
    *(ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError),
)
"""Exceptions of code that reads an answer with fields missing or of other types."""
BROKEN = frozenset({2, 4, 5, 13, 14, 16})
"""gRPC codes after which another member, or a new connection, must be asked: the member has no
leader, it was too slow, our authentication or a lease has ended."""
END = b"\xff"
"""Ends a name in a longer key: no text has this byte in UTF-8."""


class Request(NamedTuple):
    """A request: the end of its path, and its body."""

    path: str
    body: dict[str, Any]


class Keys:
    """The keys under a prefix: those of locks, and those of their waiters.

    A process receives notifications under the name of its channel, which has the same prefix.
    """

    def __init__(self, prefix: str) -> None:
        start = _bytes(prefix)
        self.locks, self.lines = start + b"lock/", start + b"line/"

    def lock(self, name: str) -> str:
        return text(self.locks + _bytes(name))

    def line(self, name: str) -> bytes:
        """Return the beginning of the keys of all waiters for a name."""
        return self.lines + _bytes(name) + END

    def waiter(self, name: str, member: str) -> str:
        return text(self.line(name) + _bytes(member))


def request(asked: Request, head: bytes) -> bytes:
    """Return a request's bytes; `head` has the header fields that all requests share."""
    body = json.dumps(asked.body, separators=(",", ":")).encode()
    return b"POST /v3/%b HTTP/1.1\r\n%bContent-Length: %d\r\n\r\n%b" % (
        *(asked.path.encode(), head, len(body), body),
    )


class Replies:
    """Parser of answers as they arrive, from a member that is not trusted.

    Args:
        largest: Bytes of the longest body.
        endless: True if the stream is one answer without an end: its lines are yielded.
    """

    def __init__(self, largest: int = MAX_REPLY_BYTES, *, endless: bool = False) -> None:
        self._largest = largest
        self._endless = endless
        self._since: float | None = None  # time at which the answer under way began
        self._unread = bytearray()
        self._body = bytearray()
        self._status = 0
        self._length: int | None = None

    @property
    def partial(self) -> bool:
        """True if the beginning of an answer has come, but not its end."""
        return bool(self._unread or self._body or (self._status and not self._endless))

    def feed(self, data: bytes, now: float = 0.0) -> Iterator[tuple[int, bytes]]:
        """Yield the status and the body of each answer that `data`, read at `now`, completes.

        Raises:
            NodeError: The data is not HTTP, too long, or under way for too long.
        """
        self._unread += data
        try:
            while (body := self._next()) is not None:
                self._since = None
                yield self._status, body
                if not self._endless:
                    self._status = 0
        except ValueError:
            why = "it answers in another protocol than HTTP, or wants TLS (etcds://)"
            raise NodeError(why) from None
        if not self.partial:
            self._since = None
        elif self._since is None:
            self._since = now
        elif now - self._since > REPLY_S:
            raise NodeError(f"half an answer for more than {REPLY_S:g} s")

    def _next(self) -> bytes | None:
        unread = self._unread
        if not self._status and not self._begin():
            return None
        if self._length is not None:
            return self._taken(0, self._length, b"")
        while (end := self._end(b"\r\n")) >= 0:
            size = _size(unread[:end].partition(b";")[0].strip(), 16)
            if size == 0:
                last = self._end(b"\r\n\r\n", end)  # after the trailer fields, if any
                if last < 0:
                    return None
                del unread[: last + 4]
                if self._endless:
                    raise NodeError("connection closed by the server")
                body, self._body = bytes(self._body), bytearray()
                return body
            self._room_for(size + len(self._body))
            if (part := self._taken(end + 2, size, b"\r\n")) is None:
                return None
            self._body += part
            if self._endless and b"\n" in part:
                lines, _, self._body = self._body.rpartition(b"\n")
                return bytes(lines)
        return None

    def _begin(self) -> bool:
        unread = self._unread
        if not b"HTTP/1.1 ".startswith(unread[:9]):
            raise ValueError
        end = self._end(b"\r\n\r\n")
        if end < 0:
            return False
        # If there are two lengths, proxies and servers differ in which one counts: accept neither.
        ((name, value),) = LENGTH.findall(bytes(unread[: end + 2]).lower())
        if name == b"content-length":
            self._length = _size(value.strip())
            self._room_for(self._length)
        elif value.strip() == b"chunked":
            self._length = None
        else:
            raise ValueError
        self._status = _size(unread[9:12])
        del unread[: end + 4]
        return True

    def _end(self, mark: bytes, start: int = 0) -> int:
        """Return the position of the next mark; -1 if it has not come yet."""
        end = self._unread.find(mark, start)
        if (len(self._unread) if end < 0 else end) - start > MAX_HEAD_BYTES:
            raise ValueError
        return end

    def _room_for(self, size: int) -> None:
        if size > self._largest:
            raise NodeError(f"an answer of more than {self._largest} bytes")

    def _taken(self, start: int, size: int, after: bytes) -> bytes | None:
        end = start + size
        if len(self._unread) < end + len(after):
            return None
        taken, behind = bytes(self._unread[start:end]), self._unread[end : end + len(after)]
        if behind != after:
            raise ValueError
        del self._unread[: end + len(after)]
        return taken


def answer(status: int, body: bytes) -> dict[str, Any]:
    """Return the content of an answer.

    Raises:
        NodeError: etcd would not send this.
    """
    try:
        said: dict[str, Any] = json.loads(body)
        if isinstance(said.get("code", 0 if status == 200 else None), int):
            return said
    except MALFORMED:
        pass
    raise NodeError(f"it answers HTTP status {status}, as no etcd of version 3.4 or newer does")


def refusal(said: dict[str, Any]) -> str:
    """Return the reason for which a request was refused; empty if it was not.

    Raises:
        NodeError: The fault is the member's, or the connection's.
    """
    if "code" not in said:
        return ""
    given = said.get("error") or said.get("message")
    why = printable(" ".join(given.split())[:200]) if isinstance(given, str) else "no reason given"
    # For example, rights have changed, or authentication has been enabled.
    if said["code"] in BROKEN or "auth" in why or "user name is empty" in why:
        raise NodeError(why)
    return why


def text(raw: bytes) -> str:
    """Return bytes as they are written in a body."""
    return b64encode(raw).decode()


def value_of(field: str) -> bytes:
    """Return the bytes of a field."""
    return b64decode(field)


def number(field: Any) -> int:
    """Return the integer in a field: of 64 bits at most, which the gateway writes as text.

    Raises:
        ValueError, TypeError: The field is not an integer.
    """
    if not INTEGER.fullmatch(str(field) if isinstance(field, int) else field):
        raise ValueError
    return int(field)


def above(start: bytes) -> str:
    """Return the end, exclusive, of the range of keys that begin with `start`."""
    head = start.rstrip(b"\xff")
    return text(head[:-1] + bytes([head[-1] + 1]))


def _size(raw: bytes | bytearray, base: int = 10) -> int:
    if not DIGITS.fullmatch(raw):
        raise ValueError
    return int(raw, base)


def _bytes(name: str) -> bytes:
    return name.encode("utf-8", "surrogatepass")
