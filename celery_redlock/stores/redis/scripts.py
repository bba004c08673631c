"""What nodes run for us: Lua scripts, each of them one atomic step.

They are sent as text: EVALSHA may be answered NOSCRIPT, and the EVAL that follows would run behind
a release that was already queued. Only a release goes by its digest, once the text was sent:
nothing of its token follows it.
"""

from __future__ import annotations

import hashlib

from ...protocol.names import MAX_DEAF
from ...protocol.replies import DONE, FOREIGN
from ...protocol.values import SHARED

BARRIER, BARRIER_MS = b"~", 1000
"""For how long new readers let a writer that the last reader called pass, at most; and what the
entry in its queue that says so begins with."""

# A writer is a string under its key. Readers are a sorted set there, of their tokens and when each
# ends by the node's own clock: so a writer's SET is refused, and need not know of them. A set whose
# members do not end in a reader's mark is not ours.
_SHARED = b"local function shared(token) return string.sub(token, -%d) == '%b' end\n" % (
    *(len(SHARED), SHARED.encode()),
)

# What is asked for writers alone; a script is sent as text each time.
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

# And where there is a reader among them. Whose it is, is as it sees it: it is in no other reader's
# way. The key ends with the last of them. A node that is full renews no reader.
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

# A key of another type is not ours. Any other error is no answer at all, and least of all a no.
_GET = b"""\
  local held = whose(key, token)
  if type(held) == 'table' and not string.find(held.err, 'WRONGTYPE') then return held end
"""

# A claim may be of several keys: all of them or none. They stand side by side, the first with its
# token, the others with nothing. A key of another type does not fail the other claims.
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
    """Return a script for writers alone, and for readers as well."""
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

# Never for less than there is: the holder may just have left it locked for longer. Nor, if asked,
# where more is left than the claim says.
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

# Answers 2 more if a waiter was called.
_DELETE = b"""\
%%blocal freed, called, token = 0, false, ARGV[1]
for _, key in ipairs(KEYS) do
%b  if held == token then freed = freed + free(key, token) end
%%bend
return (freed == #KEYS and 1 or 0) + (called and 2 or 0)""" % _GET.replace(b"%", b"%%")

UNDO = _both(_DELETE % (b"", b""))

# Wakes the first waiter whose process listens, and takes it from the queue; whether there is one.
# With a reader it wakes those right behind it. A reader that calls a writer leaves a barrier for
# new readers, at the head of the queue, until the writer has come: the next call takes it away.
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
""" % (BARRIER, BARRIER_MS, BARRIER_MS, MAX_DEAF)

# A release wakes the next waiter, whoever held the key here. All slots of a resource share a queue
# under its name. With ARGV[2], the last key is a mark that lives for so long. It is set first, in
# one atomic step: where this node is seen to be free, the mark is seen as well. A node that has no
# room for a mark is freed all the same.
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

# A waiter that is not in the queue any more has been called, and does not come: wake the next one.
# Wake it as well where nobody holds the key: a waiter may have been called, and have queued again.
# And readers that waited behind us for our turn, where others read.
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

# Whose token keeps a new reader out where readers may be: one who works on the same message, or any
# where a writer that lives waits, or has just been called. For how long, if that is known.
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
""" % (MAX_DEAF - 1, BARRIER)

# What is no string is told by the token of the reader that is the last to end, or as foreign.
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

# As a reader would be answered; for others as above.
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
%b  local key, token = KEYS[1], ARGV[1]
%bif held ~= token then return 0 end
if tonumber(redis.call('GET', KEYS[2]) or 0) < tonumber(ARGV[2]) then
  redis.call('SET', KEYS[2], ARGV[2], 'PX', ARGV[3])
end
return 1""" % (_WRITERS, _GET)

# Without a ttl: it is of the data, and stays as long as that does.
MARK = b"""\
redis.call('SET', KEYS[1], ARGV[1])
return 1"""
