"""Read keys at all nodes at once: over connections made for it, and never for long.

It only reads: SCAN, GETRANGE, PTTL, ZCARD and ZRANGE. No scripts: whoever may run one can stop a
node with it. A key may hold anything of any size, so nothing longer than our tokens can be is
fetched. A node that hangs costs the time that the caller allows, and no other node's answers. So
does one that answers nonsense: each reply is checked here, before anybody relies on it.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from time import monotonic
from typing import Any, Generic, NamedTuple, TypeVar

import redis

from ..protocol.commands import seconds_left
from ..protocol.errors import NodeError
from ..stores.redis.address import Address
from ..stores.redis.handshake import ask
from ..stores.redis.resp import Parser, reason
from .models import NodeLook

__all__ = ["FOREIGN", "QUEUE", "KeyValue", "NodeLook", "Reader"]
__all__ += ["read_nodes", "to_bytes", "to_text"]

T = TypeVar("T")

MAX_VALUE_BYTES = 4096
"""The longest value that is fetched; no token is as long."""
SCAN_COUNT = 1000
"""Keys that a node looks at per step of a SCAN: well below a millisecond of its time."""
BATCH_KEYS = 500
"""Keys that are asked for at a time, so that a node's other clients are served in between."""
MAX_TIMEOUTS = 10
"""A node may take this many timeouts in all, as long as it goes on answering."""
MAX_REPLY_BYTES = 4 * 2**20
"""The longest reply; a batch of the longest values is half of it."""
MAX_NODE_BYTES = 64 * 2**20
"""Bytes that are read of one node, counted as in `resp.Replies`: about 150 000 locks, which take up
to twice as much memory."""
RTT_SAMPLES = 3
"""The fastest of these round trips counts: the others had to wait for this process."""

FOREIGN = b""
"""Stands for a value that is no string, or longer than any of ours."""
QUEUE = b"line"
"""Stands for the value of a wait queue."""

# The workers' user may run scripts but not GETRANGE; `explain` asks as that user.
READ_SCRIPT = (
    b"""\
local found = {}
for i, key in ipairs(KEYS) do
  local value = redis.pcall('GET', key)
  if type(value) == 'table' and not string.find(value.err, 'WRONGTYPE') then return value end
  if type(value) ~= 'string' or #value > %d then value = '' end
  found[2 * i - 1] = value
  found[2 * i] = redis.call('PTTL', key)
end
return found"""
    % MAX_VALUE_BYTES
)


class KeyValue(NamedTuple):
    """What one node has under a key."""

    value: bytes  # or `FOREIGN`, or `QUEUE`
    left: float  # seconds until it expires; infinite for a key without a ttl
    waiting: int = 0  # how many wait in a queue
    first: tuple[tuple[bytes, float], ...] = ()  # their names, and since when (microseconds, 1970)


class _Parser(Parser):
    """Reads what a node tells of all its keys."""

    largest = MAX_REPLY_BYTES
    budget = MAX_NODE_BYTES
    longest = MAX_TIMEOUTS


class Reader:
    """Reads one node, over one connection.

    Attributes:
        prefix: What our keys begin with.
        heard: When it last answered; seconds of the monotonic clock.
        by_script: Whether values were read by the script: this user may not read wait queues.
    """

    def __init__(self, connection: Any, prefix: str) -> None:
        self._connection = connection
        self.prefix = prefix
        self.heard = monotonic()
        self.by_script = False

    def scan(self, head: str) -> dict[str, bytes]:
        """Return the keys that begin with prefix and `head`, by their names without the prefix."""
        start = to_bytes(self.prefix)
        pattern = _glob_escaped(to_bytes(self.prefix + head)) + b"*"
        found: dict[str, bytes] = {}
        cursor = b"0"
        while True:
            (reply,) = self.ask([("SCAN", cursor, "MATCH", pattern, "COUNT", SCAN_COUNT)])
            cursor, keys = _checked("SCAN", reply, _is_scan(reply))
            found |= {to_text(key[len(start) :]): key for key in keys if key.startswith(start)}
            if cursor == b"0":
                return found

    def values(self, keys: Mapping[str, bytes]) -> dict[str, KeyValue]:
        """Return what is under some keys, by their names, without those that do not exist."""
        found = {}
        for batch in _batches(keys):
            pairs = self._ask_each(batch, ("GETRANGE", 0, MAX_VALUE_BYTES), ("PTTL",))
            if isinstance(pairs[0][0], redis.exceptions.NoPermissionError):
                (reply,) = self.ask([("EVAL", READ_SCRIPT, len(batch), *batch.values())])
                _checked("EVAL", reply, _is_list(reply, 2 * len(batch)))
                pairs = list(zip(reply[::2], reply[1::2], strict=True))
                self.by_script = True
            for name, (value, left) in zip(batch, pairs, strict=True):
                whole = FOREIGN if _is_of_another_type(value) else value
                short = isinstance(whole, bytes) and len(whole) <= MAX_VALUE_BYTES + 1
                _checked("PTTL", left, _is_int(left, NO_KEY))
                _checked("GETRANGE", whole, short)
                if left != NO_KEY:
                    known = whole if len(whole) <= MAX_VALUE_BYTES else FOREIGN
                    found[name] = KeyValue(known, seconds_left(left))
        return found

    def queues(self, keys: Mapping[str, bytes], members: int) -> dict[str, KeyValue]:
        """Return the wait queues under some keys, by their names, with their first `members`.

        A key that is no queue is `FOREIGN`. One that is gone by now is left out.
        """
        found = {}
        for batch in _batches(keys):
            first = ("ZRANGE", 0, members - 1, "WITHSCORES")
            threes = self._ask_each(batch, ("ZCARD",), first, ("PTTL",))
            for name, (count, queue, left) in zip(batch, threes, strict=True):
                _checked("PTTL", left, _is_int(left, NO_KEY))
                if left == NO_KEY:
                    continue
                if _is_of_another_type(count) or _is_of_another_type(queue):
                    found[name] = KeyValue(FOREIGN, seconds_left(left))
                    continue
                _checked("ZCARD", count, _is_int(count, 0))
                pairs = _checked("ZRANGE", queue, _are_bytes(queue))
                scored = tuple(zip(pairs[::2], map(float, pairs[1::2]), strict=True))
                _checked("ZRANGE", queue, not any(math.isnan(score) for _member, score in scored))
                found[name] = KeyValue(QUEUE, seconds_left(left), count, scored)
        return found

    def rtt(self) -> float:
        """Return the seconds that a question takes which costs a node nothing."""
        key, taken = to_bytes(self.prefix), []
        for _ in range(RTT_SAMPLES):
            begun = monotonic()
            self.ask([("PTTL", key)])  # to be refused takes as long
            taken.append(monotonic() - begun)
        return min(taken)

    @property
    def peer(self) -> str:
        """The IP address at the other end; empty for this machine's own sockets."""
        peer = self._connection._sock.getpeername()
        return str(peer[0]) if isinstance(peer, tuple) else ""

    def _ask_each(
        self, keys: Mapping[str, bytes], *commands: tuple[Any, ...]
    ) -> list[tuple[Any, ...]]:
        """Return the replies to some commands, whose first argument is the key, for each key."""
        replies = self.ask(
            [(name, key, *rest) for key in keys.values() for name, *rest in commands]
        )
        return [
            tuple(replies[n : n + len(commands)]) for n in range(0, len(replies), len(commands))
        ]

    def ask(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Return the replies to commands that are written at once, error replies among them."""
        pack = self._connection.pack_command
        return self.ask_packed([b"".join(pack(*command)) for command in commands])

    def ask_packed(self, requests: Sequence[bytes]) -> list[Any]:
        """Return the same for requests in RESP."""
        replies = ask(self._connection, requests)
        self.heard = monotonic()
        return replies


class _NodeThread(threading.Thread, Generic[T]):
    """Runs a query at one node. A daemon, because a look-up of a host name has no limit.

    All else ends by itself: `Parser` limits the time of each reply, and of all together.
    """

    def __init__(
        self, address: Address, prefix: str, query: Callable[[Reader], T], timeout: float
    ) -> None:
        super().__init__(name=f"celery_redlock read {address.name}", daemon=True)
        self._address, self._prefix = address, prefix
        self._query, self._timeout = query, timeout
        self._reader: Reader | None = None
        self._begun = monotonic()
        self.result: T | None = None
        self.look = NodeLook(address.name, False, f"no answer within {timeout:g} s")

    def run(self) -> None:
        name, connection = self._address.name, None
        connecting = self._address.arguments.get("socket_connect_timeout", self._timeout)
        try:
            connection = self._address.connection(
                socket_timeout=self._timeout,
                socket_connect_timeout=min(connecting, self._timeout),
                parser_class=_Parser,
            )
            connection.connect()
            self._reader = reader = Reader(connection, self._prefix)
            rtt = reader.rtt()
            self.result, self.look = self._query(reader), NodeLook(name, True, "", rtt)
        except redis.TimeoutError:
            pass  # `look` says so already
        except (redis.RedisError, OSError, NodeError) as error:
            self.look = NodeLook(name, False, reason(error))
        except Exception as error:
            # No Redis, or a credential provider that failed: the text may be anything.
            why = f"its answers make no sense ({type(error).__name__})"
            self.look = NodeLook(name, False, why)
        finally:
            if connection is not None:
                with contextlib.suppress(Exception):
                    connection.disconnect()

    def outcome(self, until: float) -> tuple[NodeLook, T | None]:
        """Wait until it has ended, its node has been silent for the timeout, or `until`."""
        while self.is_alive():
            heard = self._begun if self._reader is None else self._reader.heard
            now = monotonic()
            if now < min(heard + self._timeout, until):
                self.join(min(heard + self._timeout, until) - now)
                continue
            why = f"no answer within {self._timeout:g} s"
            if now >= until:
                why = f"has not told all within {MAX_TIMEOUTS * self._timeout:g} s"
            return NodeLook(self.look.name, False, why), None
        return self.look, self.result


def read_nodes(
    addresses: Sequence[Address], prefix: str, query: Callable[[Reader], T], timeout: float
) -> tuple[list[NodeLook], list[T | None]]:
    """Run a query at all nodes at once.

    Args:
        addresses: The nodes.
        prefix: What our keys begin with.
        query: What to read there; runs in one thread per node.
        timeout: Seconds without an answer after which a node is left alone. One that goes on
            answering, because it has much to tell, has ten times as long in all.

    Returns:
        How each node answered; and what the query returned there, None if it did not.
    """
    until = monotonic() + MAX_TIMEOUTS * timeout
    threads = [_NodeThread(address, prefix, query, timeout) for address in addresses]
    for thread in threads:
        thread.start()
    outcomes = [thread.outcome(until) for thread in threads]
    for thread in threads:
        thread.join(0.2)  # so that they close their sockets; one that looks up a name may hang
    return [look for look, _ in outcomes], [result for _, result in outcomes]


def to_bytes(text: str) -> bytes:
    """Encode a key; it may hold half characters."""
    return text.encode("utf-8", "surrogatepass")


def to_text(value: bytes) -> str:
    """Decode a key or a value, which may be another program's and no UTF-8."""
    try:
        return value.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return value.decode("utf-8", "surrogateescape")


def _batches(keys: Mapping[str, bytes]) -> Iterator[dict[str, bytes]]:
    items = list(keys.items())
    for start in range(0, len(items), BATCH_KEYS):
        yield dict(items[start : start + BATCH_KEYS])


def _glob_escaped(text: bytes) -> bytes:
    return b"".join(b"\\" + bytes([c]) if c in b"\\*?[]^-" else bytes([c]) for c in text)


# -- What may be an answer -------------------------------------------------------------------------

NO_KEY = -2
"""PTTL of a key that does not exist. Of one without a ttl it is -1; else milliseconds."""


def _checked(command: str, reply: Any, fits: bool) -> Any:
    """Return a reply that can be an answer.

    Raises:
        redis.ResponseError: It is an error reply: no right to ask, or worse.
        NodeError: It is no answer to the command.
    """
    if isinstance(reply, redis.ResponseError):
        raise reply
    if not fits:
        raise NodeError(f"answered {command} with what is no answer to it")
    return reply


def _is_of_another_type(reply: Any) -> bool:
    return isinstance(reply, redis.ResponseError) and str(reply).startswith("WRONGTYPE")


def _is_list(reply: Any, length: int) -> bool:
    return isinstance(reply, list) and len(reply) == length


def _are_bytes(reply: Any) -> bool:
    return isinstance(reply, list) and all(isinstance(one, bytes) for one in reply)


def _is_scan(reply: Any) -> bool:
    if not (_is_list(reply, 2) and _are_bytes(reply[1])):
        return False
    cursor = reply[0]
    return isinstance(cursor, bytes) and cursor.isdigit() and len(cursor) <= 20


def _is_int(reply: Any, least: int) -> bool:
    return isinstance(reply, int) and least <= reply < 2**63
