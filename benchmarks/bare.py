"""The bare limit: the least Python that still is a Redlock, to measure everything else against.

Raw non-blocking sockets, hand-made RESP bytes, one write per node, one poll loop, and a decision as
soon as a quorum has spoken. What is left out is what a lock library is for: reconnection, TLS and
authentication, extending, fork safety, logging, errors that say anything. So nobody can use it, and
no lock that asks five servers from Python can be much faster.

What may not be left out is correctness. Answers of one connection come in the order of its
requests, and each request goes to all nodes: so a node whose count of answers is that of the
requests has answered the newest one, and every other answer is late, read and dropped. A failed
attempt is undone on the connection that carried it, behind its own SET. A lock that came too late
is none.
"""

from __future__ import annotations

import hashlib
import os
import select
import socket
from collections.abc import Iterable, Sequence
from time import monotonic
from typing import Any
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
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(w), w) for w in words)


def connected(url: str) -> socket.socket:
    address = urlsplit(url)
    sock = socket.create_connection((address.hostname, address.port), 1.0)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def load(sock: socket.socket, scripts: Iterable[bytes]) -> None:
    for script in scripts:
        sock.sendall(resp(b"SCRIPT", b"LOAD", script))
        answer = b""
        while answer.count(b"\r\n") < 2:  # a bulk string: length line, digest line
            answer += sock.recv(4096)


class BareLock:
    """A Redlock over `urls`, without reconnection: a node that fails once is out for good."""

    def __init__(self, urls: Sequence[str], ttl: float = 10.0, node_timeout: float = 0.25) -> None:
        self.sockets: dict[int, socket.socket] = {}
        self.quorum = len(urls) // 2 + 1
        self.refused = False
        self._timeout = node_timeout
        self._valid = ttl * 0.99 - 0.002
        self._ttl = b"%d" % round(ttl * 1000)
        # All that does not change between two calls is encoded, bound and looked up once.
        tail = b"$2\r\nNX\r\n$3\r\nGET\r\n$2\r\nPX\r\n$%d\r\n%b\r\n" % (len(self._ttl), self._ttl)
        self._set = b"*7\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$32\r\n%b\r\n" + tail
        release = hashlib.sha1(RELEASE).hexdigest().encode()
        head = b"*5\r\n$7\r\nEVALSHA\r\n$40\r\n%b\r\n$1\r\n1\r\n" % release
        self._release = head + b"$%d\r\n%b\r\n$32\r\n%b\r\n"
        self._tokens = os.urandom(12).hex().encode()
        self._count = 0
        self._sent = 0
        """Requests so far; `_answered` is how many of them a node has answered."""
        self._answered: dict[int, int] = {}
        self._rest: dict[int, bytes] = {}
        self._poll = select.poll()
        for url in urls:
            sock = connected(url)
            load(sock, (RELEASE, EXTEND))
            sock.setblocking(False)
            self.sockets[sock.fileno()] = sock
            self._answered[sock.fileno()] = 0
            self._poll.register(sock, select.POLLIN)
        self._send = {fd: sock.send for fd, sock in self.sockets.items()}
        self._recv = {fd: sock.recv for fd, sock in self.sockets.items()}

    def close(self) -> None:
        for fd in list(self.sockets):
            self._drop(fd)

    def acquire(self, resource: bytes) -> bytes | None:
        """Return the token of a lock on `resource`, or None without one.

        Then `refused` says whether all that answered refused it: one other holds it.
        """
        self._count += 1
        token = b"%b%08x" % (self._tokens, self._count)
        begun = monotonic()
        no: list[int] = []
        size = len(resource)
        if self._round(self._set % (size, resource, token), YES_SET, no) and (
            monotonic() - begun < self._valid
        ):
            return token
        self._undo(self._release % (size, resource, token), no)
        return None

    def release(self, resource: bytes, token: bytes) -> bool:
        """Delete the lock where it is ours; return whether a quorum did."""
        return self._round(self._release % (len(resource), resource, token), YES_INT, [])

    def extend_request(self, resource: bytes, token: bytes) -> bytes:
        digest = hashlib.sha1(EXTEND).hexdigest().encode()
        return resp(b"EVALSHA", digest, b"1", resource, token, self._ttl)

    def extend_unheard(self, resource: bytes, token: bytes) -> None:
        """Extend the lock where it is ours; nobody waits for the answers."""
        self._write(self.extend_request(resource, token), self._send.items())

    def settle(self) -> None:
        """Wait for the answers that came after their decision; then read and write as you like."""
        for fd, sock in self.sockets.items():
            sock.settimeout(1.0)
            while self._answered[fd] < self._sent:
                self._read(fd, sock.recv(65536))

    def extend_all(self, requests: Sequence[bytes]) -> int:
        """Write all these extensions, then read all answers; return how many every node has done.

        Settle it before.
        """
        everything = b"".join(requests)
        for sock in self.sockets.values():
            sock.sendall(everything)
        done = len(requests)
        for sock in self.sockets.values():
            answers = b""
            while len(answers) < len(YES_INT) * len(requests):
                answers += sock.recv(1 << 20)
            done = min(done, answers.count(YES_INT))
        return done

    def _write(self, request: bytes, to: Iterable[tuple[int, Any]]) -> None:
        self._sent += 1
        size, lost = len(request), []
        for fd, send in to:
            try:
                if send(request) == size:
                    continue
            except OSError:
                pass
            lost.append(fd)  # gone, or hung for so long that its buffers are full
        for fd in lost:
            self._drop(fd)

    def _undo(self, request: bytes, no: Sequence[int]) -> None:
        """Tell all but those that have refused; nobody waits for what they say."""
        self._write(request, [(fd, send) for fd, send in self._send.items() if fd not in no])
        for fd in no:  # they have answered all before: go on as if they had answered this, too
            self._answered[fd] = self._sent

    def _drop(self, fd: int) -> None:
        self._poll.unregister(fd)
        self.sockets.pop(fd).close()
        del self._send[fd], self._recv[fd]

    def _round(self, request: bytes, wanted: bytes, no: list[int]) -> bool:
        """Ask every node; return True at a quorum of `wanted`, False once there can be none."""
        self._write(request, self._send.items())
        newest, before = self._sent, self._sent - 1
        answered, recv, quorum = self._answered, self._recv, self.quorum
        poll = self._poll.poll
        yes, wait, deadline = 0, self._timeout, 0.0
        while yes < quorum <= len(recv) - len(no) and wait > 0:
            # All that has arrived is read before the decision: it is cheaper now than later.
            for fd, _ in poll(wait * 1000):
                try:
                    data = recv[fd](4096)
                except OSError:
                    data = b""
                if data == wanted and answered[fd] == before:
                    answered[fd] = newest
                    yes += 1
                elif not data:
                    self._drop(fd)
                elif (vote := self._read(fd, data)) == wanted:
                    yes += 1
                elif vote:
                    no.append(fd)
            if yes < quorum:
                deadline = deadline or monotonic() + self._timeout
                wait = deadline - monotonic()
        self.refused = not yes
        return yes >= quorum

    def _read(self, fd: int, data: bytes) -> bytes:
        """Count the complete answers in `data`; return the first line of the newest request's."""
        if data[-2:] == b"\r\n" and data.count(b"$") == data.count(YES_SET) and not self._rest:
            lines = data.splitlines(True)  # the usual: whole answers, each a line
            self._answered[fd] += len(lines)
            return lines[-1] if self._answered[fd] == self._sent else b""
        data = self._rest.pop(fd, b"") + data
        line = b""
        while (end := data.find(b"\r\n") + 2) > 1:
            line = data[:end]
            if line[:1] == b"$" and line != YES_SET:
                end += int(line[1:]) + 2
                if len(data) < end:
                    break
            data = data[end:]
            self._answered[fd] += 1
        if data:
            self._rest[fd] = data
        return line if self._answered[fd] == self._sent else b""
