"""What a node is asked, in its own words, and what its answers mean: commands, scripts, replies.

Milliseconds and bytes live here and nowhere else. Scripts are sent as text: EVALSHA may be answered
NOSCRIPT, and the EVAL that follows would run behind a release that was already queued. Only a
release itself goes by its digest, once the text was sent: nothing of its token follows it.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any

from .errors import NodeError
from .quorum import EXTENDING, Round, Verb

__all__ = ["FENCE_SUFFIX", "FOREIGN", "decode", "encode"]

FOREIGN = "<not a lock>"
"""Stands for the token where a key of another type lies under our name: it is held, not by us."""

FENCE_SUFFIX = "#fence"
"""Ends the key of a resource's last fencing token; no resource's own name may end so."""
FENCE_LIFE = b"%d" % (7 * 86_400_000)
"""Milliseconds a node remembers it: as long as a write may be late, and then clocks have moved."""
FENCE_LIMIT = 2**53 - 1
"""Scripts count in doubles, exactly up to here: microseconds until the year 2255."""

# A key of another type is not ours, and no reason to fail the other keys. Any other error is no
# answer at all, and least of all a no.
EXTEND = b"""\
local votes = {}
for i, key in ipairs(KEYS) do
  local token, ttl = ARGV[2 * i - 1], ARGV[2 * i]
  local held = redis.pcall('GET', key)
  votes[i] = '0'
  if type(held) == 'table' and not string.find(held.err, 'WRONGTYPE') then return held end
  if held == token then
    redis.call('PEXPIRE', key, ttl)
    votes[i] = '1'
  elseif held == false and redis.pcall('SET', key, token, 'PX', ttl).ok then
    votes[i] = '2'
  end
end
return table.concat(votes)"""

# Never for less than there is: the holder may just have left it locked for longer.
RENEW = b"""\
local votes = {}
for i, key in ipairs(KEYS) do
  local held = redis.pcall('GET', key)
  votes[i] = '0'
  if type(held) == 'table' and not string.find(held.err, 'WRONGTYPE') then return held end
  if held == ARGV[2 * i - 1] then
    local ttl = ARGV[2 * i]
    if redis.call('PTTL', key) < tonumber(ttl) then redis.call('PEXPIRE', key, ttl) end
    votes[i] = '1'
  end
end
return table.concat(votes)"""

UNDO = b"""\
local held = redis.pcall('GET', KEYS[1])
if type(held) == 'table' and not string.find(held.err, 'WRONGTYPE') then return held end
if held == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0"""

# Every release is announced, whoever held the key here: a waiter counts the nodes that announce.
RELEASE = b"""\
local held, freed = redis.pcall('GET', KEYS[1]), 0
if type(held) == 'table' and not string.find(held.err, 'WRONGTYPE') then return held end
if held == ARGV[1] then freed = redis.call('DEL', KEYS[1]) end
redis.pcall('PUBLISH', KEYS[1], '')
return freed"""

RELEASE_DIGEST = hashlib.sha1(RELEASE).hexdigest().encode()

PEEK = b"""\
local held = redis.pcall('GET', KEYS[1])
if type(held) == 'table' then
  if not string.find(held.err, 'WRONGTYPE') then return held end
  held = '%b'
end
return {held, redis.call('PTTL', KEYS[1])}""" % FOREIGN.encode()

# SET with NX and GET together needs Redis 7.0; this is the same for 6.2.
ACQUIRE = b"""\
local held = redis.call('GET', KEYS[1])
if not held then redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2]) end
return held"""

# With a fencing token: the key as above, and the last token, raised, in one atomic step. Our own
# token is here if an earlier answer was lost; a larger number does no harm. '%.0f': Lua would
# write 1.7e+15. What is no number is not of ours, and overwriting it might lower a token.
ACQUIRE_FENCED = b"""\
local held = redis.call('GET', KEYS[1])
if held and held ~= ARGV[1] then return held end
local last = redis.pcall('GET', KEYS[2]) or '0'
if type(last) == 'table' and not string.find(last.err, 'WRONGTYPE') then return last end
last = tonumber(last)
if not last or not (last < 9007199254740991) then
  return redis.error_reply('ERR there is something else under the name of the fencing token')
end
local fence = string.format('%.0f', math.max(tonumber(ARGV[3]), math.floor(last) + 1))
redis.call('SET', KEYS[2], fence, 'PX', ARGV[4])
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return tonumber(fence)"""

FENCE = b"""\
local held = redis.pcall('GET', KEYS[1])
if type(held) == 'table' and not string.find(held.err, 'WRONGTYPE') then return held end
if held ~= ARGV[1] then return 0 end
if tonumber(redis.call('GET', KEYS[2]) or 0) < tonumber(ARGV[2]) then
  redis.call('SET', KEYS[2], ARGV[2], 'PX', ARGV[3])
end
return 1"""


def _command(*words: bytes) -> bytes:
    """A request in RESP. What redis-py's `pack_command` makes, in a third of the time."""
    return b"*%d\r\n" % len(words) + b"".join([b"$%d\r\n%b\r\n" % (len(w), w) for w in words])


def encode(round_: Round, prefix: str, *, plain: bool = False) -> bytes:
    """The bytes to write for a round; the same for every node.

    Args:
        round_: What to ask.
        prefix: What keys begin with.
        plain: In words that any server understands, at once: for one that has shown it does not.
    """
    verb = round_.verb
    if verb in EXTENDING:
        script = EXTEND if verb is Verb.EXTEND else RENEW
        keys = [_bytes(prefix + claim.resource) for claim in round_.claims]
        values = [v for c in round_.claims for v in (_bytes(c.token), _milliseconds(c.ttl))]
        return _command(b"EVAL", script, b"%d" % len(keys), *keys, *values)
    claim = round_.claims[0]
    key = _bytes(prefix + claim.resource)
    if verb is Verb.PEEK:
        return _command(b"EVAL", PEEK, b"1", key)
    token = _bytes(claim.token)
    if verb is Verb.UNDO:
        return _command(b"EVAL", UNDO, b"1", key, token)
    if verb is Verb.RELEASE:
        if plain:
            return _command(b"EVAL", RELEASE, b"1", key, token)
        return _command(b"EVALSHA", RELEASE_DIGEST, b"1", key, token)
    if verb is Verb.FENCE:
        fence = (key + _FENCE_SUFFIX, token, b"%d" % (claim.fencing_token or 0), FENCE_LIFE)
        return _command(b"EVAL", FENCE, b"2", key, *fence)
    ttl = _milliseconds(claim.ttl)
    if claim.proposal is not None:
        fence = (key + _FENCE_SUFFIX, token, ttl, b"%d" % claim.proposal)
        return _command(b"EVAL", ACQUIRE_FENCED, b"2", key, *fence, FENCE_LIFE)
    if plain:
        return _command(b"EVAL", ACQUIRE, b"1", key, token, ttl)
    return _command(b"SET", key, token, b"NX", b"GET", b"PX", ttl)


def decode(round_: Round, reply: Any) -> Any:
    """What `Round.answer` takes, from a node's reply.

    Raises:
        NodeError: It is no answer to such a request.
    """
    verb = round_.verb
    try:
        if verb is Verb.ACQUIRE:
            proposal = round_.claims[0].proposal
            if proposal is None:
                return None if reply is None else _text(reply)
            if isinstance(reply, int) and not proposal <= reply <= FENCE_LIMIT:
                raise ValueError(reply)
            return reply if isinstance(reply, int) else _text(reply)
        if verb in EXTENDING:
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


_FENCE_SUFFIX = FENCE_SUFFIX.encode()


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _text(value: bytes) -> str:
    try:
        return value.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return value.decode("utf-8", "surrogateescape")  # not one of ours


def _milliseconds(seconds: float) -> bytes:
    return b"%d" % max(1, math.ceil(seconds * 1000))
