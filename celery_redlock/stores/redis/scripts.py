"""Lua scripts that nodes run for us, each of them one atomic step.

They are sent as text. An EVALSHA may be answered with NOSCRIPT, and the EVAL that follows would run
after a release that was already queued. Only a release is sent by its digest, once its text was
sent: no other request with its token follows it.
"""

from __future__ import annotations

import hashlib

from ...protocol.names import MAX_DEAD_WAITERS
from ...protocol.replies import DONE, FOREIGN
from ...protocol.values import SHARED

BARRIER, BARRIER_MS = b"~", 1000
"""Beginning of the queue entry that keeps new readers back for a writer that the last reader has
woken; and the milliseconds for which it does so at most."""

# A writer is a string under its key. Readers are a sorted set there: their tokens, scored by the
# ends of their leases by the node's own clock. So a writer's SET is refused without a look at them.
# A set whose members do not end in a reader's mark is foreign.
_SHARED = b"local function shared(token) return string.sub(token, -%d) == '%b' end\n" % (
    *(len(SHARED), SHARED.encode()),
)

# The functions for writers alone; they are short, because a script is sent as text each time.
_WRITERS = (
    _SHARED
    + b"""\
local function whose(key) return redis.pcall('GET', key) end
local function put(key, token, ttl) return redis.pcall('SET', key, token, 'PX', ttl).ok end
local function left(key) return redis.call('PTTL', key) end
local function renew(key, _, ttl) return redis.call('PEXPIRE', key, ttl) end
local function free(key) return redis.call('DEL', key) end
"""
)

# The functions if there is a reader among the claims. Ownership is evaluated per reader: readers
# never block each other. The key ends with the last reader. A node that is full renews no reader.
_READERS = (
    _SHARED
    + b"""\
local function clock()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end
local function whose(key, token)
  local held = redis.pcall('GET', key)
  if type(held) ~= 'table' or not shared(token) or not string.find(held.err, 'WRONGTYPE') or
    not shared(redis.pcall('ZRANGE', key, 0, 0)[1] or '') then return held end
  local now, first = clock(), redis.call('ZRANGE', key, 0, 0, 'WITHSCORES')
  while first[2] and tonumber(first[2]) <= now do
    redis.call('ZREM', key, first[1])
    first = redis.call('ZRANGE', key, 0, 0, 'WITHSCORES')
  end
  return redis.call('ZSCORE', key, token) and token or false
end
local function end_with_last(key)
  local ends = redis.call('ZRANGE', key, -1, -1, 'WITHSCORES')[2]
  if ends then redis.call('PEXPIREAT', key, ends) end
end
local function put(key, token, ttl)
  if not shared(token) then return redis.pcall('SET', key, token, 'PX', ttl).ok end
  if type(redis.pcall('ZADD', key, clock() + ttl, token)) ~= 'number' then return false end
  end_with_last(key)
  return true
end
local function left(key, token)
  if not shared(token) then return redis.call('PTTL', key) end
  return redis.call('ZSCORE', key, token) - clock()
end
local function renew(key, token, ttl)
  if shared(token) then return put(key, token, ttl) end
  return redis.call('PEXPIRE', key, ttl)
end
local function free(key, token)
  if not shared(token) then return redis.call('DEL', key) end
  redis.call('ZREM', key, token)
  end_with_last(key)
  return 1
end
"""
)

# A key of another type is foreign: it is held. Any other error is no answer, least of all a no.
_GET = b"""\
  local held = whose(key, token)
  if type(held) == 'table' and not string.find(held.err, 'WRONGTYPE') then return held end
"""

# A claim may have several keys: it gets all of them or none. They are side by side, the first with
# the token, the others with empty values. A key of another type does not fail the other claims.
_TOGETHER = b"""\
local votes, last = {}, 0
while last < #KEYS do
  local first, vote = last + 1, '1'
  local token, ttl = ARGV[2 * first - 1], ARGV[2 * first]
  repeat
    last = last + 1
    local key = KEYS[last]
%b%%b
  until ARGV[2 * last + 1] ~= ''
%%b
  votes[#votes + 1] = vote
end
return table.concat(votes)""" % _GET.replace(b"%", b"%%")


def _both(script: bytes) -> tuple[bytes, bytes]:
    """Return a script for writers alone, and the same for readers as well."""
    return _WRITERS + script, _READERS + script


EXTEND = _both(
    _TOGETHER
    % (
        b"""\
    if held == false then
      if vote == '1' then vote = '2' end
    elseif held ~= token then
      vote = '0'
    end""",
        b"""\
  if vote == '1' then
    for i = first, last do
      if not renew(KEYS[i], token, ttl) then vote = '0' end
    end
  elseif vote == '2' then
    for i = first, last do
      if not put(KEYS[i], token, ttl) then vote = '0' end
    end
  end""",
    )
)

# Never for less time than is left: the holder may just have prolonged it. Nor, if the claim says
# `below`, if more than that is left.
RENEW = _both(
    _TOGETHER
    % (
        b"    if held ~= token then vote = '0' end",
        b"""\
  local lasts, below = string.match(ttl, '^(%d+)<?(%d*)$')
  for i = first, vote == '1' and last or 0 do
    local now = left(KEYS[i], token)
    if now < tonumber(lasts) and now <= (tonumber(below) or now) then
      if not renew(KEYS[i], token, lasts) then vote = '0' end
    end
  end""",
    )
)

# Adds 2 to the answer if a waiter was woken.
_DELETE = b"""\
%%blocal freed, called, token = 0, false, ARGV[1]
for _, key in ipairs(KEYS) do
%b  if held == token then freed = freed + free(key, token) end
%%bend
return (freed == #KEYS and 1 or 0) + (called and 2 or 0)""" % _GET.replace(b"%", b"%%")

UNDO = _both(_DELETE % (b"", b""))

# Wake the first waiter whose process listens, and take it from the queue; return true if there is
# one. If it is a reader, also wake the readers right behind it. If a reader's release wakes a
# writer, it puts a barrier for new readers at the head of the queue, until the writer has come: the
# next call removes it.
_CALL = b"""\
local function call(name, by)
  local line, called, behind, deaf = name .. '#line', false, false, 0
  repeat
    local first = redis.pcall('ZPOPMIN', line)[1]
    if not first then return called end
    local process, waiter = string.match(first, '^(.*):([^:]*)$')
    local heard = process and redis.pcall('PUBLISH', process, waiter)
    if type(heard) == 'number' and heard > 0 then
      called = true
      if not shared(first) then
        if by and shared(by) then
          redis.call('ZADD', line, 0, '%b' .. clock() + %d .. '|' .. by)
          if redis.call('PTTL', line) < 0 then redis.call('PEXPIRE', line, %d) end
        end
        return true
      end
    else
      deaf = deaf + 1
      if deaf == %d then return called end
    end
    behind = called and redis.pcall('ZRANGE', line, 0, 0)[1]
  until called and not (behind and shared(behind))
  return true
end
""" % (BARRIER, BARRIER_MS, BARRIER_MS, MAX_DEAD_WAITERS)

# A release wakes the next waiter, whoever held the key here. All slots of a resource share a queue
# under its name. With ARGV[2], the last key is a mark that lives for that long. It is set first, in
# the same atomic step: if the key is seen to be free on this node, the mark is seen as well. A node
# without room for a mark is released all the same.
RELEASE = _both(
    _DELETE
    % (
        _CALL
        + b"""\
if ARGV[2] then redis.pcall('SET', table.remove(KEYS), '%b', 'PX', ARGV[2]) end
"""
        % DONE.encode(),
        b"""\
  if not (shared(token) and redis.pcall('GET', key)) then  -- the last reader
    called = call(string.match(key, '^(.*)#slot%d+$') or key, token) or called
  end
""",
    )
)
RELEASE_DIGEST = hashlib.sha1(RELEASE[0]).hexdigest().encode()

ENQUEUE = b"""\
for _, line in ipairs(KEYS) do
  redis.call('ZADD', line, ARGV[2], ARGV[1])
  redis.call('PEXPIRE', line, ARGV[3])
end
return 1"""

DEQUEUE = b"""\
local stood = 0
for _, line in ipairs(KEYS) do stood = stood + redis.call('ZREM', line, ARGV[1]) end
return stood == #KEYS and 1 or 0"""

# A waiter that is no longer in the queue was woken, and does not come: wake the next one. Do so
# also if nobody holds the key, because a waiter may have been woken and have queued again. And
# wake readers that waited behind us if other readers hold the key.
HAND_ON = (
    _SHARED
    + _CALL
    + b"""\
local stood = 0
for _, key in ipairs(KEYS) do
  local left = redis.call('ZREM', key .. '#line', ARGV[1])
  stood = stood + left
  local held = redis.pcall('GET', key)
  local behind = type(held) == 'table' and redis.pcall('ZRANGE', key .. '#line', 0, 0)[1]
  if left == 0 or not held or (behind and shared(behind)) then call(key) end
end
return stood == #KEYS and 1 or 0"""
)

# Return the token that blocks a new reader, if any: that of a reader for the same message; or any
# reader's, if a living writer waits or was just woken. And the end of that, if it is known.
_IN_THE_WAY = b"""\
local function work(token)
  local id, rest = string.match(token, '^[^|]*|[^|]*|[^|]*|([^|]+)(|[^|]*|[^|]*|)')
  return id and id .. rest
end
local function in_the_way(key, token)
  local readers, mine = redis.pcall('ZRANGE', key, 0, -1), work(token)
  for _, reader in ipairs(mine and readers or {}) do
    if work(reader) == mine then return reader end
  end
  for _, waiter in ipairs(redis.pcall('ZRANGE', key .. '#line', 0, %d)) do
    local ends, by = string.match(waiter, '^%b(%%d+)|(.*)$')
    if ends and tonumber(ends) > clock() then return by, ends end
    local process = readers[1] and not shared(waiter) and string.match(waiter, '^(.*):')
    if process and redis.pcall('PUBSUB', 'NUMSUB', process)[2] ~= 0 then return readers[1] end
  end
end
""" % (MAX_DEAD_WAITERS - 1, BARRIER)

# Non-string keys report the longest-lived reader's token, or FOREIGN.
_NAMED = b"""\
    held = redis.pcall('ZRANGE', key, -1, -1)[1]
    held = held and shared(held) and held or '%b'
""" % FOREIGN.encode()

PEEK = (
    _SHARED
    + b"""\
local seen = {}
for _, key in ipairs(KEYS) do
  local held = redis.pcall('GET', key)
  if type(held) == 'table' then
    if not string.find(held.err, 'WRONGTYPE') then return held end
%b  end
  seen[#seen + 1] = held
  seen[#seen + 1] = redis.call('PTTL', key)
end
return seen"""
    % _NAMED
)

# The answer that a reader would get; for others the same as PEEK.
PEEK_SHARED = b"""\
%blocal seen = {}
for i, key in ipairs(KEYS) do
  local token, lasts = ARGV[i], redis.call('PTTL', key)
%b  if not held and shared(token) then
    local ends
    held, ends = in_the_way(key, token)
    lasts = ends and ends - clock() or lasts
  elseif type(held) == 'table' then
%b  end
  seen[#seen + 1] = held or false
  seen[#seen + 1] = lasts
end
return seen""" % (_READERS + _IN_THE_WAY, _GET, _NAMED)

ACQUIRE_SHARED = b"""\
%blocal key, token = KEYS[1], ARGV[1]
%bheld = held or in_the_way(key, token)
if held then return held end
if not put(key, token, ARGV[2]) then return redis.error_reply('OOM a reader has no room') end
return false""" % (_READERS + _IN_THE_WAY, _GET)

# For several keys: the answer names the token that is in the way, and its key. And for one key, on
# a server that does not support SET with NX and GET together (Redis 6.2). Our own token is there if
# an earlier answer was lost.
ACQUIRE = b"""\
for i, key in ipairs(KEYS) do
  local held = redis.call('GET', key)
  if held and held ~= ARGV[1] then return {held, i - 1} end
end
for _, key in ipairs(KEYS) do redis.call('SET', key, ARGV[1], 'PX', ARGV[2]) end
return false"""

# With a fencing token: acquire the key as above, and raise the last token, in one atomic step. Our
# own token is there if an earlier answer was lost; a larger number does no harm. '%.0f' because Lua
# would write 1.7e+15. A value that is no number is foreign, and overwriting it might lower a token.
# A number too far ahead is left alone: raised again, it would be remembered for another week.
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
%b  local key, token = KEYS[1], ARGV[1]
%bif held ~= token then return 0 end
if tonumber(redis.call('GET', KEYS[2]) or 0) < tonumber(ARGV[2]) then
  redis.call('SET', KEYS[2], ARGV[2], 'PX', ARGV[3])
end
return 1""" % (_WRITERS, _GET)

# Without a ttl: it belongs to the data, and stays as long as they do.
MARK = b"""\
redis.call('SET', KEYS[1], ARGV[1])
return 1"""
