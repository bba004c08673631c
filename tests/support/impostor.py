"""A node that answers what a lock asks as it likes; all else is answered by a real server."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterable

from tests.support.proxy import Proxy

__all__ = ["Impostor", "Reply"]

Reply = bytes | Callable[[bytes], bytes | Iterable[bytes]] | None

ASKED = (b"\r\nEVAL\r\n", b"\r\nEVALSHA\r\n", b"\r\nNX\r\n$3\r\nGET\r\n")
"""Parts that the requests of a lock contain."""
HANDSHAKE = b"\r\nreturn 1\r\n"
"""A part that only a handshake contains."""


class Impostor(Proxy):
    """A proxy in front of a server that forges answers.

    Attributes:
        reply: What it answers to a lock's requests, or makes of them, in one piece or several;
            None to pass them on. An empty one closes the connection.
        words: What the requests contain that it answers itself: those of a lock by default.
        hangs_up: Close behind every such answer.
        asked: How many such requests it was sent.
        sent: Bytes of its answers that the other side took.
    """

    def __init__(self, port: int, reply: Reply = None, words: tuple[bytes, ...] = ()) -> None:
        super().__init__(port)
        self.reply = reply
        self.words = words
        self.hangs_up = False
        self.asked = self.sent = 0

    def say(self, data: bytes) -> None:
        """Send something to every client, unasked."""
        for client in self._open[::2]:
            with contextlib.suppress(OSError):
                client.sendall(data)

    def _requests(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(1_048_576):
                self.requests += 1
                mine = any(words in data for words in self.words or ASKED)
                if self.reply is None or not mine or (HANDSHAKE in data and not self.words):
                    server.sendall(data)
                    continue
                self.asked += 1
                reply = self.reply(data) if callable(self.reply) else self.reply
                for piece in [reply] if isinstance(reply, bytes) else reply:
                    client.sendall(piece)
                    self.sent += len(piece)
                if self.hangs_up or not reply:
                    break
        for one in (client, server):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
