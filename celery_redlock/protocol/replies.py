"""Decode the replies of a node. Every kind of store gives them in the form that Redis uses.

Any exception raised here means that the reply is not an answer to the request.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .errors import NodeError

if TYPE_CHECKING:
    from .round import Round

__all__ = ["DONE", "FOREIGN", "Held", "decode", "seconds_left"]

FOREIGN = "<not a lock>"
"""Replaces the token if the key under our name is of another type: it is held, and not by us."""
DONE = "done"
"""The value of a key that marks a delivery as done."""

MAX_TTL_S = 10 * 365 * 86_400.0
"""The longest remaining ttl that we accept from a node, in seconds; a longer one is cut. Only a key
of another program has so much left, and some clocks and threads cannot handle larger numbers."""
MAX_INFO_BYTES = 16384
"""Maximum number of bytes of a report on replication: enough for a hundred replicas. It is
requested between two other requests, and everything waits while it is read."""


class Held(str):
    """The token of another holder, with the first of our names that it holds on this node."""

    name: str

    def __new__(cls, token: str, name: str) -> Held:
        """Make a token with a name."""
        held = super().__new__(cls, token)
        held.name = name
        return held


def decode(round_: Round, reply: Any) -> Any:
    """Return a node's reply in the form that `Round.answer` takes.

    Raises:
        NodeError: The reply is not an answer to such a request.
    """
    verb = round_.verb
    try:
        return verb.decode(round_.claims, reply)
    except (TypeError, ValueError, ArithmeticError, AttributeError, LookupError):
        what = f"a {type(reply).__name__}, which is no valid reply"
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


def seconds_left(milliseconds: int) -> float:
    """Return the seconds left of a key from the reply to PTTL: infinite if it has no ttl, else at
    most `MAX_TTL_S`.

    Raises:
        ValueError: No server gives such a reply.
    """
    if milliseconds == -1:
        return math.inf
    _checked(milliseconds, milliseconds >= -2)  # -2: the key has just gone
    return min(max(0, milliseconds) / 1000, MAX_TTL_S)


def _seen(token: bytes | None, milliseconds: int) -> tuple[str, float] | None:
    """Return the token under one key and its seconds left; None if the key is free."""
    return None if token is None else (_text(token), seconds_left(milliseconds))


def _first(seen: list[tuple[str, float] | None]) -> tuple[str, float] | None:
    """Return the first token under the keys of a claim, and the seconds until all are free."""
    held = [pair for pair in seen if pair is not None]
    return (held[0][0], max(left for _token, left in held)) if held else None


def _checked(reply: Any, right: bool) -> Any:
    if not right:
        raise ValueError
    return reply


def _text(value: bytes) -> str:
    try:
        return value.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return value.decode("utf-8", "surrogateescape")  # it is not one of our tokens
