"""A server in the test's own process that does what a script says: one thread for each connection.

A driver connects to it as to any server. The script decides when an answer is sent, in which
pieces, and where the connection ends; what no script is about is served from a dictionary.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from celery_redlock.stores.redis import scripts

__all__ = ["DEADLINE", "Line", "Peer", "RedisPeer", "bulk", "in_thread", "verb_of"]

T = TypeVar("T")

DEADLINE = 10.0
"""Seconds that a test waits for anything at most: far more than it takes on a busy machine."""
INFO = b"run_id:%b\r\nrole:%b\r\nuptime_in_seconds:1000\r\nmaster_host:h\r\nmaster_port:1\r\n"

VERBS = {
    **dict.fromkeys(scripts.UNDO, "undo"),
    **dict.fromkeys(scripts.RELEASE, "release"),
    **dict.fromkeys(scripts.EXTEND, "extend"),
    **dict.fromkeys(scripts.RENEW, "renew"),
    **{scripts.PEEK: "peek", scripts.ENQUEUE: "queue", scripts.ACQUIRE: "acquire"},
}
"""Purpose of each script."""


class Line:
    """A connection to a peer, as its script has it.

    Attributes:
        number: How many connections there were before it.
    """

    def __init__(self, peer: Peer, number: int, stream: socket.socket) -> None:
        self.peer, self.number = peer, number
        self.stream = stream
        self._file = stream.makefile("rb")

    def send(self, data: bytes, *, pieces: int = 0) -> None:
        """Send bytes; `pieces`: so many at a time."""
        for at in range(0, len(data), pieces or len(data) or 1):
            self.stream.sendall(data[at : at + (pieces or len(data))])

    def request(self) -> Any:
        """Return the next request that is not of a handshake; None if the other side is gone."""
        with contextlib.suppress(OSError, ValueError):
            while (asked := self.peer.read(self._file)) is not None:
                greeting = self.peer.greeting(asked)
                if greeting is None:
                    self.peer.seen.put((self.number, asked))
                    return asked
                self.send(greeting)
        return None

    def gone(self) -> bool:
        """Read up to the end; return True once the other side has closed."""
        with contextlib.suppress(ConnectionError):
            while self.stream.recv(65536):
                pass
        return True

    def close(self) -> None:
        """End the connection."""
        self._file.close()
        with contextlib.suppress(OSError):
            self.stream.shutdown(socket.SHUT_RDWR)
        self.stream.close()


class Peer:
    """A server that runs a script for each connection.

    Args:
        script: Called in a thread of its own; the connection ends when it returns.

    Attributes:
        port: Where it listens.
        seen: Each request that a script has read: the connection's number, and the request.
        failures: What scripts have raised.
    """

    def __init__(self, script: Callable[[Any], object] | None = None) -> None:
        self.script = script or self.serve
        self.seen: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        self.failures: list[BaseException] = []
        self._lines: list[Line] = []
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        # What a peer does not read fills the other side's buffer, not this one.
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        self.port: int = self._listener.getsockname()[1]
        self._acceptor = threading.Thread(target=self._accept, daemon=True)
        self._acceptor.start()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        assert not self.failures, self.failures

    def read(self, file: Any) -> Any:
        """Read one request; None at the end."""
        raise NotImplementedError

    def greeting(self, asked: Any) -> bytes | None:
        """Return the answer to a request of a handshake; None to any other."""
        raise NotImplementedError

    def serve(self, line: Line) -> None:
        """Answer from the memory until the other side is gone."""
        while (asked := line.request()) is not None:
            line.send(self.answer(asked))

    def answer(self, asked: Any) -> bytes:
        """Return the answer from the memory."""
        raise NotImplementedError

    def next(self) -> Any:
        """Wait for the next request; return it."""
        return self.seen.get(timeout=DEADLINE)[1]

    @property
    def connections(self) -> int:
        """Return the number of connections that were made to it."""
        return len(self._lines)

    def close(self) -> None:
        """End all connections, and wait for the scripts."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._acceptor.join(DEADLINE)
        for line in self._lines:
            with contextlib.suppress(OSError):
                line.stream.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(DEADLINE)
            assert not thread.is_alive(), "a script does not end"

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                stream, _ = self._listener.accept()
                stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                stream.settimeout(DEADLINE)
                line = Line(self, len(self._lines), stream)
                thread = threading.Thread(target=self._run, args=(line,), daemon=True)
                self._lines.append(line)
                self._threads.append(thread)
                thread.start()

    def _run(self, line: Line) -> None:
        try:
            self.script(line)
        except ConnectionError:
            pass  # the other side was faster
        except BaseException as error:
            self.failures.append(error)
        finally:
            line.close()


class RedisPeer(Peer):
    """A peer that is spoken to as a Redis server is.

    Attributes:
        held: The tokens that it has, by their keys.
        run_id: What it says that it is.
        role: Likewise.
    """

    def __init__(self, script: Callable[[Line], object] | None = None, run_id: str = "") -> None:
        self.held: dict[bytes, bytes] = {}
        self.role = "master"
        super().__init__(script)
        self.run_id = run_id or f"run-{self.port}"

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def read(self, file: Any) -> list[bytes] | None:
        head = file.readline()
        if not head.endswith(b"\r\n"):
            return None
        assert head[:1] == b"*", head
        words = []
        for _ in range(int(head[1:])):
            size = file.readline()
            if not size:
                return None
            assert size[:1] == b"$", size
            words.append(file.read(int(size[1:]) + 2)[:-2])
        return words

    def greeting(self, asked: list[bytes]) -> bytes | None:
        if asked[0] in (b"CLIENT", b"SELECT", b"AUTH"):
            return b"+OK\r\n"
        if asked[0] == b"INFO":
            return bulk(INFO % (self.run_id.encode(), self.role.encode()))
        if asked[:2] == [b"EVAL", b"return 1"]:
            return b":1\r\n"
        if asked[:2] == [b"EVALSHA", b"0" * 40]:
            return b"-NOSCRIPT No matching script.\r\n"
        return None

    def answer(self, asked: list[bytes]) -> bytes:
        verb, keys, values = verb_of(asked)
        if verb == "acquire":
            if (holder := self.held.get(keys[0])) is None:
                self.held[keys[0]] = values[0]
                return b"$-1\r\n"
            return bulk(holder)
        if verb in ("undo", "release"):
            mine = self.held.get(keys[0]) == values[0]
            if mine:
                del self.held[keys[0]]
            return b":%d\r\n" % mine
        if verb == "extend":
            votes = b""
            for key, token in zip(keys, values[::2], strict=True):
                missing = key not in self.held
                mine = self.held.setdefault(key, token) == token
                votes += b"2" if missing else b"1" if mine else b"0"
            return bulk(votes)
        if verb == "peek":
            found = [self.held.get(key) for key in keys]
            pairs = [bulk(one) + b":5000\r\n" if one else b"$-1\r\n:-2\r\n" for one in found]
            return b"*%d\r\n" % (2 * len(found)) + b"".join(pairs)
        return b":1\r\n"


def bulk(data: bytes) -> bytes:
    """Return a bulk string as a server writes it."""
    return b"$%d\r\n%b\r\n" % (len(data), data)


def verb_of(asked: list[bytes]) -> tuple[str, list[bytes], list[bytes]]:
    """Return what a request asks for, of which keys, and with which values."""
    if asked[0] == b"SET":
        return "acquire", [asked[1]], [asked[2], asked[6]]
    count = int(asked[2])
    verb = "release" if asked[0] == b"EVALSHA" else VERBS.get(asked[1], "another")
    return verb, asked[3 : 3 + count], asked[3 + count :]


class _Result:
    """Result of a call in another thread."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self._value: Any = None
        self._error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self._value = self._call()
        except BaseException as error:
            self._error = error

    def __call__(self) -> Any:
        self.thread.join(DEADLINE)
        assert not self.thread.is_alive(), "it does not return"
        if self._error is not None:
            raise self._error
        return self._value


def in_thread(call: Callable[[], T]) -> Callable[[], T]:
    """Call something in another thread; return a function that waits for its result or error."""
    return _Result(call)
