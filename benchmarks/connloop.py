"""The loop of `bare.py` over redis-py's own `Connection`: what borrowing the protocol costs.

`Connection` brings TLS, authentication, unix sockets and a parser; the loop stays ours: pack a
command once, write it to every node, poll all the sockets, read. The rules of `bare.py` hold here
too: an answer is a vote only when its connection owes no older one, and an attempt is undone behind
its own SET.

Every argument below is there because the default is a trap for a lock: redis-py re-sends a command
that timed out, greets the server with CLIENT SETINFO, and pings before it sends.
"""

from __future__ import annotations

import hashlib
import os
import select
from collections.abc import Iterable, Sequence
from time import monotonic
from typing import Any

from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from benchmarks.bare import EXTEND, RELEASE


class Node:
    """One connection and the number of answers it owes."""

    __slots__ = ("conn", "fd", "owed", "read", "send")

    def __init__(self, url: str, node_timeout: float) -> None:
        client = Redis.from_url(
            url,
            protocol=2,
            retry=Retry(NoBackoff(), 0),
            socket_timeout=node_timeout,
            socket_connect_timeout=1.0,
            health_check_interval=0,
            client_name="bench",
            driver_info=None,
        )
        self.conn: Any = client.connection_pool.make_connection()
        self.conn.connect()
        for script in (RELEASE, EXTEND):
            self.conn.send_command("SCRIPT", "LOAD", script, check_health=False)
            self.conn.read_response()
        # From here on nothing may wait inside redis-py: a hung node whose buffers are full must
        # not hold up the others. (For speed it makes no difference.)
        self.conn._sock.settimeout(0)
        self.fd: int = self.conn._sock.fileno()
        self.send = self.conn.send_packed_command
        self.read = self.conn.read_response
        self.owed = 0


class ConnectionLock:
    """A Redlock over `urls`, without reconnection: a node that fails once is out for good."""

    def __init__(self, urls: Sequence[str], ttl: float = 10.0, node_timeout: float = 0.25) -> None:
        self.nodes = {node.fd: node for node in (Node(url, node_timeout) for url in urls)}
        self.size = len(self.nodes)
        self.quorum = self.size // 2 + 1
        self.node_timeout = node_timeout
        self.ttl = round(ttl * 1000)
        first = next(iter(self.nodes.values())).conn
        self._pack = first.pack_command
        self._release_sha, self._extend_sha = (
            hashlib.sha1(script).hexdigest() for script in (RELEASE, EXTEND)
        )
        self._poll = select.poll()
        for fd in self.nodes:
            self._poll.register(fd, select.POLLIN)

    def close(self) -> None:
        for node in self.nodes.values():
            node.conn.disconnect()
        self.nodes.clear()

    def acquire(self, resource: bytes) -> bytes | None:
        """Return the token of a lock on `resource`, or None without one."""
        token = os.urandom(16)
        request = self._pack("SET", resource, token, "NX", "GET", "PX", self.ttl)
        refused: list[Node] = []
        if self._round(request, None, refused):
            return token
        undo = self._pack("EVALSHA", self._release_sha, 1, resource, token)
        self._send(undo, [node for node in self.nodes.values() if node not in refused])
        return None

    def release(self, resource: bytes, token: bytes) -> bool:
        """Delete the lock where it is ours; return whether a quorum did."""
        request = self._pack("EVALSHA", self._release_sha, 1, resource, token)
        return self._round(request, 1, [])

    def extend(self, resource: bytes, token: bytes) -> bool:
        """Set the time to live again where the lock is ours; return whether a quorum did."""
        request = self._pack("EVALSHA", self._extend_sha, 1, resource, token, self.ttl)
        return self._round(request, 1, [])

    def _send(self, request: Any, nodes: Iterable[Node]) -> None:
        for node in nodes:
            try:
                node.send(request, check_health=False)
                node.owed += 1
            except RedisError:
                self._drop(node)

    def _drop(self, node: Node) -> None:
        self._poll.unregister(node.fd)
        del self.nodes[node.fd]
        node.conn.disconnect()

    def _round(self, request: Any, wanted: object, refused: list[Node]) -> bool:
        """Ask every node; return True at a quorum of `wanted`, False once there can be none."""
        nodes, quorum = self.nodes, self.quorum
        self._send(request, list(nodes.values()))
        yes = 0
        deadline = monotonic() + self.node_timeout
        while len(nodes) - len(refused) >= quorum:
            ready = self._poll.poll(max(0.0, deadline - monotonic()) * 1000)
            for fd, _ in ready:
                node = nodes[fd]
                try:
                    answer = node.read()
                    node.owed -= 1
                    # A late answer and the wanted one may have come in the same packet: the
                    # second is then in the parser's buffer, where poll cannot see it.
                    while node.owed and node.conn.can_read(0):
                        answer = node.read()
                        node.owed -= 1
                except RedisError:
                    self._drop(node)
                    continue
                if node.owed:
                    continue
                if answer == wanted:
                    yes += 1
                else:
                    refused.append(node)
            if yes >= quorum:
                return True
            if not ready and monotonic() >= deadline:
                break
        return False
