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
from .round import EXTENDING, Held, Round, Verb

__all__ = [
    "DONE",
    "FENCE_SUFFIX",
    "FOREIGN",
    "LINE_SUFFIX",
    "MARK_SUFFIX",
    "RESERVED_SUFFIX",
    "SLOT_SUFFIX",
    "base_of",
    "decode",
    "encode",
    "seconds_left",
]

FOREIGN = "<not a lock>"
"""Stands for the token where a key of another type lies under our name: it is held, not by us."""

FENCE_SUFFIX = "#fence"
"""Ends the key of a resource's last fencing token; no resource's own name may end so."""
SLOT_SUFFIX = "#slot"
"""With a number, ends the key of one of several holders of a resource; no name may end so."""
RESERVED_SUFFIX = "#reserved"
"""Ends the key of a resource's reservation (`reservation.py`), likewise."""
MARK_SUFFIX = "#done"
"""Ends the key that marks a delivery as done; no resource's own name may end so."""
LINE_SUFFIX = "#line"
"""Ends the key of the line of those who wait for a resource (`wait_queue.py`), likewise."""
LINE_LIFE = b"60000"
"""Milliseconds after which it is forgotten; every waiter that tries renews it."""
DONE = "done"
"""What stands under it."""
FENCE_LIFE = b"%d" % (7 * 86_400_000)
"""Milliseconds a node remembers it: as long as a write may be late, and then clocks have moved."""
LONGEST_TTL = 10 * 365 * 86_400.0
"""Seconds that we believe a key may have left, of another program: nothing of ours is waited for as
long, and a larger number would be more than some clocks and threads can take."""
LONGEST_INFO = 16384
"""Bytes of what a node says of its replication, with a hundred replicas. It is asked for between
two requests, and everybody waits while it is read."""

# A claim may be of several keys: all of them or none. They stand side by side, the first with its
# token, the others with nothing. A key of another type is not ours, and no reason to fail the other
# claims. Any other error is no answer at all, and least of all a no.
_TOGETHER = b"""\
local votes, last = {}, 0
while last < #KEYS do
  local first, vote = last + 1, '1'
  local token, ttl = ARGV[2 * first - 1], ARGV[2 * first]
  repeat
    last = last + 1
    local held = redis.pcall('GET', KEYS[last])
    if type(held) == 'table' and not string.find(held.err, 'WRONGTYPE') then return held end
%b
  until ARGV[2 * last + 1] ~= ''
%b
  votes[#votes + 1] = vote
end
return table.concat(votes)"""

EXTEND = _TOGETHER % (
    b"""\
    if held == false then
      if vote == '1' then vote = '2' end
    elseif held ~= token then
      vote = '0'
    end""",
    b"""\
  if vote == '1' then
    for i = first, last do redis.call('PEXPIRE', KEYS[i], ttl) end
  elseif vote == '2' then
    for i = first, last do
      if not redis.pcall('SET', KEYS[i], token, 'PX', ttl).ok then vote = '0' end
    end
  end""",
)

# Never for less than there is: the holder may just have left it locked for longer. Nor, if asked,
# where more is left than the claim says.
RENEW = _TOGETHER % (
    b"    if held ~= token then vote = '0' end",
    b"""\
  local lasts, below = string.match(ttl, '^(%d+)<?(%d*)$')
  for i = first, vote == '1' and last or 0 do
    local left = redis.call('PTTL', KEYS[i])
    if left < tonumber(lasts) and left <= (tonumber(below) or left) then
      redis.call('PEXPIRE', KEYS[i], lasts)
    end
  end""",
)

UNDO = b"""\
local freed = 0
for _, key in ipairs(KEYS) do
  local held = redis.pcall('GET', key)
  if type(held) == 'table' and not string.find(held.err, 'WRONGTYPE') then return held end
  if held == ARGV[1] then freed = freed + redis.call('DEL', key) end
end
return freed == #KEYS and 1 or 0"""

# The first in line whose process listens; who is called stands there no more. Whether there is one.
CALL = b"""\
local function call(channel)
  while true do
    local first = redis.pcall('ZPOPMIN', channel .. '#line')[1]
    if not first then return false end
    local process, waiter = string.match(first, '^(.*):([^:]*)$')
    local heard = process and redis.pcall('PUBLISH', process, waiter)
    if type(heard) == 'number' and heard > 0 then return true end
  end
end
"""

# A release calls the next waiter, whoever held the key here. All slots of a resource have one
# queue, under its name, given as ARGV[2]. Answers 2 more if one was called.
RELEASE = (
    b"""\
%blocal freed, called = 0, false
for _, key in ipairs(KEYS) do
  local held = redis.pcall('GET', key)
  if type(held) == 'table' and not string.find(held.err, 'WRONGTYPE') then return held end
  if held == ARGV[1] then freed = freed + redis.call('DEL', key) end
  called = call(ARGV[2] or key) or called
end
return (freed == #KEYS and 1 or 0) + (called and 2 or 0)"""
    % CALL
)

QUEUE = b"""\
for _, line in ipairs(KEYS) do
  redis.call('ZADD', line, ARGV[2], ARGV[1])
  redis.call('PEXPIRE', line, ARGV[3])
end
return 1"""

LEAVE = b"""\
local stood = 0
for _, line in ipairs(KEYS) do stood = stood + redis.call('ZREM', line, ARGV[1]) end
return stood == #KEYS and 1 or 0"""

# A waiter that stands there no more has been called, and does not come: the next one is called. It
# also is where nobody holds it: the waiter may have been called, and have joined the queue again.
PASS = (
    b"""\
%blocal stood = 0
for _, key in ipairs(KEYS) do
  local left = redis.call('ZREM', key .. '#line', ARGV[1])
  stood = stood + left
  if left == 0 or not redis.pcall('GET', key) then call(key) end
end
return stood == #KEYS and 1 or 0"""
    % CALL
)

# Marked first, in one atomic step: where this node is seen to be free, the mark is seen as well. A
# node that has no room for a mark is freed all the same. The last key is the mark's, and the last
# value how long it lives.
RELEASE_MARKED = b"""\
local mark, life = table.remove(KEYS), table.remove(ARGV)
redis.pcall('SET', mark, '%b', 'PX', life)
%b""" % (DONE.encode(), RELEASE)

RELEASE_DIGEST = hashlib.sha1(RELEASE).hexdigest().encode()

PEEK = b"""\
local seen = {}
for _, key in ipairs(KEYS) do
  local held = redis.pcall('GET', key)
  if type(held) == 'table' then
    if not string.find(held.err, 'WRONGTYPE') then return held end
    held = '%b'
  end
  seen[#seen + 1] = held
  seen[#seen + 1] = redis.call('PTTL', key)
end
return seen""" % FOREIGN.encode()

# For several keys: answers whose token is in the way, and under which of them. And for one, where a
# server does not know SET with NX and GET together (Redis 6.2): our own token is here if an earlier
# answer was lost.
ACQUIRE = b"""\
for i, key in ipairs(KEYS) do
  local held = redis.call('GET', key)
  if held and held ~= ARGV[1] then return {held, i - 1} end
end
for _, key in ipairs(KEYS) do redis.call('SET', key, ARGV[1], 'PX', ARGV[2]) end
return false"""

# With a fencing token: the key as above, and the last token, raised, in one atomic step. Our own
# token is here if an earlier answer was lost; a larger number does no harm. '%.0f': Lua would
# write 1.7e+15. What is no number is not of ours, and overwriting it might lower a token. One that
# is too far ahead is as it was: raised once more, it would be remembered for another week.
ACQUIRE_FENCED = b"""\
local held = redis.call('GET', KEYS[1])
if held and held ~= ARGV[1] then return held end
local last = redis.pcall('GET', KEYS[2]) or '0'
if type(last) == 'table' and not string.find(last.err, 'WRONGTYPE') then return last end
last = tonumber(last)
if not last or not (last < 9007199254740991) then
  return redis.error_reply('ERR there is something else under the name of the fencing token')
end
if last >= tonumber(ARGV[5]) then
  return redis.error_reply('ERR its last fencing token is more than a day ahead of the clock here; \
see docs/fencing.md')
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


_LOOK = _command(b"INFO", b"replication")


def encode(round_: Round, prefix: str, *, plain: bool = False) -> bytes:
    """The bytes to write for a round; the same for every node.

    Args:
        round_: What to ask.
        prefix: What keys begin with.
        plain: In words that any server understands, at once: for one that has shown it does not.
    """
    verb = round_.verb
    if verb is Verb.LOOK:
        return _LOOK
    if verb in EXTENDING:
        script = EXTEND if verb is Verb.EXTEND else RENEW
        keys, values = [], []
        for claim in round_.claims:
            keys += [_bytes(prefix + name) for name in claim.resources]
            ttl = _milliseconds(claim.ttl)
            if verb is Verb.RENEW and claim.below < math.inf:
                ttl += b"<" + _milliseconds(claim.below)
            values += [_bytes(claim.token), ttl]
            values += [b""] * 2 * (len(claim.resources) - 1)
        return _command(b"EVAL", script, b"%d" % len(keys), *keys, *values)
    if verb is Verb.PEEK:
        keys = [_bytes(prefix + name) for claim in round_.claims for name in claim.resources]
        return _command(b"EVAL", PEEK, b"%d" % len(keys), *keys)
    claim = round_.claims[0]
    keys = [_bytes(prefix + name) for name in claim.resources]
    count = b"%d" % len(keys)
    token = _bytes(claim.token)
    if verb in (Verb.ENQUEUE, Verb.DEQUEUE):
        lines = [key + _LINE_SUFFIX for key in keys]
        if verb is Verb.DEQUEUE:
            return _command(b"EVAL", LEAVE, count, *lines, token)
        return _command(b"EVAL", QUEUE, count, *lines, token, b"%d" % claim.since, LINE_LIFE)
    if verb is Verb.HAND_ON:
        return _command(b"EVAL", PASS, count, *keys, token)
    if verb is Verb.UNDO:
        return _command(b"EVAL", UNDO, count, *keys, token)
    if verb is Verb.RELEASE:
        news = [token]
        if SLOT_SUFFIX in claim.resources[0]:
            news.append(_bytes(prefix + base_of(claim.resources[0])))
        if claim.mark is not None:
            name, life = claim.mark
            marked = (*keys, _bytes(prefix + name), *news, _milliseconds(life))
            return _command(b"EVAL", RELEASE_MARKED, b"%d" % (len(keys) + 1), *marked)
        if plain:
            return _command(b"EVAL", RELEASE, count, *keys, *news)
        return _command(b"EVALSHA", RELEASE_DIGEST, count, *keys, *news)
    key = keys[0]
    if verb is Verb.FENCE:
        fence = (key + _FENCE_SUFFIX, token, b"%d" % (claim.fencing_token or 0), FENCE_LIFE)
        return _command(b"EVAL", FENCE, b"2", key, *fence)
    ttl = _milliseconds(claim.ttl)
    if claim.proposal is not None:
        span = (b"%d" % claim.proposal, FENCE_LIFE, b"%d" % claim.ceiling)
        return _command(
            *(b"EVAL", ACQUIRE_FENCED, b"2", key, key + _FENCE_SUFFIX, token, ttl), *span
        )
    if plain or len(keys) > 1:
        return _command(b"EVAL", ACQUIRE, count, *keys, token, ttl)
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
            if isinstance(reply, list) and proposal is None:
                token, place = reply
                if place < 0:
                    raise ValueError(place)
                return Held(_text(token), round_.claims[0].resources[place])
            if proposal is None:
                return None if reply is None else _text(reply)
            if isinstance(reply, int) and not proposal <= reply <= round_.claims[0].ceiling:
                raise ValueError(reply)
            return reply if isinstance(reply, int) else _text(reply)
        if verb in EXTENDING:
            votes = _text(reply)
            if len(votes) == len(round_.claims) and set(votes) <= set("012"):
                return votes
        elif verb is Verb.LOOK:
            if len(reply) <= LONGEST_INFO:
                return _text(reply)
        elif verb is Verb.PEEK:
            seen = [_seen(*pair) for pair in zip(reply[::2], reply[1::2], strict=True)]
            places = iter(seen)
            answers = [_one([next(places) for _ in c.resources]) for c in round_.claims]
            if next(places, seen) is seen:
                return answers if len(answers) > 1 else answers[0]
        elif isinstance(reply, int) and 0 <= reply <= (3 if verb is Verb.RELEASE else 1):
            return reply if reply > 1 else reply > 0
    except (TypeError, ValueError, ArithmeticError, AttributeError, LookupError, StopIteration):
        pass
    raise NodeError(f"answered {verb.value} with a {type(reply).__name__} that is no answer to it")


def base_of(name: str) -> str:
    """The resource whose slot this is; of any other name, the name."""
    base, _, number = name.rpartition(SLOT_SUFFIX)
    return base if number.isascii() and number.isdecimal() else name


def seconds_left(milliseconds: int) -> float:
    """What PTTL says of a key that is there: infinite if it has no ttl, `LONGEST_TTL` at most.

    Raises:
        ValueError: No server says so.
    """
    if milliseconds < 0:
        if milliseconds == -1:
            return math.inf
        if milliseconds != -2:  # which is: it has just gone
            raise ValueError(milliseconds)
    return min(max(0, milliseconds) / 1000, LONGEST_TTL)


def _seen(token: bytes | None, milliseconds: int) -> tuple[str, float] | None:
    """What a node holds under one key: a token, and for how long yet in seconds."""
    if token is None:
        return None
    return _text(token), seconds_left(milliseconds)


def _one(seen: list[tuple[str, float] | None]) -> tuple[str, float] | None:
    """Of the keys of a claim: the first that is held, and until the last of them is free."""
    held = [pair for pair in seen if pair is not None]
    return (held[0][0], max(left for _token, left in held)) if held else None


_FENCE_SUFFIX = FENCE_SUFFIX.encode()
_LINE_SUFFIX = LINE_SUFFIX.encode()


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _text(value: bytes) -> str:
    try:
        return value.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return value.decode("utf-8", "surrogateescape")  # not one of ours


def _milliseconds(seconds: float) -> bytes:
    return b"%d" % max(1, math.ceil(seconds * 1000))
