"""A hostile Sentinel: whatever it sends, the next one is asked where the master is."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from celery_redlock import QuorumUnavailable, Redlock
from celery_redlock.locking.pubsub import ReleaseSubscriber
from celery_redlock.stores.kinds import parse_nodes
from celery_redlock.survey.snapshot import survey
from tests.support.names import Patch, Servers
from tests.support.peer import DEADLINE, in_thread
from tests.support.proxy import close
from tests.support.sentinels import SERVICE, Puppet
from tests.support.wait import wait_until

BUFFERED = 20 * 2**20
"""Bytes that the system may hold between both ends: they are sent, and never read."""
FLOOD = 100 * 2**20


def flood(client: socket.socket) -> Iterator[bytes]:
    yield b"$1500000000\r\n"
    for _ in range(FLOOD // 65536):
        yield b"x" * 65536


def drip(client: socket.socket) -> Iterator[bytes]:
    yield b"*1\r\n$10000\r\n"
    while True:
        yield b"x"
        time.sleep(0.02)


HOSTILE: dict[str, Callable[[socket.socket], Iterator[bytes]]] = {
    "a reply without end": flood,
    "bytes that drip": drip,
    "silence": lambda client: iter([]),
    "another type": lambda client: iter([b":5\r\n" * 9]),
    "odd state": lambda client: iter([b"*1\r\n*2\r\n$4\r\nname\r\n:5\r\n" * 9]),
    "HTTP": lambda client: iter([b"HTTP/1.1 400 Bad Request\r\n\r\n"]),
}


class Hostile:
    """A Sentinel that sends this.

    Attributes:
        sent: Bytes that one client took at most.
    """

    def __init__(self, sends: Callable[[socket.socket], Iterator[bytes]]) -> None:
        self._sends, self.sent = sends, 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        close(self._listener)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(
                    target=self._serve, args=(self._listener.accept()[0],), daemon=True
                ).start()

    def _serve(self, client: socket.socket) -> None:
        sent = 0
        with client, contextlib.suppress(OSError):
            client.recv(65536)
            for piece in self._sends(client):
                client.sendall(piece)
                sent += len(piece)
                self.sent = max(self.sent, sent)
            client.recv(65536)


@pytest.fixture(params=HOSTILE)
def hostile(request: pytest.FixtureRequest, monkeypatch: Patch) -> Iterator[Hostile]:
    monkeypatch.setattr("celery_redlock.stores.redis.address.CONNECT_TIMEOUT", 0.3)
    with contextlib.closing(Hostile(HOSTILE[request.param])) as made:
        yield made


def test_hostile_sentinel_does_not_hide_the_master_that_another_names(
    hostile: Hostile, servers: Servers
) -> None:
    """A lock, a look and a subscription each ask the Sentinels by themselves."""
    with Puppet(servers[0].port) as honest:
        url = f"sentinel://127.0.0.1:{hostile.port},127.0.0.1:{honest.port}/{SERVICE}"
        redlock = Redlock([url], restart_guard="off")
        subscriber = ReleaseSubscriber(parse_nodes([url]), "p:")
        try:
            lease = redlock.acquire("r", wait=DEADLINE)
            (entry,) = in_thread(lambda: survey(redlock, timeout=DEADLINE).entries)()
            assert entry.resource == "r"
            with subscriber.waiter():
                wait_until(lambda: subscriber._listening == {0}, DEADLINE, "it is subscribed")
            assert redlock.release(lease)
        finally:
            subscriber.close()
            redlock.close()
    assert hostile.sent < BUFFERED


def test_node_behind_only_a_hostile_sentinel_is_silent(hostile: Hostile) -> None:
    redlock = Redlock([f"sentinel://127.0.0.1:{hostile.port}/{SERVICE}"], restart_guard="off")
    try:
        with pytest.raises(QuorumUnavailable):
            in_thread(lambda: redlock.try_acquire("r"))()
    finally:
        redlock.close()
    assert hostile.sent < BUFFERED
