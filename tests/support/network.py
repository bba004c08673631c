"""The network between a worker and a node: a TCP proxy that holds, delays and breaks.

A cut delays bytes and loses none, as in TCP: they wait, and go on when the cut is healed. One
thread carries all links of a campaign.
"""

from __future__ import annotations

import contextlib
import random
import selectors
import socket
import struct
import threading
import time
from collections import deque
from typing import Any

REQUESTS, REPLIES = "requests", "replies"
TICK = 0.004
"""Seconds between two looks at held or delayed data."""
IDLE = 0.05
"""The same, while nothing is."""


class Link:
    """A link from a worker to a node. Made by `Network.link`; changed from any thread.

    Attributes:
        target: The node's port.
        listener: Where it listens.
        held: The ways that are cut.
        delay: Seconds that every piece of data takes, each way.
        jitter: Seconds more, at most.
        breaks: So many replies are broken off after their first byte, and the connection reset.
        drops: Reset all its connections, once.
    """

    def __init__(self, target: int, seed: str) -> None:
        self.target = target
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.held: set[str] = set()
        self.delay = self.jitter = 0.0
        self.breaks = 0
        self.drops = False
        self._random = random.Random(seed)

    @property
    def port(self) -> int:
        return int(self.listener.getsockname()[1])

    def heal(self) -> None:
        """End all faults of the link."""
        self.held = set()
        self.delay = self.jitter = 0.0
        self.breaks = 0

    def takes(self) -> float:
        """Seconds, of the piece of data that has come now."""
        return self.delay + (self._random.uniform(0.0, self.jitter) if self.jitter else 0.0)


class _Connection:
    """Two sockets, and the data on its way between them."""

    def __init__(self, link: Link, client: socket.socket, server: socket.socket) -> None:
        self.link = link
        self.ends = {REQUESTS: (client, server), REPLIES: (server, client)}
        self.queues: dict[str, deque[tuple[float, bytes]]] = {REQUESTS: deque(), REPLIES: deque()}
        self.broken = False
        for end in (client, server):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            end.setblocking(False)

    def take(self, way: str) -> bool:
        """Read the data that has arrived; return False at the end."""
        try:
            data = self.ends[way][0].recv(65536)
        except BlockingIOError:
            return True
        except OSError:
            data = b""
        queue = self.queues[way]
        due = time.monotonic() + self.link.takes()
        queue.append((max(due, queue[-1][0] if queue else 0.0), data))
        return bool(data)

    def give(self) -> None:
        """Pass on the data that is due."""
        now = time.monotonic()
        for way, queue in self.queues.items():
            while queue and queue[0][0] <= now and way not in self.link.held and not self.broken:
                data = queue.popleft()[1]
                target = self.ends[way][1]
                try:
                    if not data:
                        self.broken = way == REPLIES  # the node is gone
                        target.shutdown(socket.SHUT_WR)
                    elif way == REPLIES and self.link.breaks > 0:
                        self.link.breaks -= 1
                        target.send(data[:1])
                        self.reset()
                        self.broken = True
                    else:
                        sent = target.send(data)
                        if sent < len(data):
                            queue.appendleft((now, data[sent:]))
                            break
                except BlockingIOError:
                    queue.appendleft((now, data))
                    break
                except OSError:
                    self.broken = True

    def reset(self) -> None:
        """Let the client's end close with a reset."""
        linger = struct.pack("ii", 1, 0)
        self.ends[REPLIES][1].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)

    def close(self) -> None:
        for end in self.ends[REQUESTS]:
            end.close()


class Network:
    """All links, and the thread that carries them."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._links: list[Link] = []
        self._connections: set[_Connection] = set()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="network", daemon=True)

    @property
    def thread(self) -> int:
        """Return the kernel's number of its thread."""
        return self._thread.native_id or 0

    def link(self, target: int, seed: str) -> Link:
        """A new link to a port of this host."""
        link = Link(target, seed)
        self._links.append(link)
        self._selector.register(link.listener, selectors.EVENT_READ, link)
        return link

    def __enter__(self) -> Network:
        self._thread.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._over.set()
        self._thread.join(5.0)
        for connection in self._connections:
            connection.close()
        for link in self._links:
            link.listener.close()
        self._selector.close()

    def _run(self) -> None:
        while not self._over.is_set():
            dropping = [link for link in self._links if link.drops]
            for link in dropping:
                link.drops = False
            waiting = any(any(c.queues.values()) for c in self._connections)
            for key, _event in self._selector.select(TICK if waiting else IDLE):
                if isinstance(key.data, Link):
                    self._accept(key.data)
                else:
                    connection, way = key.data
                    if not connection.take(way):
                        self._selector.unregister(key.fileobj)
            for connection in list(self._connections):
                connection.give()
                if connection.broken or connection.link in dropping:
                    self._drop(connection, connection.link in dropping)

    def _accept(self, link: Link) -> None:
        client, _address = link.listener.accept()
        try:
            server = socket.create_connection(("127.0.0.1", link.target), timeout=0.5)
        except OSError:
            client.close()
            return
        connection = _Connection(link, client, server)
        self._connections.add(connection)
        for way, (source, _target) in connection.ends.items():
            self._selector.register(source, selectors.EVENT_READ, (connection, way))

    def _drop(self, connection: _Connection, reset: bool) -> None:
        if reset:
            connection.reset()
        self._connections.discard(connection)
        for source, _target in connection.ends.values():
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(source)
        connection.close()
