"""A TCP proxy in threads: between a lock and its server, it delays, swallows and cuts replies."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import TypeVar

__all__ = ["Front", "Proxy", "close"]

T = TypeVar("T", bound="Front")


class Front:
    """Stands in front of the server at `port`, at a free port of 127.0.0.1.

    Attributes:
        port: Where clients find it.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        """Where clients find it."""
        return f"redis://127.0.0.1:{self.port}/0"

    def __enter__(self: T) -> T:
        return self

    def __exit__(self, *_error: object) -> None:
        close(self._listener)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _address = self._listener.accept()
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._take(client)

    def _take(self, client: socket.socket) -> None:
        """Begin to serve a client; must not wait."""
        raise NotImplementedError


class Proxy(Front):
    """Listens on a free port of 127.0.0.1 and passes everything on to `port`.

    What it does to replies can be changed at any time; it holds for the next bytes:

    - `pass`: passes them on.
    - `mute`: swallows them. Requests still reach the server.
    - `deaf`: swallows requests.
    - `late`: passes them on after `delay` seconds.
    - `slow`: passes requests on after `delay` seconds.
    - `slow to connect`: the same, but for status replies only: those to a handshake.
    - `cut`: passes on the first byte of a reply and closes. Status replies (`+OK`, so that a
      connection can be made) pass.
    - `rubbish`: answers every request with a status that is no answer to it.

    Attributes:
        mode: See above.
        then: The mode it is meant for later; for who makes it.
        delay: Seconds, for `late` and `slow`.
        connections: How many were ever made.
        requests: How many times bytes came from a client.
    """

    def __init__(self, port: int, *, then: str = "pass", delay: float = 0.0) -> None:
        self.mode = "pass"
        self.then = then
        self.delay = delay
        self.connections = self.requests = 0
        self._open: list[socket.socket] = []
        super().__init__(port)

    def __exit__(self, *_error: object) -> None:
        super().__exit__()
        self.reset()

    def reset(self) -> None:
        """Break all connections."""
        while self._open:
            close(self._open.pop())

    def lead_to(self, port: int, *, keep: bool = False) -> None:
        """Put another server behind this address; keep connections to the old one, or not."""
        self._port = port
        if not keep:
            self.reset()

    def _take(self, client: socket.socket) -> None:
        try:
            server = socket.create_connection(("127.0.0.1", self._port))
        except OSError:
            close(client)
            return
        self.connections += 1
        self._open += [client, server]
        for target in (self._requests, self._replies):
            threading.Thread(target=target, args=(client, server), daemon=True).start()

    def _requests(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(65536):
                self.requests += 1
                if self.mode == "slow":
                    time.sleep(self.delay)
                if self.mode != "deaf":
                    server.sendall(data)
        close(server)

    def _replies(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(65536):
                if self.mode == "mute":
                    continue
                slow = self.mode == "slow to connect" and data.startswith(b"+")
                if self.mode == "late" or slow:
                    time.sleep(self.delay)  # what it is for: order is kept, time is not
                if self.mode == "cut" and not data.startswith(b"+"):
                    client.sendall(data[:1])
                    break
                if self.mode == "rubbish" and not data.startswith(b"+"):
                    data = b"*2\r\n:1\r\n:2\r\n"
                client.sendall(data)
        close(client)
        close(server)


def close(connection: socket.socket) -> None:
    """Close a socket, and end the calls in which threads wait for it.

    Left alone, `accept` goes on: with the next socket that gets the number, if it is restarted.
    """
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
