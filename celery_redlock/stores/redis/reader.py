"""Read the keys of one Redis node, over a connection of its own, within limits of time.

It only reads: SCAN, GETRANGE, PTTL, ZCARD and ZRANGE. No scripts, because whoever may run one can
stop a node with it. A key may hold anything of any size, so values longer than any token of ours
are not fetched. A node that hangs costs the time that the caller allows, and does not lose the
other nodes' answers. A node that sends nonsense costs no more: each reply is checked here before it
is used.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from time import monotonic
from typing import Any

import redis

from ...protocol.errors import NodeError
from ...protocol.names import LINE_SUFFIX
from ...protocol.replies import seconds_left
from ...protocol.values import is_shared
from ..reading import FOREIGN, MAX_TIMEOUTS, QUEUE, KeyValue, NodeReader, to_bytes, to_text
from .handshake import ask
from .resp import Parser, reason

__all__ = ["RedisReader"]

MAX_VALUE_BYTES = 4096
"""The longest value that is fetched; every token is shorter."""
SCAN_COUNT = 1000
"""Keys that a node scans per step of a SCAN: well below a millisecond of its time."""
BATCH_KEYS = 500
"""Keys per request, so that a node's other clients are served in between."""
MAX_REPLY_BYTES = 4 * 2**20
"""The longest reply; a batch of the longest values is half of it."""
MAX_NODE_BYTES = 64 * 2**20
"""Bytes read from one node at most, counted as in `resp.Replies`: about 150 000 locks, which take
up to twice as much memory."""

# The workers' user may run scripts but not GETRANGE; `explain` reads as that user.
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


MAX_READERS = 100
"""Maximum number of readers to show for one key: those whose leases end last."""


class _Parser(Parser):
    """Parser with the limits for a survey of all keys."""

    largest = MAX_REPLY_BYTES
    budget = MAX_NODE_BYTES
    longest = MAX_TIMEOUTS


class RedisReader(NodeReader):
    """Reader of one node."""

    store = "Redis"

    def connect(self) -> None:
        """Connect to the node.

        Raises:
            redis.RedisError, OSError: It cannot be reached, or refuses us.
        """
        connecting = self._address.arguments.get("socket_connect_timeout", self._timeout)
        self.connection = self._address.connection(
            socket_timeout=self._timeout,
            socket_connect_timeout=min(connecting, self._timeout),
            parser_class=_Parser,
        )
        self.connection.connect()
        self.heard = monotonic()

    def close(self) -> None:
        """Close the connection. Never fails."""
        with contextlib.suppress(Exception):
            self.connection.disconnect()

    def why(self, error: Exception) -> str:
        """Return the reason of a failed read, in one line without secrets; empty if too slow."""
        if isinstance(error, redis.TimeoutError):
            return ""
        if isinstance(error, (redis.RedisError, OSError, NodeError)):
            return reason(error)
        # Not Redis, or a failed credential provider: the text may be anything.
        return f"its answers make no sense ({type(error).__name__})"

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
        """Return the values of some keys, by their names, without those that do not exist."""
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
            sets = {
                name: key
                for name, key in batch.items()
                if name in found and not found[name].value and not name.endswith(LINE_SUFFIX)
            }
            found |= self._readers(sets)
        return found

    def _readers(self, keys: Mapping[str, bytes]) -> dict[str, KeyValue]:
        """Return the readers of some keys, by the keys' names."""
        if not keys:
            return {}
        found = {}
        last = ("ZRANGE", -MAX_READERS, -1, "WITHSCORES")
        pairs = self._ask_each(keys, last, ("PTTL",))
        for name, (reply, left) in zip(keys, pairs, strict=True):
            if _are_bytes(reply) and reply and all(is_shared(to_text(one)) for one in reply[::2]):
                ends = [float(score) for score in reply[1::2]]
                lefts = [(left - ends[-1] + end) / 1000 for end in ends]
                each = zip(reply[::2], lefts, strict=True)
                readers = tuple((token, rest) for token, rest in each if rest > 0)
                if readers:
                    found[name] = KeyValue(reply[-2], seconds_left(left), readers=readers)
        return found

    def queues(self, keys: Mapping[str, bytes], members: int) -> dict[str, KeyValue]:
        """Return the wait queues under some keys, by their names, with their first `members`.

        A key that is no queue is `FOREIGN`. A key that has ended meanwhile is left out.
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

    def _ping(self) -> object:
        return self.ask([("PTTL", to_bytes(self.prefix))])  # a refusal takes as long

    @property
    def peer(self) -> str:
        """The IP address at the other end; empty for this machine's own sockets."""
        peer = self.connection._sock.getpeername()
        return str(peer[0]) if isinstance(peer, tuple) else ""

    def _ask_each(
        self, keys: Mapping[str, bytes], *commands: tuple[Any, ...]
    ) -> list[tuple[Any, ...]]:
        """Return the replies to some commands for each key, which is their first argument."""
        replies = self.ask(
            [(name, key, *rest) for key in keys.values() for name, *rest in commands]
        )
        return [
            tuple(replies[n : n + len(commands)]) for n in range(0, len(replies), len(commands))
        ]

    def ask(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Return the replies to commands that are written at once, error replies included."""
        pack = self.connection.pack_command
        return self.ask_packed([b"".join(pack(*command)) for command in commands])

    def ask_packed(self, requests: Sequence[bytes]) -> list[Any]:
        """Return the replies to requests in RESP, in the same way."""
        replies = ask(self.connection, requests)
        self.heard = monotonic()
        return replies


def _batches(keys: Mapping[str, bytes]) -> Iterator[dict[str, bytes]]:
    items = list(keys.items())
    for start in range(0, len(items), BATCH_KEYS):
        yield dict(items[start : start + BATCH_KEYS])


def _glob_escaped(text: bytes) -> bytes:
    return b"".join(b"\\" + bytes([c]) if c in b"\\*?[]^-" else bytes([c]) for c in text)


# -- Checks of answers -----------------------------------------------------------------------------

NO_KEY = -2
"""PTTL of a key that does not exist. For a key without a ttl it is -1; else milliseconds."""


def _checked(command: str, reply: Any, fits: bool) -> Any:
    """Return a reply that is valid for the command.

    Raises:
        redis.ResponseError: It is an error reply, such as for a missing right.
        NodeError: It is not an answer to the command.
    """
    if isinstance(reply, redis.ResponseError):
        raise reply
    if not fits:
        raise NodeError(f"answered {command} with a malformed reply")
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
