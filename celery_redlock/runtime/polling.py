"""Which nodes have something to read."""

from __future__ import annotations

import select
import ssl

__all__ = ["SIZE", "WAITS", "Poll"]

SIZE = 65536
"""Bytes to read at a time."""

if not hasattr(select, "poll"):
    # Here, as all that takes locks imports this module, and no declaration of a task does.
    raise ImportError(
        "celery_redlock takes locks and makes reservations on POSIX systems only (Linux, macOS): on"
        " this one, tasks can be declared, and published if their scope is 'while_executing'"
    )

WAITS = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
"""Not now. A TLS connection may have to read before it can write, and the other way round, when it
changes its keys."""


class Poll:
    """The sockets of the nodes, each watched by its node's index."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._index_of: dict[int, int] = {}

    def watch(self, index: int, fd: int) -> None:
        self.forget(index)
        self._index_of[fd] = index
        self._poll.register(fd, select.POLLIN)

    def forget(self, index: int) -> None:
        for fd in [fd for fd, known in self._index_of.items() if known == index]:
            del self._index_of[fd]
            self._poll.unregister(fd)

    def copy(self) -> Poll:
        """Return another of the same: one that is being waited for cannot be waited for again."""
        other = Poll()
        for fd, index in list(self._index_of.items()):
            other.watch(index, fd)
        return other

    def wait(self, timeout: float) -> list[int]:
        """Return the nodes with something to read, after at most `timeout` seconds."""
        ready = self._poll.poll(timeout * 1000)
        return [self._index_of[fd] for fd, _event in ready if fd in self._index_of]
