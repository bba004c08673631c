"""One Redis master: its connection, its commands and scripts, what its answers mean.

Milliseconds and bytes live here and nowhere else. The connection is redis-py's own, for TLS, ACL
and all the rest of making one; we write to all nodes and then poll, so we need no more of it than
`send_packed_command` and `read_response`. Scripts are sent as text: EVALSHA may be answered
NOSCRIPT, and the EVAL that follows would run behind a release that was already queued.
"""

from __future__ import annotations

import logging
import math
import ssl
from collections.abc import Callable
from typing import Any

import redis
from redis._parsers.encoders import Encoder
from redis.connection import PythonRespSerializer
from redis.exceptions import ResponseError

from .address import Address
from .channel import Channel
from .errors import NodeError
from .quorum import Round, Verb

__all__ = ["FOREIGN", "Node", "encode"]

logger = logging.getLogger("celery_redlock.node")

FOREIGN = "<not a lock>"
"""Stands for the token where a key of another type lies under our name: it is held, not by us."""

SETTLED = 1.0
"""Seconds a connection must live, if nothing was answered on it, to have been a good one."""

# redis.pcall: a key of another type is not ours, and no reason to fail the other keys.
EXTEND = b"""\
local votes = {}
for i, key in ipairs(KEYS) do
  local token, ttl = ARGV[2 * i - 1], ARGV[2 * i]
  local held = redis.pcall('GET', key)
  votes[i] = '0'
  if held == token then
    redis.call('PEXPIRE', key, ttl)
    votes[i] = '1'
  elseif held == false and redis.pcall('SET', key, token, 'PX', ttl).ok then
    votes[i] = '2'
  end
end
return table.concat(votes)"""

UNDO = b"""\
if redis.pcall('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0"""

# Every release is announced, whoever held the key here: a waiter counts the nodes that announce.
RELEASE = b"""\
local freed = 0
if redis.pcall('GET', KEYS[1]) == ARGV[1] then freed = redis.call('DEL', KEYS[1]) end
redis.pcall('PUBLISH', KEYS[1], '')
return freed"""

PEEK = b"return {redis.call('GET', KEYS[1]), redis.call('PTTL', KEYS[1])}"

# SET with NX and GET together needs Redis 7.0; this is the same for 6.2.
ACQUIRE = b"""\
local held = redis.call('GET', KEYS[1])
if not held then redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2]) end
return held"""

_pack = PythonRespSerializer(6000, Encoder("utf-8", "strict", False).encode).pack


def encode(round_: Round, prefix: str, *, old_server: bool = False) -> list[bytes]:
    """The bytes to write for a round; the same for every node."""
    pack: Callable[..., list[bytes]] = _pack
    if round_.verb is Verb.EXTEND:
        keys = [_key(prefix, claim.resource) for claim in round_.claims]
        values = [v for c in round_.claims for v in (_bytes(c.token), _milliseconds(c.ttl))]
        return pack("EVAL", EXTEND, len(keys), *keys, *values)
    claim = round_.claims[0]
    key, token = _key(prefix, claim.resource), _bytes(claim.token)
    command: tuple[Any, ...]
    if round_.verb is Verb.ACQUIRE and not old_server:
        command = ("SET", key, token, "NX", "GET", "PX", _milliseconds(claim.ttl))
    elif round_.verb is Verb.ACQUIRE:
        command = ("EVAL", ACQUIRE, 1, key, token, _milliseconds(claim.ttl))
    elif round_.verb is Verb.PEEK:
        command = ("EVAL", PEEK, 1, key)
    else:
        command = ("EVAL", RELEASE if round_.verb is Verb.RELEASE else UNDO, 1, key, token)
    return pack(*command)


def decode(round_: Round, reply: Any) -> Any:
    """What `Round.answer` takes, from a node's reply.

    Raises:
        NodeError: It is no answer to such a request.
    """
    verb = round_.verb
    try:
        if verb is Verb.ACQUIRE:
            return None if reply is None else _text(reply)
        if verb is Verb.EXTEND:
            votes = _text(reply)
            if len(votes) == len(round_.claims) and set(votes) <= set("012"):
                return votes
        elif verb is Verb.PEEK:
            token, milliseconds = reply
            left = math.inf if milliseconds == -1 else milliseconds / 1000
            return None if token is None else (_text(token), left)
        elif isinstance(reply, int):
            return reply > 0
    except (TypeError, ValueError, AttributeError):
        pass
    raise NodeError(f"answered {verb.value} with a {type(reply).__name__} that is no answer to it")


class Node:
    """One node of a lock; all calls are made with the driver's turn held.

    Attributes:
        name: Its address, without credentials.
        channel: What it has been asked and has not answered.
        connection: The connection, or None while there is none.
        failures: Attempts to connect since it last proved to work; sets the backoff.
    """

    def __init__(self, index: int, address: Address, prefix: str) -> None:
        self.index = index
        self.name = address.name
        self.channel = Channel(index)
        self.connection: Any = None
        self._address = address
        self._prefix = prefix
        self._old_server = False
        self.failures = 0
        self._proven = False
        self._opened = self._seen = 0.0
        self._complaints: dict[Verb | None, str] = {}

    def connect(self) -> Any:
        """A new connection, ready and non-blocking. Blocks: call it without the turn.

        Raises:
            NodeError: It cannot be reached, or it refuses us.
        """
        connection = self._address.connection()
        try:
            connection.connect()
            connection._sock.setblocking(False)
        except (redis.RedisError, OSError) as error:
            connection.disconnect()
            raise NodeError(_reason(error), node=self.name) from None
        return connection

    def opened(self, connection: Any, now: float) -> None:
        """Take a connection into use; what is owed and what waits is written to it first."""
        self.connection = connection
        self._proven = False
        self._opened = self._seen = now
        self._content(None)
        for round_ in self.channel.connected(now):
            if self.connection is None:
                return
            self._write(encode(round_, self._prefix, old_server=self._old_server))

    def unreachable(self, reason: str) -> None:
        """Connecting failed; the node is silent until it succeeds."""
        self.channel.unreachable(reason)
        self.complain(None, reason)

    def ask(self, round_: Round, payload: list[bytes], now: float) -> None:
        """Write a round's request, or vote SILENT for it."""
        self._seen = now
        try:
            if self.channel.stalled(now):
                self.receive(now)  # unread answers are no silence
            if self.channel.ask(round_, now):
                if self._old_server and round_.verb is Verb.ACQUIRE:
                    payload = encode(round_, self._prefix, old_server=True)
                self._write(payload)
            elif self.channel.up:
                self.complain(round_.verb, str(round_.details[self.index]))
        except BaseException:
            # Struck between the queue and the socket (a time limit, a KeyboardInterrupt): the next
            # answer might be taken for another round's.
            self._drop("interrupted")
            raise

    def receive(self, now: float) -> None:
        """Read all answers that have arrived, and hand each to its round."""
        self._seen = now
        try:
            while self.connection is not None and self._receive_one(now):
                pass
        except BaseException:
            self._drop("interrupted")
            raise

    def complain(self, verb: Verb | None, reason: str) -> None:
        """Log that the node fails, once until it works again or fails in another way."""
        kind = reason.split(" ", 1)[0] if verb else reason
        if self._complaints.get(verb) != kind:
            self._complaints[verb] = kind
            what = f"does not {verb.value}" if verb else "is unreachable"
            logger.warning("node %s %s: %s", self.name, what, reason)

    def close(self) -> None:
        """Close the connection, if there is one."""
        if self.connection is not None:
            self.connection.disconnect()
            self.connection = None

    def _receive_one(self, now: float) -> bool:
        """Read one answer; whether there may be more to read."""
        assert self.connection is not None
        unanswered = self.channel.unanswered
        try:
            reply = self.connection.read_response(disable_decoding=True, disconnect_on_error=False)
        except ResponseError as error:
            if unanswered:
                self._refused(self.channel.answered(), error, now)
                return True
            self._drop(_reason(error))
            return False
        except (redis.RedisError, OSError) as error:
            if isinstance(error.__context__, (BlockingIOError, ssl.SSLWantReadError)):
                return False
            self._drop(_reason(error))
            return False
        if not unanswered:
            self._drop("it sent what nobody asked for")
            return False
        round_ = self.channel.answered()
        try:
            round_.answer(self.index, decode(round_, reply), now)
        except NodeError as error:
            round_.silence(self.index, str(error))
            self._drop(str(error))
            return False
        self._proven = True
        if self._complaints:
            self._content(round_.verb)
        if round_.amnesiac:
            forgotten = round_.amnesiac.count(self.index)
            if forgotten:
                logger.warning(
                    "node %s has forgotten %d locks before their time: was it restarted or flushed,"
                    " does it evict keys?",
                    self.name,
                    forgotten,
                )
                round_.amnesiac.clear()
        return self._more()

    def _more(self) -> bool:
        """Whether bytes may have been read that are not parsed yet."""
        if not self.channel.unanswered:
            return False
        if isinstance(self.connection._sock, ssl.SSLSocket):
            return True  # the TLS layer may hold decrypted bytes that no poll tells of
        return bool(self.connection._parser._buffer.unread_bytes())

    def _refused(self, round_: Round, error: ResponseError, now: float) -> None:
        """The node answered with an error."""
        text = str(error)
        if "WRONGTYPE" in text and round_.verb in (Verb.ACQUIRE, Verb.PEEK):
            seen = FOREIGN if round_.verb is Verb.ACQUIRE else (FOREIGN, math.inf)
            round_.answer(self.index, seen, now)
            return
        if round_.verb is Verb.ACQUIRE and "syntax error" in text and not self._old_server:
            # Redis 6.2; it has not done anything yet, so asking in other words is the same try.
            self._old_server = True
            self.channel.unanswered.append(round_)
            self._write(encode(round_, self._prefix, old_server=True))
            return
        reason = _reason(error)
        round_.silence(self.index, reason)
        self.complain(round_.verb, reason)

    def _write(self, payload: list[bytes]) -> None:
        assert self.connection is not None
        try:
            self.connection.send_packed_command(payload, check_health=False)
        except (redis.RedisError, OSError) as error:
            self._drop(_reason(error))

    def _drop(self, reason: str) -> None:
        """The connection is of no use any more."""
        if self.connection is None:
            return
        self.close()
        self.channel.dropped()
        if self._proven or self._seen - self._opened > SETTLED:
            self.failures = 0
        else:
            # It connects and breaks, over and over: as good as unreachable.
            self.unreachable(reason)

    def _content(self, verb: Verb | None) -> None:
        if self._complaints.pop(verb, None) is not None:
            what = f"can {verb.value} again" if verb else "is back"
            logger.info("node %s %s", self.name, what)


def _reason(error: BaseException) -> str:
    """What went wrong, in one line that begins with the server's own error code."""
    text = " ".join(str(error).split())[:200]
    code = getattr(type(error), "status_code", "")
    known: dict[type[BaseException], str] = {
        redis.exceptions.ReadOnlyError: "READONLY",
        redis.exceptions.OutOfMemoryError: "OOM",
        redis.exceptions.NoPermissionError: "NOPERM",
        redis.exceptions.NoScriptError: "NOSCRIPT",
        redis.exceptions.BusyLoadingError: "LOADING",
        redis.exceptions.AuthenticationError: "AUTH",
    }
    prefix = code or known.get(type(error), "")
    if prefix and not text.startswith(prefix):
        text = f"{prefix} {text}"
    if prefix == "READONLY":
        text += " (this address is a replica; name its master)"
    return text or type(error).__name__


def _key(prefix: str, resource: str) -> bytes:
    return _bytes(prefix + resource)


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _text(value: bytes) -> str:
    return value.decode("utf-8", "surrogateescape")


def _milliseconds(seconds: float) -> int:
    return max(1, math.ceil(seconds * 1000))
