"""The bare limit: the least Python that still is a Redlock, to measure everything else against.

Raw non-blocking sockets, hand-made RESP bytes, one write per node, one poll loop, and a decision as
soon as a quorum has spoken. What is left out is what a lock library is for: reconnection, TLS and
authentication, the arithmetic of a lease, fork safety, logging, errors that say anything. So nobody
can use it, and no lock that asks five servers from Python can be much faster.

What may not be left out is correctness. Two rules carry it. Answers of one connection come in the
order of its requests, so a node counts the answers it still owes and only the answer to the newest
request is a vote; a late one is read and dropped. And a failed attempt is undone on the same
connection that carried it, behind its own SET.
"""

from __future__ import annotations

import hashlib
import os
import select
import socket
from collections.abc import Iterable, Sequence
from time import monotonic
from urllib.parse import urlsplit

RELEASE = (
    b"if redis.call('get',KEYS[1])==ARGV[1] then redis.call('del',KEYS[1])"
    b" redis.call('publish',KEYS[1],'')return 1 end return 0"
)
EXTEND = (
    b"if redis.call('get',KEYS[1])==ARGV[1] then"
    b" return redis.call('pexpire',KEYS[1],ARGV[2])end return 0"
)
YES_SET = b"$-1\r\n"  # SET NX GET found nothing, so it has written
YES_INT = b":1\r\n"


def resp(*words: bytes) -> bytes:
    """Return one command as RESP bytes."""
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(w), w) for w in words)


class Node:
    """One connection: its socket, the answers it owes, and the unread head of the next one."""

    __slots__ = ("fd", "owed", "recv", "rest", "send", "sock")

    def __init__(self, url: str) -> None:
        address = urlsplit(url)
        self.sock = socket.create_connection((address.hostname, address.port), 1.0)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for script in (RELEASE, EXTEND):
            self.sock.sendall(resp(b"SCRIPT", b"LOAD", script))
            answer = b""
            while answer.count(b"\r\n") < 2:  # a bulk string: length line, digest line
                answer += self.sock.recv(4096)
        self.sock.setblocking(False)
        self.fd = self.sock.fileno()
        self.send, self.recv = self.sock.send, self.sock.recv
        self.owed = 0
        self.rest = b""

    def newest(self, data: bytes) -> bytes | None:
        """Read the complete answers in `data`; return the first line of the newest request's."""
        data = self.rest + data
        vote = None
        while (end := data.find(b"\r\n") + 2) > 1:
            line = data[:end]
            if line[:1] == b"$" and line != YES_SET:
                end += int(line[1:]) + 2
                if len(data) < end:
                    break
            data = data[end:]
            self.owed -= 1
            if not self.owed:
                vote = line
        self.rest = data
        return vote


class BareLock:
    """A Redlock over `urls`, without reconnection: a node that fails once is out for good."""

    def __init__(self, urls: Sequence[str], ttl: float = 10.0, node_timeout: float = 0.25) -> None:
        self.nodes = {node.fd: node for node in map(Node, urls)}
        self.size = len(self.nodes)
        self.quorum = self.size // 2 + 1
        self.node_timeout = node_timeout
        self.ttl = b"%d" % round(ttl * 1000)
        self.refused = False
        self._yes = 0
        self._release_sha = hashlib.sha1(RELEASE).hexdigest().encode()
        self._extend_sha = hashlib.sha1(EXTEND).hexdigest().encode()
        self._poll = select.poll()
        for fd in self.nodes:
            self._poll.register(fd, select.POLLIN)

    def close(self) -> None:
        for node in self.nodes.values():
            node.sock.close()
        self.nodes.clear()

    def acquire(self, resource: bytes) -> bytes | None:
        """Return the token of a lock on `resource`, or None without one.

        Then `refused` says whether all that answered refused it: one other holds it.
        """
        token = os.urandom(16)
        request = b"*7\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$16\r\n%s\r\n" % (
            len(resource),
            resource,
            token,
        )
        request += b"$2\r\nNX\r\n$3\r\nGET\r\n$2\r\nPX\r\n$%d\r\n%s\r\n" % (len(self.ttl), self.ttl)
        refused: list[Node] = []
        if self._round(request, YES_SET, refused):
            return token
        self.refused = not self._yes
        undo = self._release_request(resource, token)
        self._send(undo, [node for node in self.nodes.values() if node not in refused])
        return None

    def release(self, resource: bytes, token: bytes) -> bool:
        """Delete the lock where it is ours; return whether a quorum did."""
        return self._round(self._release_request(resource, token), YES_INT, [])

    def extend(self, resource: bytes, token: bytes) -> bool:
        """Set the time to live again where the lock is ours; return whether a quorum did."""
        return self._round(self.extend_request(resource, token), YES_INT, [])

    def extend_request(self, resource: bytes, token: bytes) -> bytes:
        return resp(b"EVALSHA", self._extend_sha, b"1", resource, token, self.ttl)

    def _release_request(self, resource: bytes, token: bytes) -> bytes:
        return b"*5\r\n$7\r\nEVALSHA\r\n$40\r\n%s\r\n$1\r\n1\r\n$%d\r\n%s\r\n$16\r\n%s\r\n" % (
            self._release_sha,
            len(resource),
            resource,
            token,
        )

    def _send(self, request: bytes, nodes: Iterable[Node]) -> None:
        size = len(request)
        for node in nodes:
            try:
                whole = node.send(request) == size
            except OSError:
                whole = False
            if whole:
                node.owed += 1
            else:  # gone, or hung for so long that its buffers are full
                self._drop(node)

    def _drop(self, node: Node) -> None:
        self._poll.unregister(node.fd)
        del self.nodes[node.fd]
        node.sock.close()

    def _round(self, request: bytes, wanted: bytes, refused: list[Node]) -> bool:
        """Ask every node; return True at a quorum of `wanted`, False once there can be none."""
        nodes, quorum = self.nodes, self.quorum
        self._send(request, list(nodes.values()))
        self._yes = yes = 0
        deadline = monotonic() + self.node_timeout
        while len(nodes) - len(refused) >= quorum:
            ready = self._poll.poll(max(0.0, deadline - monotonic()) * 1000)
            for fd, _ in ready:
                node = nodes[fd]
                try:
                    data = node.recv(65536)
                except OSError:
                    data = b""
                if data == wanted and node.owed == 1:
                    node.owed = 0
                    yes += 1
                elif not data:
                    self._drop(node)
                elif (vote := node.newest(data)) == wanted:
                    yes += 1
                elif vote is not None:
                    refused.append(node)
            self._yes = yes
            # Only after the whole batch: what has arrived is cheaper to read now than later.
            if yes >= quorum:
                return True
            if not ready and monotonic() >= deadline:
                break
        return False
