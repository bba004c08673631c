"""Encode the requests to a Redis node: one for each verb.

Milliseconds and bytes occur here and in `scripts.py`, and nowhere else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ...protocol.names import FENCE_LIFE_S, FENCE_SUFFIX, LINE_SUFFIX, QUEUE_LIFE_S
from ...protocol.round import Verb
from ...protocol.values import SHARED, is_shared
from . import scripts

if TYPE_CHECKING:
    from ...protocol.round import Round
    from ...protocol.values import Mark

__all__ = ["encode", "request"]

QUEUE_LIFE_MS = b"%d" % (QUEUE_LIFE_S * 1000)
FENCE_LIFE_MS = b"%d" % (FENCE_LIFE_S * 1000)

# -- Requests. Each encoder takes some claims, the prefix of keys, and True to use only wording that
# any server accepts at once, for a node that has rejected the usual one.


def encode(round_: Round, prefix: str, *, plain: bool = False) -> bytes:
    """Return the bytes to write for a round; the same for every node."""
    return _REQUESTS[round_.verb](round_.claims, prefix, plain)


def request(*words: bytes) -> bytes:
    """Return a request in RESP. `pack_command` of redis-py takes three times as long."""
    sized: list[Any] = [None] * (2 * len(words))
    sized[::2], sized[1::2] = map(len, words), words
    return b"*%d\r\n" % len(words) + b"$%d\r\n%b\r\n" * len(words) % tuple(sized)


LOOK = request(b"INFO", b"replication")
# Templates of the two most frequent requests, one of each per task, with a gap for each value and
# its length.
_SET = request(b"SET", b"<>", b"<>", b"NX", b"GET", b"PX", b"<>").replace(b"$2\r\n<>", b"$%d\r\n%b")
_FREE = request(b"EVALSHA", scripts.RELEASE_DIGEST, b"1", b"<>", b"<>").replace(
    b"$2\r\n<>", b"$%d\r\n%b"
)


def _mark_values(mark: Mark) -> tuple[bytes, ...]:
    return (_bytes(mark.text),)


def _eval(script: bytes, keys: Sequence[bytes], *values: bytes) -> bytes:
    return request(b"EVAL", script, b"%d" % len(keys), *keys, *values)


def _keys(claims: Sequence[Any], prefix: str, suffix: str = "") -> list[bytes]:
    return [_bytes(prefix + name + suffix) for claim in claims for name in claim.resources]


def _acquire(claims: Sequence[Any], prefix: str, plain: bool) -> bytes:
    (claim,) = claims
    token, lasts = _bytes(claim.token), _milliseconds(claim.ttl)
    is_reader = is_shared(claim.token)
    if not (plain or is_reader or len(claim.resources) > 1 or claim.proposal is not None):
        key = _bytes(prefix + claim.resources[0])
        return _SET % (len(key), key, len(token), token, len(lasts), lasts)
    keys = _keys(claims, prefix)
    if claim.proposal is not None:
        keys += _keys(claims, prefix, FENCE_SUFFIX)
        numbers = (b"%d" % claim.proposal, FENCE_LIFE_MS, b"%d" % claim.ceiling)
        return _eval(scripts.ACQUIRE_FENCED, keys, token, lasts, *numbers)
    return _eval(scripts.ACQUIRE_SHARED if is_reader else scripts.ACQUIRE, keys, token, lasts)


def _extension(
    scripts_: tuple[bytes, bytes], claims: Sequence[Any], prefix: str, _plain: bool
) -> bytes:
    script = scripts_[any(map(is_shared, [claim.token for claim in claims]))]
    values: list[bytes] = []
    ttl, lasts = 0.0, b""  # encoded once: most claims have the same
    for claim in claims:
        if claim.ttl != ttl:
            ttl, lasts = claim.ttl, _milliseconds(claim.ttl)
        values += (_bytes(claim.token), lasts)
        if scripts_ is scripts.RENEW and claim.below < math.inf:
            values[-1] += b"<" + _milliseconds(claim.below)
        if len(claim.resources) > 1:
            values += [b""] * 2 * (len(claim.resources) - 1)
    return _eval(script, _keys(claims, prefix), *values)


def _peek(queries: Sequence[Any], prefix: str, _plain: bool) -> bytes:
    as_readers = [SHARED.encode() if getattr(query, "shared", False) else b"" for query in queries]
    if any(as_readers):
        return _eval(scripts.PEEK_SHARED, _keys(queries, prefix), *as_readers)
    return _eval(scripts.PEEK, _keys(queries, prefix))


def _release(claims: Sequence[Any], prefix: str, plain: bool) -> bytes:
    (claim,) = claims
    token, is_reader = _bytes(claim.token), is_shared(claim.token)
    if not (plain or is_reader or len(claim.resources) > 1 or claim.mark is not None):
        key = _bytes(prefix + claim.resources[0])
        return _FREE % (len(key), key, len(token), token)
    keys, values = _keys(claims, prefix), [token]
    if claim.mark is not None:
        name, life = claim.mark
        keys.append(_bytes(prefix + name))
        values.append(_milliseconds(life))
    if plain or is_reader:
        return _eval(scripts.RELEASE[is_reader], keys, *values)
    return request(b"EVALSHA", scripts.RELEASE_DIGEST, b"%d" % len(keys), *keys, *values)


def _on_keys(
    script: bytes,
    *suffixes: str,
    values: Callable[[Any], tuple[bytes, ...]] = lambda claim: (_bytes(claim.token),),
) -> Callable[[Sequence[Any], str, bool], bytes]:
    """Return an encoder of requests that run a script on suffixed keys and a claim's values."""

    def encoded(claims: Sequence[Any], prefix: str, _plain: bool) -> bytes:
        keys = [key for suffix in suffixes or ("",) for key in _keys(claims, prefix, suffix)]
        return _eval(script, keys, *values(claims[0]))

    return encoded


def _fence_values(claim: Any) -> tuple[bytes, ...]:
    return _bytes(claim.token), b"%d" % (claim.fencing_token or 0), FENCE_LIFE_MS


def _queue_values(entry: Any) -> tuple[bytes, ...]:
    return _bytes(entry.token), b"%d" % entry.since, QUEUE_LIFE_MS


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _milliseconds(seconds: float) -> bytes:
    return b"%d" % max(1, math.ceil(seconds * 1000))


_REQUESTS: dict[Verb, Callable[[Sequence[Any], str, bool], bytes]] = {
    Verb.ACQUIRE: _acquire,
    Verb.EXTEND: partial(_extension, scripts.EXTEND),
    Verb.RENEW: partial(_extension, scripts.RENEW),
    Verb.RELEASE: _release,
    Verb.UNDO: lambda claims, prefix, _plain: _eval(
        scripts.UNDO[is_shared(claims[0].token)], _keys(claims, prefix), _bytes(claims[0].token)
    ),
    Verb.FENCE: _on_keys(scripts.FENCE, "", FENCE_SUFFIX, values=_fence_values),
    Verb.PEEK: _peek,
    Verb.ENQUEUE: _on_keys(scripts.ENQUEUE, LINE_SUFFIX, values=_queue_values),
    Verb.DEQUEUE: _on_keys(scripts.DEQUEUE, LINE_SUFFIX),
    Verb.HAND_ON: _on_keys(scripts.HAND_ON),
    Verb.LOOK: lambda *_: LOOK,
    Verb.MARK: _on_keys(scripts.MARK, values=_mark_values),
}
