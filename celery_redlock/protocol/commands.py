"""What a node is asked, in its own words, and what its answers mean: requests and replies.

Milliseconds and bytes live here and in `scripts.py`, and nowhere else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from . import scripts
from .errors import NodeError
from .scripts import DONE as DONE
from .scripts import FOREIGN as FOREIGN

if TYPE_CHECKING:
    from .round import Round
    from .values import Mark

__all__ = [
    *("DONE", "FENCE_SUFFIX", "FOREIGN", "LINE_SUFFIX", "MARK_SUFFIX", "RESERVED_SUFFIX"),
    *("SLOT_SUFFIX", "Held", "base_of", "decode", "encode", "request", "seconds_left"),
]

FENCE_SUFFIX = "#fence"
"""Ends the key of a resource's last fencing token; no resource's own name may end so."""
SLOT_SUFFIX = "#slot"
"""With a number, ends the key of one of several holders of a resource; no name may end so."""
RESERVED_SUFFIX = "#reserved"
"""Ends the key of a resource's reservation (`reservation.py`), likewise."""
MARK_SUFFIX = "#done"
"""Ends the key that marks a delivery as done, likewise."""
LINE_SUFFIX = "#line"
"""Ends the key of a resource's wait queue (`wait_queue.py`), likewise."""
TRUSTED_KEY = "#trusted"
"""Names the mark of a node that has earned its vote (`restart_guard.py`, rules 2 and 6): for how
many seconds it had been known by then, and as what. No ttl. No resource's name may end so."""
QUEUE_LIFE_MS = b"60000"
"""After which a wait queue is forgotten; every waiter that tries renews it."""
FENCE_LIFE_MS = b"%d" % (7 * 86_400_000)
"""How long a node remembers a fencing token: as long as a write may be late, while clocks have
moved on."""
MAX_TTL_S = 10 * 365 * 86_400.0
"""How long we believe that a key has left, of another program: nothing of ours is waited for as
long, and a larger number would be more than some clocks and threads can take."""
MAX_INFO_BYTES = 16384
"""What a node may say of its replication, with a hundred replicas. It is asked between two
requests, and everybody waits while it is read."""


class Held(str):
    """The token of another holder of one of several names, with the first name where it is."""

    name: str

    def __new__(cls, token: str, name: str) -> Held:
        """Make a token that remembers a name."""
        held = super().__new__(cls, token)
        held.name = name
        return held


# -- Requests: of some claims, the prefix of keys, and whether to use only words that any server
# understands at once, for a node that has shown that it does not.


def encode(round_: Round, prefix: str, *, plain: bool = False) -> bytes:
    """Return the bytes to write for a round; the same for every node."""
    return round_.verb.encode(round_.claims, prefix, plain)


def request(*words: bytes) -> bytes:
    """Return a request in RESP. `pack_command` of redis-py takes three times as long."""
    sized: list[Any] = [None] * (2 * len(words))
    sized[::2], sized[1::2] = map(len, words), words
    return b"*%d\r\n" % len(words) + b"$%d\r\n%b\r\n" * len(words) % tuple(sized)


LOOK = request(b"INFO", b"replication")


def mark_values(mark: Mark) -> tuple[bytes, ...]:
    return (_bytes(mark.text),)


def _eval(script: bytes, keys: Sequence[bytes], *values: bytes) -> bytes:
    return request(b"EVAL", script, b"%d" % len(keys), *keys, *values)


def _keys(claims: Sequence[Any], prefix: str, suffix: str = "") -> list[bytes]:
    return [_bytes(prefix + name + suffix) for claim in claims for name in claim.resources]


def acquire(claims: Sequence[Any], prefix: str, plain: bool) -> bytes:
    claim, keys = claims[0], _keys(claims, prefix)
    values = (_bytes(claim.token), _milliseconds(claim.ttl))
    if claim.proposal is not None:
        keys += _keys(claims, prefix, FENCE_SUFFIX)
        numbers = (b"%d" % claim.proposal, FENCE_LIFE_MS, b"%d" % claim.ceiling)
        return _eval(scripts.ACQUIRE_FENCED, keys, *values, *numbers)
    if plain or len(keys) > 1:
        return _eval(scripts.ACQUIRE, keys, *values)
    return request(b"SET", keys[0], values[0], b"NX", b"GET", b"PX", values[1])


def extension(script: bytes, claims: Sequence[Any], prefix: str, _plain: bool) -> bytes:
    values: list[bytes] = []
    ttl, lasts = 0.0, b""  # most have the same
    for claim in claims:
        if claim.ttl != ttl:
            ttl, lasts = claim.ttl, _milliseconds(claim.ttl)
        values += (_bytes(claim.token), lasts)
        if script is scripts.RENEW and claim.below < math.inf:
            values[-1] += b"<" + _milliseconds(claim.below)
        if len(claim.resources) > 1:
            values += [b""] * 2 * (len(claim.resources) - 1)
    return _eval(script, _keys(claims, prefix), *values)


def release(claims: Sequence[Any], prefix: str, plain: bool) -> bytes:
    (claim,), keys = claims, _keys(claims, prefix)
    values = [_bytes(claim.token)]
    slot = SLOT_SUFFIX in claim.resources[0]
    if slot or claim.mark is not None:
        values.append(_bytes(prefix + base_of(claim.resources[0])) if slot else b"")
    if claim.mark is not None:
        name, life = claim.mark
        keys.append(_bytes(prefix + name))
        values.append(_milliseconds(life))
    if plain:
        return _eval(scripts.RELEASE, keys, *values)
    return request(b"EVALSHA", scripts.RELEASE_DIGEST, b"%d" % len(keys), *keys, *values)


def on_keys(
    script: bytes,
    *suffixes: str,
    values: Callable[[Any], tuple[bytes, ...]] = lambda claim: (_bytes(claim.token),),
) -> Callable[[Sequence[Any], str, bool], bytes]:
    """Make requests that run a script on keys with some suffixes, with values of the claim."""

    def encoded(claims: Sequence[Any], prefix: str, _plain: bool) -> bytes:
        keys = [key for suffix in suffixes or ("",) for key in _keys(claims, prefix, suffix)]
        return _eval(script, keys, *values(claims[0]))

    return encoded


def fence_values(claim: Any) -> tuple[bytes, ...]:
    return _bytes(claim.token), b"%d" % (claim.fencing_token or 0), FENCE_LIFE_MS


def queue_values(entry: Any) -> tuple[bytes, ...]:
    return _bytes(entry.token), b"%d" % entry.since, QUEUE_LIFE_MS


# -- Replies: what they mean. Whatever is raised here means that it is no answer.


def decode(round_: Round, reply: Any) -> Any:
    """Return what `Round.answer` takes, from a node's reply.

    Raises:
        NodeError: It is no answer to such a request.
    """
    verb = round_.verb
    try:
        return verb.decode(round_.claims, reply)
    except (TypeError, ValueError, ArithmeticError, AttributeError, LookupError):
        what = f"a {type(reply).__name__} that is no answer to it"
        raise NodeError(f"answered {verb.word} with {what}") from None


def acquired(claims: Sequence[Any], reply: Any) -> Any:
    claim = claims[0]
    if claim.proposal is not None:
        if not isinstance(reply, int):
            return _text(reply)
        return _checked(reply, claim.proposal <= reply <= claim.ceiling)
    if isinstance(reply, list):
        token, place = reply
        return Held(_text(token), claim.resources[_checked(place, place >= 0)])
    return None if reply is None else _text(reply)


def extended(claims: Sequence[Any], reply: Any) -> Any:
    votes = _text(reply)
    return _checked(votes, len(votes) == len(claims) and set(votes) <= set("012"))


def done(_claims: Sequence[Any], reply: Any) -> bool:
    return bool(_checked(reply, isinstance(reply, int) and 0 <= reply <= 1))


def released(_claims: Sequence[Any], reply: Any) -> Any:
    _checked(reply, isinstance(reply, int) and 0 <= reply <= 3)
    return reply if reply > 1 else reply > 0


def peeked(claims: Sequence[Any], reply: Any) -> Any:
    _checked(reply, len(reply) == 2 * sum(len(claim.resources) for claim in claims))
    seen = iter([_seen(*pair) for pair in zip(reply[::2], reply[1::2], strict=True)])
    answers = [_first([next(seen) for _ in claim.resources]) for claim in claims]
    return answers if len(answers) > 1 else answers[0]


def looked(_claims: Sequence[Any], reply: Any) -> str:
    return _text(_checked(reply, len(reply) <= MAX_INFO_BYTES))


def base_of(name: str) -> str:
    """Return the resource whose slot this is; of any other name, the name."""
    base, _, number = name.rpartition(SLOT_SUFFIX)
    return base if number.isascii() and number.isdecimal() else name


def seconds_left(milliseconds: int) -> float:
    """Return what PTTL says of a key that is there: infinite if it has no ttl, else `MAX_TTL_S`
    at most.

    Raises:
        ValueError: No server says so.
    """
    if milliseconds == -1:
        return math.inf
    _checked(milliseconds, milliseconds >= -2)  # -2: it has just gone
    return min(max(0, milliseconds) / 1000, MAX_TTL_S)


def _seen(token: bytes | None, milliseconds: int) -> tuple[str, float] | None:
    """Return what a node holds under one key: a token, and for how long yet in seconds."""
    return None if token is None else (_text(token), seconds_left(milliseconds))


def _first(seen: list[tuple[str, float] | None]) -> tuple[str, float] | None:
    """Of the keys of a claim: the first that is held, and until the last of them is free."""
    held = [pair for pair in seen if pair is not None]
    return (held[0][0], max(left for _token, left in held)) if held else None


def _checked(reply: Any, right: bool) -> Any:
    if not right:
        raise ValueError
    return reply


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _text(value: bytes) -> str:
    try:
        return value.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return value.decode("utf-8", "surrogateescape")  # not one of ours


def _milliseconds(seconds: float) -> bytes:
    return b"%d" % max(1, math.ceil(seconds * 1000))
