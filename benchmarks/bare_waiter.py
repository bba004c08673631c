"""The bare limit of waiting: a queue on the nodes, and a release that calls its first.

A try is one script: it takes the lock of its node, or stands in the queue there. That is sorted by
when a waiter came, so all nodes have the same first. A release, or the undoing of a try without a
majority, makes each node publish to its first waiter; it tries at the first such news, as the
others are on their way. Nothing else is in it: no expiry of a waiter that has died.
"""

from __future__ import annotations

import hashlib
import select
import socket
from collections.abc import Sequence
from time import monotonic

from benchmarks.bare import YES_INT, BareLock, connected, load, resp

TRY = (
    b"local first=redis.call('zrange',KEYS[2],0,0)[1] "
    b"if(not first or first==ARGV[1])and redis.call('set',KEYS[1],ARGV[1],'NX','PX',ARGV[2])then "
    b"if first then redis.call('zrem',KEYS[2],first)end return 1 end "
    b"redis.call('zadd',KEYS[2],ARGV[3],ARGV[1])return 0"
)
CALL = (
    b"local first=redis.call('zrange',KEYS[2],0,0)[1] "
    b"if first then redis.call('publish',string.sub(first,1,24),'')end return 1"
)
GIVE = (
    b"redis.call('zrem',KEYS[2],ARGV[1])"
    b"if redis.call('get',KEYS[1])==ARGV[1] then redis.call('del',KEYS[1])end " + CALL
)
UNDO = (
    b"if redis.call('get',KEYS[1])~=ARGV[1] then return 1 end redis.call('del',KEYS[1])"
    b"redis.call('zadd',KEYS[2],ARGV[2],ARGV[1])" + CALL
)
LOOK = 0.1
"""Seconds after which a waiter that was not called tries again: two may have undone at once."""


class BareWaiter(BareLock):
    """Waits for one lock at a time."""

    def __init__(self, urls: Sequence[str]) -> None:
        super().__init__(urls)
        self._calls = select.poll()
        self._ears: dict[int, socket.socket] = {}
        for url in urls:
            ear = connected(url)
            load(ear, (TRY, GIVE, UNDO))
            ear.sendall(resp(b"SUBSCRIBE", self._tokens))  # with what each of its tokens begins
            ear.recv(4096)
            self._ears[ear.fileno()] = ear
            self._calls.register(ear, select.POLLIN)

    def close(self) -> None:
        super().close()
        for ear in self._ears.values():
            ear.close()

    def wait(self, resource: bytes, seconds: float) -> bytes | None:
        """Return the token of a lock on `resource`, or None if it is not free within `seconds`."""
        self._count += 1
        token = b"%b%08x" % (self._tokens, self._count)
        begun = monotonic()
        came = b"%.6f" % begun
        attempt = _call(TRY, resource, token, self._ttl, came)
        while True:
            no: list[int] = []
            if self._round(attempt, YES_INT, no):
                return token
            if monotonic() > begun + seconds:
                self.give(resource, token)
                return None
            if len(no) < len(self.sockets):  # some have granted it, or may yet
                self._undo(_call(UNDO, resource, token, came), no)
            for fd, _ in self._calls.poll(LOOK * 1000):
                self._ears[fd].recv(65536)

    def give(self, resource: bytes, token: bytes) -> bool:
        return self._round(_call(GIVE, resource, token), YES_INT, [])


def _call(script: bytes, resource: bytes, *words: bytes) -> bytes:
    digest = hashlib.sha1(script).hexdigest().encode()
    return resp(b"EVALSHA", digest, b"2", resource, b"q:" + resource, *words)
