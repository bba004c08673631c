"""Statements for PostgreSQL: one for each verb, with its parameters and the meaning of its rows.

Each is one call of a function of `schema.sql`, and so one transaction. A reply takes the form that
a Redis node would give it, for the checks of `protocol/replies.py`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ...protocol.names import QUEUE_LIFE_S
from ...protocol.replies import MAX_TTL_S
from ...protocol.round import Round, Verb

__all__ = ["SWEEP", "Statement", "encode", "from_text", "reply_to", "to_text"]

Row = Sequence[bytes | None]
Values = tuple[bytes | None, ...]

SWEEP = b"SELECT redlock_sweep()"
QUEUE_LIFE = b"%f" % QUEUE_LIFE_S
UNSTORABLE = re.compile("[\\\\\0\ud800-\udfff]")
"""Characters that a text of PostgreSQL cannot hold, and the backslash that escapes them."""
MAX_BYTES = 2600
HEAD_BYTES, TAIL_BYTES = 600, 300
"""Bytes kept of a longer name; the rest becomes a digest. The tail has the suffix with the kind."""


@dataclass(frozen=True)
class Statement:
    """The statement of a verb.

    Attributes:
        sql: The statement.
        values: Function that makes its parameters from the claims and the prefix of names.
        reply: Function that makes a reply from its rows.
    """

    sql: bytes
    values: Callable[[Sequence[Any], str], Values]
    reply: Callable[[Sequence[Any], Sequence[Row]], Any]


def encode(round_: Round, prefix: str) -> tuple[bytes, Values]:
    """Return the statement for a round, and its parameters."""
    statement = _STATEMENTS[round_.verb]
    return statement.sql, statement.values(round_.claims, prefix)


def reply_to(round_: Round, rows: Sequence[Row]) -> Any:
    """Return the meaning of the rows, as a reply for `replies.decode`."""
    return _STATEMENTS[round_.verb].reply(round_.claims, rows)


def to_text(name: str) -> bytes:
    """Return a name as PostgreSQL can hold it; different names stay different.

    An index takes no more than 2704 bytes. The name of a resource is always shorter. A mark
    contains a task's id, which may be anything: the middle of such a name becomes a digest.
    """
    text = UNSTORABLE.sub(lambda found: f"\\{ord(found[0]):04x}", name).encode()
    if len(text) <= MAX_BYTES:
        return text
    head, tail = (part.decode(errors="ignore") for part in (text[:HEAD_BYTES], text[-TAIL_BYTES:]))
    return f"{head}…{hashlib.sha256(text).hexdigest()}…{tail}".encode()


def from_text(text: bytes) -> str:
    """Return the name that `to_text` has written."""
    return re.sub(r"\\([0-9a-f]{4})", lambda found: chr(int(found[1], 16)), text.decode())


def _array(texts: Iterable[bytes]) -> bytes:
    quoted = [b'"%b"' % t.replace(b"\\", b"\\\\").replace(b'"', b'\\"') for t in texts]
    return b"{%b}" % b",".join(quoted)


def _names(claims: Iterable[Any], prefix: str) -> bytes:
    return _array([to_text(prefix + name) for claim in claims for name in claim.resources])


def _acquire(claims: Sequence[Any], prefix: str) -> Values:
    (claim,) = claims
    fence: Values = (None, None)
    if claim.proposal is not None:
        fence = (b"%d" % claim.proposal, b"%d" % claim.ceiling)
    return _names(claims, prefix), to_text(claim.token), b"%f" % claim.ttl, *fence


def _acquired(claims: Sequence[Any], rows: Sequence[Row]) -> Any:
    ((held_by, place, granted),) = rows
    if held_by is not None:
        token = _token(held_by)
        return [token, int(place or 0) - 1] if len(claims[0].resources) > 1 else token
    return None if claims[0].proposal is None else int(granted or b"")


def _extend(claims: Sequence[Any], prefix: str) -> Values:
    each = [(n, claim) for n, claim in enumerate(claims) for _ in claim.resources]
    return (
        _names(claims, prefix),
        _array([to_text(claim.token) for _, claim in each]),
        _array([b"%d" % n for n, _ in each]),
        _array([b"%f" % claim.ttl for _, claim in each]),
        _array([b"%f" % min(claim.below, MAX_TTL_S) for _, claim in each]),
    )


def _release(claims: Sequence[Any], prefix: str) -> Values:
    (claim,) = claims
    mark: Values = (None, None)
    if claim.mark is not None:
        mark = to_text(prefix + claim.mark[0]), b"%f" % claim.mark[1]
    return _names(claims, prefix), to_text(claim.token), *mark


def _undo(claims: Sequence[Any], prefix: str) -> Values:
    return _names(claims, prefix), to_text(claims[0].token)


def _enqueue(claims: Sequence[Any], prefix: str) -> Values:
    return *_undo(claims, prefix), b"%d" % claims[0].since, QUEUE_LIFE


def _peeked(_claims: Sequence[Any], rows: Sequence[Row]) -> list[Any]:
    reply: list[Any] = []
    for token, seconds in rows:
        left = float(seconds or 0)
        reply += (None, -2) if token is None else (_token(token), max(0, int(left * 1000)))
    return reply


def _token(text: bytes) -> bytes:
    return from_text(text).encode("utf-8", "surrogatepass")


def _votes(_claims: Sequence[Any], rows: Sequence[Row]) -> Any:
    return rows[0][0]


def _number(_claims: Sequence[Any], rows: Sequence[Row]) -> int:
    return int(rows[0][0] or b"")


_EXTEND = (
    b"SELECT redlock_extend($1::text[], $2::text[], $3::int[], $4::float8[], $5::float8[], %b)"
)
_STATEMENTS = {
    Verb.ACQUIRE: Statement(
        b"SELECT * FROM redlock_acquire($1::text[], $2::text, $3::float8, $4::bigint, $5::bigint)",
        _acquire,
        _acquired,
    ),
    Verb.EXTEND: Statement(_EXTEND % b"true", _extend, _votes),
    Verb.RENEW: Statement(_EXTEND % b"false", _extend, _votes),
    Verb.RELEASE: Statement(
        b"SELECT redlock_release($1::text[], $2::text, $3::text, $4::float8)", _release, _number
    ),
    Verb.UNDO: Statement(
        b"SELECT (redlock_free($1::text[], $2::text) = pg_catalog.cardinality($1::text[]))::int",
        _undo,
        _number,
    ),
    Verb.PEEK: Statement(
        b"SELECT * FROM redlock_peek($1::text[])", lambda c, p: (_names(c, p),), _peeked
    ),
    Verb.ENQUEUE: Statement(
        b"SELECT redlock_enqueue($1::text[], $2::text, $3::bigint, $4::float8)", _enqueue, _number
    ),
    Verb.DEQUEUE: Statement(b"SELECT redlock_dequeue($1::text[], $2::text)", _undo, _number),
    Verb.HAND_ON: Statement(b"SELECT redlock_hand_on($1::text[], $2::text)", _undo, _number),
}
"""Requests to one authority. It alone raises fences, its role is not asked for again, and it has no
mark of its trust: the verbs FENCE, LOOK and MARK are for several Redis nodes."""
