"""How etcd is spoken to: JSON over HTTP/1.1, as each member's gateway takes it on its client port.

A member executes the requests of one connection one after the other, in the order in which they
were written, and answers in it: so they may be written behind one another without waiting.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Iterator
from typing import Any, NamedTuple

from ...protocol.errors import NodeError

__all__ = ["Keys", "Replies", "Request", "above", "answer"]
__all__ += ["refusal", "request", "text", "value_of"]

MAX_HEAD_BYTES = 65_536
MAX_BODY_BYTES = 2**26
"""More is no answer to anything of ours."""
BROKEN = frozenset({2, 4, 5, 13, 14, 16})
"""gRPC codes after which another member, or a new connection, is to be asked: it has no leader, it
was not in time, our authentication or a lease has ended."""
END = b"\xff"
"""Ends a name in a longer key: no text has it in UTF-8."""


class Request(NamedTuple):
    """What is asked: the end of the path, and the body."""

    path: str
    body: dict[str, Any]


class Keys:
    """The keys under a prefix: of locks, and of those who wait for them.

    A process hears whom a release calls under the name of its channel, which begins so too.
    """

    def __init__(self, prefix: str) -> None:
        start = _bytes(prefix)
        self.locks, self.lines = start + b"lock/", start + b"line/"

    def lock(self, name: str) -> str:
        return text(self.locks + _bytes(name))

    def line(self, name: str) -> bytes:
        """Return what the keys of all begin with who wait for a name."""
        return self.lines + _bytes(name) + END

    def waiter(self, name: str, member: str) -> str:
        return text(self.line(name) + _bytes(member))


def request(asked: Request, head: bytes) -> bytes:
    """Return a request's bytes; `head`: the fields of its head that all have."""
    body = json.dumps(asked.body, separators=(",", ":")).encode()
    return b"POST /v3/%b HTTP/1.1\r\n%bContent-Length: %d\r\n\r\n%b" % (
        *(asked.path.encode(), head, len(body), body),
    )


class Replies:
    """Reads answers as they arrive.

    Args:
        endless: What is read is one answer that does not end: each part of it is handed out.
    """

    def __init__(self, *, endless: bool = False) -> None:
        self._endless = endless
        self._unread = bytearray()
        self._body = bytearray()
        self._status = 0
        self._length: int | None = None

    def feed(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        """Yield the status and the body of each answer that is complete.

        Raises:
            NodeError: This is no HTTP.
        """
        self._unread += data
        try:
            while (body := self._next()) is not None:
                yield self._status, body
                if not self._endless:
                    self._status = 0
        except (ValueError, LookupError):
            raise NodeError("it answers in another protocol than HTTP") from None

    def _next(self) -> bytes | None:
        unread = self._unread
        if not self._status and not self._begin():
            return None
        if self._length is not None:
            return self._taken(0, self._length, 0)
        while (end := unread.find(b"\r\n")) >= 0:
            size = int(unread[:end].partition(b";")[0], 16)
            if size == 0:
                last = unread.find(b"\r\n\r\n", end)  # behind what fields there are
                if last < 0:
                    return None
                del unread[: last + 4]
                if self._endless:
                    raise NodeError("connection closed by the server")
                body, self._body = bytes(self._body), bytearray()
                return body
            if not 0 < size + len(self._body) <= MAX_BODY_BYTES:
                raise ValueError
            part = self._taken(end + 2, size, 2)
            if part is None or self._endless:
                return part
            self._body += part
        return None

    def _begin(self) -> bool:
        unread = self._unread
        end = unread.find(b"\r\n\r\n")
        if not b"HTTP/1.1 ".startswith(unread[:9]) or len(unread) > MAX_HEAD_BYTES > end:
            raise ValueError
        if end < 0:
            return False
        first, *fields = bytes(unread[:end]).lower().split(b"\r\n")
        said = dict(field.split(b": ", 1) for field in fields)
        self._length = None
        if said.get(b"transfer-encoding") != b"chunked":
            self._length = int(said[b"content-length"])
            if not 0 <= self._length <= MAX_BODY_BYTES:
                raise ValueError
        self._status = int(first.split()[1])
        del unread[: end + 4]
        return True

    def _taken(self, start: int, size: int, after: int) -> bytes | None:
        if len(self._unread) < start + size + after:
            return None
        taken = bytes(self._unread[start : start + size])
        del self._unread[: start + size + after]
        return taken


def answer(status: int, body: bytes) -> dict[str, Any]:
    """Return what an answer says.

    Raises:
        NodeError: It says nothing that etcd says.
    """
    try:
        said = json.loads(body)
        if isinstance(said, dict) and (status == 200 or "code" in said):
            return said
    except ValueError:
        pass
    raise NodeError(f"it answers HTTP status {status}, as no etcd of version 3.4 or newer does")


def refusal(said: dict[str, Any]) -> str:
    """Return why a request was refused; empty if it was not.

    Raises:
        NodeError: It is the member that cannot serve, or the connection.
    """
    if "code" not in said:
        return ""
    why = " ".join(str(said.get("error") or said.get("message")).split())[:200]
    # The rights of all have changed, say, or everybody must name himself from now on.
    if said["code"] in BROKEN or "auth" in why or "user name is empty" in why:
        raise NodeError(why)
    return why


def text(raw: bytes) -> str:
    """Return bytes as they stand in a body."""
    return b64encode(raw).decode()


def value_of(field: str) -> bytes:
    """Return the bytes of a field."""
    return b64decode(field)


def above(start: bytes) -> str:
    """Return the end of the range of keys that begin so, exclusive."""
    head = start.rstrip(b"\xff")
    return text(head[:-1] + bytes([head[-1] + 1]))


def _bytes(name: str) -> bytes:
    return name.encode("utf-8", "surrogatepass")
