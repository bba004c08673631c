"""Goes to all nodes at once and reads keys there: on connections of its own, and never for long.

It only reads: SCAN, GETRANGE, PTTL, ZCARD and ZRANGE. No scripts: whoever may run one can stop a
node with it. What lies under a key may be anything and of any size, so nothing longer than our
tokens can be is fetched. A node that hangs costs the time that the caller allows, and no other
node's answers. So does one that answers what is no answer: each is looked at here, so that what is
brought home is what it says it is.
"""

from __future__ import annotations

import contextlib
import math
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any, Generic, NamedTuple, TypeVar

import redis

from ..protocol.commands import request, seconds_left
from ..protocol.errors import NodeError
from ..stores.redis.address import Address
from ..stores.redis.handshake import ask
from ..stores.redis.resp import Parser, reason

__all__ = ["FOREIGN", "Line", "NodeLook", "Reader", "Seen", "visit"]

T = TypeVar("T")

LONGEST = 4096
"""Bytes of the longest value that is fetched; no token is as long."""
FOREIGN = b""
"""Stands for a value that is no string, or longer than any of ours."""
SCAN_COUNT = 1000
"""Keys that a node looks at per step of a SCAN: well below a millisecond of its time."""
LONGEST_VISIT = 10
"""By how many times the timeout a node may take longer in all, as long as it answers."""
LARGEST = 4 * 2**20
"""Bytes of the longest reply to a visit: a batch of the longest values is half of it."""
BUDGET = 64 * 2**20
"""Bytes that are read of one node in one visit, see `resp.Replies`: about 150 000 locks, which
take up to twice as much memory."""
BATCH = 500
"""Keys that are asked for at a time: a node's other clients have their turn in between."""

# The workers' user may run scripts and not GETRANGE: for `explain`, which asks as that user.
SEE = (
    b"""\
local seen = {}
for i, key in ipairs(KEYS) do
  local held = redis.pcall('GET', key)
  if type(held) == 'table' and not string.find(held.err, 'WRONGTYPE') then return held end
  if type(held) ~= 'string' or #held > %d then held = '' end
  seen[2 * i - 1] = held
  seen[2 * i] = redis.call('PTTL', key)
end
return seen"""
    % LONGEST
)


@dataclass(frozen=True)
class NodeLook:
    """How one node answered.

    Attributes:
        name: Its address, without credentials.
        reachable: Whether it told all that it was asked for.
        error: Why not; empty if it did.
        rtt: Seconds from a small question to its answer; NaN if it did not answer.
    """

    name: str
    reachable: bool
    error: str = ""
    rtt: float = math.nan


class Seen(NamedTuple):
    """What lies under a key.

    Attributes:
        value: The bytes, or `FOREIGN`.
        left: Seconds until it expires; infinite for a key without a ttl.
    """

    value: bytes
    left: float


class Line(NamedTuple):
    """Who stands in a line.

    Attributes:
        total: How many.
        first: Of the first of them: name, and since when in microseconds since 1970.
        left: Seconds until the line is forgotten.
    """

    total: int
    first: tuple[tuple[bytes, float], ...]
    left: float


class _Parser(Parser):
    """Reads what a node tells of all its keys."""

    largest = LARGEST
    budget = BUDGET
    longest = LONGEST_VISIT


class Reader:
    """Reads one node, over one connection.

    Attributes:
        heard: When it last answered; seconds of the monotonic clock.
    """

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self.heard = monotonic()

    def scan(self, prefix: str, head: str) -> dict[str, bytes]:
        """The keys below a prefix that go on with `head`: name without the prefix, and key."""
        pattern = _glob_escaped(_bytes(prefix + head)) + b"*"
        start = _bytes(prefix)
        found: dict[str, bytes] = {}
        cursor = b"0"
        while True:
            (reply,) = self.ask(
                [request(b"SCAN", cursor, b"MATCH", pattern, b"COUNT", b"%d" % SCAN_COUNT)]
            )
            _expect(reply)
            pair = isinstance(reply, list) and len(reply) == 2
            if not (pair and _is_cursor(reply[0]) and _are_bytes(reply[1])):
                raise _nonsense("SCAN")
            cursor, keys = reply
            for key in keys:
                if key.startswith(start):
                    found[_text(key[len(start) :])] = key
            if cursor == b"0":
                return found

    def read(self, keys: Mapping[str, bytes]) -> dict[str, Seen]:
        """What lies under some keys, by their names; those that are not there are left out."""
        seen = {}
        for batch in _batches(list(keys.items())):
            names, found = [name for name, _key in batch], [key for _name, key in batch]
            requests = []
            for key in found:
                requests.append(request(b"GETRANGE", key, b"0", b"%d" % LONGEST))
                requests.append(request(b"PTTL", key))
            replies = self.ask(requests)
            if isinstance(replies[0], redis.exceptions.NoPermissionError):
                (replies,) = self.ask([request(b"EVAL", SEE, b"%d" % len(batch), *found)])
                _expect(replies)
                if not (isinstance(replies, list) and len(replies) == 2 * len(batch)):
                    raise _nonsense("EVAL")
            for name, value, left in zip(names, replies[::2], replies[1::2], strict=True):
                _expect(left)
                if _is_wrong_type(value):
                    value = FOREIGN
                _expect(value)
                if not (isinstance(value, bytes) and len(value) <= LONGEST + 1 and _is_ttl(left)):
                    raise _nonsense("GETRANGE")
                if len(value) > LONGEST:
                    value = FOREIGN
                if left != -2:
                    seen[name] = Seen(value, seconds_left(left))
        return seen

    def lines(self, keys: Mapping[str, bytes], most: int) -> dict[str, Line]:
        """Those who stand in some lines, `most` of each by name; no line is left out as no line."""
        lines = {}
        for batch in _batches(list(keys.items())):
            requests = []
            for _name, key in batch:
                requests += [request(b"ZCARD", key)]
                requests += [request(b"ZRANGE", key, b"0", b"%d" % (most - 1), b"WITHSCORES")]
                requests += [request(b"PTTL", key)]
            replies = iter(self.ask(requests))
            for name, _key in batch:
                count, members, left = next(replies), next(replies), next(replies)
                _expect(left)
                if _is_wrong_type(count) or _is_wrong_type(members) or left == -2:
                    continue
                _expect(count)
                _expect(members)
                if not (_is_count(count) and _are_bytes(members) and _is_ttl(left)):
                    raise _nonsense("ZRANGE")
                pairs = zip(members[::2], members[1::2], strict=True)
                first = tuple((member, float(score)) for member, score in pairs)
                if any(math.isnan(score) for _member, score in first):
                    raise _nonsense("ZRANGE")
                lines[name] = Line(count, first, seconds_left(left))
        return lines

    def rtt(self, key: bytes) -> float:
        """Seconds that a question takes which costs a node nothing."""
        taken = []
        for _ in range(3):
            begun = monotonic()
            self.ask([request(b"PTTL", key)])  # to be refused takes as long
            taken.append(monotonic() - begun)
        return min(taken)  # the others had to wait for a turn of this process

    @property
    def peer(self) -> str:
        """The IP address at the other end; empty for this machine's own sockets."""
        peer = self._connection._sock.getpeername()
        return str(peer[0]) if isinstance(peer, tuple) else ""

    def ask(self, requests: Sequence[bytes]) -> list[Any]:
        """The replies to requests that are written at once; error replies are among them."""
        replies = ask(self._connection, requests)
        self.heard = monotonic()
        return replies


class _Visit(threading.Thread, Generic[T]):
    """One node's, in a thread of its own."""

    def __init__(
        self, address: Address, prefix: str, errand: Callable[[Reader], T], timeout: float
    ) -> None:
        super().__init__(name=f"celery_redlock visit {address.name}", daemon=True)
        self._address, self._errand, self._timeout = address, errand, timeout
        self._key = _bytes(prefix)
        self._connection: Any = None
        self._reader: Reader | None = None
        self._begun = monotonic()
        self.result: T | None = None
        self.look = NodeLook(address.name, False, f"no answer within {timeout:g} s")

    def run(self) -> None:
        address, connection = self._address, None
        connecting = address.arguments.get("socket_connect_timeout", self._timeout)
        try:
            self._connection = connection = address.connection(
                socket_timeout=self._timeout,
                socket_connect_timeout=min(connecting, self._timeout),
                parser_class=_Parser,
            )
            connection.connect()
            self._reader = reader = Reader(connection)
            rtt = reader.rtt(self._key)
            result = self._errand(reader)
            self.result, self.look = result, NodeLook(address.name, True, "", rtt)
        except redis.TimeoutError:
            pass  # what is said of it until it answers stays true
        except (redis.RedisError, OSError, NodeError) as error:
            self.look = NodeLook(address.name, False, reason(error))
        except Exception as error:
            # Of whoever is no Redis, or of a credential provider: the text may be anything.
            why = f"its answers make no sense ({type(error).__name__})"
            self.look = NodeLook(address.name, False, why)
        finally:
            if connection is not None:
                with contextlib.suppress(Exception):
                    connection.disconnect()

    @property
    def heard(self) -> float:
        """When its node last answered, or when it set out."""
        return self._begun if self._reader is None else self._reader.heard

    def hang_up(self) -> None:
        """End the thread's wait for its node."""
        stream = getattr(self._connection, "_sock", None)
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.shutdown(socket.SHUT_RDWR)


def visit(
    addresses: Sequence[Address], prefix: str, errand: Callable[[Reader], T], timeout: float
) -> tuple[list[NodeLook], list[T | None]]:
    """Run an errand at every node, at all of them at once.

    Args:
        addresses: The nodes.
        prefix: What our keys begin with.
        errand: What to do there; in a thread per node.
        timeout: Seconds without an answer after which a node is left alone. One that goes on
            answering, since it has much to tell, has ten times as long in all.

    Returns:
        How each node answered; and what the errand brought from it, None if it did not.
    """
    until = monotonic() + LONGEST_VISIT * timeout
    visits = [_Visit(address, prefix, errand, timeout) for address in addresses]
    for one in visits:
        one.start()
    looks, results = [], []
    for one in visits:
        while one.is_alive() and (left := min(one.heard + timeout, until) - monotonic()) > 0:
            one.join(left)
        late = one.is_alive()
        why = f"no answer within {timeout:g} s"
        if late and monotonic() > until:
            why = f"has not told all within {LONGEST_VISIT * timeout:g} s"
        looks.append(NodeLook(one.look.name, False, why) if late else one.look)
        results.append(None if late else one.result)
        if late:
            one.hang_up()
    for one in visits:
        one.join(0.2)  # they close their sockets; not for who hangs in a name look-up
    return looks, results


def _batches(items: list[T]) -> Iterator[list[T]]:
    return (items[start : start + BATCH] for start in range(0, len(items), BATCH))


def _is_wrong_type(reply: object) -> bool:
    return isinstance(reply, redis.ResponseError) and str(reply).startswith("WRONGTYPE")


def _expect(reply: object) -> None:
    """An error reply is none that tells anything of a key: no right to ask, or worse."""
    if isinstance(reply, redis.ResponseError):
        raise reply


def _nonsense(command: str) -> NodeError:
    return NodeError(f"answered {command} with what is no answer to it")


def _are_bytes(reply: object) -> bool:
    return isinstance(reply, list) and all(isinstance(one, bytes) for one in reply)


def _is_cursor(reply: object) -> bool:
    return isinstance(reply, bytes) and reply.isdigit() and len(reply) <= 20


def _is_count(reply: object) -> bool:
    return isinstance(reply, int) and 0 <= reply < 2**63


def _is_ttl(reply: object) -> bool:
    """-2 of a key that is not there, -1 of one without a ttl; else milliseconds."""
    return isinstance(reply, int) and -2 <= reply < 2**63


def _glob_escaped(text: bytes) -> bytes:
    """For MATCH, where these have a meaning."""
    return b"".join(b"\\" + bytes([c]) if c in b"\\*?[]^-" else bytes([c]) for c in text)


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _text(key: bytes) -> str:
    try:
        return key.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return key.decode("utf-8", "surrogateescape")  # not one of ours
