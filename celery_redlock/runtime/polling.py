"""Which nodes can be read: select.poll, or select.select where there is nothing like it."""

from __future__ import annotations

import select
import ssl

from .greenlets import READABLE, poll

__all__ = ["WAITS", "Poll"]

WAITS = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
"""Not now. A TLS connection may have to read before it can write, and the other way round, when it
changes its keys."""


class Poll:
    """The sockets of the nodes, each watched by its node's index."""

    def __init__(self) -> None:
        self._poll = poll()
        self._index_of: dict[int, int] = {}

    def watch(self, index: int, fd: int) -> None:
        self.forget(index)
        self._index_of[fd] = index
        if self._poll is not None:
            self._poll.register(fd, READABLE)

    def forget(self, index: int) -> None:
        for fd in [fd for fd, known in self._index_of.items() if known == index]:
            del self._index_of[fd]
            if self._poll is not None:
                self._poll.unregister(fd)

    def copy(self) -> Poll:
        """Another of the same: one that is being waited for cannot be waited for again."""
        other = Poll()
        for fd, index in list(self._index_of.items()):
            other.watch(index, fd)
        return other

    def wait(self, timeout: float) -> list[int]:
        """Indexes of the nodes with something to read, after at most `timeout` seconds."""
        if self._poll is not None:
            fds = [fd for fd, _event in self._poll.poll(timeout * 1000)]
        else:
            fds = select.select(list(self._index_of), [], [], timeout)[0]
        return [self._index_of[fd] for fd in fds if fd in self._index_of]
