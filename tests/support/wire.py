"""A connection without a network, for a `Node`."""

from __future__ import annotations

import socket


class Wire:
    """A connection without a server: a test reads what was written, and writes what is read."""

    def __init__(self) -> None:
        self._sock, self.peer = socket.socketpair()
        self._sock.setblocking(False)
        self.peer.setblocking(False)
        self.closed = False

    def disconnect(self) -> None:
        self.closed = True
        self._sock.close()
        self.peer.close()
