"""The bare limit of waiting: `BareLock`, woken by what its nodes publish at a release.

Five more raw sockets, each subscribed to the channel of the resource; one poll over them while
there is nothing to do. As in the lock itself: subscribed before the last try, and news of one node
does not make a majority free. Nothing else is in it: no expiry of a holder that has died.
"""

from __future__ import annotations

import random
import select
import socket
from collections.abc import Sequence
from time import monotonic

from benchmarks.bare import BareLock, connected, resp

SPLIT = 0.002
"""Seconds at most, at random, before the next try where another was in the way at some nodes."""


class BareWaiter:
    """Waits for one lock at a time."""

    def __init__(self, urls: Sequence[str]) -> None:
        self.lock = BareLock(urls)
        self._poll = select.poll()
        self._ears: dict[int, socket.socket] = {}
        for url in urls:
            ear = connected(url)
            self._ears[ear.fileno()] = ear
            self._poll.register(ear, select.POLLIN)

    def acquire(self, resource: bytes, seconds: float) -> bytes | None:
        """Return the token of a lock on `resource`, or None if it is not free within `seconds`."""
        token = self.lock.acquire(resource)
        if token:
            return token
        until = monotonic() + seconds
        self._tell(b"SUBSCRIBE", resource)
        self._news(until)
        while not (token := self.lock.acquire(resource)) and monotonic() < until:
            self._news(until if self.lock.refused else monotonic() + random.uniform(0, SPLIT))
        self._tell(b"UNSUBSCRIBE", resource)
        return token

    def _tell(self, command: bytes, channel: bytes) -> None:
        request = resp(command, channel)
        for ear in self._ears.values():
            ear.sendall(request)

    def _news(self, until: float) -> None:
        """Wait until a quorum of the nodes has said something."""
        heard = set()
        while len(heard) < self.lock.quorum and (left := until - monotonic()) > 0:
            for fd, _ in self._poll.poll(left * 1000):
                self._ears[fd].recv(65536)
                heard.add(fd)
